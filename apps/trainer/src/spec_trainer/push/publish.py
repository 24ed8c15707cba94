"""Push one exported draft to running servers, once."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
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
    from spec_trainer.configuration.run import PushConfig
    from spec_trainer.push.request import PushRequest


def publish_draft(
    folder: Path,
    target: TargetSpec,
    servers: Sequence[str],
    options: PushConfig | PushRequest,
    backend_name: str,
) -> PublishReport:
    """Push the draft in ``folder`` to the servers at these addresses, with a version number higher than any server's.

    ``target``: the draft's target. Raise UsageError, with a message of one line, for a problem found before any
    server was asked to receive, and EngineError if a server does not answer.
    """
    from safetensors.torch import load_file

    check_draft(folder, target, None)
    if QUANTISATION in (read_config(folder) or {}):
        raise ConfigError(f"draft {folder} is quantised, and no server takes that; push the original")
    check_finite(folder)
    backend_type = load_available(Backend, backend_name)
    backend = backend_type(backend_type.Config())
    with ExitStack() as stack:
        publisher = stack.enter_context(open_publisher(backend, options, target, backend.device(0)))
        weights = load_file(folder / "model.safetensors")
        deadline = time.monotonic() + options.timeout_s

        def left_s() -> float:
            return max(1e-3, deadline - time.monotonic())

        for url, server in connect_servers(servers, options.timeout_s).items():
            stack.enter_context(server)  # closed first: the publisher waits for no answer then
            publisher.add(url, server, left_s()).result()
        return publisher.publish(None, weights, timeout_s=left_s()).result()
