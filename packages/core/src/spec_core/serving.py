"""A Serving says how users serve drafts with an engine's program, such as ``vllm serve``.

The application asks only the engines that a draft names in ``Draft.serving_methods``. An answer starts nothing and
imports nothing heavy.

Contract (``spec_testing.ServingSuite`` quotes the numbers):

V1  ``check_export`` only reads files, and works where the program is not installed. It raises ArtifactError, one
    line, if no supported version of the program can serve an export.
V2  ``availability`` returns whether a program that can serve the exports of a draft is installed here, before there
    is an export. If none is, ``reason`` is one line that says which version can and how to install it, and
    ``versions`` has what is installed instead. If one is, ``reason`` is empty or one line that says with which
    version and what to know about it. It raises ConfigError, one line, if no version can.
V3  ``command`` returns a shell command of one line that starts the unmodified program with a draft folder and a
    number of draft tokens per round. It raises ConfigError, one line, if the installed version cannot run this target
    with a draft. ``configured`` returns a Serving whose commands name what the engine's options
    give, such as a file of the target. Optional: by default the commands do not depend on them.
V4  ``live_server_words`` returns further words of the command with which the program listens at a host and a port,
    takes pushed drafts and hands out live requests, by HTTP (``spec_kit.hosting.HttpReplica``). The program reads its
    secret and which requests it stores from the environment variables SPEC_DRAFT_TOKEN and SPEC_LIVE_REQUESTS.
    Optional: by default it returns None, because the program does not do all this.
V5  ``counters`` reads the counters of a running, unmodified program from the text of its metrics, and returns None
    for the metrics of any other program. Counts are integers from 0 to 2**53. Optional: by default it returns None
    for all metrics.
V6  ``write`` writes an export as one new file, or as a new folder if ``writes_folder``, in a format of ``formats``,
    which the program loads as it was trained. It raises UsageError, one line, and leaves nothing if the format
    cannot express the draft. Optional: by default there are no formats, because the program loads the export.
V7  ``command_by_load`` returns a command as ``command`` does, with which the program changes the number of draft
    tokens with the number of requests that it decodes at once. It raises ConfigError, one line, if the installed
    version cannot do so for this draft; if none is installed, the newest counts. Optional: by default it raises.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar, Self

from spec_core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from spec_core.config import EngineConfig
    from spec_core.draft import Draft
    from spec_core.records import Availability, ServerCounters
    from spec_core.target import TargetSpec


class Serving(ABC):
    """A Serving describes the program that serves drafts. The module's docstring has the contract."""

    formats: ClassVar[frozenset[str]] = frozenset()
    """Names of the formats in which ``write`` writes an export (V6)."""
    writes_folder: ClassVar[bool] = False
    """Whether ``write`` writes a folder, not a file (V6)."""

    @abstractmethod
    def check_export(self, target: TargetSpec, draft: Draft, folder: Path) -> None:
        """Raise ArtifactError if no supported version of the program can serve the export in ``folder`` (V1).

        An error refuses the export.
        """

    @abstractmethod
    def availability(self, target: TargetSpec, draft: Draft) -> Availability:
        """Return whether a program that can serve the draft's exports for ``target`` is installed here (V2).

        Raise ConfigError if no version of the program can.
        """

    @abstractmethod
    def command(self, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int) -> str:
        """Return the shell command that serves ``target`` with the draft in ``folder`` (V3).

        Called only if ``check_export`` accepts the folder.
        """

    def configured(self, config: EngineConfig) -> Self:
        """Return this Serving with commands for ``config``, the section ``engine`` of its engine (V3)."""
        return self

    def command_by_load(
        self, target: TargetSpec, draft: Draft, folder: Path, draft_tokens: Mapping[int, int]
    ) -> str:
        """Return the shell command whose program chooses the number of draft tokens by its load (V7).

        ``draft_tokens``: number of concurrent requests -> draft tokens per round from that number on, ascending. The
        first key is 1. A value of 0 means no draft; at least one is positive.
        """
        raise ConfigError("its program has one number of draft tokens for every load")

    def live_server_words(self, host: str, port: int) -> Sequence[str] | None:
        """Return words for ``command`` that make its program a server for ``follow``, or None (V4)."""
        return None

    def counters(self, metrics: str) -> ServerCounters | None:
        """Return a server's counters from its metrics in Prometheus' text format (V5).

        Return None for the metrics of another program. The text comes over the network and may be anything; values
        that cannot be parsed count as absent.
        """
        return None

    def write(
        self, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, output: Path
    ) -> str:
        """Write the export in ``folder`` as the new ``output``; return the shell command that serves it (V6).

        ``config``: the section ``engine`` of the engine that has this Serving.
        """
        raise ConfigError("this engine's program loads an export's folder, and has no other format")
