"""Nodes that are pods: made, watched and deleted through the API server, and kept off machines of evicted ones.

The driver's round never waits for the API server. One thread does what was asked for (`_work`), again and again with
a back-off where the server is not reached, has no quota left or is busy; another follows the run's pods by list and
watch (`_follow`). What cannot succeed (rights that are missing, a pod that is refused) ends the node, and the driver's
own rules say what follows. Every failure is one line, once.

[Note: machines] A pod's machine is the Kubernetes node that it ran on. Machines of evicted nodes are in
OUT/run/kubernetes.json, and every later pod of the run is kept off them by its affinity. With
job.resilience.kubernetes.cordon they are marked unschedulable for everybody too; but not where no executor was ever
heard of, for then the image may be at fault, nor where the cluster itself took the pod away.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from netlayer.config.resilience import KubernetesConfig
from netlayer.errors import ConfigError
from netlayer.results import utc_now, write_text
from trainer.resilience.folder import RunFolder
from trainer.resilience.kubernetes.pods import (
    NODE_LABEL,
    RUN_LABEL,
    Owner,
    checked,
    client,
    load_template,
    pod_name,
    pod_of,
)
from trainer.resilience.messages import plain

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_REQUEST_S = (5.0, 20.0)  # to connect, to be answered
_WATCH_S = 60  # of one watch; then the pods are listed again, so that an event that was missed is missed no longer
_BACKOFF_S, _BACKOFF_MOST_S = 0.5, 30.0
_CLOSE_S, _JOIN_S = 10.0, 2.0
_GRACE_S = 1  # 0 would drop the pod before its processes have ended
# The cluster's own decisions, which are no fault of the machine's (reasons of the condition DisruptionTarget).
_TAKEN = ("PreemptionByScheduler", "EvictionByEvictionAPI")

Action = Literal["create", "restart", "delete", "cordon"]


def connect(settings: KubernetesConfig) -> tuple[Any, str]:
    """Return the client's ApiClient, and the namespace of the run.

    Raises:
        HardwareMissing: the client is not installed.
        ConfigError: neither a pod's service account nor a kubeconfig is there.
    """
    module = client()
    import yaml
    from kubernetes import config

    configuration = module.Configuration()
    account = _ACCOUNT / "namespace"
    remedy = "give a kubeconfig (KUBECONFIG), or run in a pod with a service account"
    try:
        if os.environ.get("KUBERNETES_SERVICE_HOST") and account.is_file() and not settings.context:
            config.load_incluster_config(configuration)
            namespace = account.read_text(encoding="utf-8").strip()
        else:
            # The client's own default is what the variable was when it was imported.
            file, context = os.environ.get("KUBECONFIG") or None, settings.context or None
            config.load_kube_config(file, context, configuration)
            known, current = config.list_kube_config_contexts(file)
            chosen = next((each for each in known if each["name"] == context), current)
            namespace = chosen["context"].get("namespace", "default")
    # A kubeconfig that is no YAML, or has no such parts, fails in the client as it may.
    except (config.ConfigException, yaml.YAMLError, OSError, ValueError, TypeError, LookupError) as exc:
        text = " ".join(str(exc).split())[:300]
        raise ConfigError("job.resilience.backend", "kubernetes", f"no cluster is known: {text}", remedy) from exc
    configuration.retries = False  # a failure is told at once, and tried again here
    return module.ApiClient(configuration), settings.namespace or namespace


@dataclass
class _Pod:
    """State of a node's pod, as far as it is known.

    Args:
        host: the machine it was put on; empty: none yet.
        is_ended: its container has ended, or it was refused.
        disruption: why the cluster took it away, where it did.
        waits: why it does not run yet, in words.
        is_gone: it was deleted.
        seen_s: when it was last heard of (monotonic).
        uid, version: of the object that says so.
    """

    host: str = ""
    is_ended: bool = False
    disruption: str = ""
    waits: str = ""
    is_gone: bool = False
    seen_s: float = 0.0
    uid: str = ""
    version: int = 0


@dataclass
class _Task:
    """Something to do for a node or a machine, until it is done."""

    action: Action
    target: str
    attempts: int = 0
    due_s: float = 0.0


class KubernetesBackend:
    """Pods as nodes.

    Args:
        folder: of the run; it lies on a volume that all pods mount at the same place.
        api: the client's ApiClient, and the namespace; None: `connect`.
        on_line: gets every failure, and why pods wait, as a line for the user.

    Raises:
        HardwareMissing, ConfigError: as `connect`, or the template is no pod.
    """

    def __init__(
        self,
        folder: RunFolder,
        api: tuple[Any, str] | None = None,
        *,
        on_line: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self._folder, self._spec, self._on_line = folder, folder.spec(), on_line
        self._settings = self._spec.resilience.kubernetes
        self.comes_s = self._settings.start_s
        self._template, self._owner = load_template(self._settings.template), Owner.from_environ()
        self._client, self.namespace = api or connect(self._settings)
        self._core = client().CoreV1Api(self._client)
        self._errors = _errors()
        self._lock = threading.Condition()
        self._pods: dict[str, _Pod] = {}
        self._tasks: dict[str, _Task] = {}
        self._lines: dict[str, str] = {}
        self._file = folder.run / "kubernetes.json"
        self._blocked, self._placed = _load(self._file)
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []
        self._stream: Any = None

    # ---- the protocol ----

    def name(self, number: int) -> str:
        return f"node-{number}"

    def launch(self, node: str) -> None:
        self._ask("create", node)

    def ensure(self, node: str) -> None:
        self._ask("restart", node)

    def remove(self, node: str, pid: int) -> None:  # noqa: ARG002 - the pod ends with all that is in it
        self._ask("delete", node)

    def has_died(self, node: str) -> bool:
        with self._lock:
            pod, task = self._pods.get(node), self._tasks.get(node)
            is_coming = task is not None and task.action in ("create", "restart")
            return pod is not None and (pod.is_ended or pod.is_gone) and not is_coming

    def block(self, node: str, reason: str, *, was_heard: bool) -> None:
        """Keep the run's later pods off the machine of an evicted node ([Note: machines])."""
        with self._lock:
            host, pod = self._placed.get(node, ""), self._pods.get(node, _Pod())
            if not host or host in self._blocked:
                return
            if pod.disruption in _TAKEN:
                return
            self._blocked[host] = reason
            self._save()
            text = f"{node} ran on {host}: no later pod of this run comes there"
            self._say(f"block {host}", text)
            if self._settings.cordon and was_heard:
                self._ask("cordon", host)

    def check(self) -> None:
        """List the run's pods once, and wait for the answer.

        Raises:
            ConfigError: the API server is not reached, or refuses that.
        """
        try:
            self._list()
        except self._errors as exc:
            remedy = "netlayer run manifests writes the rights that a driver needs; kubectl auth can-i list pods"
            where = f"kubernetes, namespace {self.namespace}"
            raise ConfigError("job.resilience.backend", where, _text(exc), remedy) from exc

    def close(self) -> None:
        """Do what is still to be done, for a bounded time, and let go of the API server."""
        with self._lock:
            until_s = time.monotonic() + _CLOSE_S
            while self._tasks and self._threads and time.monotonic() < until_s:
                self._lock.wait(until_s - time.monotonic())
            left = [f"{task.action} {task.target}" for task in self._tasks.values()]
            self._closed.set()
            self._lock.notify_all()
        if left:
            remedy = f"kubectl delete pods -n {self.namespace} -l {RUN_LABEL}={self._spec.run}"
            self._say("close", f"not done: {', '.join(left[:5])}{' ...' * (len(left) > 5)}; {remedy}")
        until_s = time.monotonic() + _JOIN_S
        while any(thread.is_alive() for thread in self._threads) and time.monotonic() < until_s:
            if self._stream is not None:
                self._stream.stop()  # again and again: one that is being opened does not know of it
            for thread in self._threads:
                thread.join(0.05)
        self._client.rest_client.close()

    # ---- what is asked for ----

    def _ask(self, action: Action, target: str) -> None:
        """Have something done; for one target the newest request holds."""
        with self._lock:
            self._tasks[target] = _Task(action, target)
            self._begin()
            self._lock.notify_all()

    def _begin(self) -> None:
        if self._threads or self._closed.is_set():
            return
        for run in (self._work, self._follow):
            thread = threading.Thread(target=run, name=f"kubernetes {run.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _next(self) -> _Task | None:
        """Wait for the next task that is due; None: the backend is closed."""
        with self._lock:
            while not self._closed.is_set():
                now_s = time.monotonic()
                task = min(self._tasks.values(), key=lambda each: each.due_s, default=None)
                if task is not None and task.due_s <= now_s:
                    return task
                self._lock.wait(task.due_s - now_s if task else None)
            return None

    def _work(self) -> None:
        while (task := self._next()) is not None:
            actions: dict[Action, Callable[[str], None]] = {
                "create": self._create, "restart": self._restart, "delete": self._delete, "cordon": self._cordon,
            }  # fmt: skip
            try:
                actions[task.action](task.target)
            except self._errors as exc:
                self._put_off(task, exc)
                continue
            with self._lock:
                self._lines.pop(task.target, None)
                self._drop(task)

    def _drop(self, task: _Task) -> None:
        if self._tasks.get(task.target) is task:  # else another one was asked for meanwhile
            del self._tasks[task.target]
        self._lock.notify_all()

    def _put_off(self, task: _Task, exc: Exception) -> None:
        """Try again later, or say that it cannot be done."""
        text = _text(exc)
        with self._lock:
            self._say(task.target, f"{task.action} {task.target}: {text}")
            if _is_final(exc, task.action):
                if task.action in ("create", "restart"):
                    self._fail(task.target, text)
                self._drop(task)
                return
            pause_s = max(_pause_s(task.attempts), min(_retry_after(exc), 60.0))
            task.attempts += 1
            task.due_s = time.monotonic() + pause_s

    def _fail(self, node: str, text: str) -> None:
        """Take a node for dead whose pod cannot be made; the reason is where the driver's own line points at."""
        self._pods[node] = _Pod(is_ended=True, seen_s=time.monotonic())
        own = self._folder.node(node)
        own.mkdir(parents=True, exist_ok=True)
        with (own / "executor.log").open("a", encoding="utf-8") as file:
            file.write(f"{utc_now()} no pod: {text}\n")

    def _create(self, node: str) -> None:
        self._folder.node(node).mkdir(parents=True, exist_ok=True)
        tree = pod_of(self._spec, self._folder.out, node, self._template, dict(self._blocked), self._owner)
        tree["metadata"]["namespace"] = self.namespace
        body = client().V1Pod.from_dict(checked(tree, "V1Pod", f"pod of {node}"))
        try:
            made = self._core.create_namespaced_pod(self.namespace, body, _request_timeout=_REQUEST_S)
        except client().ApiException as exc:
            if exc.status != 409:
                raise
            # Of a driver before this one, or of a request whose answer was lost.
            made = self._core.read_namespaced_pod(
                pod_name(self._spec.run, node), self.namespace, _request_timeout=_REQUEST_S
            )
        self._take(node, made)

    def _restart(self, node: str) -> None:
        """Create a pod that is not there; one that has ended is deleted before."""
        try:
            pod = self._core.read_namespaced_pod(
                pod_name(self._spec.run, node), self.namespace, _request_timeout=_REQUEST_S
            )
        except client().ApiException as exc:
            if exc.status != 404:
                raise
            self._create(node)
            return
        if not _read(pod).is_ended and pod.metadata.deletion_timestamp is None:
            self._take(node, pod)
            return
        self._delete(node)
        raise _NotYet(f"the old pod of {node} is being deleted")

    def _delete(self, node: str) -> None:
        options = client().V1DeleteOptions(grace_period_seconds=_GRACE_S)
        try:
            self._core.delete_namespaced_pod(
                pod_name(self._spec.run, node), self.namespace, body=options, _request_timeout=_REQUEST_S
            )
        except client().ApiException as exc:
            if exc.status != 404:
                raise

    def _cordon(self, host: str) -> None:
        body = {
            "metadata": {"annotations": {"netlayer/cordoned-by": f"run {self._spec.run}"}},
            "spec": {"unschedulable": True},
        }
        self._core.patch_node(host, body, _request_timeout=_REQUEST_S)
        self._say(f"cordon {host}", f"{host} is cordoned; once it is repaired: kubectl uncordon {host}")

    # ---- what is seen ----

    def _follow(self) -> None:
        """List the run's pods, and follow what happens to them, until the backend is closed."""
        from kubernetes import watch

        attempts = 0
        while not self._closed.is_set():
            try:
                version = self._list()
                stream = self._stream = watch.Watch()
                for event in stream.stream(
                    self._core.list_namespaced_pod, self.namespace, label_selector=self._selector,
                    resource_version=version, timeout_seconds=_WATCH_S, _request_timeout=(_REQUEST_S[0], _WATCH_S + 15),
                ):  # fmt: skip
                    if event["type"] in ("ADDED", "MODIFIED", "DELETED"):
                        pod = event["object"]
                        self._take(_node_of(pod), pod, is_gone=event["type"] == "DELETED")
                attempts = 0
                self._lines.pop("watch", None)
            except self._errors as exc:
                if self._closed.is_set():
                    return
                if getattr(exc, "status", 0) != 410:  # there the server has forgotten where we were: listed anew
                    self._say("watch", f"pods cannot be watched: {_text(exc)}")
                self._closed.wait(_pause_s(attempts))
                attempts += 1

    @property
    def _selector(self) -> str:
        return f"{RUN_LABEL}={self._spec.run}"

    def _list(self) -> str:
        """List all pods of the run, mark those that are gone, and return the list's resource version."""
        begin_s = time.monotonic()
        pods = self._core.list_namespaced_pod(
            self.namespace, label_selector=self._selector, _request_timeout=_REQUEST_S
        )
        there = set()
        for pod in pods.items:
            there.add(_node_of(pod))
            self._take(_node_of(pod), pod)
        with self._lock:
            for node, known in self._pods.items():
                # One that was made while the list was on its way need not be in it.
                if node not in there and known.seen_s < begin_s:
                    known.is_gone = True
        return str(pods.metadata.resource_version or "")

    def _take(self, node: str, pod: Any, *, is_gone: bool = False) -> None:
        """Note what a pod's object says, unless what is known is newer.

        The watch, lists and answers to requests come by different ways: an answer may be late. Versions of one kind of
        object grow.
        """
        known = _read(pod)
        with self._lock:
            known.is_gone, known.seen_s = is_gone, time.monotonic()
            before = self._pods.get(node)
            is_same = before is not None and known.uid != "" and before.uid == known.uid
            if before is not None and (known.version < before.version or (is_same and before.is_gone)):
                return
            known.disruption = known.disruption or (before.disruption if before else "")
            self._pods[node] = known
            if known.host and self._placed.get(node) != known.host:
                self._placed[node] = known.host
                self._save()
            if known.waits and not is_gone:
                self._say(f"wait {node}", f"{node} waits: {known.waits}")
            if known.disruption and not (before and before.disruption):
                self._say(f"taken {node}", f"{node} was taken away by the cluster: {known.disruption}")

    def _save(self) -> None:
        with contextlib.suppress(OSError):  # a full disk ends no run; it is written again with the next change
            write_text(self._file, json.dumps({"blocked": self._blocked, "placed": self._placed}, indent=1) + "\n")

    def _say(self, about: str, text: str) -> None:
        """Say something once; again where it has changed."""
        with self._lock:
            if self._lines.get(about) == text:
                return
            self._lines[about] = text
        self._on_line(f"kubernetes: {plain(text, 600)}")


class _NotYet(Exception):
    """Something must happen at the API server first."""


def _errors() -> tuple[type[Exception], ...]:
    """Return what the client raises where the server is not reached, refuses, or answers what is no answer."""
    import urllib3.exceptions
    from kubernetes.client.exceptions import OpenApiException

    # ValueError: an object that the client's models do not take.
    return (OpenApiException, urllib3.exceptions.HTTPError, OSError, ValueError, ConfigError, _NotYet)


def _text(exc: Exception) -> str:
    """Return what has failed, in one line; the server's own message where it gives one."""
    status = getattr(exc, "status", None)
    if status is None:
        what = str(exc) if isinstance(exc, (ConfigError, _NotYet)) else f"the API server is not reached: {exc}"
        return plain(" ".join(what.split()), 400)
    try:
        message = str(json.loads(exc.body)["message"])  # type: ignore[attr-defined]
    except (ValueError, LookupError, TypeError, AttributeError):
        message = str(getattr(exc, "reason", ""))
    return plain(f"the API server answers {status}: {' '.join(message.split())}", 400)


def _is_final(exc: Exception, action: Action) -> bool:
    """Whether trying again cannot help: rights and refused objects; a quota may be free again."""
    if isinstance(exc, ConfigError):
        return True
    status = getattr(exc, "status", None)
    is_quota = status == 403 and "exceeded quota" in _text(exc)
    if action == "delete":
        return status in (400, 422)  # a pod that stays would train on: rights may be given meanwhile
    return status in (400, 404, 422) or (status == 403 and not is_quota)


def _pause_s(attempts: int) -> float:
    """Seconds before another attempt; there may be thousands of them while a server is away."""
    return min(_BACKOFF_S * float(2 ** min(attempts, 20)), _BACKOFF_MOST_S)


def _retry_after(exc: Exception) -> float:
    """Seconds that the server asks to wait; 0: none."""
    headers = getattr(exc, "headers", None) or {}
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, float(headers.get("Retry-After", 0)))
    return 0.0


