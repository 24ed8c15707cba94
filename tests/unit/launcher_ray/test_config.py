"""Which of Ray's resources counts the devices of a backend."""

import pytest

from spec_core.errors import ConfigError
from spec_launcher_ray.config import RayConfig


@pytest.mark.parametrize(("device_type", "resource"), [("cpu", "CPU"), ("cuda", "GPU"), ("npu", "NPU")])
def test_ray_has_a_word_of_its_own(device_type, resource):
    assert RayConfig().resource_of(device_type) == resource


def test_an_option_names_another():
    assert RayConfig(resource="slice").resource_of("cuda") == "slice"
    assert RayConfig(resource="TPU").resource_of("xla") == "TPU"


def test_devices_that_ray_does_not_know_want_the_option():
    with pytest.raises(ConfigError, match=r"devices of type 'xla'; set launcher\.resource to the name"):
        RayConfig().resource_of("xla")
