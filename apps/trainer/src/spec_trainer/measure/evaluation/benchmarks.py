"""Read public benchmarks from the hub or from files, and make questions of their rows.

A question has the wording with which published acceptance lengths of drafts were measured, so that this project's
figures can be compared with them. Answers are graded if a row has the right number, as in GSM8K, or the right choice,
as in MMLU.
"""

from __future__ import annotations

import itertools
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from spec_core import foreign_errors
from spec_core.errors import ConfigError, DataError
from spec_core.foreign import read_bytes
from spec_core.records import GenerationRequest
from spec_core.wording import shortened, shown
from spec_trainer.data.errors import BadRow
from spec_trainer.data.row_files import READABLE
from spec_trainer.data.rows import Chat
from spec_trainer.data.sources import data_files, read_files, read_hub
from spec_trainer.measure.evaluation.grading import LETTERS, right_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from decimal import Decimal
    from pathlib import Path

    from spec_trainer.data.row_files import DataRow
    from spec_trainer.data.tokens import Encoder

Row = Mapping[str, Any]

_COMMIT = re.compile(r"\w{1,64}")
_COMMIT_BYTES = 1 << 10
_BOXED = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
_CHOICE = "Please reason step by step, and put the letter of the right choice within \\boxed{}."
_PASSES_TESTS = (
    "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
)
_MASKED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""Beginning of the texts that SPEED-Bench does not redistribute, 494 of its 880 questions."""
_SPECULATOR_FILES = (
    *("HumanEval", "math_reasoning", "qa", "question", "rag", "summarization", "tool_call", "translation"),
    "writing",
)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A benchmark: a data set on the hub, and how to make questions of its rows."""

    hub: str
    """Id of the data set on the hub."""
    questions: Callable[[Row], list[str]]
    """Returns the questions of a row, one for each turn of the conversation; raises KeyError if the row lacks a
    field."""
    config: str | None = None
    file: str | None = None
    """The file of the data set that holds the rows, if it has several and no configurations."""
    split: str = "test"


def _one(field: str, wording: str = "{}") -> Callable[[Row], list[str]]:
    return lambda row: [wording.format(_text(row[field]))]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, got {type(value).__name__}")
    if not value.strip():
        raise TypeError("expected a text, got an empty one")
    if value.startswith(_MASKED):
        raise TypeError(
            "its text is masked; fetch the texts with prepare_data.py of Model-Optimizer "
            "(examples/specdec_bench), and name the parent of its output by --bench-data"
        )
    return value


def _turns(row: Row, field: str = "prompt") -> list[str]:
    turns = row[field]
    if not isinstance(turns, list):  # a string would be iterated letter by letter
        raise TypeError(f"expected a list of texts in '{field}', got {type(turns).__name__}")
    return [_text(turn) for turn in turns]


def _instruction(row: Row) -> list[str]:
    instruction = _text(row["instruction"])
    added = row.get("input")
    return [f"{instruction}\n\nInput:\n{added}" if added else instruction]