def _node_of(pod: Any) -> str:
    return str((pod.metadata.labels or {}).get(NODE_LABEL, ""))


def _read(pod: Any) -> _Pod:
    """Return what a pod's object says of its node."""
    status = pod.status
    phase = status.phase if status else None
    conditions = (status.conditions if status else None) or []
    containers = (status.container_statuses if status else None) or []
    disruption = next(
        (each.reason or "" for each in conditions if each.type == "DisruptionTarget" and each.status == "True"), ""
    )
    return _Pod(
        host=(pod.spec.node_name if pod.spec else None) or "",
        is_ended=phase in ("Succeeded", "Failed"),
        disruption=disruption,
        uid=pod.metadata.uid or "",
        version=int(version) if (version := pod.metadata.resource_version or "").isdecimal() else 0,
        waits=next(_waits(conditions, containers), "") if phase == "Pending" else "",
    )


def _waits(conditions: list[Any], containers: list[Any]) -> Iterator[str]:
    """Reasons for which a pod does not run, the plainest first; that a container is being made is none."""
    for each in containers:
        waiting = each.state.waiting if each.state else None
        if waiting is not None and waiting.reason not in (None, "ContainerCreating", "PodInitializing"):
            yield f"{waiting.reason}: {waiting.message or ''}".rstrip(": ")
    for each in conditions:
        if each.type == "PodScheduled" and each.status == "False":
            yield f"{each.reason or 'not scheduled'}: {each.message or ''}".rstrip(": ")


def _load(file: Path) -> tuple[dict[str, str], dict[str, str]]:
    """Blocked machines with the reason, and machines by node, as the driver before this one has left them.

    Raises:
        ConfigError: the file is damaged: without it a pod could come back to a machine that was evicted.
    """
    try:
        tree = json.loads(file.read_bytes())
        blocked, placed = dict(tree["blocked"]), dict(tree["placed"])
    except FileNotFoundError:
        return {}, {}
    except (ValueError, LookupError, TypeError) as exc:
        raise ConfigError(str(file), None, f"cannot be read ({exc})", "restore it, or remove it") from exc
    return {str(a): str(b) for a, b in blocked.items()}, {str(a): str(b) for a, b in placed.items()}
