"""ServingSuite tests the contract of spec_core.serving (V1–V7).

::

    from spec_testing import ServingSuite, draw_draft

    class TestMyServing(ServingSuite):
        @pytest.fixture
        def serving(self) -> Serving:
            return MyServing()

        @pytest.fixture
        def target(self, folder) -> TargetSpec:
            return read_target(folder)

        @pytest.fixture
        def draft_folder(self, target, tmp_path) -> Path:
            return draw_draft(tmp_path / "draft", target, seed=0)
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from spec_core import Draft, EngineConfig, Serving, TargetSpec
from spec_core.errors import ConfigError, UsageError
from spec_core.records import Availability
from spec_kit.drafting import recognise
from spec_testing.conformance import ConformanceSuite


class ServingSuite(ConformanceSuite):
    """Tests of a Serving. A subclass defines the fixtures ``serving``, ``target`` and ``draft_folder``."""

    @pytest.fixture
    def serving(self) -> Serving:
        """Return the engine's Serving."""
        raise pytest.UsageError("a ServingSuite needs a fixture 'serving'")

    @pytest.fixture
    def target(self) -> TargetSpec:
        """Return a target that the program serves."""
        raise pytest.UsageError("a ServingSuite needs a fixture 'target'")

    @pytest.fixture
    def draft_folder(self) -> Path:
        """Return the folder of an exported draft for the target, which the program serves."""
        raise pytest.UsageError("a ServingSuite needs a fixture 'draft_folder'")

    @pytest.fixture
    def config(self) -> EngineConfig:
        """Return the options of the engine with which an export is written in one of ``formats``."""
        return EngineConfig.model_validate({})

    @pytest.fixture
    def draft(self, target: TargetSpec, draft_folder: Path) -> Draft:
        """Return the draft of the folder."""
        return recognise(draft_folder, target)

    def test_v1_an_export_is_accepted_and_only_read(
        self, serving: Serving, target: TargetSpec, draft: Draft, draft_folder: Path
    ) -> None:
        """V1: an export that the program serves is accepted; its files stay as they are."""
        before = _contents(draft_folder)
        serving.check_export(target, draft, draft_folder)
        assert _contents(draft_folder) == before

    def test_v2_it_is_known_before_an_export_which_program_serves_it(
        self, serving: Serving, target: TargetSpec, draft: Draft
    ) -> None:
        """V2: a program serves the draft here, or one line says which can."""
        found = serving.availability(target, draft)
        assert isinstance(found, Availability)
        assert found.ok or found.reason
        assert "\n" not in found.reason

    def test_v2_a_draft_that_no_version_serves_is_refused(
        self, serving: Serving, target: TargetSpec, draft: Draft, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """V2: a draft that does not name the engine is refused in one line."""
        monkeypatch.setattr(draft, "serving_methods", {}, raising=False)
        with pytest.raises(ConfigError, match=r"\A[^\n]+\Z"):
            serving.availability(target, draft)

    def test_v3_a_command_is_one_line_that_names_target_and_draft(
        self, serving: Serving, target: TargetSpec, draft: Draft, draft_folder: Path
    ) -> None:
        """V3: the command, split as by a shell, contains the target's folder and the draft's folder."""
        command = serving.command(target, draft, draft_folder, 2)
        words = shlex.split(command)
        assert "\n" not in command
        assert str(target.folder) in words
        assert any(str(draft_folder) in word for word in words)

    def test_v4_words_of_a_server_for_follow_name_its_port(self, serving: Serving) -> None:
        """V4: the words of the server's command line name the port, and each is a word of a shell."""
        words = serving.live_server_words("127.0.0.1", 54321)
        if words is None:
            pytest.skip("the program cannot be a server for follow")
        assert any("54321" in word for word in words)
        assert shlex.split(shlex.join(words)) == list(words)

    @pytest.mark.parametrize(
        "metrics", ["", "<html>", "# HELP up\n" * 3, "other:generation_tokens_total 3", "other_total nan"]
    )
    def test_v5_metrics_of_another_program_are_none(self, serving: Serving, metrics: str) -> None:
        """V5: None for the metrics of another program, and never an error, whatever the text."""
        assert serving.counters(metrics) is None

    def test_v6_an_export_is_one_new_file_or_folder_that_the_command_names(
        self,
        serving: Serving,
        config: EngineConfig,
        target: TargetSpec,
        draft: Draft,
        draft_folder: Path,
        tmp_path: Path,
    ) -> None:
        """V6: the output is new, and the command names it; a program without formats refuses in one line."""
        output = tmp_path / "export"
        if serving.formats:
            command = serving.write(config, target, draft, draft_folder, output)
            assert str(output) in shlex.split(command)
            assert output.is_dir() if serving.writes_folder else output.is_file()
        with pytest.raises(UsageError, match=r"\A[^\n]+\Z"):
            serving.write(config, target, draft, draft_folder, output)
        assert output.exists() == bool(serving.formats)

    @pytest.mark.parametrize("draft_tokens", [{1: 3, 4: 2, 9: 0}, {1: 0, 2: 1}])
    def test_v7_a_command_by_load_is_one_line_or_refused_in_one(
        self,
        serving: Serving,
        target: TargetSpec,
        draft: Draft,
        draft_folder: Path,
        draft_tokens: dict[int, int],
    ) -> None:
        """V7: as V3, for a program that changes the number of draft tokens; others refuse in one line."""
        before = _contents(draft_folder)
        try:
            answer = serving.command_by_load(target, draft, draft_folder, draft_tokens)
            refused = False
        except ConfigError as error:
            answer = str(error)
            refused = True
        assert answer
        assert "\n" not in answer
        if not refused:
            words = shlex.split(answer)
            assert answer != serving.command(target, draft, draft_folder, max(draft_tokens.values()))
            assert str(target.folder) in words
            assert any(str(draft_folder) in word for word in words)
        assert _contents(draft_folder) == before


def _contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
