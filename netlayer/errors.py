"""Errors that a user can act on. Every one carries the exit code that a command ends with.

    NetlayerError                 exit 1: wrong data or a failed threshold
    |-- ConfigError               exit 2: a file, an option or an environment that cannot be used
    |   |-- PackageClash          exit 2: another distribution owns one of our package names
    |-- HardwareMissing           exit 3: the machine lacks what was asked for
    |-- CheckFailed               exit 1: data arrived wrong, or a threshold was missed
    |-- RankFailed                exit 1: one rank of a launch failed (rank, log file and traceback inside)
    |-- CollectiveFailed          exit 1: a collective did not complete; names it, its group, the step and the culprits
    |   |-- CollectiveTimeout     exit 1: in time; a TimeoutError too
    |   |-- PeerLost              exit 1: because a connection broke; a ConnectionError too
    |-- RanksMissing              exit 1: ranks of the run did not come in time; names them; a TimeoutError too
    |-- GroupFailed               exit 1: a process group could not be made; names it and its ranks
    |-- StoreError                exit 1: the key-value store cannot be used any more
        |-- StoreUnreachable      exit 2: no server answers at the address given
        |-- StoreLost             exit 1: the server came back without our data

A bad argument to a library function is a plain ValueError; any other wait that took too long is a plain TimeoutError.
"""

from __future__ import annotations

import errno

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_HARDWARE = 3

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # of an OSError: no room, by the disk, a quota or a limit


class NetlayerError(Exception):
    """Root of the tree. `str(error)` is one line that a person can act on."""

    exit_code = EXIT_FAILED


class ConfigError(NetlayerError):
    """The user's configuration, options or environment cannot be used.

    Args:
        field: what is wrong, as the user wrote it (`job.parallel.tp`, `--out`).
        value: its value; None is not shown in the message.
        rule: the rule it breaks, in words.
        remedy: what to do about it.
    """

    exit_code = EXIT_USAGE

    def __init__(self, field: str, value: object, rule: str, remedy: str) -> None:
        self.field, self.value, self.rule, self.remedy = field, value, rule, remedy
        value_text = "" if value is None else f" = {_one_line(value)}"
        super().__init__(f"{_one_line(field)}{value_text}: {_one_line(rule)}; {_one_line(remedy)}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str, str]]:
        return type(self), (self.field, self.value, self.rule, self.remedy)


class PackageClash(ConfigError):
    """Another installed distribution has a top-level package of one of our names."""


class HardwareMissing(NetlayerError):
    """The machine lacks a device, a driver or a library that was asked for by name."""

    exit_code = EXIT_HARDWARE


class CheckFailed(NetlayerError):
    """Data arrived wrong, or a figure missed its threshold."""


class RankFailed(NetlayerError):
    """One rank of a launch failed; the others were ended.

    Args:
        rank: number of the failed rank.
        reason: reason in one line.
        log_file: path of its log.
        traceback: traceback of its exception, or the last lines of its log.
        place: its coordinates in the job and its step, if known: `tp=0, pp=1, dp=0; host h; step 5`.
    """

    def __init__(self, rank: int, reason: str, log_file: str, traceback: str = "", place: str = "") -> None:
        self.rank, self.reason, self.log_file, self.traceback, self.place = rank, reason, log_file, traceback, place
        suffix = f" ({place})" if place else ""
        super().__init__(f"rank {rank}{suffix} failed: {_one_line(reason)}; its log: {log_file}")

    def __reduce__(self) -> tuple[type[RankFailed], tuple[int, str, str, str, str]]:
        return type(self), (self.rank, self.reason, self.log_file, self.traceback, self.place)


class CollectiveFailed(NetlayerError):
    """A collective did not complete on this rank.

    Args:
        message: one line: the collective, its group, the step, and what every rank to blame was doing.
        missing: ranks that answer and have not launched it.
        silent: ranks that do not answer: dead, stopped, or hung outside Python.
        differing: ranks that launched another collective in its place.
    """

    def __init__(
        self,
        message: str,
        missing: tuple[int, ...] = (),
        silent: tuple[int, ...] = (),
        differing: tuple[int, ...] = (),
    ) -> None:
        self.missing, self.silent, self.differing = missing, silent, differing
        super().__init__(_one_line(message))

    def __reduce__(self) -> tuple[type[CollectiveFailed], tuple[str | tuple[int, ...], ...]]:
        return type(self), (str(self), self.missing, self.silent, self.differing)

    @property
    def culprits(self) -> tuple[int, ...]:
        """Every rank that is named as a cause, in rank order."""
        return tuple(sorted({*self.missing, *self.silent, *self.differing}))


# Both are built-in errors too, so that code that tells causes from consequences sees a lost peer in them.
class CollectiveTimeout(CollectiveFailed, TimeoutError):
    """A collective did not complete in time."""


class PeerLost(CollectiveFailed, ConnectionError):
    """A collective failed because the connection to a peer broke, or a peer gave up."""


class RanksMissing(NetlayerError, TimeoutError):
    """Not all ranks of the run came in time.

    Args:
        message: one line: who is missing, and how many have come.
        missing: their ranks, in order.
    """

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        self.missing = missing
        super().__init__(_one_line(message))

    def __reduce__(self) -> tuple[type[RanksMissing], tuple[str, tuple[int, ...]]]:
        return type(self), (str(self), self.missing)


class GroupFailed(NetlayerError):
    """A process group could not be made."""


class StoreError(NetlayerError):
    """The key-value store that ranks meet in cannot be used any more."""


class StoreUnreachable(StoreError):
    """No store server answers at the address given."""

    exit_code = EXIT_USAGE


class StoreLost(StoreError):
    """The store server came back without the data of this run."""


def _one_line(value: object) -> str:
    return " ".join(str(value).split())
