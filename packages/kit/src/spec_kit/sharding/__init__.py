"""This library is for strategies: sharded tensors, and hints for dividing a module (docs/libraries/sharding.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names
from spec_kit.sharding.tensor_parallel_hints import TensorParallelHints

if TYPE_CHECKING:
    from spec_kit.sharding.dealing import Parts, map_dealt
    from spec_kit.sharding.rank_sums import ordered_sum
    from spec_kit.sharding.safetensors_folder import SafetensorsFolder
    from spec_kit.sharding.sharded_state import FlatShard, load_sharded, read_full, save_sharded
    from spec_kit.sharding.torch_optimizer import build_torch_optimizer
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "FlatShard",
    "Parts",
    "SafetensorsFolder",
    "TensorParallelHints",
    "build_torch_optimizer",
    "load_sharded",
    "map_dealt",
    "ordered_sum",
    "read_full",
    "save_sharded",
]
