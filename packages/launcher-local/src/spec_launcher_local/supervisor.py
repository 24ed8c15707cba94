"""Former home of the plugin, for environments whose metadata was installed before it moved."""

from spec_launcher_local.launcher import LocalLauncher as Supervisor

__all__ = ["Supervisor"]
