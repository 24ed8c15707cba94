"""As SGLang's: every entry point of the group is called, failures are logged only, then hooks are applied."""

import logging
from importlib.metadata import entry_points

from sglang.srt.plugins.hook_registry import HookRegistry


def load_plugins():
    for plugin in entry_points(group="sglang.srt.plugins"):
        try:
            plugin.load()()
        except Exception:
            logging.exception("plugin %s", plugin.name)
    HookRegistry.apply_hooks()
