"""Stores of a run: where they are, which machine copies to which, and how the one of a machine is started and ended.

In the run's folder, which all machines see, lies `peer-copies/`, for its owner alone:

    token           of the run, which stores and clients hold
    MACHINE.json    address of a store that runs, or has been killed
    MACHINE.log     what it has said
    ring.json       the machines of the present start in their order, and how many others get a copy

A machine is what NETLAYER_NODE calls it, which `netlayer run` sets, or its host's name with a mark of the time since
which it has been up (and of the container): a store that outlived its training is found by the same name. Needs no
torch. Not covered: machines that do not see one folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from netlayer.environ import boot_id, pid_namespace
from netlayer.errors import ConfigError
from netlayer.lock import exclusive
from netlayer.results import write_text
from trainer.peer_copy.client import StoreClient, StoreGone

FOLDER = "peer-copies"
NODE = "NETLAYER_NODE"
_TOKEN, _RING = "token", "ring.json"
_START_S = 60.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_KEPT = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "VIRTUAL_ENV")
"""Variables that a store inherits; none that marks a process as one of a launcher's, which ends those with the run."""


@dataclass(frozen=True)
class Ring:
    """Machines in the order in which they copy: each to the `copies` after it.

    Args:
        machines: their names.
        copies: other machines that get what one writes.
    """

    machines: Sequence[str]
    copies: int

    def targets(self, machine: str) -> list[str]:
        """Return the machines that hold what one writes, itself first."""
        if machine not in self.machines:
            return list(self.machines)
        first = self.machines.index(machine)
        return [self.machines[(first + each) % len(self.machines)] for each in range(self.copies + 1)]


def machine_name() -> str:
    """Return the name of this machine among those of a run."""
    if node := os.environ.get(NODE):
        return node if _NAME.fullmatch(node) else f"node-{hashlib.sha256(node.encode()).hexdigest()[:16]}"
    mark = hashlib.sha256(f"{boot_id()}/{pid_namespace()}".encode()).hexdigest()[:8]
    host = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())[:40].strip("-") or "host"
    return f"{host}-{mark}"


