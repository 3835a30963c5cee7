"""A Kubernetes API server's stand-in on loopback: pods and nodes, list, watch, create, delete, patch, rights, quotas.

Every object that comes in or goes out is read by the official client's model of its kind and must come out as it went
in; what does not is a violation, and the tests see it. It checks a request's rights against rules of RBAC, takes
pods to machines as a scheduler would (affinity by name, anti-affinity by label, cordons), and its kubelet runs the
first container's command as a process of this machine. Not covered: admission, namespaces beside one, TLS,
tokens, grace periods, and all that a real server checks and the client's models do not.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from kubernetes import client

Tree = dict[str, Any]
_POD = re.compile(r"^/api/v1/namespaces/(?P<namespace>[a-z0-9-]+)/pods(?:/(?P<name>[a-z0-9.-]+))?$")
_NODE = re.compile(r"^/api/v1/nodes/(?P<name>[a-z0-9.-]+)$")
_NAME = re.compile(r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
_KEPT_EVENTS = 1000


@dataclass
class Failure:
    """An answer that the next matching request gets in place of its own."""

    verb: str
    resource: str
    code: int
    reason: str
    message: str
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1


class FakeKubernetes:
    """The server; `with FakeKubernetes(machines) as server`.

    Args:
        machines: names of the Kubernetes nodes.
        rules: of the driver's Role and ClusterRole; None: everything is allowed.
        runs: the kubelet starts the containers' commands.
    """

    def __init__(self, machines: list[str], rules: list[Tree] | None = None, *, runs: bool = False) -> None:
        self.lock = threading.Condition()
        self.rules, self.runs = rules, runs
        self.nodes = {name: _node(name) for name in machines}
        self.pods: dict[str, Tree] = {}
        self.events: deque[tuple[int, str, Tree]] = deque(maxlen=_KEPT_EVENTS)
        self.forgotten = 0  # versions up to here are too old for a watch
        self.version = 1
        self.failures: list[Failure] = []
        self.requests: list[tuple[str, str]] = []
        self.violations: list[str] = []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.is_closed = False
        handler = type("Handler", (_Handler,), {"fake": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._threads = [threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)]
        if runs:
            self._threads.append(threading.Thread(target=self._kubelet, daemon=True))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, path: Path, namespace: str = "train") -> Path:
        tree = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": "t"}}],
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "me", "namespace": namespace}}],
        }
        path.write_text(json.dumps(tree))  # JSON is YAML
        return path

    def __enter__(self) -> FakeKubernetes:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        with self.lock:
            self.is_closed = True
            self.lock.notify_all()
        self._server.shutdown()
        self._server.server_close()
        for thread in self._threads:
            thread.join(5)
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    # ---- what tests do and see ----

    def fail(self, verb: str, resource: str, code: int, reason: str, message: str, **rest: Any) -> None:
        self.failures.append(Failure(verb, resource, code, reason, message, **rest))

    def set_status(self, name: str, **status: Any) -> None:
        """Change a pod's status, as its kubelet would."""
        with self.lock:
            self.pods[name]["status"].update(status)
            self.note("MODIFIED", self.pods[name])

    def delete(self, name: str) -> None:
        with self.lock:
            pod = self.pods.pop(name)
            self.note("DELETED", pod)
        process = self.processes.get(name)
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def until(self, is_so: Callable[[], bool], limit_s: float = 30.0) -> None:
        end_s = time.monotonic() + limit_s
        while not is_so():
            assert time.monotonic() < end_s, (list(self.pods), self.requests[-10:], self.violations)
            time.sleep(0.01)

    # ---- the cluster ----

    def note(self, kind: str, tree: Tree) -> None:
        """Give an object its next version, and tell those that watch."""
        with self.lock:
            self.version += 1
            tree["metadata"]["resourceVersion"] = str(self.version)
            if tree["kind"] == "Pod":
                self.events.append((self.version, kind, copy.deepcopy(tree)))
            self.lock.notify_all()

    def place(self, pod: Tree) -> None:
        """Put a pod on the first machine that takes it."""
        used = {each["spec"].get("nodeName") for each in self.pods.values() if self._is_apart(pod, each)}
        for name, node in self.nodes.items():
            is_free = not node["spec"].get("unschedulable") and name not in used
            if is_free and self._fits(pod, name, node):
                pod["spec"]["nodeName"] = name
                pod["status"] = {"phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1"}
                return
        message = f"0/{len(self.nodes)} nodes are available"
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        pod["status"] = {"phase": "Pending", "conditions": [condition]}

    @staticmethod
    def _is_apart(pod: Tree, other: Tree) -> bool:
        if other["status"].get("phase") in ("Succeeded", "Failed"):
            return False
        apart = pod["spec"].get("affinity", {}).get("podAntiAffinity", {})
        terms = apart.get("requiredDuringSchedulingIgnoredDuringExecution", [])
        labels = other["metadata"].get("labels", {}).items()
        return any(term["labelSelector"]["matchLabels"].items() <= labels for term in terms)

    @staticmethod
    def _fits(pod: Tree, name: str, node: Tree) -> bool:
        wanted = pod["spec"].get("nodeSelector", {})
        if not wanted.items() <= node["metadata"]["labels"].items():
            return False
        required = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
        terms = required.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms")
        if terms is None:
            return True
        known = {"metadata.name": name}
        return any(
            all(
                (known[each["key"]] in each["values"]) is (each["operator"] == "In")
                for each in term.get("matchFields", [])
            )
            for term in terms
        )

    def _kubelet(self) -> None:
        while True:
            with self.lock:
                if self.is_closed:
                    return
                for name, pod in self.pods.items():
                    if pod["status"].get("phase") != "Running":
                        continue
                    if name not in self.processes:
                        self.processes[name] = _start(pod)
                    code = self.processes[name].poll()
                    if code is not None:
                        self.set_status(name, phase="Failed" if code else "Succeeded")
            time.sleep(0.02)


