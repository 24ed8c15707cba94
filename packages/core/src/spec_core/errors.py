"""This module has all errors that the project raises on purpose.

::

    SpecError
    ├── UsageError                  the command, configuration or input is wrong (exit code 2)
    │   ├── ConfigError             a key or value of the configuration, or a combination of them
    │   ├── DataError               a file or row of training data
    │   ├── TargetError             a target folder that cannot be read, or that a draft cannot express
    │   ├── ArtifactError           a checkpoint, draft or run directory that is damaged or belongs elsewhere
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
        │   └── HostLost            the host that all workers are on is lost: none can be started again
        ├── NoDevices               no host has devices free for a worker now
        ├── ProtocolError           a peer sent something that the protocol forbids
        │   └── SchemaMismatch      sender and receiver disagree on the features
        └── EngineError             the engine refused or failed a request

The message of a ``UsageError`` is one clear line for the user: what is wrong, the value, what was expected, what to
do. A ``RunError`` stores its cause and, if one rank is at fault, names that rank.
"""

from __future__ import annotations


class SpecError(Exception):
    """Base of all errors of the project; the command line returns ``exit_code`` for it."""

    exit_code = 1


class UsageError(SpecError):
    """The command, the configuration or the input is wrong."""

    exit_code = 2


class ConfigError(UsageError, ValueError):
    """A key or value of the configuration is wrong, or a combination of them."""


class DataError(UsageError, ValueError):
    """A file or row of training data cannot be used."""


class TargetError(UsageError, ValueError):
    """A target folder cannot be read, or a draft cannot express the target."""


class ArtifactError(UsageError, ValueError):
    """A checkpoint, draft or run directory is missing, damaged, unsupported or of another run or target."""


class PluginError(UsageError):
    """A plugin cannot be used."""


class PluginNotFound(PluginError, LookupError):
    """No distribution provides a plugin of the requested name."""


class PluginConflict(PluginError):
    """Two distributions provide a plugin of the same name."""


class PluginImportFailed(PluginError, ImportError):
    """The module of a plugin does not import."""


class PluginInvalid(PluginError, TypeError):
    """A plugin breaks its interface: base class, abstract methods, name, Config or probe."""


class PluginApiMismatch(PluginError):
    """A plugin was written for another version of the interface."""


class PluginUnavailable(PluginError):
    """The probe of a plugin says that this machine cannot run it."""


class RunError(SpecError, RuntimeError):
    """The run failed after it had started."""


class DeadlineExceeded(RunError, TimeoutError):
    """A blocking call took longer than its timeout."""


class PeerLost(RunError, ConnectionError):
    """Another process of the run died, or sent nothing for too long."""


class HostLost(PeerLost):
    """All workers of a run were on one host, which is lost, so no worker can be started again."""


class NoDevices(RunError):
    """No host has devices free for a worker now; one may have them later."""


class ProtocolError(RunError):
    """A peer sent a message that the protocol forbids."""


class SchemaMismatch(ProtocolError):
    """Sender and receiver disagree on the features."""


class EngineError(RunError):
    """The engine refused or failed a request."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
