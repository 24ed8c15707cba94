"""This library has process groups over collectives such as gloo's (docs/libraries/streams.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.collectives.agreed_process_group import AgreedProcessGroup, Communicator
    from spec_kit.collectives.gloo_process_group import GlooProcessGroup
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "AgreedProcessGroup",
    "Communicator",
    "GlooProcessGroup",
]
