"""Library for strategies: a checkpoint's files, of tensors that ranks hold in parts (docs/libraries/sharding.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.sharding.safetensors_folder import SafetensorsFolder
    from spec_kit.sharding.sharded_state import FlatShard, load_sharded, read_full, save_sharded
else:
    __getattr__ = lazy_names(
        __name__,
        safetensors_folder="SafetensorsFolder",
        sharded_state="FlatShard load_sharded read_full save_sharded",
    )

__all__ = ["FlatShard", "SafetensorsFolder", "load_sharded", "read_full", "save_sharded"]
