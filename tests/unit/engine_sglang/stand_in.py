"""The decoder of the stand-in for SGLang, which is no package of this environment."""

import importlib.util
from pathlib import Path

STAND_IN = Path(__file__).with_name("sglang_stand_in")

_spec = importlib.util.spec_from_file_location("stand_in_model", STAND_IN / "sglang/srt/model.py")
stand_in_model = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(stand_in_model)
