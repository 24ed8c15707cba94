"""``evaluate --server`` sends prompts of files, images and the key, and refuses what it cannot use."""

import json
import socket
from base64 import b64encode
from io import BytesIO

import pytest
from PIL import Image

from .streaming_server import of_bench, streaming


def test_prompts_of_a_file_are_chats_texts_and_tokens(evaluate, tmp_path):
    rows = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]},
        {"text": "Once upon"},
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]},
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with streaming() as (url, served):
        assert evaluate("--server", url, "--prompts", file)[0] == 0
    asked = [body for body in served.bodies if body["max_tokens"] == 128]
    assert asked[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert [body["prompt"] for body in asked[1:]] == ["Once upon", [5, 6]]


def test_images_of_prompts_are_sent_as_data_uris(evaluate, tmp_path):
    images = {name: BytesIO() for name in ("PNG", "JPEG")}
    for name, file in images.items():
        Image.new("RGB", (9, 7), "red").save(file, name)
        (tmp_path / name).write_bytes(file.getvalue())
    places = [{"type": "image"}, {"type": "text", "text": "What is seen?"}, {"type": "image"}]
    rows = [
        {"messages": [{"role": "user", "content": places}], "images": list(images)},
        {"conversations": [{"from": "human", "value": "<image>\nAnd here?"}], "image": "PNG"},
        {"messages": [{"role": "user", "content": "And here?"}]},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with streaming() as (url, served):
        words = ("--server", url, "--prompts", prompts, "--max-new-tokens", 9)
        assert evaluate(*words, f"data.media_root={tmp_path}")[0] == 0
        code, out, error = evaluate(*words)
    assert (code, out) == (2, "")
    assert "set data.media_root to the folder of the images" in error
    png, jpeg = (
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/{name.lower()};base64,{b64encode(file.getvalue()).decode()}"},
        }
        for name, file in images.items()
    )
    sent = [body["messages"][0]["content"] for body in served.bodies if body["max_tokens"] == 9]
    assert sent == [[png, places[1], jpeg], [png, {"type": "text", "text": "And here?"}], "And here?"]


def test_the_key_is_the_one_in_the_environment(evaluate, bench, monkeypatch):
    with streaming(key="hush") as (url, _):
        code, out, line = evaluate(*of_bench(url, bench))
        assert (code, out) == (1, "")
        assert (
            line
            == f'spec-trainer: error: {url} refused models: 401 Unauthorized: {{"error": "Unauthorized"}}'
        )
        monkeypatch.setenv("OPENAI_API_KEY", "hush")
        assert evaluate(*of_bench(url, bench))[0] == 0
        monkeypatch.setenv("OPENAI_API_KEY", "hush\n")
        code, _, line = evaluate(*of_bench(url, bench))
    assert code == 2
    assert "cannot be sent; expected printable ASCII" in line
    assert line.endswith("(OPENAI_API_KEY)")
    assert "hush" not in line


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ["--server", "localhost:8000"],
            "'localhost:8000' is no address of a server; expected http://host:port",
        ),
        (
            ["--server", "http://a:1", "--baseline-server", "a"],
            "'a' is no address of a server; expected http://host:port",
        ),
        (["--baseline-server", "http://a:1"], "--baseline-server=http://a:1 without --server"),
        (["--server", "http://a:1", "--draft-model", "d"], "--draft-model=d with --server"),
        (["--server", "http://a:1", "--engine", "vllm"], "--engine=vllm with --server"),
        (["--server", "http://a:1", "engine.dtype=float32"], "'engine.dtype=float32' is not for --server"),
        (
            ["--server", "http://a:1", "--concurrency", "1,2000"],
            "--concurrency=1,2000 with --server: each request",
        ),
        (["--server", "http://a:1", "--timeout-s", "0"], "--timeout-s=0.0: expected 0.1 or more"),
    ],
)
def test_bad_usage_is_one_line_before_anything_is_asked(evaluate, bench, words, problem):
    code, out, line = evaluate("--bench", "gsm8k", "--bench-data", bench, *words)
    assert (code, out) == (2, "")
    assert line.startswith(f"spec-trainer: error: {problem}")


def test_a_refused_connection_is_one_line(evaluate, bench):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, _, line = evaluate(*of_bench(f"http://127.0.0.1:{port}", bench))
    assert code == 1
    problem = f"http://127.0.0.1:{port} does not answer models: Connection refused"
    assert line.startswith(f"spec-trainer: error: {problem}")
