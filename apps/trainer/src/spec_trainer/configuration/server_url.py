"""This module defines the type of a configured server's URL."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator


def _checked(url: str) -> str:
    from spec_processes.sockets import server_address

    server_address(url)
    return url


ServerUrl = Annotated[str, AfterValidator(_checked)]
"""The URL of a server, such as http://127.0.0.1:8000."""
