"""Read and write the configuration as YAML."""

from spec_trainer.configuration.reading import dump_yaml, read_configuration, read_resolved

__all__ = ["dump_yaml", "read_configuration", "read_resolved"]
