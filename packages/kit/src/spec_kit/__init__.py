"""This package has the libraries for plugins (docs/libraries); importing them imports no torch."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.own_stream import OwnStream
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = ["OwnStream"]
