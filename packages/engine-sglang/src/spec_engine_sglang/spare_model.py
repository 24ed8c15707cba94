"""Make the spare of a live model: the same modules with copied parameters.

An update is loaded into the spare. SGLang builds its models within global state that no longer exists when it
serves, so the spare is made from the live model. Weights can be loaded into the spare, but it can never run,
because it shares buffers and modules without parameters with the live model. This module does not import
SGLang.
"""

from __future__ import annotations

import torch
from torch import nn

Address = tuple[torch.device, int]


def spare_of(live: nn.Module, foreign: nn.Module) -> nn.Module:
    """Return a model like ``live`` with copies of its parameters.

    Parameters that are shared with ``foreign`` are not copied.
    """
    theirs = {_address(parameter) for parameter in foreign.parameters()}
    copies: dict[nn.Parameter, nn.Parameter | None] = {}
    spares: dict[nn.Module, nn.Module] = {}

    def copy_of(parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None:
            return None
        if parameter not in copies:
            copies[parameter] = None if _address(parameter) in theirs else _copied(parameter)
        return copies[parameter]

    def spare(module: nn.Module | None) -> nn.Module | None:
        if module is None or next(module.parameters(), None) is None:
            return module
        if module not in spares:
            spares[module] = made = object.__new__(type(module))
            made.__dict__.update(module.__dict__)
            made.__dict__["_buffers"] = dict(module._buffers)
            made.__dict__["_parameters"] = {name: copy_of(own) for name, own in module._parameters.items()}
            made.__dict__["_modules"] = {name: spare(child) for name, child in module._modules.items()}
        return spares[module]

    made = spare(live)
    assert made is not None
    return made


def _copied(parameter: nn.Parameter) -> nn.Parameter:
    """Return a copy of a parameter, with its class and its attributes, such as ``weight_loader``."""
    values = parameter.detach().clone(memory_format=torch.preserve_format)
    copied = torch.Tensor._make_subclass(type(parameter), values, parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(copied, name, value)
    return copied


def _address(parameter: nn.Parameter) -> Address:
    return parameter.device, parameter.untyped_storage().data_ptr()
