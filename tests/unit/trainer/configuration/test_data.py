"""Section data: defaults, and what it refuses."""

import subprocess
import sys

import pytest

from spec_core.errors import ConfigError
from spec_core.validation import validate
from spec_trainer.configuration.data import DataConfig


def test_no_key_is_required():
    """A draft that follows live traffic does without a path; the run's configuration says who needs one."""
    config = validate(DataConfig, {}, "data")
    assert (config.path, config.on_bad_row) == (None, "error")


@pytest.mark.parametrize(
    ("key", "value"), [("max_length", 1), ("on_bad_row", "warn"), ("packing", "yes"), ("eval_samples", -1)]
)
def test_values_out_of_range_are_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=key):
        validate(DataConfig, {"path": "x", key: value}, "data")


def test_reading_lines_imports_no_heavy_library():
    code = (
        "import sys, spec_trainer.configuration.data, spec_trainer.data.dataset, spec_trainer.data.batching\n"
        "print(sorted({'torch', 'transformers', 'datasets', 'pyarrow', 'jinja2'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