def _choices(row: Row) -> list[str]:
    question = _text(row["question"])
    choices = row["choices"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= len(LETTERS):
        raise TypeError(f"expected a list of 2 to {len(LETTERS)} texts in 'choices'")
    if (answer := row.get("answer")) is not None and right_answer(row) is None:
        raise TypeError(f"'answer' is {shown(answer)}, expected the index or the letter of a choice")
    lines = [f"{letter}. {_text(choice)}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return ["\n".join([question, "", *lines, "", _CHOICE])]


BENCHMARKS: Mapping[str, Benchmark] = {
    "mt_bench": Benchmark(hub="HuggingFaceH4/mt_bench_prompts", split="train", questions=_turns),
    "gsm8k": Benchmark(hub="openai/gsm8k", config="main", questions=_one("question", _BOXED)),
    "math500": Benchmark(hub="HuggingFaceH4/MATH-500", questions=_one("problem", _BOXED)),
    "aime24": Benchmark(hub="HuggingFaceH4/aime_2024", split="train", questions=_one("problem", _BOXED)),
    "aime25": Benchmark(hub="MathArena/aime_2025", split="train", questions=_one("problem", _BOXED)),
    "humaneval": Benchmark(hub="openai/openai_humaneval", questions=_one("prompt", _PASSES_TESTS)),
    "mbpp": Benchmark(hub="google-research-datasets/mbpp", config="sanitized", questions=_one("prompt")),
    "mmlu": Benchmark(hub="cais/mmlu", config="all", questions=_choices),
    "alpaca": Benchmark(hub="tatsu-lab/alpaca", split="train", questions=_instruction),
    "speed_bench": Benchmark(
        hub="nvidia/SPEED-Bench", config="qualitative", questions=partial(_turns, field="turns")
    ),
    **{
        f"redhat_{file.lower()}": Benchmark(
            hub="RedHatAI/speculator_benchmarks",
            file=f"{file}.jsonl",
            split="train",
            questions=_one("prompt"),
        )
        for file in _SPECULATOR_FILES
    },
}


@dataclass
class BenchmarkRow:
    """A row of a benchmark: its questions, and the prompts of the questions asked so far."""

    benchmark: str
    where: str
    questions: list[str]
    right: Decimal | str | None = None
    """The right answer, a number or the letter of a choice; None if the row has none."""
    prompts: list[Sequence[int]] = field(default_factory=list["Sequence[int]"])
    messages: list[dict[str, Any]] = field(default_factory=list["dict[str, Any]"])

    def ask(self, encoder: Encoder, longest: int) -> None:
        """Make the prompt of this row's next question, which follows the questions and answers so far.

        Raise DataError if the prompt has more than ``longest`` tokens.
        """
        self.messages.append({"role": "user", "content": self.questions[len(self.prompts)]})
        try:
            prompt = encoder.opening(Chat(self.messages), self.messages).input_ids
        except BadRow as bad:
            raise DataError(f"{self.where}: {bad}") from bad
        if not 0 < len(prompt) <= longest:
            raise DataError(
                f"{self.where}: turn {len(self.prompts) + 1} makes a prompt of {len(prompt)} tokens; 1 to {longest} "
                "are possible: leave the row out, or lower --max-new-tokens"
            )
        self.prompts.append(prompt)

    def answer(self, text: str) -> None:
        """Append the target's answer to the last prompt to the conversation."""
        self.messages.append({"role": "assistant", "content": text})

    @property
    def is_open(self) -> bool:
        """Whether this row has a question that was not asked yet."""
        return len(self.prompts) < len(self.questions)


def parse_benchmarks(words: str) -> dict[str, int | None]:
    """Return the number of rows of each benchmark in text such as ``gsm8k:200,mt_bench``.

    The number is None if the text gives none: then all rows are asked. Capitals, dashes and underscores in
    names do not matter: ``MT-Bench`` is ``mt_bench``. The name of the data set on the hub is accepted, too, and
    means all of its benchmarks. Raise ConfigError for any other text.
    """
    names: dict[str, list[str]] = {}
    for name in BENCHMARKS:
        for spelling in _spellings(name):
            names.setdefault(spelling, []).append(name)
    wanted: dict[str, int | None] = {}
    for word in words.split(","):
        given, colon, count = word.strip().partition(":")
        found = names.get(_plain(given), [])
        is_number = count.isdecimal() and len(count) < 8 and int(count) > 0
        if not found or wanted.keys() & found or (colon and not is_number):
            raise ConfigError(
                f"--bench={shortened(words, 200)}: {shortened(word.strip(), 50)!r} is not understood; expected some "
                f"of {', '.join(BENCHMARKS)}, each at most once, and with a number of rows where not all are wanted, "
                "such as mt_bench,gsm8k:200"
            )
        wanted |= dict.fromkeys(found, int(count) if colon else None)
    return wanted


def _plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name.lower())


def _spellings(name: str) -> set[str]:
    """Return all accepted names of a benchmark, in lower case without dashes and underscores.

    They are its key in ``BENCHMARKS``, with and without its configuration, and the name of its data set on the hub,
    also with a dash in place of the slash.
    """
    benchmark = BENCHMARKS[name]
    hub = benchmark.hub
    own = hub.partition("/")[2]
    names = (name, f"{benchmark.config}-{name}", hub, hub.replace("/", "-"), own)
    return {_plain(spelling) for spelling in names}


class Questions:
    """The conversations of the benchmarks' rows; the target's answers are added turn by turn."""

    def __init__(self, rows: Sequence[BenchmarkRow], encoder: Encoder, longest: int) -> None:
        """Make a prompt of the first question of each row.

        ``longest``: the largest number of tokens of a prompt.
        """
        self._rows = rows
        self._encoder = encoder
        self._longest = longest
        for row in rows:
            row.ask(encoder, longest)
        self._waiting = deque(row for row in rows if row.is_open)
        self._asked: dict[GenerationRequest, BenchmarkRow] = {}

    @property
    def prompts(self) -> list[Sequence[int]]:
        """Token ids of the prompts so far: benchmark by benchmark, row by row, turn by turn."""
        return [prompt for row in self._rows for prompt in row.prompts]

    @property
    def benchmarks(self) -> tuple[str, ...]:
        """Name of the benchmark of each prompt in ``prompts``."""
        return tuple(row.benchmark for row in self._rows for _ in row.prompts)

    @property
    def right(self) -> tuple[Decimal | str | None, ...]:
        """The right answer, a number or a letter, to each prompt in ``prompts``; None if there is none."""
        return tuple(row.right for row in self._rows for _ in row.prompts)

    @property
    def num_open(self) -> int:
        """Number of rows with a question that was not asked yet."""
        return sum(row.is_open for row in self._rows)

    def next_request(self) -> GenerationRequest | None:
        """Return a request for an answer that a row's next question follows; None if there is none at present."""
        if not self._waiting:
            return None
        row = self._waiting.popleft()
        request = GenerationRequest(prompt=row.prompts[-1])
        self._asked[request] = row
        return request

    def take(self, request: GenerationRequest, token_ids: Sequence[int]) -> None:
        """Make the prompt of the question after the answer ``token_ids``, which has no end-of-text token.

        An answer that was cut is used, too.
        """
        row = self._asked.pop(request)
        row.answer(self._encoder.decode(token_ids))
        row.ask(self._encoder, self._longest)
        if row.is_open:
            self._waiting.append(row)


def read_benchmarks(wanted: Mapping[str, int | None], folder: Path | None) -> list[BenchmarkRow]:
    """Return the wanted number of rows of each benchmark, from ``folder`` or the hub.

    Raise DataError, which names the row, if a row does not have the benchmark's columns.
    """
    found: list[BenchmarkRow] = []
    for name, most in wanted.items():
        rows = list(itertools.islice(_rows(name, folder), most))
        if not rows:
            raise DataError(f"benchmark {name} has no rows in {folder or BENCHMARKS[name].hub}")
        found += [BenchmarkRow(name, row.where, _questions(name, row), _right(row)) for row in rows]
    return found


def _rows(name: str, folder: Path | None) -> Iterator[DataRow]:
    benchmark = BENCHMARKS[name]
    if folder is not None:
        yield from read_files(_files(name, folder))
        return
    try:
        yield from read_hub(benchmark.hub, benchmark.split, benchmark.config, benchmark.file)
    except DataError as error:
        raise DataError(f"{error}; --bench-data=FOLDER reads the rows of benchmarks from files") from error


def _files(name: str, folder: Path) -> list[Path]:
    """Return the files of the benchmark ``name`` in ``folder``.

    They are the data file with this name, or else the files of a copy of the benchmark's data set. The file's
    name may be any of ``_spellings``, such as ``sanitized-mbpp``.
    """
    benchmark = BENCHMARKS[name]
    names = _spellings(name)
    with foreign_errors(DataError, f"--bench-data={folder} cannot be read"):
        members = sorted(folder.iterdir())
    for member in members:
        suffix = next((suffix for suffix in READABLE if member.name.endswith(suffix)), "")
        if _plain(member.name.removesuffix(suffix)) in names and (suffix or member.is_dir()):
            return _of_split(benchmark, member) if member.is_dir() else [member]
    if copy := _copy(benchmark.hub, names, folder.absolute()):
        return _of_split(benchmark, copy)
    raise DataError(
        f"--bench-data={folder} has no {name}: expected {name}.jsonl, {name}.json, {name}.parquet or a folder {name} "
        f"with rows as in {benchmark.hub} on the hub"
    )


def _copy(hub: str, names: set[str], folder: Path) -> Path | None:
    """Return the folder that holds a copy of the data set ``hub``; None if there is none.

    The first of these is taken: the current snapshot, if ``folder`` or ``folder``/hub is a hub cache;
    ``folder``/owner/name; ``folder`` itself, if it is a snapshot of the data set or its name is in ``names``.
    """
    cached = f"datasets--{hub.replace('/', '--')}"
    for place in (folder / cached, folder / "hub" / cached, folder):
        if place.name == cached and (current := place / "refs" / "main").is_file():
            return place / "snapshots" / _commit(current)
    if (folder / hub).is_dir():
        return folder / hub
    is_snapshot = folder.parent.name == "snapshots" and folder.parent.parent.name == cached
    return folder if is_snapshot or _plain(folder.name) in names else None


def _commit(file: Path) -> str:
    commit = read_bytes(file, DataError, _COMMIT_BYTES).decode(errors="replace").strip()
    if not _COMMIT.fullmatch(commit):
        raise DataError(f"{file} names no commit: it is no cache of the hub")
    return commit


def _of_split(benchmark: Benchmark, folder: Path) -> list[Path]:
    """Return the files in ``folder`` that hold the benchmark's file, configuration and split.

    If no path names the configuration (or split), the files of all configurations (or splits) are returned.
    """
    files = data_files(folder)
    for part in (benchmark.file, benchmark.config, benchmark.split, "question"):
        named = [file for file in files if part and _names(file.relative_to(folder), part)]
        files = named or files
    return files


def _names(path: Path, part: str) -> bool:
    """Return whether ``path`` belongs to ``part``, a configuration or split of a data set.

    It does if one of its folders has this name, or if the file's name begins with this word.
    """
    return part in path.parts[:-1] or re.match(rf"{part}\b", path.name) is not None


def _right(row: DataRow) -> Decimal | str | None:
    return right_answer(row.content) if isinstance(row.content, Mapping) else None


def _questions(name: str, row: DataRow) -> list[str]:
    content = row.content
    if isinstance(content, BadRow):
        raise DataError(f"{row.where}: {content}") from content
    try:
        questions = []
        if isinstance(content, Mapping):
            ask = partial(_turns, field="turns") if "turns" in content else BENCHMARKS[name].questions
            questions = ask(content)
    except (KeyError, TypeError) as error:
        problem = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{row.where} is no row of {name} as in {BENCHMARKS[name].hub}: {problem}") from error
    if not questions:
        raise DataError(f"{row.where} is no row of {name} as in {BENCHMARKS[name].hub}: expected texts")
    return questions
