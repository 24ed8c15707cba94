"""A stand-in for SGLang 0.5.16, which does not run without a GPU: its processes, its plugin loading and its calling
conventions, as far as the sglang engine relies on them. What it computes is in ``srt/model.py``."""

from sglang.srt.entrypoints.engine import Engine

__all__ = ["Engine"]
__version__ = "0.5.16"
