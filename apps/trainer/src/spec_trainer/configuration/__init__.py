"""The configuration's YAML: read, with references between its keys, and written."""

from spec_trainer.configuration.reading import dump_yaml, read_configuration, read_resolved

__all__ = ["dump_yaml", "read_configuration", "read_resolved"]
