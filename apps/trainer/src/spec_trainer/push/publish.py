"""Push one exported draft to running servers, once."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from spec_core import Backend
from spec_core.errors import ConfigError
from spec_core.plugins import load_available
from spec_kit.drafting import QUANTISATION, read_config
from spec_kit.drafting.draft_files import check_finite
from spec_trainer.push.servers import connect_servers, open_publisher
from spec_trainer.run.draft_folder import check_draft

if TYPE_CHECKING:
    from spec_core import TargetSpec
    from spec_kit.weight_sync import PublishReport
    from spec_trainer.push.request import PushRequest


def publish_draft(request: PushRequest, target: TargetSpec) -> PublishReport:
    """Push the draft of ``request`` with a version number higher than any server's.

    ``target``: the draft's target. Raise UsageError, with a message of one line, for a problem found before any
    server was asked to receive, and EngineError if a server does not answer.
    """
    from safetensors.torch import load_file

    check_draft(request.draft_model, target, None)
    if QUANTISATION in (read_config(request.draft_model) or {}):
        raise ConfigError(
            f"draft {request.draft_model} is quantised, and no server takes that; push the original"
        )
    check_finite(request.draft_model)
    backend_type = load_available(Backend, request.backend)
    backend = backend_type(backend_type.Config())
    with ExitStack() as stack:
        publisher = stack.enter_context(open_publisher(backend, request, target, backend.device(0)))
        weights = load_file(request.draft_model / "model.safetensors")
        deadline = time.monotonic() + request.timeout_s

        def left_s() -> float:
            return max(1e-3, deadline - time.monotonic())

        for url, server in connect_servers(request.to, request.timeout_s).items():
            stack.enter_context(server)  # closed first: the publisher waits for no answer then
            publisher.add(url, server, left_s()).result()
        return publisher.publish(None, weights, timeout_s=left_s()).result()
