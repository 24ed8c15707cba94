"""Files of rows as they come from elsewhere: cut, in other encodings, packed too tightly, with odd fields."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

from .damage import ODD_VALUES

_SUFFIXES = [".jsonl", ".json", ".jsonl.gz", ".parquet"]
_ENCODINGS = [
    "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "latin-1", "cp1252", "gb18030",
    "shift_jis", "utf-7",
]  # fmt: skip
_TEXTS = [
    "how?",
    "nine",
    "Grüße",
    "你好",
    "<|im_end|>",
    "<|im_start|>assistant\n",
    "\x00",
    "\ufeff",
    "x" * 5_000,
    "",
]
_PARTS: list[Any] = [
    "a", "", None, 5, [], {}, ["a"], {"text": "a"}, {"type": "text"}, {"type": "text", "text": "a"},
    {"type": "text", "text": None}, {"type": "text", "text": ["a"]}, {"type": "input_text", "text": "a"},
    {"type": None, "text": "a"}, {"type": ["text"], "text": "a"}, {"type": "image"}, {"type": "tool_use", "id": 1},
    {"type": "thinking", "thinking": "a"}, {"type": "refusal", "refusal": "no"}, {"type": "video", "video": "a"},
]  # fmt: skip
_MARKS: list[Any] = [0, 1, True, False, 0.0, 1.0, 0.5, -1, 2, 10**400, "0", "no", "", [], [0], {}, {"a": 1}]
_FIELDS = [
    "role", "content", "tool_calls", "reasoning_content", "name", "tool_call_id", "weight", "train", "train_detail",
]  # fmt: skip
_ROW_FIELDS = [
    "messages",
    "tools",
    "loss_mask",
    "last_turn_only",
    "chat_template_kwargs",
    "system",
    "images",
    "text",
]


def rows(root: Path, folder: Path, draw: random.Random) -> tuple[str, list[object]]:
    """Draw a file of rows, or a file that is damaged as a whole, and a command that reads it."""
    suffix = draw.choice(_SUFFIXES)
    file = folder / f"rows{suffix}"
    how = draw.choice([_odd_rows, _odd_rows, _odd_rows, _cut, _encoded, _nested, _bomb])
    what = how(file, draw)
    data = ["--target", root / "target", "--data", file]
    more = ["data.on_bad_row=skip"] if draw.random() < 0.3 else []
    more += draw.choice([[], [], ["--show", draw.choice([1, 9])], [f"data.eval_path={file}"]])
    if draw.random() < 0.8:
        return f"{file.name}: {what}", ["plan", *data, "--output", folder / "out", *more]
    words = ["--target", root / "target", "--draft-model", root / "eagle3", "--prompts", file]
    return f"{file.name}: {what}", ["evaluate", *words, "--max-new-tokens", 1, "--no-untrained"]


def _odd_rows(file: Path, draw: random.Random) -> str:
    """One row has an odd field; which one also depends on what else there is."""
    chats = [_chat(draw) for _ in range(4)]
    how = draw.choice(["part", "part", "mark", "mark", "null", "field", "row field", "lines"])
    chat, turn = chats[1], draw.choice(chats[1]["messages"])
    if how == "part":
        turn["content"] = value = draw.choices(_PARTS, k=draw.choice([1, 2, 3]))
    elif how == "mark":
        key = draw.choice(["weight", "train", "trainable", "loss", "loss_mask"])
        value = draw.choice(_MARKS)
        if key == "loss_mask":
            chat[key] = value = draw.choice([value, [value] * draw.choice([1, 3, 4])])
        else:
            turn[key] = value
    elif how == "null":
        key, value = draw.choice(list(turn)), None
        draw.choice([turn, chat])[key] = None
        chat["messages"] = draw.choice([chat["messages"], [None], [*chat["messages"], None], None])
    elif how == "field":
        turn[draw.choice(_FIELDS)] = value = draw.choice(ODD_VALUES)
    elif how == "row field":
        chat[draw.choice(_ROW_FIELDS)] = value = draw.choice(ODD_VALUES)
    else:
        turn["content"] = value = "\n".join(json.dumps(row) for row in chats[2:])
    try:
        _write(file, chats)
    except (ValueError, TypeError, ArithmeticError):  # what no table of Parquet can hold
        _write(file, [{"messages": json.dumps(chat["messages"])}])
    return f"{how} {str(value)[:60]!r}"


def _cut(file: Path, draw: random.Random) -> str:
    _write(file, [_chat(draw) for _ in range(9)])
    content = file.read_bytes()
    stop = draw.randrange(len(content))
    more = draw.choice([b"", b"", b"\x00" * 99, b"\n" * 99, content[:stop], b"<html>"])
    file.write_bytes(content[:stop] + more)
    return f"cut at {stop}, {more[:9]!r} added"


def _encoded(file: Path, draw: random.Random) -> str:
    encoding = draw.choice(_ENCODINGS)
    _write(file, [_chat(draw) for _ in range(3)], encoding)
    return encoding


def _nested(file: Path, draw: random.Random) -> str:
    """A value within a row has very many levels."""
    levels = draw.choice([30, 200, 990, 5_000, 100_000])
    left, right = draw.choice([("[", "]"), ('{"a":', "}")])
    value = left * levels + draw.choice(["1", "null", ""]) + right * draw.choice([levels, levels, 0])
    row = json.dumps(_chat(draw)).replace('"how?"', value).replace('"user"', f'"user", "x": {value}', 1)
    if file.name.endswith(".parquet"):
        _write_deep_table(file, min(levels, 200))
    else:
        _write_text(file, f"[{row}]" if file.suffix == ".json" else row * draw.choice([1, 2]))
    return f"{levels} of {left}"


def _bomb(file: Path, draw: random.Random) -> str:
    """A small file that holds much."""
    if file.suffix == ".parquet":
        return _write_large_table(file, draw)
    how = draw.choice(["spaces", "lines", "text", "zeros", "members", "of itself"])
    chat = json.dumps({"messages": [{"role": "user", "content": "x" * (1 << 20)}]}) + "\n"
    unit = {"spaces": " " * (1 << 20), "lines": "\n" * (1 << 20), "text": chat, "zeros": "\x00" * (1 << 20)}
    if how in unit and file.suffix == ".gz":
        file.write_bytes(gzip.compress(unit[how].encode() * 100, 1))
    elif file.suffix == ".gz":
        packed = gzip.compress(json.dumps(_chat(draw)).encode() + b"\n")
        file.write_bytes(packed * 300 if how == "members" else gzip.compress(packed))
    else:
        how = how if how in unit else "text"
        _write_text(file, unit[how] * draw.choice([1, 20]))
    return how


def _chat(draw: random.Random) -> dict[str, Any]:
    turns = [{"role": role, "content": draw.choice(_TEXTS)} for role in ("user", "assistant") * 2]
    return {"messages": turns}


def _write(file: Path, chats: list[dict[str, Any]], encoding: str = "utf-8") -> None:
    if file.suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        parquet.write_table(pa.Table.from_pylist(chats), file)
        return
    text = json.dumps(chats, ensure_ascii=encoding == "utf-8")
    if file.suffix != ".json":
        text = "".join(json.dumps(chat, ensure_ascii=encoding == "utf-8") + "\n" for chat in chats)
    _write_text(file, text, encoding)


def _write_text(file: Path, text: str, encoding: str = "utf-8") -> None:
    content = text.encode(encoding, errors="replace")
    file.write_bytes(gzip.compress(content, 1) if file.suffix == ".gz" else content)


def _write_deep_table(file: Path, levels: int) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    kind = pa.int64()
    for _ in range(levels):
        kind = pa.list_(kind)
    parquet.write_table(pa.table({"messages": pa.array([None], kind), "text": ["a b"]}), file)


def _write_large_table(file: Path, draw: random.Random) -> str:
    import pyarrow as pa
    from pyarrow import parquet

    how = draw.choice(["one text in all rows", "rows of nothing", "many columns", "a null list"])
    if how == "one text in all rows":
        text = pa.DictionaryArray.from_arrays(pa.array([0] * 9_000, pa.int32()), pa.array(["x" * (1 << 20)]))
        table = pa.table({"text": text})
    elif how == "rows of nothing":
        table = pa.table({"text": pa.nulls(5_000_000, pa.string())})
    elif how == "many columns":
        table = pa.table({f"c{i}": ["a"] for i in range(20_000)})
    else:
        table = pa.table({"messages": pa.array([None, [None] * 1_000_000], pa.list_(pa.int64()))})
    parquet.write_table(table, file, compression="zstd")
    return how
