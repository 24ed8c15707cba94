import pytest

from spec_backend_cuda.nvml import Gpu
from spec_backend_cuda.visible_devices import gpu_of, gpus_visible_to_child, visible_gpus
from spec_core.errors import ConfigError

GPUS = [Gpu(f"GPU-{letter}1234567", (9, 0)) for letter in "abc"]
LISTED = "CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("listed", "seen"),
    [
        (None, ["0", "1", "2"]),
        ("2,0", ["2", "0"]),
        (" 1 , 2", ["1", "2"]),
        ("", []),
        ("-1", []),
        ("0,7,1", ["0"]),
        ("GPU-b", ["GPU-b1234567"]),
        ("GPU-b1234567,GPU-a1234567", ["GPU-b1234567", "GPU-a1234567"]),
        ("GPU-", []),  # several begin so
        ("GPU-x,0", []),
        ("MIG-8f1c", ["MIG-8f1c"]),
        ("0,1,0", []),
        ("GPU-b,GPU-b12", []),
    ],
)
def test_a_list_is_read_as_cuda_reads_it(listed, seen):
    environ = {} if listed is None else {LISTED: listed}
    assert visible_gpus(environ, GPUS) == seen


@pytest.mark.parametrize("listed", ["2,0,1", "GPU-c,GPU-a,GPU-b"])
def test_a_child_gets_its_part_of_an_inherited_list(listed):
    entries = [entry if entry.isdigit() else f"{entry}1234567" for entry in listed.split(",")]
    environ = {LISTED: listed}
    assert gpus_visible_to_child(environ, GPUS, 0, 1) == {LISTED: entries[0]}
    assert gpus_visible_to_child(environ, GPUS, 1, 2) == {LISTED: ",".join(entries[1:])}


def test_without_a_list_indices_are_in_pci_order():
    assert gpus_visible_to_child({}, GPUS, 2, 1) == {LISTED: "2", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert gpus_visible_to_child({"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, GPUS, 2, 1) == {LISTED: "2"}


def test_a_device_that_is_not_there_is_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"device 1.*shows 1 \(CUDA_VISIBLE_DEVICES=2\)") as error:
        gpus_visible_to_child({LISTED: "2"}, GPUS, 1, 1)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"2 devices from 2 on.*shows 3 \(CUDA_VISIBLE_DEVICES=not set\)"):
        gpus_visible_to_child({}, GPUS, 2, 2)


def test_an_entry_names_its_gpu():
    assert gpu_of("1", GPUS) is GPUS[1]
    assert gpu_of("GPU-c1234567", GPUS) is GPUS[2]
    assert gpu_of("MIG-8f1c", GPUS) is None
