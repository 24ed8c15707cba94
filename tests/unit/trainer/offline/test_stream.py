"""A rank's micro-batches from a folder: those that an engine would have sent."""

import pytest
import torch
from safetensors.torch import load_file

from spec_core.errors import RunError
from spec_trainer.base.progress import StepProgress
from spec_trainer.base.stop_request import StopRequest
from spec_trainer.offline.store import open_features
from spec_trainer.offline.stream import StoredStream
from spec_trainer.workers.inline_driver import inline_driver

from .conftest import flip

CPU = torch.device("cpu")
ONE_PASS_EACH = "engine.batch_tokens=10"
"""Every sample has ten tokens: each goes through the target alone, so rounding cannot depend on its neighbours."""


def stored(run, rank=0) -> StoredStream:
    return StoredStream(run, rank, open_features(run), CPU)


FP8 = "data.features_dtype=fp8_e4m3"


@pytest.mark.parametrize("other", ["data.packing=true", "data.packing=false", FP8])
def test_batches_equal_those_of_an_engine_bit_for_bit(capture, resolved, other):
    keys = ["train.global_batch_tokens=64", "train.steps=5", "train.eval_every=2", other]
    online = resolved(*keys, "train.accumulation=2", ONE_PASS_EACH)
    captured = capture(ONE_PASS_EACH, *([other] if other == FP8 else []))
    offline = resolved(*keys, "train.accumulation=2", f"data.features={captured}")
    items = list(online.schedule.items(0))
    assert sum(item.evaluates for item in items) >= 2
    seen = []

    def take(run, rank, device, links):
        links.work(0, lambda: seen.extend(links.stream.micro_batches(item) for item in items))

    with inline_driver(online, StopRequest(), StepProgress(1), take, CPU) as driver, stored(offline) as read:
        driver.train(online)
        assert len(seen) == len(items)
        for item, batches in zip(items, seen, strict=True):
            for one, other in zip(batches, read.micro_batches(item), strict=True):
                assert one.spans == other.spans
                assert torch.equal(one.input_ids_T, other.input_ids_T)
                assert torch.equal(one.loss_mask_T, other.loss_mask_T)
                assert torch.equal(one.hidden_TNH, other.hidden_TNH)


@pytest.mark.parametrize("sent", [(), (FP8,)], ids=["more", "8_bits"])
def test_wanted_layers_are_taken_out_of(capture, resolved, sent):
    folder = capture("draft.layers=[1,2,4,5]", ONE_PASS_EACH, *sent)
    run, whole = (
        resolved(f"data.features={folder}", f"draft.layers={layers}", *sent)
        for layers in ("[2,5]", "[1,2,4,5]")
    )
    with stored(run) as few, stored(whole) as many:
        item = run.schedule.train_item(0)
        (some,), (every,) = few.micro_batches(item), many.micro_batches(item)
    assert torch.equal(some.hidden_TNH, every.hidden_TNH[:, [1, 3, 4]])


def test_8_bits_take_less_disk_and_differ_by_their_rounding(capture, resolved, tmp_path):
    def taken(*keys):
        folder = capture(ONE_PASS_EACH, *keys).rename(tmp_path / f"captured{len(keys)}")
        run = resolved(f"data.features={folder}", *keys)
        with stored(run) as stream:
            (batch,) = stream.micro_batches(run.schedule.train_item(0))
        shards = [load_file(file)["hidden_states"] for file in folder.glob("*.safetensors")]
        return batch.hidden_TNH, sum(states.nbytes for states in shards)

    (exact, most), (rounded, least) = taken(), taken(FP8)
    assert (most, least) == (200 * 4 * 32 * 4, 200 * 4 * (32 + 4))  # tokens, layers, bytes of a row
    scale = exact.abs().amax(-1, keepdim=True) / 448
    assert not torch.equal(rounded, exact)
    assert ((rounded - exact).abs() <= torch.maximum(exact.abs() * 2.0**-4, scale * 2.0**-10) * 1.0001).all()


def test_ranks_share_a_batch(capture, resolved):
    run = resolved(f"data.features={capture()}", "train.ranks=2", "train.global_batch_tokens=100")
    item = run.schedule.train_item(0)
    with stored(run, 0) as first, stored(run, 1) as second:
        parts = [stream.micro_batches(item)[0] for stream in (first, second)]
    seen = [span.sample_id for part in parts for span in part.spans]
    assert sorted(seen) == sorted(item.sample_ids)
    assert all(part.hidden_TNH.any() for part in parts)


def test_a_resumed_run_begins_where_it_stopped(capture, resolved):
    run = resolved(f"data.features={capture()}", "train.global_batch_tokens=40", "train.steps=8")
    with stored(run) as stream:
        for item in run.schedule.items(3):
            (batch,) = stream.micro_batches(item)
            assert [span.sample_id for span in batch.spans] == sorted(item.sample_ids)


def test_a_damaged_sample_is_never_handed_out(capture, resolved):
    folder = capture()
    run = resolved(
        f"data.features={folder}", "train.global_batch_tokens=10", "train.epochs=1", "train.steps=null"
    )
    flip(folder / "features-00001.safetensors", -1000)
    items, handed_out = run.schedule.items(0), []
    with stored(run) as stream:
        with pytest.raises(
            RunError, match=r"features-00001\.safetensors: .* of sample (\d+) are damaged"
        ) as caught:
            handed_out.extend(stream.micro_batches(item)[0].spans[0].sample_id for item in items)
        assert f"sample {run.schedule.train_item(len(handed_out)).sample_ids[0]} are" in str(caught.value)


def test_a_closed_stream_leaves_no_thread(capture, resolved):
    import threading

    run = resolved(f"data.features={capture()}")
    before = set(threading.enumerate())
    with stored(run) as stream:
        stream.micro_batches(run.schedule.train_item(0))
    assert set(threading.enumerate()) == before
