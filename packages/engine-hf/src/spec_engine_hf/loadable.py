"""Check, before a run starts, that the installed Transformers can load a target."""

from __future__ import annotations

import json
import logging
import warnings
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spec_core.errors import TargetError

if TYPE_CHECKING:
    from spec_core import TargetSpec


def check_loadable(target: TargetSpec) -> None:
    """Raise TargetError if Transformers cannot load the target's model type or its quantised weights.

    Transformers is imported only for a quantised target and for a model type without a module of its own.
    """
    config = json.loads((target.folder / "config.json").read_bytes())
    model_type = config["model_type"]
    if not _is_known(model_type):
        raise TargetError(
            f"target {target.folder}: engine hf runs it by transformers {version('transformers')}, which "
            f"does not know model_type={model_type!r}; pip install --upgrade transformers, or choose another "
            "engine (engine.name)"
        )
    if quantization := config.get("quantization_config"):
        _check_quantization(target, quantization)


def _is_known(model_type: str) -> bool:
    """Return whether Transformers supports this model type.

    Most model types have a module of their own in Transformers. Others are looked up in its registry.
    """
    found = find_spec("transformers")
    if found is not None and found.origin is not None:
        module = Path(found.origin).parent / "models" / model_type.replace("-", "_")
        if (module / "__init__.py").is_file():
            return True
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return model_type in CONFIG_MAPPING


def _check_quantization(target: TargetSpec, quantization: dict[str, Any]) -> None:
    """Raise TargetError if Transformers does not know the quantisation or needs a library that is missing."""
    from transformers.quantizers.auto import AutoHfQuantizer

    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            AutoHfQuantizer.from_config(quantization, pre_quantized=True).validate_environment(
                device_map=None
            )
    except (ImportError, RuntimeError, ValueError, TypeError, KeyError) as error:
        method = quantization.get("quant_method")
        raise TargetError(
            f"target {target.folder} is quantised ({method}), and transformers {version('transformers')} cannot load "
            f"it: {' '.join(str(error).split())}; or choose another engine (engine.name)"
        ) from error
    finally:
        log.setLevel(level)
