"""What the section ``engine`` has in common, whichever of the engines here it configures."""

from __future__ import annotations

from spec_core.config import EngineConfig, Seconds


class SendingConfig(EngineConfig):
    send_timeout_s: Seconds = 300.0
    """Longest wait for a trainer to connect to, or to have room for a sample."""
