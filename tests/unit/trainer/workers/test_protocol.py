"""Messages survive JSON."""

import json

import pytest

from spec_trainer.workers.protocol import Begin, Capture, Failed, Generate, Ready, Serve, StepShown, from_json


@pytest.mark.parametrize(
    "message",
    [
        Begin(),
        Ready("a:1", 3),
        StepShown({"loss": 1.5}),
        Failed("ValueError", "x", usage=False),
        Serve(3, "/d"),
        Generate([[1, 2]], 7),
    ],
)
def test_a_message_comes_back(message):
    assert from_json(json.loads(json.dumps(message.to_json()))) == message


def test_a_capture_holds_references_only():
    fields = json.loads(json.dumps(Capture(3, [(70, 7, ["a:1"])]).to_json()))
    assert fields == {"kind": "Capture", "batch": 3, "samples": [[70, 7, ["a:1"]]]}
