"""PushRequest has the options of ``spec-trainer push``. This module imports little, for a fast start."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from spec_core.errors import ConfigError
from spec_trainer.base.option_values import check_least, check_timeout
from spec_trainer.configuration.push_options import TransportOptions


@dataclass(frozen=True, kw_only=True)
class PushRequest:
    """A draft, and the servers that are to serve it."""

    draft_model: Path
    """Exported draft folder."""
    target: str
    """Folder or hub id of the target that the servers run."""
    to: Annotated[list[str], Parameter(consume_multiple=1, negative="")]
    """Addresses of the servers, such as http://127.0.0.1:8000."""
    transport: Annotated[list[str] | None, Parameter(consume_multiple=1, negative="")] = None
    """Weight transports, the preferred one first. By default the fastest installed transport for each server."""
    bucket_bytes: int | None = None
    """Largest number of bytes of weights that are sent at once. By default each transport's own value, which is 256
    MiB for this project's transports."""
    folder: Path | None = None
    """Folder in which weight transports that send files keep the newest versions. Servers must see it under the same
    path. By default a temporary folder on this host."""
    options: Annotated[TransportOptions, Parameter(parse=False)] = field(default_factory=dict)
    """Name of a weight transport -> its options, from the command's arguments ``push.options.NAME.KEY=VALUE``."""
    backend: str = "cpu"
    """Hardware of this process; a backend plugin."""
    address: str = "127.0.0.1:0"
    """host:port at which the servers reach this process; port 0 is any free one."""
    timeout_s: float = 60.0
    """Longest time for the whole push."""

    def __post_init__(self) -> None:
        """Raise ConfigError for a value out of its range."""
        for word in (*self.to, *(self.transport or ())):
            if word.startswith("push."):
                key = word.partition("=")[0]
                raise ConfigError(f"{key} stands behind a flag of several values; write it before the flags")
        if not self.to:
            raise ConfigError("--to names no server; expected addresses such as http://127.0.0.1:8000")
        check_least("bucket_bytes", self.bucket_bytes, 4096)
        check_timeout(self.timeout_s)
