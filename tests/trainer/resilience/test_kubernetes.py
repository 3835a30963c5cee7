"""Pods as nodes: made, watched, deleted, kept off evicted machines, against a stand-in for the API server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("kubernetes")

from click.testing import CliRunner

from netlayer.config.file import load_config, to_toml
from netlayer.config.tree import Config, build_config
from netlayer.errors import ConfigError
from netlayer.store.redis_server import EmbeddedRedis, find_redis_binary
from tests.trainer.resilience.fake_kubernetes import FakeKubernetes
from trainer.commands.run import run as command
from trainer.resilience.driver import Driver
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.kubernetes import KubernetesBackend, connect, manifests, pods
from trainer.resilience.kubernetes.backend import _pause_s
from trainer.resilience.machine import State

MACHINES = ["m0", "m1", "m2"]


def settings(**more: Any) -> dict[str, Any]:
    return {"image": "netlayer:1", "namespace": "train", **more}


def config_of(job: dict[str, Any] | None = None, **more: Any) -> Config:
    resilience = {
        "backend": "kubernetes", "kubernetes": settings(**more), "checks": "host", "heartbeat_s": 0.5, "missed": 40,
        "silence_floor_s": 600.0, "kernel_log": "off",
    }  # fmt: skip
    tree = {
        "name": "job", "store": {"url": "redis://redis.store:6379"}, "launch": {"backend": "gloo"},
        "parallel": {"dp": 2}, "checkpoint": {"every_steps": 10}, "resilience": resilience,
    }  # fmt: skip
    return build_config({"cluster": {"servers": 2, "gpus_per_server": 1}, "job": tree | (job or {})})


def folder_of(out: Path, config: Config, words: tuple[str, ...] = ("x",)) -> RunFolder:
    folder = RunFolder(out)
    environ = {"NETLAYER_RUN_BACKEND": config.job.launch.backend}
    spec = Spec("0123456789abcdef", "job", words, 2, 1, 1, 0.5, environ, config.job.resilience)
    folder.create(spec, to_toml(config))
    return folder


class Cluster:
    """A fake server, and backends of one run that are closed at the end."""

    def __init__(self, server: FakeKubernetes, path: Path) -> None:
        self.server, self.path, self.lines = server, path, list[str]()
        self.backends: list[KubernetesBackend] = []

    def backend(self, out: str = "run", **more: Any) -> KubernetesBackend:
        config = config_of(**more)
        folder = RunFolder(self.path / out)
        if not folder.exists:
            folder = folder_of(self.path / out, config)
        made = KubernetesBackend(folder, connect(config.job.resilience.kubernetes), on_line=self.lines.append)
        self.backends.append(made)
        return made

    def pod(self, node: str) -> dict[str, Any]:
        return self.server.pods[f"netlayer-0123456789abcdef-{node}"]

    def host(self, node: str) -> str:
        return str(self.pod(node)["spec"].get("nodeName", ""))

    def until_there(self, *nodes: str) -> None:
        names = {f"netlayer-0123456789abcdef-{node}" for node in nodes}
        self.server.until(lambda: names <= self.server.pods.keys())
        self.server.until(lambda: all(node in self.backends[-1]._pods for node in nodes))

    def end(self) -> None:
        for backend in self.backends:
            backend.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.setattr("trainer.resilience.kubernetes.backend._BACKOFF_S", 0.02)
    with FakeKubernetes(MACHINES) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        made = Cluster(server, tmp_path)
        yield made
        made.end()
    assert server.violations == []


@pytest.mark.parametrize("text", [None, "a: [", "7", "clusters: 3", "{}"])
def test_a_kubeconfig_that_is_none_is_refused_in_one_line(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kubeconfig"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(ConfigError, match="no cluster is known") as error:
        connect(config_of().job.resilience.kubernetes)
    assert "\n" not in str(error.value)


def test_a_pod_has_the_run_s_labels_and_no_secret(cluster: Cluster) -> None:
    backend = cluster.backend(claim="shared", mount=str(cluster.path), node_selector={})
    backend.launch("node-0")
    cluster.until_there("node-0")
    pod = cluster.pod("node-0")
    assert pod["metadata"]["labels"]["netlayer/run"] == "0123456789abcdef"
    assert pod["metadata"]["labels"]["netlayer/node"] == "node-0"
    spec = pod["spec"]
    assert spec["restartPolicy"] == "Never"
    assert spec["automountServiceAccountToken"] is False
    [container] = spec["containers"]
    assert container["command"][1:3] == ["-m", "trainer.resilience.executor"]
    assert container["command"][3:] == [str(cluster.path / "run"), "node-0", "$(NETLAYER_ADDRESS)"]
    assert {"name": "netlayer-out", "persistentVolumeClaim": {"claimName": "shared"}} in spec["volumes"]
    token = (cluster.path / "run" / "run" / "token").read_text()
    assert token not in json.dumps(pod)


def test_gpus_are_asked_for_under_nccl_alone(tmp_path: Path) -> None:
    for backend, limits in (("gloo", None), ("nccl", {"nvidia.com/gpu": "8"})):
        config = config_of({"launch": {"backend": backend}})
        environ = {"NETLAYER_RUN_BACKEND": backend}
        spec = Spec("r", "job", ("x",), 2, 8, 1, 0.5, environ, config.job.resilience)
        pod = pods.pod_of(spec, tmp_path, "node-0", pods.load_template(""), [], None)
        assert pod["spec"]["containers"][0].get("resources", {}).get("limits") == limits


def test_a_template_is_kept_and_each_of_its_terms_names_the_blocked_machines(tmp_path: Path) -> None:
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    zones = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]} for zone in ("a", "b")]
    spec = {
        "affinity": {"nodeAffinity": {required: {"nodeSelectorTerms": zones}}},
        "tolerations": [{"operator": "Exists"}],
        "containers": [{"name": "side", "image": "s"}, {"name": "netlayer", "image": "n", "env": []}],
    }
    file = tmp_path / "pod.yaml"
    file.write_text(json.dumps({"apiVersion": "v1", "kind": "Pod", "spec": spec}))
    config = config_of(image="", template=str(file))
    run = Spec("r", "job", ("x",), 2, 1, 1, 0.5, {}, config.job.resilience)
    pod = pods.pod_of(run, tmp_path, "node-0", pods.load_template(str(file)), ["m1", "m0"], pods.Owner("job", "u1"))
    pods.checked(pod, "V1Pod", "pod")
    terms = pod["spec"]["affinity"]["nodeAffinity"][required]["nodeSelectorTerms"]
    assert [term["matchExpressions"] for term in terms] == [zone["matchExpressions"] for zone in zones]
    for term in terms:
        assert [each["values"] for each in term["matchFields"]] == [["m0"], ["m1"]]
    assert pod["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert [each["name"] for each in pod["spec"]["containers"]] == ["side", "netlayer"]
    assert pod["spec"]["containers"][1]["image"] == "n"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == "u1"


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("spec: {containers: [{name: a}], restartPolicyy: Never}", "spec.restartPolicyy"),
        ("spec: {containers: 7}", "is no Pod"),
        ("kind: Job\nspec: {}", "is no Pod"),
        ("a: [", "cannot be read"),
    ],
)
def test_a_wrong_template_is_refused_in_one_line(tmp_path: Path, text: str, rule: str) -> None:
    file = tmp_path / "pod.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rule) as error:
        pods.load_template(str(file))
    assert "\n" not in str(error.value)


def test_an_evicted_node_s_machine_is_blocked_and_cordoned_and_a_later_driver_knows(cluster: Cluster) -> None:
    backend = cluster.backend(cordon=True)
    backend.launch("node-0")
    cluster.until_there("node-0")
    first = cluster.host("node-0")
    backend.block("node-0", "lost", was_heard=True)
    cluster.server.until(lambda: bool(cluster.server.nodes[first]["spec"].get("unschedulable")))
    backend.remove("node-0", 0)
    cluster.server.until(lambda: not cluster.server.pods)
    cluster.server.nodes[first]["spec"].clear()  # somebody makes it schedulable again: the run still keeps off
    later = cluster.backend(cordon=True)
    for node in ("node-1", "node-2", "node-3"):
        later.launch(node)
    cluster.until_there("node-1", "node-2", "node-3")
    hosts = [cluster.host(node) for node in ("node-1", "node-2", "node-3")]
    assert hosts == [*(name for name in MACHINES if name != first), ""]
    cluster.server.until(lambda: any("node-3 waits: Unschedulable" in line for line in cluster.lines))


def test_a_machine_is_not_cordoned_for_an_image_that_never_ran_nor_blocked_for_a_preemption(cluster: Cluster) -> None:
    backend = cluster.backend(cordon=True)
    for node in ("node-0", "node-1"):
        backend.launch(node)
    cluster.until_there("node-0", "node-1")
    backend.block("node-0", "never came", was_heard=False)
    taken = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}
    cluster.server.set_status("netlayer-0123456789abcdef-node-1", phase="Failed", conditions=[taken])
    cluster.server.until(lambda: backend.has_died("node-1"))
    backend.block("node-1", "lost", was_heard=True)
    backend.close()
    kept = json.loads((cluster.path / "run" / "run" / "kubernetes.json").read_text())
    assert list(kept["blocked"]) == [kept["placed"]["node-0"]]
    assert not any(node["spec"].get("unschedulable") for node in cluster.server.nodes.values())


def test_a_pod_that_ends_or_is_deleted_has_died_and_is_started_anew_only_when_asked_for(cluster: Cluster) -> None:
    backend = cluster.backend()
    for node in ("node-0", "node-1"):
        backend.launch(node)
    cluster.until_there("node-0", "node-1")
    assert not backend.has_died("node-0")
    cluster.server.set_status("netlayer-0123456789abcdef-node-0", phase="Failed")
    cluster.server.delete("netlayer-0123456789abcdef-node-1")
    cluster.server.until(lambda: backend.has_died("node-0") and backend.has_died("node-1"))
    later = cluster.backend()
    for node in ("node-0", "node-1"):
        later.ensure(node)
    cluster.server.until(lambda: all(later._pods.get(node) and not later._tasks for node in ("node-0", "node-1")))
    assert [cluster.pod(node)["status"]["phase"] for node in ("node-0", "node-1")] == ["Running", "Running"]
    assert not later.has_died("node-0")


def test_an_answer_that_is_late_does_not_undo_what_the_watch_has_told(cluster: Cluster) -> None:
    backend = cluster.backend()
    backend.launch("node-0")
    cluster.until_there("node-0")
    name = "netlayer-0123456789abcdef-node-0"
    late = backend._core.read_namespaced_pod(name, "train")
    cluster.server.set_status(name, phase="Failed")
    cluster.server.until(lambda: backend.has_died("node-0"))
    backend._take("node-0", late)
    assert backend.has_died("node-0")
    cluster.server.delete(name)
    cluster.server.until(lambda: backend._pods["node-0"].is_gone)
    backend._take("node-0", late)
    assert backend._pods["node-0"].is_gone


def test_a_watch_that_is_too_old_lists_anew(cluster: Cluster) -> None:
    backend = cluster.backend()
    backend.launch("node-0")
    cluster.until_there("node-0")
    cluster.server.until(lambda: ("watch", "pods") in cluster.server.requests)
    with cluster.server.lock:
        cluster.server.forgotten = cluster.server.version + 1
        cluster.server.version += 1
        cluster.server.pods.clear()  # and no event tells of it
        cluster.server.lock.notify_all()
    cluster.server.until(lambda: backend.has_died("node-0"))
    assert not any("watched" in line for line in cluster.lines)


def test_a_busy_server_and_a_full_quota_are_waited_for(cluster: Cluster) -> None:
    quota = 'pods "x" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=8, used: 8, limited: 8'
    cluster.server.fail("create", "pods", 403, "Forbidden", quota, times=2)
    cluster.server.fail("create", "pods", 429, "TooManyRequests", "try later", headers={"Retry-After": "0.05"})
    backend = cluster.backend()
    backend.launch("node-0")
    cluster.until_there("node-0")
    assert sum("exceeded quota" in line for line in cluster.lines) == 1
    assert sum("answers 429: try later" in line for line in cluster.lines) == 1
    assert not backend.has_died("node-0")


def test_a_server_that_is_away_for_days_is_asked_at_a_bounded_pace() -> None:
    pauses = [_pause_s(attempts) for attempts in (0, 1, 10, 5000)]
    assert pauses == sorted(pauses)
    assert pauses[-1] == 30.0


def test_rights_that_are_missing_end_the_node_with_the_reason_in_its_log(cluster: Cluster) -> None:
    cluster.server.rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch", "delete"]}]
    backend = cluster.backend()
    backend.check()
    backend.launch("node-0")
    cluster.server.until(lambda: backend.has_died("node-0"))
    [line] = [line for line in cluster.lines if "create" in line]
    assert 'cannot create resource "pods"' in line
    assert "\n" not in line
    assert "cannot create" in (cluster.path / "run" / "run" / "nodes" / "node-0" / "executor.log").read_text()
    cluster.server.rules = []
    with pytest.raises(ConfigError, match='cannot list resource "pods"'):
        backend.check()


def test_a_start_without_rights_ends_before_anything_runs(cluster: Cluster) -> None:
    cluster.server.rules = []
    file = cluster.path / "job.toml"
    file.write_text(to_toml(config_of()))
    result = CliRunner().invoke(command, ["start", str(file), "--out", str(cluster.path / "a")])
    assert isinstance(result.exception, ConfigError)
    assert 'cannot list resource "pods"' in str(result.exception)
    assert cluster.server.requests == [("list", "pods")]
    assert not (cluster.path / "a" / "run" / "journal.jsonl").exists()


def test_a_pod_that_an_earlier_request_has_made_is_taken_over(cluster: Cluster) -> None:
    cluster.backend().launch("node-0")
    cluster.until_there("node-0")
    uid = cluster.pod("node-0")["metadata"]["uid"]
    later = cluster.backend()
    later.launch("node-0")
    cluster.server.until(lambda: "node-0" in later._pods and not later._tasks)
    assert cluster.pod("node-0")["metadata"]["uid"] == uid
    assert not later.has_died("node-0")


def test_a_cordon_that_is_refused_is_said_and_the_run_goes_on(cluster: Cluster) -> None:
    cluster.server.rules = [{"resources": ["pods"], "verbs": list(manifests.POD_VERBS)}]
    backend = cluster.backend(cordon=True)
    backend.launch("node-0")
    cluster.until_there("node-0")
    backend.block("node-0", "lost", was_heard=True)
    cluster.server.until(lambda: any('cannot patch resource "nodes"' in line for line in cluster.lines))
    cluster.server.until(lambda: not backend._tasks)
    assert cluster.host("node-0") in backend._blocked


def test_a_server_that_is_gone_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.resilience.kubernetes.backend._CLOSE_S", 0.3)
    with FakeKubernetes(MACHINES) as server:
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
    made = Cluster(server, tmp_path)
    backend = made.backend()
    with pytest.raises(ConfigError, match="is not reached"):
        backend.check()
    backend.launch("node-0")
    server.until(lambda: any("create node-0: the API server is not reached" in line for line in made.lines))
    assert not backend.has_died("node-0")
    backend.remove("node-0", 0)
    backend.close()
    assert any("not done: delete node-0" in line and "kubectl delete pods" in line for line in made.lines)


@pytest.mark.parametrize("jobset", [False, True])
def test_manifests_are_objects_of_the_client_and_their_rights_are_enough_and_least(
    tmp_path: Path, jobset: bool
) -> None:
    import yaml

    file, out = tmp_path / "job.toml", tmp_path / "deploy"
    file.write_text(to_toml(config_of(claim="shared", mount="/netlayer", cordon=True)))
    words = ["manifests", str(file), "--out", str(out), *(["--jobset"] if jobset else [])]
    result = CliRunner().invoke(command, words, catch_exceptions=False)
    assert result.exit_code == 0
    trees = {path.name: list(yaml.safe_load_all(path.read_text())) for path in out.glob("*.yaml")}
    listed = trees.pop("kustomization.yaml")[0]["resources"]
    assert set(listed) == trees.keys()
    [driver] = trees["driver.yaml"]
    if jobset:
        assert driver["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
        template = driver["spec"]["replicatedJobs"][0]["template"]
        driver = {"apiVersion": "batch/v1", "kind": "Job", "metadata": driver["metadata"], "spec": template["spec"]}
    for tree in [driver, *(each for name, many in trees.items() if name != "driver.yaml" for each in many)]:
        model = f"V1{tree['kind']}"
        assert pods.checked(tree, model, model) == tree
    # The job's file is read back to what it was.
    text = trees["job.yaml"][0]["data"]["job.toml"]
    (tmp_path / "again.toml").write_text(text)
    assert load_config(tmp_path / "again.toml") == load_config(file)
    rules = [rule for many in trees.values() for tree in many for rule in tree.get("rules", [])]
    used = _requests_of_a_backend(tmp_path, rules)
    granted = {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
    assert used == granted


def _requests_of_a_backend(path: Path, rules: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """What a backend does in its life, by (verb, resource), under these rules."""
    with FakeKubernetes(MACHINES, rules) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(server.kubeconfig(path / "kubeconfig")))
        made = Cluster(server, path)
        backend = made.backend(cordon=True)
        backend.check()
        backend.ensure("node-0")
        made.until_there("node-0")
        backend.block("node-0", "lost", was_heard=True)
        server.until(lambda: ("patch", "nodes") in server.requests and ("watch", "pods") in server.requests)
        backend.remove("node-0", 0)
        made.end()
        assert not server.pods
        assert not any("forbidden" in line for line in made.lines)
        return set(server.requests)


@pytest.mark.parametrize(
    ("job", "more", "rule"),
    [
        ({"store": {"url": ""}}, {}, "job.store.url"),
        ({"store": {"url": "redis://:secret@redis"}}, {}, "manifests hold no secret"),
        ({"launch": {"backend": "auto"}}, {}, "job.launch.backend"),
        ({}, {"image": ""}, "kubernetes.image"),
        ({}, {"claim": "shared"}, "kubernetes.mount"),
        ({}, {"claim": "shared", "mount": "/elsewhere"}, "does not lie under"),
    ],
)
def test_settings_that_cannot_work_are_refused(job: dict[str, Any], more: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as error:
        manifests.manifests(config_of(job, **more), "n", Path("/netlayer/runs/a"), 0)
    assert "secret@" not in str(error.value)


def test_a_driver_that_leaves_at_sigterm_asks_for_no_stop() -> None:
    lines = (
        "import os, signal, time",
        "from trainer.commands.run import _Signals",
        "class Driver:",
        "    def ask_to_stop(self, *, at_once): print('asked', flush=True)",
        "_Signals(None, leaves=True).driver = Driver()",
        "os.kill(os.getpid(), signal.SIGINT)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "time.sleep(60)",
    )
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (143, "asked\n")


@pytest.mark.skipif(find_redis_binary() is None, reason="needs a redis-server")
def test_a_run_on_pods_replaces_a_lost_one_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    config = config_of({"optimizer": {"steps": 60}}, cordon=True)
    folder = folder_of(out, config, ("tests.trainer.resilience.fake_rank", str(out), "60"))
    lines: list[str] = []
    with FakeKubernetes(MACHINES, runs=True) as server, EmbeddedRedis() as redis:
        folder.set_store_url(redis.url)
        monkeypatch.setenv("KUBECONFIG", str(server.kubeconfig(tmp_path / "kubeconfig")))
        backend = KubernetesBackend(folder, on_line=lines.append)
        driver = Driver(folder, backend, 60, owns_store=False, on_line=lines.append)
        _drive_until(driver, lambda: (out / "saved").exists() and (out / "saved").read_text() == "40", lines)
        [before] = [node for node in driver.facts.members if node == "node-1"]
        host = backend._placed[before]
        server.processes[f"netlayer-0123456789abcdef-{before}"].send_signal(signal.SIGKILL)
        _drive_until(driver, lambda: driver.facts.state is State.RUN and driver.facts.restarts == 1, lines)
        assert driver.facts.members == ["node-0", "node-2"]
        assert driver.facts.checked == ["node-0", "node-2"]  # the new one passed what the old ones passed
        assert [each["decision"]["kind"] for each in driver.facts.incidents] == ["node_lost"]
        assert list(driver.facts.evicted) == [before]
        assert backend._placed["node-2"] not in (host, backend._placed["node-0"])
        server.until(lambda: bool(server.nodes[host]["spec"].get("unschedulable")))
        (out / "go").touch()
        _drive_until(driver, lambda: driver.facts.state is State.COMPLETED, lines)
        driver.end()
        assert not server.pods
        for process in server.processes.values():
            process.wait(10)
    assert server.violations == []


def _drive_until(driver: Driver, is_so: Any, lines: list[str]) -> None:
    end_s = time.monotonic() + 90
    while not is_so():
        assert time.monotonic() < end_s, (driver.facts.state, lines[-10:])
        driver.round()
        time.sleep(0.02)
