"""Asks servers, and compares the states that a server keeps of its requests with those of Transformers."""

from __future__ import annotations

import http.client
import json
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch

from spec_backend_cpu.backend import CpuBackend
from spec_core import EngineContext
from spec_core.records import SamplingParams
from spec_engine_hf.engine import HfConfig, HfEngine
from spec_kit.targets import read_target

from ..transformers_target import Transformer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from spec_kit.hosting import HttpReplica


def answers_of(target: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Return the greedy answers of the target alone."""
    context = EngineContext(backend=CpuBackend(CpuBackend.Config()))
    with HfEngine.create(HfConfig(), read_target(target), context) as engine:
        answers = engine.generate(prompts, SamplingParams(max_new_tokens=num_tokens, stop_at_eos=False))
    return [list(one.token_ids) for one in answers]


def answered(
    port: int,
    path: str,
    fields: dict[str, object],
    read: Callable[[dict[str, Any]], list[int]],
    patience_s: float,
) -> list[int] | None:
    """Return the tokens that ``read`` finds in the answer of a server, or None if the client left before it came."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=patience_s)
    with closing(connection):
        connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
        try:
            answer = connection.getresponse()
        except TimeoutError:
            return None
        content = answer.read()
    assert answer.status == 200, content
    return read(json.loads(content))


def captured(replica: HttpReplica, target: Path) -> tuple[int, Counter[str]]:
    """Check the states of every stored request against Transformers; return the number of right ones, and causes.

    Each number is within 1e-4 of the largest one of its layer.
    """
    schema, reference = replica.states_schema(), Transformer(target)
    num_right, causes = 0, Counter()
    while True:
        taken = replica.take_requests()
        for request in taken.requests:
            ids = [*request.prompt, *request.answer][:-1]
            rows = replica.take_states(request.states, len(ids), schema)
            if isinstance(rows, str):
                causes[rows] += 1
                continue
            assert torch.frombuffer(bytearray(rows.token_ids), dtype=torch.int32).tolist() == ids
            found_TNH = torch.frombuffer(rows.states, dtype=torch.float32).view(schema.shape(len(ids)))
            expected_TNH = reference.hidden(ids)[:, list(schema.layers)]
            errors_N = (found_TNH - expected_TNH).abs().amax(dim=(0, 2))
            assert (errors_N <= 1e-4 * expected_TNH.abs().amax(dim=(0, 2))).all(), (len(ids), errors_N)
            num_right += 1
        if not taken.left:
            return num_right, causes + Counter(taken.left_out)
