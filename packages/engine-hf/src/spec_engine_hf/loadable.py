"""Check, before a run starts, that the installed Transformers can load a target."""

from __future__ import annotations

import json
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from spec_core import TargetSpec, foreign_errors
from spec_core.errors import TargetError
from spec_kit.targets import quantised_weight, quiet_transformers, stored_tensors


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
    if (quantization := config.get("quantization_config")) is not None:
        _check_quantization(target, quantization)
    elif (name := quantised_weight(stored_tensors(target.folder))) is not None:
        raise TargetError(
            f"target {target.folder} is quantised ({name}), but its config.json has no quantization_config, without "
            "which transformers ignores the scales; choose another engine (engine.name)"
        )


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

    method = quantization.get("quant_method")
    problem = (
        f"target {target.folder} is quantised ({method}), and transformers {version('transformers')} cannot load it; "
        "mend this or choose another engine (engine.name)"
    )
    with quiet_transformers(), foreign_errors(TargetError, problem):
        quantizer = AutoHfQuantizer.from_config(quantization, pre_quantized=True)
        quantizer.validate_environment(device_map=None)