def _start(pod: Tree) -> subprocess.Popen[bytes]:
    """Run a pod's first container, with the variables that the API fills in."""
    container = pod["spec"]["containers"][0]
    fields = {"metadata.name": pod["metadata"]["name"], "status.podIP": pod["status"]["podIP"]}
    own = {
        each["name"]: each.get("value") or fields[each["valueFrom"]["fieldRef"]["fieldPath"]]
        for each in container["env"]
    }
    command = [re.sub(r"\$\((\w+)\)", lambda match: own[match[1]], word) for word in container["command"]]
    command[0] = sys.executable
    log = Path(pod["metadata"]["annotations"]["netlayer/out"]) / f"{pod['metadata']['name']}.log"
    with log.open("ab") as output:
        return subprocess.Popen(
            command, env={**os.environ, **own}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip


def _node(name: str) -> Tree:
    labels = {"kubernetes.io/hostname": f"host-of-{name}"}  # need not be the name
    meta = {"name": name, "labels": labels, "resourceVersion": "1", "uid": f"uid-{name}"}
    return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {}, "status": {}}


class _Refused(Exception):
    """An answer of an error, as the API's Status object."""

    def __init__(self, code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.code, self.headers = code, headers or {}
        self.status = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
            "reason": reason, "code": code,
        }  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    fake: FakeKubernetes
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_PATCH = do_GET  # noqa: N815

    def _answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        try:
            try:
                self._route(body)
            except _Refused as exc:
                self._send(exc.code, exc.status, "V1Status", exc.headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _route(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        pod, node = _POD.match(parts.path), _NODE.match(parts.path)
        if not pod and not node:
            raise _Refused(404, "NotFound", "the server could not find the requested resource")
        resource, name = ("pods", pod["name"]) if pod else ("nodes", (node or {})["name"])
        verb = {"GET": "get" if name else "list", "POST": "create", "DELETE": "delete", "PATCH": "patch"}[self.command]
        verb = "watch" if query.get("watch") == "true" else verb
        self.fake.requests.append((verb, resource))
        self._fail_as_asked(verb, resource)
        self._check_rights(verb, resource, name)
        if pod:
            actions = {"list": self._list, "watch": self._watch, "get": self._get, "create": self._create}
            actions |= {"delete": self._delete}
            actions[verb](name, pod["namespace"], query, body)
        else:
            self._patch_node(name, body)

    def _fail_as_asked(self, verb: str, resource: str) -> None:
        for failure in self.fake.failures:
            if (failure.verb, failure.resource) == (verb, resource) and failure.times:
                failure.times -= 1
                raise _Refused(failure.code, failure.reason, failure.message, failure.headers)

    def _check_rights(self, verb: str, resource: str, name: str | None) -> None:
        if self.fake.rules is None:
            return
        if not any(verb in rule["verbs"] and resource in rule["resources"] for rule in self.fake.rules):
            user = "system:serviceaccount:train:netlayer"
            text = f'User "{user}" cannot {verb} resource "{resource}" in API group ""'
            raise _Refused(403, "Forbidden", f'{resource} "{name or ""}" is forbidden: {text}')

    # ---- pods ----

    def _list(self, _name: str, _namespace: str, query: Tree, _body: bytes) -> None:
        with self.fake.lock:
            items = [copy.deepcopy(each) for each in self.fake.pods.values() if _is_selected(each, query)]
            version = str(self.fake.version)
        tree = {"apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": version}, "items": items}
        self._send(200, tree, "V1PodList")

    def _watch(self, _name: str, _namespace: str, query: Tree, _body: bytes) -> None:
        fake, version = self.fake, int(query.get("resourceVersion") or 0)
        end_s = time.monotonic() + float(query.get("timeoutSeconds", 60))
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        while True:
            with fake.lock:
                if version < fake.forgotten:
                    status = _Refused(410, "Expired", f"too old resource version: {version}").status
                    self._chunk({"type": "ERROR", "object": status})
                    break
                new = [(number, kind, tree) for number, kind, tree in fake.events if number > version]
                if not new:
                    if fake.is_closed or time.monotonic() > end_s:
                        break
                    fake.lock.wait(0.2)
                    continue
            for number, kind, tree in new:
                version = number
                if _is_selected(tree, query):
                    self._check_model(tree, "V1Pod")
                    self._chunk({"type": kind, "object": tree})
        self.wfile.write(b"0\r\n\r\n")

    def _get(self, name: str, _namespace: str, _query: Tree, _body: bytes) -> None:
        self._send(200, copy.deepcopy(self._pod(name)), "V1Pod")

    def _pod(self, name: str) -> Tree:
        try:
            return self.fake.pods[name]
        except KeyError:
            raise _Refused(404, "NotFound", f'pods "{name}" not found') from None

    def _create(self, _name: str, namespace: str, _query: Tree, body: bytes) -> None:
        pod = json.loads(body)
        self._check_model(pod, "V1Pod")
        name = pod["metadata"]["name"]
        if not _NAME.match(name) or len(name) > 253 or not pod["spec"]["containers"][0].get("image"):
            raise _Refused(422, "Invalid", f'Pod "{name}" is invalid: its name, or its image')
        for term in _node_terms(pod):
            if any(len(each["values"]) != 1 for each in term.get("matchFields", [])):
                rule = "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"
                raise _Refused(422, "Invalid", f'Pod "{name}" is invalid: matchFields: Required value: {rule}')
        with self.fake.lock:
            if name in self.fake.pods:
                raise _Refused(409, "AlreadyExists", f'pods "{name}" already exists')
            now = "2026-11-27T12:00:00Z"
            pod["metadata"] |= {"namespace": namespace, "uid": f"uid-{self.fake.version}", "creationTimestamp": now}
            self.fake.place(pod)
            self.fake.pods[name] = pod
            self.fake.note("ADDED", pod)
            made = copy.deepcopy(pod)
        self._send(201, made, "V1Pod")

    def _delete(self, name: str, _namespace: str, _query: Tree, body: bytes) -> None:
        if body:
            self._check_model(json.loads(body), "V1DeleteOptions")
        pod = copy.deepcopy(self._pod(name))
        self.fake.delete(name)
        self._send(200, pod, "V1Pod")

    # ---- nodes ----

    def _patch_node(self, name: str, body: bytes) -> None:
        if "patch+json" not in self.headers["Content-Type"]:
            raise _Refused(415, "UnsupportedMediaType", "the body of the request was in an unknown format")
        if name not in self.fake.nodes:
            raise _Refused(404, "NotFound", f'nodes "{name}" not found')
        with self.fake.lock:
            node, patch = self.fake.nodes[name], json.loads(body)
            node["spec"].update(patch.get("spec", {}))
            annotations = node["metadata"].setdefault("annotations", {})
            annotations.update(patch.get("metadata", {}).get("annotations", {}))
            self.fake.note("MODIFIED", node)
            patched = copy.deepcopy(node)
        self._send(200, patched, "V1Node")

    # ---- what goes out ----

    def _check_model(self, tree: Tree, model: str) -> None:
        try:
            read = getattr(client, model).from_dict(tree)
        except ValueError as exc:
            self.fake.violations.append(f"{model}: {exc}")
            return
        written = json.loads(json.dumps(client.ApiClient().sanitize_for_serialization(read)))
        times = re.compile(r"\+00:00\"")
        if times.sub('Z"', json.dumps(written, sort_keys=True)) != json.dumps(tree, sort_keys=True):
            self.fake.violations.append(f"{model}: {tree} comes out as {written}")

    def _send(self, code: int, tree: Tree, model: str, headers: dict[str, str] | None = None) -> None:
        self._check_model(tree, model)
        data = json.dumps(tree).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _chunk(self, tree: Tree) -> None:
        data = json.dumps(tree).encode() + b"\n"
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()


def _is_selected(tree: Tree, query: Tree) -> bool:
    labels = tree["metadata"].get("labels", {})
    wanted = [pair.split("=", 1) for pair in query.get("labelSelector", "").split(",") if pair]
    return all(labels.get(name) == value for name, value in wanted)


def _node_terms(pod: Tree) -> list[Tree]:
    by_node = pod["spec"].get("affinity", {}).get("nodeAffinity", {})
    terms: list[Tree] = by_node.get("requiredDuringSchedulingIgnoredDuringExecution", {}).get("nodeSelectorTerms", [])
    return terms
