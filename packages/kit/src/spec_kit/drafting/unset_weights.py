"""UnsetWeights is a context in which new modules get no random weights; stored weights follow later."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DRAWS = (nn.init.kaiming_uniform_, nn.init.normal_, nn.init.uniform_, Tensor.normal_, Tensor.uniform_)
"""Functions by which modules draw their weights."""


class UnsetWeights(TorchFunctionMode):
    """Skips random initial values, which torch draws on one core of the CPU; sets other values as usual."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the tensor as it is instead of drawing its values; call any other function."""
        kwargs = kwargs or {}
        if func in _DRAWS:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)