def address_towards(peer: str) -> str:
    """Return the address by which machines reach this one that also reach `peer`; the loopback's for one there."""
    with contextlib.suppress(OSError):
        family, _, _, _, place = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(place)  # of a datagram socket: nothing is sent, the kernel only chooses an interface
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def run_token(out: Path) -> str:
    """Return the token of a run, drawn where there is none yet.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = out / FOLDER
    path = folder / _TOKEN
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            # Under a name of its own first: another machine's process never reads half of it, and one of them wins.
            half = folder / f".{_TOKEN}.{secrets.token_hex(8)}"
            descriptor = os.open(half, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(secrets.token_hex(32) + "\n")
            with contextlib.suppress(FileExistsError):
                os.link(half, path)
            half.unlink()
        return path.read_text(encoding="ascii").strip()
    except OSError as exc:
        raise ConfigError("--out", folder, f"cannot be written ({exc.strerror})", "give a folder of yours") from exc


def write_ring(out: Path, ring: Ring) -> None:
    """Set the machines of the present start; the first rank alone does."""
    text = json.dumps({"machines": list(ring.machines), "copies": ring.copies})
    write_text(out / FOLDER / _RING, text + "\n")


def read_ring(out: Path) -> Ring:
    """Return the machines of the last start; of none where no start has got so far."""
    try:
        facts = json.loads((out / FOLDER / _RING).read_text(encoding="utf-8"))
        return Ring([str(each) for each in facts["machines"]], int(facts["copies"]))
    except (OSError, ValueError, LookupError, TypeError):
        return Ring([], 0)


def store_urls(out: Path) -> dict[str, str]:
    """Return the stores that were started for a run, those that are gone too, by their machines."""
    urls = {}
    for file in sorted((out / FOLDER).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if file.name != _RING:
                urls[file.stem] = str(json.loads(file.read_text(encoding="utf-8"))["url"])
    return urls


def has_copies(out: Path) -> bool:
    """Whether a start of the run in this folder has had stores."""
    return (out / FOLDER / _RING).is_file()


def location_of(out: Path) -> str:
    """Return the URL under which the copies of a run are checkpoints."""
    return f"peers://{str(out.resolve()).lstrip('/')}"


def announce_store(folder: Path, machine: str, url: str) -> None:
    """Write where a store is; it does so itself, once it may be connected to."""
    facts = {"url": url, "pid": os.getpid(), "host": socket.gethostname()}
    write_text(folder / f"{machine}.json", json.dumps(facts) + "\n")


def forget_store(folder: Path, machine: str) -> None:
    """Remove what a store of this process has announced."""
    path = folder / f"{machine}.json"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        if json.loads(path.read_text(encoding="utf-8"))["pid"] == os.getpid():
            path.unlink()


def start_store(
    out: Path, machine: str = "", *, address: str = "127.0.0.1", limit_bytes: int = 0, hold_s: float = 1800.0
) -> str:
    """Start the store of this machine for a run, unless there is one; return its URL.

    It is no child of this process, and outlives it; `stop_store` ends it, or `hold_s` seconds without a word of the
    run. It takes no file before somebody has set a limit: training does (`trainer.peer_copy.copies`).

    Args:
        out: folder of the run.
        machine: name of this machine; none: `machine_name()`.
        address: of this machine, at which the others reach it.
        limit_bytes: how much memory it may take; 0: nothing yet, and one that is there keeps its limit.
        hold_s: after which it ends where nobody has spoken to it.

    Raises:
        ConfigError: it cannot be started; says why.
    """
    # The store runs in no folder of ours, where a relative path leads elsewhere.
    machine, token, folder = machine or machine_name(), run_token(out), (out / FOLDER).resolve()
    with exclusive(folder / f".{machine}.lock"):
        if (store := _answering(out, machine, token)) is not None:
            if limit_bytes:
                store.set_limit(limit_bytes)
            return store.url
        settings = {
            "folder": str(folder),
            "machine": machine,
            "address": address,
            "limit_bytes": limit_bytes,
            "hold_s": hold_s,
            "token_file": str(folder / _TOKEN),
        }
        log = folder / f"{machine}.log"
        settings_file = folder / f".{machine}.settings"
        write_text(settings_file, json.dumps(settings) + "\n")
        environ = {name: os.environ[name] for name in _KEPT if name in os.environ}
        environ["PYTHONPATH"] = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
        command = [sys.executable, "-m", "trainer.peer_copy.store", str(settings_file)]
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environ,
                cwd="/",
                start_new_session=True,
            )
        code = process.wait()  # it has left a daemon, which listens already, or says why not
        end_s = time.monotonic() + _START_S
        while not code and time.monotonic() < end_s:
            if (store := _answering(out, machine, token)) is not None:
                settings_file.unlink(missing_ok=True)
                return store.url
            time.sleep(0.02)
    rule = f"has no store of checkpoints on {machine}: {_last_line(log) or 'it does not answer'}"
    raise ConfigError("job.checkpoint.peer_copies", address, rule, f"see {log}, or set it to 0")


def stop_store(out: Path, machine: str = "") -> bool:
    """End the store of a machine; return whether one was there."""
    machine = machine or machine_name()
    if not (out / FOLDER / _TOKEN).is_file():
        return False
    store = _answering(out, machine, run_token(out))
    if store is None:
        return False
    with contextlib.suppress(StoreGone):
        store.end()
    return True


class Keeper:
    """Speaks to a store now and then, so that it does not take its run for gone.

    Args:
        url: of the store.
        token: of the run.
        hold_s: for which it waits for a word.
    """

    def __init__(self, url: str, token: str, hold_s: float) -> None:
        self._store, self._ended = StoreClient(url, token), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(hold_s / 4,), name="keeps a store", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop, and leave the store as it is."""
        self._ended.set()
        self._thread.join()
        self._store.close()

    def _run(self, every_s: float) -> None:
        while not self._ended.wait(every_s):
            with contextlib.suppress(OSError):  # it may be gone, which a copy will say
                self._store.listing()


def _answering(out: Path, machine: str, token: str) -> StoreClient | None:
    """Return the store of a machine if it answers."""
    url = store_urls(out).get(machine)
    if url is None:
        return None
    store = StoreClient(url, token)
    try:
        store.listing()
    except OSError:
        return None
    return store


def _last_line(log: Path) -> str:
    with contextlib.suppress(OSError):
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1][:200] if lines else ""
    return ""
