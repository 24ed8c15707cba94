"""VllmServing says how users serve drafts with ``vllm serve``."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import ClassVar

from spec_core import Draft, EngineConfig, Serving, TargetSpec
from spec_core.errors import ArtifactError, ConfigError
from spec_core.records import Availability, ServerCounters
from spec_engine_vllm.server_counters import vllm_counters
from spec_engine_vllm.serving_format import (
    check_vllm_folder,
    has_confidence_head,
    problem_on_cpu,
    problem_without_first_runner,
    serve_words,
    speculation_by_load,
    version_need,
    vllm_command,
    vllm_problem,
)
from spec_engine_vllm.target_classes import gives_states
from spec_engine_vllm.versions import (
    BEFORE,
    DISTRIBUTIONS,
    VERSIONS,
    has_first_runner,
    is_cpu_build,
    probe_vllm,
    verifies_adaptively,
)
from spec_engine_vllm.vllm_ranks import EXTENSION
from spec_kit.drafting import ServedDraft, write_speculators
from spec_kit.hosting import SpeculativeMode
from spec_kit.targets import hub_name

_STATE_METHODS = frozenset({"eagle3", "dflash", "dspark"})
"""Speculative methods of vLLM whose drafts read states of several layers (``v1/worker/gpu_model_runner.py``)."""


class VllmServing(Serving):
    """Unmodified vLLM, or its CPU build."""

    formats: ClassVar[frozenset[str]] = frozenset({"speculators"})
    writes_folder: ClassVar[bool] = True

    def check_export(self, target: TargetSpec, draft: Draft, folder: Path) -> None:
        """Raise ArtifactError if no supported vLLM can serve the export."""
        check_vllm_folder(folder, target)

    def availability(self, target: TargetSpec, draft: Draft) -> Availability:
        """Return whether a vLLM that can serve the draft's exports is installed here (V2).

        If it would do so by its first model runner, which is deprecated, ``reason`` says so.
        """
        if "vllm" not in draft.serving_methods:
            raise ConfigError(f"it does not serve draft {draft.name!r} with these options")
        check_states(draft, target)
        if problem := vllm_problem(draft, target):
            raise ConfigError(problem)
        on_cpu = is_cpu_build()
        need = version_need(draft, target, is_cpu_build=on_cpu)
        versions, needed_by = (f">={need[0]},{BEFORE}", "this draft") if need else (VERSIONS, "this engine")
        found = probe_vllm(versions, needed_by)
        if on_cpu and (problem := problem_on_cpu(draft, target)):
            reason = f"{problem}; for a GPU: pip install '{DISTRIBUTIONS[0]}{versions}'"
            return replace(found, ok=False, reason=reason)
        if not found.ok:
            return found if need is None else replace(found, reason=f"{need[1]}; {found.reason}")
        needs_first_runner = problem_without_first_runner(draft, target)
        if needs_first_runner and not has_first_runner():
            return replace(found, ok=False, reason=needs_first_runner)
        return replace(found, reason=_by_first_runner(found)) if needs_first_runner or on_cpu else found

    def command(self, target: TargetSpec, draft: Draft, folder: Path, num_draft_tokens: int) -> str:
        """Return the shell command that serves the draft with the installed vLLM or its CPU build."""
        check_states(draft, target)
        return vllm_command(target, _mode(draft, folder, num_draft_tokens), is_cpu_build=is_cpu_build())

    def command_by_load(
        self, target: TargetSpec, draft: Draft, folder: Path, draft_tokens: Mapping[int, int]
    ) -> str:
        """Return the shell command with a number of draft tokens for each range of concurrent requests (V7).

        A DSpark draft gets adaptive verification instead, if the installed vLLM has it.
        """
        check_states(draft, target)
        mode = _mode(draft, folder, max(draft_tokens.values()))
        adaptively = verifies_adaptively(has_confidence_head=has_confidence_head(folder))
        by_load = speculation_by_load(mode, draft_tokens, verifies_adaptively=adaptively)
        return vllm_command(target, mode, is_cpu_build=is_cpu_build(), by_load=by_load)

    def write(
        self, config: EngineConfig, target: TargetSpec, draft: Draft, folder: Path, output: Path
    ) -> str:
        """Write the draft in the layout of speculators; return the command that serves it and its target (V6)."""
        if not isinstance(draft, ServedDraft):
            raise ConfigError(f"the layout of speculators has no place for a draft {draft.name!r}")
        name = hub_name(target.folder) or str(target.folder.resolve())
        write_speculators(draft, folder, target, output, name, draft.default_draft_tokens)
        try:
            check_vllm_folder(output, target)
        except ArtifactError:
            shutil.rmtree(output)
            raise
        return shlex.join(serve_words(output, is_cpu_build=is_cpu_build()))

    def live_server_words(self, host: str, port: int) -> list[str]:
        """Return the flags of a vLLM server that takes pushed drafts and stores live requests (V4)."""
        middleware = "spec_engine_vllm.draft_routes.DraftRoutes"
        where = ["--host", host, "--port", str(port)]
        return [*where, "--worker-extension-cls", EXTENSION, "--middleware", middleware]

    def counters(self, metrics: str) -> ServerCounters | None:
        """Return the counters of a vLLM server from its metrics; None for another program."""
        return vllm_counters(metrics)


def check_states(draft: Draft, target: TargetSpec) -> None:
    """Raise ConfigError if the draft reads hidden states that the installed vLLM does not give of the target."""
    if draft.serving_methods.get("vllm") in _STATE_METHODS and not gives_states(target.architecture):
        raise ConfigError(
            f"vLLM's class {target.architecture} gives drafts no hidden states; SGLang may: serve it there"
        )


def _by_first_runner(found: Availability) -> str:
    installed = " ".join(chain(*found.versions.items()))
    return (
        f"{installed}, by vLLM's first model runner, which vLLM will remove (docs/engines.md says what then)"
    )


def _mode(draft: Draft, folder: Path, num_draft_tokens: int) -> SpeculativeMode:
    method = draft.serving_methods["vllm"]
    return SpeculativeMode(folder=folder, method=method, num_draft_tokens=num_draft_tokens, load=0)
