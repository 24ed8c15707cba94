"""Names that are imported at their first use."""

import pytest

from spec_kit.lazy import lazy_names


def test_a_name_whose_module_needs_an_absent_distribution_names_the_extra(tmp_path):
    file = tmp_path / "__init__.py"
    file.write_text("if TYPE_CHECKING:\n    from no_such_distribution.images import Image\n")
    needed = r"spec_kit\.targets\.Image needs no_such_distribution; pip install 'spec-kit\[images\]'"
    with pytest.raises(ModuleNotFoundError, match=needed):
        lazy_names("spec_kit.targets", str(file), extra="images")("Image")
