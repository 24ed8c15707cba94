"""Whether a run can push is known before it starts, where that is known on the host of the command."""

from textwrap import dedent
from types import SimpleNamespace

import pytest
import torch

from spec_core.errors import ConfigError
from spec_kit.hosting import DRAFT_TOKEN_VARIABLE
from spec_testing import reference_backend
from spec_trainer.configuration.run import PushConfig
from spec_trainer.push import servers
from spec_trainer.push.servers import check_servers, open_publisher, open_transports

from ....distributions import write_distribution

BUCKET = """
    from spec_core import WeightTransportConfig
    from spec_weight_transports.file import FileTransport

    class BucketConfig(WeightTransportConfig):
        folder: str = ""

    class Bucket(FileTransport):
        name = "bucket"
        Config = BucketConfig
"""
"""A third party's transport, one of whose options is called like a key of this project's, and is no path."""
ELSEWHERE = "192.0.2.1"
"""An address of no host (RFC 5737)."""


def test_with_workers_on_other_hosts_the_pusher_checks_its_own_address(resolved, monkeypatch):
    monkeypatch.setenv(DRAFT_TOKEN_VARIABLE, "of the test")
    monkeypatch.setattr(servers, "connect_servers", lambda urls: {})
    spec = resolved(
        "train.push_every=2", "push.to=[http://127.0.0.1:1]", f"push.address={ELSEWHERE}:0", "train.steps=5"
    )
    refused = pytest.raises(ConfigError, match=f"servers cannot connect to '{ELSEWHERE}:0'")
    with refused:
        check_servers(spec)
    monkeypatch.setattr(type(spec), "members", lambda self: [SimpleNamespace(host=ELSEWHERE)])
    check_servers(spec)
    with refused:
        open_publisher(spec.backend, spec.config.push, spec.target, torch.device("cpu"))


def test_an_option_of_a_third_partys_transport_may_be_called_folder_and_be_no_path(tmp_path, monkeypatch):
    (tmp_path / "bucket.py").write_text(dedent(BUCKET))
    write_distribution(tmp_path, "bucket", "[spec_core.weight_transports]\nbucket = bucket:Bucket\n")
    monkeypatch.syspath_prepend(tmp_path)
    push = PushConfig(transport=("bucket",), options={"bucket": {"folder": "s3://drafts"}})
    assert open_transports(reference_backend(), push)["bucket"].config.folder == "s3://drafts"
