"""Faults that a test plants in the process of one step of ``spec-trainer check``."""

import multiprocessing
import os

import fake_cann
import torch

from spec_backend_ascend import host
from spec_trainer.cli.commands import check, own_process

PORT_IN_USE = 11
CARD_LOST = 507018
_libraries = []


def after(fault, test, backend):
    """Run a step after a fault has been planted; fork the second process, too, and wait little for it."""
    own_process.get_context = lambda _: multiprocessing.get_context("fork")
    check._OTHER_PROCESS_S, own_process._END_S = 3.0, 0.1
    fault()
    return test(backend)


def taken_card():
    os.environ["FAKE_CANN_HBM_MB"] = "1"


def taken_port():
    fake_cann.fail("HcclGetRootInfo", PORT_IN_USE)


def no_sharing():
    host.IPC_SINCE.clear()  # driver and CANN are new enough
    fake_cann.fail("aclrtIpcMemGetExportKey", fake_cann.NOT_SUPPORTED)


def hanging_hccl():
    fake_cann.slow("HcclAllReduce", 600)


def crash():
    os.abort()


def second_card_lost():
    check._second_rank = _lost_rank


def _lost_rank(*_):
    fake_cann.fail("aclrtSetDevice", CARD_LOST, for_good=True)
    check._load("ascend").device(1)


def missing_operator():
    _replace_swiglu(lambda x, dim=-1: torch.ops.npu.npu_absent(x))


def wrong_operator():
    _replace_swiglu(lambda x, dim=-1: torch.nn.functional.silu(x.chunk(2, dim)[0]))


def _replace_swiglu(operator):
    library = torch.library.Library("npu", "IMPL")
    library.impl("npu_swiglu", operator, "PrivateUse1", allow_override=True)
    _libraries.append(library)
