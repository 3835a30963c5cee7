"""`init_process_group(init_method="redis://host:port/RUN")`: ranks of plain torch.distributed meet on Redis.

Importing this module registers the schemes:

    redis://[user:password@]host:port/RUN[?db=N]                   rediss://... the same over TLS [&ssl_ca_certs=/path]
    unix:///path/to/redis.sock?run=RUN[&db=N]

Rank and world size come from the arguments of `init_process_group`, from the query (`?rank=0&world_size=2`), else from
RANK and WORLD_SIZE, as torchrun sets them. Every attempt of a torchrun job, and every further process group that a
process opens under the same RUN, gets keys of its own. Not covered: a change of the world size under way.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote, urlencode, urlsplit

from torch.distributed.rendezvous import register_rendezvous_handler

from netlayer.errors import ConfigError
from netlayer.store.meeting import SCHEMES, check_url
from netlayer.store.redis_store import DEFAULT_TIMEOUT, RedisStore

__all__ = ["SCHEMES", "open_store", "server_of", "take_back"]

_OURS = ("rank", "world_size", "run")  # what is left of the query is for the connection
_opened: Counter[tuple[str, str]] = Counter()  # by server and run


def open_store(
    url: str, timeout: timedelta = DEFAULT_TIMEOUT, rank: int = -1, world_size: int = -1
) -> tuple[RedisStore, int, int]:
    """The store at the address, rank and world size; those that are -1 from the address or the environment.

    Raises:
        ConfigError: the address or the environment cannot be used; and what RedisStore raises.
    """
    check_url(url)
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    world_size = _number(query, "world_size", 1) if world_size < 0 else world_size
    rank = _number(query, "rank", 0) if rank < 0 else rank
    if rank >= world_size:
        raise ConfigError(
            "rank", rank, f"must be below the world size {world_size}", "correct rank and world size of this process"
        )
    server, run = _place(url)
    repeat = f"+{_opened[server, run]}" if _opened[server, run] else ""
    store = RedisStore(server, run + repeat, timeout, rank=rank, world_size=world_size)
    _opened[server, run] += 1
    return store, rank, world_size


def take_back(url: str) -> None:
    """The store that was opened last at the address met nobody: the next one takes its name.

    A rank that never reached the server has not counted, so those that did must not have counted either.
    """
    _opened[_place(url)] -= 1


def _rendezvous(url: str, timeout: timedelta = DEFAULT_TIMEOUT, **_: Any) -> Iterator[tuple[RedisStore, int, int]]:
    """The handler that torch calls: rank and world size of `init_process_group` stand in the query."""
    yield open_store(url, timeout)
    raise RuntimeError("a redis:// rendezvous cannot be repeated; start the process again")


def server_of(url: str) -> str:
    """Return the address of the server alone, of an address with a run."""
    return _place(url)[0]


def _place(url: str) -> tuple[str, str]:
    """Split an address into the server's URL and the run's name."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    return _server_url(parts, query), _run_name(parts, query)


def _server_url(parts: SplitResult, query: dict[str, str]) -> str:
    """Return the URL that RedisStore takes: without the run and our own query parameters."""
    options = urlencode({name: value for name, value in query.items() if name not in _OURS})
    # torch may hand on unix:///path as unix:/path. The path of the other schemes is the run.
    path = parts.path if parts.scheme == "unix" else ""
    return f"{parts.scheme}://{parts.netloc}{path}" + (f"?{options}" if options else "")


def _run_name(parts: SplitResult, query: dict[str, str]) -> str:
    """The run id, made different for every attempt of torchrun."""
    run = query.get("run", "") if parts.scheme == "unix" else unquote(parts.path).strip("/")
    if not run:
        raise ConfigError(
            "init_method",
            None,
            "must name the run",
            "write redis://host:port/RUN or unix:///path/to/redis.sock?run=RUN",
        )
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Neither alone tells attempts apart: a lost node restarts the ranks without counting, a fixed port stays.
        run += f".{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}.{os.environ.get('MASTER_PORT', 0)}"
    return run


def _number(query: dict[str, str], name: str, least: int) -> int:
    """`name` of the query, else of the environment (in capitals)."""
    variable = name.upper()
    text = query.get(name, "-1")
    if text == "-1":  # torch's own way to say "not given"
        text = os.environ.get(variable, "")
    if not text:
        raise ConfigError(
            name,
            None,
            f"is neither an argument, nor in the URL, nor in {variable} of the environment",
            f"give init_process_group(..., {name}=N), start with torchrun, or set {variable}",
        )
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise ConfigError(name, text, f"must be a whole number, {least} or more", f"correct {name} or {variable}")
    return number


for _scheme in SCHEMES:
    register_rendezvous_handler(_scheme, _rendezvous)  # type: ignore[no-untyped-call]
