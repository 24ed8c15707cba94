"""These tests run in an environment with torch-npu, on the stand-in CANN (tests/rigs/fake_cann):

python tests/rigs/fake_cann/with_rig.py python -m pytest tests/rig_ascend
"""

import os
from pathlib import Path

HERE = Path(__file__).parent
# Elsewhere the modules could not even be imported.
collect_ignore_glob = [] if "FAKE_CANN" in os.environ else ["test_*.py"]


def pytest_configure(config):
    config.addinivalue_line("markers", "rig: needs torch-npu and the stand-in CANN")


def pytest_collection_modifyitems(items):
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("rig")
