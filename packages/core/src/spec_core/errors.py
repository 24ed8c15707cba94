"""Every error that the project raises on purpose.

::

    SpecError
    ├── UsageError                  the command, configuration or input is wrong (exit code 2)
    │   ├── ConfigError             a key or value of the configuration, or a combination of them
    │   ├── DataError               a file or row of training data
    │   ├── TargetError             a target folder that cannot be read, or that a draft cannot express
    │   ├── ArtifactError           a checkpoint, draft or run directory that is not what it should be
    │   └── PluginError             a plugin that cannot be used
    │       ├── PluginNotFound      no distribution provides that name
    │       ├── PluginConflict      two distributions provide the same name
    │       ├── PluginImportFailed  its module does not import
    │       ├── PluginInvalid       breaks the interface: base class, abstract methods, name, Config, probe
    │       ├── PluginApiMismatch   written for another version of the interface
    │       └── PluginUnavailable   its probe says that this machine cannot run it
    └── RunError                    the run failed after it had started (exit code 1)
        ├── DeadlineExceeded        a blocking call outlasted its timeout
        ├── PeerLost                another process of the run died or went silent
        ├── ProtocolError           a peer sent something that the protocol forbids
        │   └── SchemaMismatch      sender and receiver disagree on the features
        └── EngineError             the engine refused or failed a request

``UsageError`` is one clear line for the person at the keyboard: what is wrong, the value, what was
expected, what to do. ``RunError`` keeps its cause and, where a rank is to blame, names it.
"""

from __future__ import annotations


class SpecError(Exception):
    """Root of the tree. ``exit_code`` is what the command line returns for it."""

    exit_code = 1


class UsageError(SpecError):
    exit_code = 2


class ConfigError(UsageError, ValueError):
    pass


class DataError(UsageError, ValueError):
    pass


class TargetError(UsageError, ValueError):
    pass


class ArtifactError(UsageError, ValueError):
    pass


class PluginError(UsageError):
    pass


class PluginNotFound(PluginError, LookupError):
    pass


class PluginConflict(PluginError):
    pass


class PluginImportFailed(PluginError, ImportError):
    pass


class PluginInvalid(PluginError, TypeError):
    pass


class PluginApiMismatch(PluginError):
    pass


class PluginUnavailable(PluginError):
    pass


class RunError(SpecError, RuntimeError):
    pass


class DeadlineExceeded(RunError, TimeoutError):
    pass


class PeerLost(RunError, ConnectionError):
    pass


class ProtocolError(RunError):
    pass


class SchemaMismatch(ProtocolError):
    pass


class EngineError(RunError):
    pass
