"""Library for strategies: a checkpoint's files, of tensors that ranks hold in parts (docs/libraries/sharding.md)."""

from typing import TYPE_CHECKING

from spec_core.lazy import lazy_names

if TYPE_CHECKING:
    from spec_core.sharding.sharded_state import (
        INDEX_FILE,
        FlatShard,
        check_names,
        copy_overlap,
        load_sharded,
        read_full,
        save_sharded,
    )
else:
    __getattr__ = lazy_names(
        __name__,
        sharded_state="INDEX_FILE FlatShard check_names copy_overlap load_sharded read_full save_sharded",
    )

__all__ = [
    "INDEX_FILE",
    "FlatShard",
    "check_names",
    "copy_overlap",
    "load_sharded",
    "read_full",
    "save_sharded",
]
