"""Before anything starts: what the strategy cannot do is refused, with the reason. Needs no Megatron-Core."""

import pytest

from spec_core.errors import ConfigError
from spec_core.records import ShardHints
from spec_draft_dflash.draft import DFlashDraft
from spec_draft_eagle3.draft import Eagle3Draft
from spec_draft_mtp.draft import MtpDraft
from spec_kit.sharding import TensorParallelHints
from spec_testing.toy_target import toy_target

from ...mtp_targets import write_config

strategy = pytest.importorskip("spec_strategy_megatron.strategy")
MegatronConfig, MegatronStrategy = strategy.MegatronConfig, strategy.MegatronStrategy

SIZES = {"vocab_size": 96, "num_heads": 4, "num_kv_heads": 2}


def check(tmp_path, parts, draft=Eagle3Draft, target=None, sequence_parallel=False, **options):
    instance = draft(draft.Config.model_validate(options))
    target = toy_target(tmp_path, **{**SIZES, **(target or {})})
    config = MegatronConfig(tensor_parallel=parts, sequence_parallel=sequence_parallel)
    MegatronStrategy.check(config, target, instance.shard_hints(target))


@pytest.mark.parametrize(
    ("parts", "options", "message"),
    [
        (8, {}, r"8 does not divide the 4 pieces .* midlayer.self_attn.q_proj; set it to a divisor of 4"),
        (4, {"num_kv_heads": 3, "num_heads": 12}, "4 does not divide the 3 pieces .*self_attn.k_proj"),
        (3, {}, "3 does not divide the 4 pieces .* midlayer.self_attn.q_proj"),
        (2, {"vocab_size": 31}, "2 does not divide the 31 pieces .* lm_head"),
        (2, {"intermediate_size": 33}, "2 does not divide the 33 pieces .*mlp.gate_proj"),
        (2, {"draft": DFlashDraft, "target": {"vocab_size": 97}}, "the 97 tokens of the target's vocabulary"),
        (
            2,
            {"draft": DFlashDraft, "block_size": 5, "sequence_parallel": True},
            r"2 does not divide the 5 tokens of a sequence in the draft's layers.0",
        ),
    ],
)
def test_what_does_not_split_is_refused(tmp_path, parts, options, message):
    with pytest.raises(ConfigError, match=message):
        check(tmp_path, parts, **options)


def test_what_splits_is_not(tmp_path):
    check(tmp_path, 2)
    check(tmp_path, 2, DFlashDraft)
    check(tmp_path, 4)  # two ranks have the same key-value head
    check(tmp_path, 2, DFlashDraft, block_size=6, sequence_parallel=True)
    check(tmp_path, 2, vocab_size=30, target={"vocab_size": 97})  # cut where the draft's rows are
    check(tmp_path, 1, vocab_size=31, intermediate_size=33)


def test_a_draft_that_does_not_say_where_its_tokens_may_be_divided_is_refused(tmp_path):
    config = MegatronConfig(tensor_parallel=2, sequence_parallel=True)
    for hints in (ShardHints(), ShardHints(tensor_parallel=TensorParallelHints(columns={"head": 2}))):
        with pytest.raises(ConfigError, match=r"strategy.sequence_parallel=true needs a draft .*; remove it"):
            MegatronStrategy.check(config, toy_target(tmp_path), hints)


def test_a_draft_with_a_part_that_cannot_be_divided_is_refused(tmp_path):
    write_config("deepseek_v3", toy_target(tmp_path, **SIZES))
    with pytest.raises(
        ConfigError, match=r"^strategy.tensor_parallel=2: .* mixture of experts, which .*; set it to 1, or "
    ):
        check(tmp_path, 2, MtpDraft)
    check(tmp_path, 1, MtpDraft)


def test_more_parts_than_ranks_are_refused():
    with pytest.raises(
        ConfigError, match=r"tensor_parallel=4 does not divide train.ranks=2; set train.ranks"
    ):
        MegatronStrategy.data_parallel(MegatronConfig(tensor_parallel=4), 0, 2)


def test_neighbours_are_one_data_parallel_rank():
    config = MegatronConfig(tensor_parallel=2)
    assert [MegatronStrategy.data_parallel(config, rank, 4).rank for rank in range(4)] == [0, 0, 1, 1]
