"""Hardware is known in the backend packages alone: nothing else names a vendor's devices, libraries or attributes."""

import ast
import re

import pytest

from .sources import ROOT, SOURCES, tree, walked

WORDS = frozenset(
    {"cuda", "gpu", "npu", "xpu", "mps", "nccl", "hccl", "ascend", "torch_npu", "is_cuda", "is_npu", "is_xpu"}
)
OUTSIDE = [file for file in SOURCES if not file.relative_to(ROOT).parts[1].startswith("backend-")]
CONFORMANCE = "packages/testing/src/spec_testing/conformance.py"
STAND_IN = "packages/strategy-megatron/src/spec_strategy_megatron/stand_in.py"
SECOND = "vllm.v1.worker.gpu"
NAMED = {
    # What a draft must not name.
    *((CONFORMANCE, name) for name in ("cuda", "npu", "xpu", "mps")),
    # Ray has an option of its own for this resource.
    ("packages/launcher-ray/src/spec_launcher_ray/cluster.py", "GPU"),
    # Ray's own names for what it counts, by torch's type of the device.
    *(
        ("packages/launcher-ray/src/spec_launcher_ray/config.py", name)
        for name in ("cuda", "GPU", "npu", "NPU")
    ),
    # vLLM's name of a buffer on the device, and of its second model runner, whichever device that is.
    ("packages/engine-vllm/src/spec_engine_vllm/step_batch.py", "gpu"),
    ("packages/engine-vllm/src/spec_engine_vllm/serving_capture.py", f"{SECOND}.model_runner"),
    ("packages/engine-vllm/src/spec_engine_vllm/step_batch.py", f"{SECOND}.spec_decode.eagle.eagle3_utils"),
    # A plugin of vLLM that must be of its version, whether or not a run uses it.
    ("packages/engine-vllm/src/spec_engine_vllm/versions.py", "vllm-ascend"),
    # Megatron-Core names one type of device where it means any: it is told the right one.
    *((STAND_IN, name) for name in ("cuda", "torch.cuda.")),
}
"""Strings that decide nothing about hardware."""


def vendor_names(module: ast.Module) -> list[str]:
    """Attributes, names, imports and one-word strings that are a vendor's; prose (docstrings, messages) is not."""
    found = []
    for node in walked(module):
        match node:
            case ast.Attribute(attr=text) | ast.Name(id=text) | ast.arg(arg=text):
                found.append(text)
            case ast.ImportFrom(module=str(text)) | ast.alias(name=text):
                found.append(text)
            case ast.keyword(arg=str(text)) | ast.Constant(value=str(text)):
                found.append(text)
    return [
        text
        for text in found
        if not re.search(r"\s", text) and WORDS & set(re.split(r"[^a-z_]+", text.lower()))
    ]


def test_nothing_outside_the_backends_names_a_vendor():
    """And no exception stays in the list that is not needed any more."""
    found = {(str(file.relative_to(ROOT)), text) for file in OUTSIDE for text in vendor_names(tree(file))}
    assert found == NAMED


@pytest.mark.parametrize(
    "code",
    [
        "if device.type == 'cuda': pass",
        "if device.type in ('npu', 'xpu'): pass",
        "if str(device).startswith('cuda:'): pass",
        "match backend.name:\n case 'ascend': pass",
        "branches = {'nccl': 1}[group]",
        "torch.cuda.synchronize()",
        "getattr(torch, 'npu')",
        "tensor.is_npu",
        "import torch_npu",
        "import torch.cuda",
        "from torch.cuda import Stream",
        "from torch import npu",
        "dist.init_process_group('cpu:gloo,npu:hccl')",
    ],
)
def test_a_branch_on_hardware_would_be_found(code):
    assert vendor_names(ast.parse(code))


@pytest.mark.parametrize(
    "code",
    [
        "if backend.capabilities().device_ipc: pass",
        "torch.get_device_module(device).synchronize()",
        "arguments = {'disable_cuda_graph': True}",
        "def f():\n    '''Runs on cuda and npu.'''",
        "message = 'backend cuda is not installed'",
    ],
)
def test_asking_a_capability_is_none(code):
    assert vendor_names(ast.parse(code)) == []
