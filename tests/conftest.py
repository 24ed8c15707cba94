"""Fixtures for every test: tiny random targets, saved as Hugging Face folders, built once per session."""

import functools
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spec_processes import collect_rarely

from .made_once import made_once
from .random_targets import save_random_target

# The tests' process imports torch and transformers, and keeps thousands of tests.
collect_rarely()
# Nothing in the tests may look for a model hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Several workers and what they start share the machine: more threads of each would only wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

MakeTarget = Callable[..., Path]


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name a parameter of megabytes by its beginning: each worker sends all names, and each report has its test's."""
    return repr(val[:60]) if isinstance(val, str | bytes) and len(val) > 500 else None


def pytest_collection_finish() -> None:
    """Leave the libraries and the collected tests out of all later walks of the garbage collector."""
    gc.freeze()


@pytest.fixture(scope="session")
def make_target(tmp_path_factory: pytest.TempPathFactory) -> MakeTarget:
    """``make_target(model_type, shard_bytes=None, dtype="float32", **config)``: the folder of a target with random
    weights (equal for equal arguments), without a tokenizer.

    ``model_type`` is Hugging Face's, ``config`` overrides fields of its config; ``shard_bytes`` splits the weights
    into files of about that size with an index. Do not change the folder: others share it. Eight layers, width 32,
    97 tokens.
    """
    folders: dict[str, Path] = {}

    def make(shape: str, shard_bytes: int | None = None, dtype: str = "float32", **config: object) -> Path:
        key = repr((shape, shard_bytes, dtype, sorted(config.items())))
        if key not in folders:
            folder = tmp_path_factory.mktemp(shape)
            save_random_target(folder, shape, shard_bytes, dtype, **config)
            folders[key] = folder
        return folders[key]

    return make


@pytest.fixture
def limit_files() -> Iterator[Callable[[int], None]]:
    """``limit_files(bytes)``: no file of this process may grow beyond that, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda size: resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture(scope="session")
def tiny_llama(make_target: MakeTarget) -> Path:
    """Llama: eight layers, width 32, 97 tokens, untied head."""
    return make_target("llama")


@pytest.fixture(scope="session")
def tiny_qwen3(make_target: MakeTarget) -> Path:
    """Qwen3: as ``tiny_llama``, with norms on queries and keys and a tied head."""
    return make_target("qwen3", tie_word_embeddings=True)


@pytest.fixture(scope="session")
def seeing_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``seeing_target(model_type)``: a tiny random target that sees, with tokenizer and image processor. Shared by
    all workers."""

    @functools.cache
    def make(model_type: str) -> Path:
        from .seeing_targets import save_seeing_target

        return made_once(
            tmp_path_factory, f"seen-by-{model_type}", lambda folder: save_seeing_target(folder, model_type)
        )

    return make


@pytest.fixture(scope="session")
def add_characters() -> Callable[[Path], None]:
    """``add_characters(folder)``: give a target of 97 tokens a tokenizer of characters, with a chat template."""

    def add(folder: Path) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        characters = ["<unk>", "<s>", "</s>", *map(chr, range(32, 125)), "\n"]
        tokenizer = Tokenizer(models.WordLevel({text: i for i, text in enumerate(characters)}, "<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
        tokenizer.decoder = decoders.Fuse()
        template = "{% for m in messages %}{{ m.role[0] + ':' + m.content + '\n' }}{% endfor %}a:"
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>", chat_template=template
        )
        fast.save_pretrained(folder)

    return add


_RAY_CLUSTER = """
import sys, ray
context = ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """The address of a running cluster of two cores, which this process is connected to. It is nobody's child, as the
    cluster of others, and ends with this process."""
    ray = pytest.importorskip("ray")
    words = ["sh", "-c", 'exec 3<&0; "$@" <&3 &', "sh", sys.executable, "-c", _RAY_CLUSTER]
    # A token would have to be set before Ray is imported in this process.
    env = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as starter:
        assert starter.stdout is not None
        address = starter.stdout.readline().strip()
        ray.init(address, log_to_driver=False, configure_logging=False)
        yield address
        ray.shutdown()
