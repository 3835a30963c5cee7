"""The folder of a run: what is in it, and the requests of commands to its driver.

    OUT/                     output of the training: metrics.jsonl, checkpoints/, events/, as of `netlayer train`
    OUT/run/spec.json        what executors run, how often they tell of it, and the settings of job.resilience
    OUT/run/job.toml         the job, resolved when the run was started; its store's URL may hold a password (0600)
    OUT/run/token            key of all messages; for its user alone (0600)
    OUT/run/store.url        address of the run's Redis, which may hold a password (0600)
    OUT/run/journal.jsonl    every transition, with its evidence
    OUT/run/status.json      what the driver sees, a few seconds old at most
    OUT/run/driver.lock      held by the driver while it lives
    OUT/run/requests/        one file a request: evict, pause, resume, stop
    OUT/run/nodes/NODE/      logs of the node's executor and ranks, one file a rank and incarnation

A command asks the driver by a file, not by Redis: whoever may write into the folder may stop the run anyway, and a
request outlives a driver and a Redis that are gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from netlayer.config.resilience import ResilienceConfig
from netlayer.errors import ConfigError
from netlayer.results import write_text
from trainer.checkpoint.resume import own_folder
from trainer.resilience.messages import is_node_name

REQUESTS = ("evict", "pause", "resume", "stop")
_MAX_REQUEST_BYTES = 4096


@dataclass(frozen=True)
class Spec:
    """Description of a run for its executors, written once by the first driver.

    Args:
        run: id, drawn at random.
        name: of the job, for people.
        command: of a training process: a Python module and its arguments; the executor sets rank and world size.
        nodes: that train at once.
        ranks_per_node: training processes of a node.
        threads: OMP_NUM_THREADS of each, the same in every incarnation, for the losses depend on it.
        heartbeat_s: seconds between heartbeats.
        environ: further variables of the training processes.
        resilience: settings of job.resilience.
        preload: modules that a process of each node imports once, to fork the training processes from it; none: each
            is a fresh interpreter.
        ranks_as: how heartbeats tell of processes: as a table; as rows in runs that an earlier netlayer has started.
    """

    run: str
    name: str
    command: tuple[str, ...]
    nodes: int
    ranks_per_node: int
    threads: int
    heartbeat_s: float
    environ: dict[str, str] = field(default_factory=dict)
    resilience: ResilienceConfig = field(default_factory=ResilienceConfig)
    preload: tuple[str, ...] = ()
    ranks_as: str = "table"


@dataclass(frozen=True)
class Request:
    """A command's request to the driver; `node` is that of `evict`."""

    action: str
    node: str
    file: Path


class RunFolder:
    """Paths of a run, and the files in them that are read and written in more than one place."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.run = out / "run"
        self.journal, self.status = self.run / "journal.jsonl", self.run / "status.json"
        self.job, self.lock = self.run / "job.toml", self.run / "driver.lock"
        self.requests, self.ended, self.beat = self.run / "requests", self.run / "ended", self.run / "beat"
        self._spec, self._token, self._url = self.run / "spec.json", self.run / "token", self.run / "store.url"

    @property
    def exists(self) -> bool:
        return self._spec.is_file()

    def node(self, name: str) -> Path:
        """Folder of a node.

        Raises:
            ConfigError: that is no node's name; a `..` or a slash would lead out of the run.
        """
        if not is_node_name(name):
            rule = "is no node's name: letters, digits, and single . _ - between them, 63 at most"
            raise ConfigError("node", ascii(name[:80]), rule, "netlayer run status lists the nodes")
        return self.run / "nodes" / name

    def create(self, spec: Spec, job: str) -> None:
        """Write what executors read; a run that is there already stays as it is."""
        for folder in (self.run, self.requests, self.run / "nodes"):
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        _write_private(self.job, job)
        _write_private(self._token, secrets.token_hex(32))
        tree = asdict(spec) | {"resilience": spec.resilience.model_dump(mode="json")}
        write_text(self._spec, json.dumps(tree, indent=1) + "\n")  # last: then the run exists

    def spec(self) -> Spec:
        """Return the run's description.

        Raises:
            ConfigError: there is no run, or its file is damaged.
        """
        try:
            tree: dict[str, Any] = json.loads(self._spec.read_bytes())
            settings = ResilienceConfig.model_validate(tree.pop("resilience"))
            return Spec(
                **{"ranks_as": "rows"}
                | tree
                | {"command": tuple(tree["command"]), "preload": tuple(tree.get("preload", ()))},
                resilience=settings,
            )
        except (FileNotFoundError, NotADirectoryError):
            remedy = "give the --out of netlayer run start"
            raise ConfigError("run", self.out, "is no run of netlayer run", remedy) from None
        except (ValueError, TypeError, LookupError) as exc:
            raise ConfigError(str(self._spec), None, f"cannot be read ({exc})", "restore it") from exc

    def token(self) -> bytes:
        return bytes.fromhex(self._token.read_text(encoding="ascii"))

    def store_url(self) -> str:
        """Address of the run's Redis; empty: not known yet."""
        try:
            return self._url.read_text(encoding="utf-8")
        except FileNotFoundError:
            return ""

    @property
    def checkpoints(self) -> Path:
        """Folder in which the job saves: job.checkpoint.folder, or one in its output."""
        job = tomllib.loads(self.job.read_text(encoding="utf-8")).get("job", {})
        return own_folder(self.out, job.get("checkpoint", {}).get("folder", ""))

    def set_store_url(self, url: str) -> None:
        _write_private(self._url, url)

    def ask(self, action: str, node: str = "") -> None:
        """Put a request down for the driver.

        Raises:
            ConfigError: the node's name is none.
        """
        if node:
            self.node(node)
        name = f"{time.time_ns()}-{secrets.token_hex(4)}.json"
        write_text(self.requests / name, json.dumps({"action": action, "node": node}) + "\n")

    def asked(self) -> Iterator[Request]:
        """Requests, oldest first; the driver removes the file of each once it is in the journal."""
        files: list[Path] = []
        with contextlib.suppress(OSError):  # of a shared folder, for a moment
            files = list(self.requests.iterdir())  # in each round, and mostly there are none: a pattern takes longer
        for file in sorted(file for file in files if file.suffix == ".json" and not file.name.startswith(".")):
            try:
                tree = json.loads(file.read_bytes()[:_MAX_REQUEST_BYTES])
                action, node = str(tree["action"]), str(tree.get("node", ""))
            except OSError:  # as above: the request stays, and is read again
                continue
            except (ValueError, LookupError, TypeError, AttributeError):
                action, node = "", ""
            if action not in REQUESTS or (node and not is_node_name(node)):
                file.unlink(missing_ok=True)
                continue
            yield Request(action, node, file)


def _write_private(path: Path, text: str) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    part.replace(path)
