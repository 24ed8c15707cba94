"""This package starts and ends processes on one host, for launchers and for engines.

``spawn`` starts a Python module in a new process group and returns the process and a ControlChannel to it.
The child calls ``channel_to_parent`` to open its side. The kernel kills the child when the thread that
started it ends. A Reaper kills the processes that the child has started, even if this process is killed by
SIGKILL. A launcher runs WORKER_MODULE in each worker and adds its ChannelWorker to a WorkerInbox.
"""

from spec_processes.channel_listener import ChannelListener, connect_channel, connect_output
from spec_processes.collector import collect_rarely
from spec_processes.control import BEATS_PER_TIMEOUT, ControlChannel
from spec_processes.reaper import Reaper, end_group, ending
from spec_processes.safe_path import SAFE_PATH, leave_out_working_directory
from spec_processes.spawn import channel_to_parent, die_with_parent, spawn, spawn_on
from spec_processes.stacks import ask_for_stacks
from spec_processes.thread_waits import let_waiting_threads_sleep
from spec_processes.torch_extensions import hide_broken_extensions, restart_where_torch_would_fail
from spec_processes.visible_devices import child_devices
from spec_processes.worker_inbox import WORKER_MODULE, ChannelWorker, WorkerInbox

__all__ = [
    "BEATS_PER_TIMEOUT",
    "SAFE_PATH",
    "WORKER_MODULE",
    "ChannelListener",
    "ChannelWorker",
    "ControlChannel",
    "Reaper",
    "WorkerInbox",
    "ask_for_stacks",
    "channel_to_parent",
    "child_devices",
    "collect_rarely",
    "connect_channel",
    "connect_output",
    "die_with_parent",
    "end_group",
    "ending",
    "hide_broken_extensions",
    "leave_out_working_directory",
    "let_waiting_threads_sleep",
    "restart_where_torch_would_fail",
    "spawn",
    "spawn_on",
]
