"""This library updates a draft's weights while an engine serves (docs/libraries/weight_sync.md)."""

from typing import TYPE_CHECKING

from spec_kit.lazy import lazy_names

if TYPE_CHECKING:
    from spec_kit.weight_sync.buckets import BucketPlan, bucket_size
    from spec_kit.weight_sync.current_device import queued_before, separate_stream
    from spec_kit.weight_sync.delivery import ReplicaOutcome
    from spec_kit.weight_sync.digest import tensor_digest, tensors_digest
    from spec_kit.weight_sync.draft_slot import DraftLayout, DraftSlot
    from spec_kit.weight_sync.exchanged_slot import ExchangedSlot
    from spec_kit.weight_sync.installed import open_weight_transports
    from spec_kit.weight_sync.publisher import Publisher, PublishReport
    from spec_kit.weight_sync.receiver import UpdateReceiver
    from spec_kit.weight_sync.receiver_replica import ReceiverReplica
    from spec_kit.weight_sync.tensor_exchange import Exchange
else:
    __getattr__ = lazy_names(__name__, __file__)

__all__ = [
    "BucketPlan",
    "DraftLayout",
    "DraftSlot",
    "Exchange",
    "ExchangedSlot",
    "PublishReport",
    "Publisher",
    "ReceiverReplica",
    "ReplicaOutcome",
    "UpdateReceiver",
    "bucket_size",
    "open_weight_transports",
    "queued_before",
    "separate_stream",
    "tensor_digest",
    "tensors_digest",
]
