"""Start ranks on this machine or join those that torchrun started; see README.md in this folder."""

from paralign.launch.channel import report_event
from paralign.launch.server import patient_threads, start_fork_server
from paralign.launch.torchrun import World, current_world, join_world
from paralign.launch.world import run_ranks

__all__ = [
    "World",
    "current_world",
    "join_world",
    "patient_threads",
    "report_event",
    "run_ranks",
    "start_fork_server",
]
