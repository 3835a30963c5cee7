"""Other hosts: the one form of host files, connections over ssh, and commands that run on many hosts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.remote.connection import LIBRARY_MISSING as LIBRARY_MISSING
    from netlayer.remote.connection import NO_ADDRESS as NO_ADDRESS
    from netlayer.remote.connection import UNREACHABLE as UNREACHABLE
    from netlayer.remote.connection import Connection as Connection
    from netlayer.remote.connection import Failure as Failure
    from netlayer.remote.connection import end_all as end_all
    from netlayer.remote.connection import ssh_command as ssh_command
    from netlayer.remote.fan_out import run_on as run_on
    from netlayer.remote.fan_out import worst as worst
    from netlayer.remote.hosts import is_host as is_host
    from netlayer.remote.hosts import read_hosts as read_hosts

__all__ = [
    "LIBRARY_MISSING",
    "NO_ADDRESS",
    "UNREACHABLE",
    "Connection",
    "Failure",
    "end_all",
    "is_host",
    "read_hosts",
    "run_on",
    "ssh_command",
    "worst",
]

__getattr__ = lazy_names(
    __name__,
    {
        "LIBRARY_MISSING": ".connection",
        "NO_ADDRESS": ".connection",
        "UNREACHABLE": ".connection",
        "Connection": ".connection",
        "Failure": ".connection",
        "end_all": ".connection",
        "is_host": ".hosts",
        "read_hosts": ".hosts",
        "run_on": ".fan_out",
        "ssh_command": ".connection",
        "worst": ".fan_out",
    },
)
