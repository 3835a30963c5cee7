"""The pod of a node: what a template says, and what the run needs of every one of them.

Objects are the API's own, as dicts of JSON; the models of the official client say whether they are right (`checked`).
No secret is in a pod: key and store's address lie in the run's folder, which the pod mounts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.config.resilience import KubernetesConfig
from netlayer.errors import ConfigError, HardwareMissing
from trainer.resilience.folder import Spec

RUN_LABEL, NODE_LABEL = "netlayer/run", "netlayer/node"
CONTAINER = "netlayer"
_MODULE = "trainer.resilience.executor"
_JOB, _JOB_UID = "NETLAYER_DRIVER_JOB", "NETLAYER_DRIVER_JOB_UID"
Tree = dict[str, Any]


def client() -> Any:
    """Return the official client's module.

    Raises:
        HardwareMissing: it is not installed.
    """
    try:
        import kubernetes.client
    except ModuleNotFoundError as exc:
        rule = "the official Kubernetes client is not installed; run: pip install 'netlayer[kubernetes]'"
        raise HardwareMissing(f"job.resilience.backend = kubernetes: {rule}") from exc
    return kubernetes.client


def checked(tree: Mapping[str, Any], model: str, where: str) -> Tree:
    """Return an object as the client's model of its kind writes it.

    Args:
        model: the model's name: `V1Pod`.
        where: what to call the object in an error.

    Raises:
        ConfigError: it is none, or has a field that its kind has not.
    """
    module = client()
    try:
        read = getattr(module, model).from_dict(tree)
    except (ValueError, TypeError, AttributeError) as exc:
        text = " ".join(str(exc).split())[:300]
        raise ConfigError(where, None, f"is no {model.removeprefix('V1')}: {text}", "correct it") from exc
    written: Tree = module.ApiClient().sanitize_for_serialization(read)
    lost = sorted(_lost(tree, written, ""))
    if lost:  # the models drop what they do not know: a misspelt field would be without effect
        raise ConfigError(where, lost[0], f"is no field of a {model.removeprefix('V1')}", "correct its name")
    return written


def _lost(before: Any, after: Any, path: str) -> Iterable[str]:
    """Paths that are in one tree and not in the other."""
    if isinstance(before, Mapping):
        for key, value in before.items():
            if value is None:
                continue
            if not isinstance(after, Mapping) or key not in after:
                yield f"{path}.{key}".lstrip(".")
            else:
                yield from _lost(value, after[key], f"{path}.{key}")
    elif isinstance(before, list):
        for index, value in enumerate(before):
            if not isinstance(after, list) or index >= len(after):
                yield f"{path}[{index}]"
            else:
                yield from _lost(value, after[index], f"{path}[{index}]")


def load_template(path: str) -> Tree:
    """Return the pod that all others start from; without a file, an empty one.

    Raises:
        ConfigError: the file cannot be read, or is no pod.
    """
    field = "job.resilience.kubernetes.template"
    if not path:
        return {"metadata": {}, "spec": {"containers": [{"name": CONTAINER}]}}
    client()  # its dependency reads YAML
    import yaml

    try:
        tree = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as exc:
        text = " ".join(str(exc).split())[:300]
        raise ConfigError(field, path, f"cannot be read ({text})", "give a YAML file of a Pod") from exc
    if not isinstance(tree, dict) or tree.get("kind", "Pod") != "Pod" or "spec" not in tree:
        raise ConfigError(field, path, "is no Pod", "give a YAML file with kind: Pod and its spec")
    return checked(tree, "V1Pod", f"{field} = {path}")


@dataclass(frozen=True)
class Owner:
    """The Job that the driver's pod belongs to: when somebody deletes it, the cluster deletes the nodes' pods too."""

    name: str
    uid: str

    @staticmethod
    def from_environ() -> Owner | None:
        """Return the owner that the driver's manifest names; None outside a cluster."""
        name, uid = os.environ.get(_JOB, ""), os.environ.get(_JOB_UID, "")
        return Owner(name, uid) if name and uid else None

    @staticmethod
    def environ() -> list[Tree]:
        """Variables of the driver's container, which the cluster fills in from labels of a Job's pod."""
        labels = {_JOB: "batch.kubernetes.io/job-name", _JOB_UID: "batch.kubernetes.io/controller-uid"}
        return [
            {"name": name, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}}
            for name, label in labels.items()
        ]


def user_of(uid: int, gid: int) -> Tree:
    """Security context of a pod whose processes, and whose volume, are a user's."""
    return {"runAsUser": uid, "runAsGroup": gid, "fsGroup": gid}


def pod_name(run: str, node: str) -> str:
    """Name of a node's pod: the same for every driver, so that a later one finds it."""
    return f"netlayer-{run}-{node.lower()}"


def pod_of(
    spec: Spec, out: Path, node: str, template: Mapping[str, Any], blocked: Iterable[str], owner: Owner | None
) -> Tree:
    """Return the pod that runs a node's executor.

    Args:
        spec, out: of the run.
        template: of `load_template`.
        blocked: machines that it must not come to.
        owner: what it is deleted with.
    """
    settings = spec.resilience.kubernetes
    meta, own = dict(template.get("metadata") or {}), dict(template["spec"])
    meta.pop("namespace", None)
    meta["name"] = pod_name(spec.run, node)
    names = {"app.kubernetes.io/name": "netlayer", "app.kubernetes.io/component": "executor"}
    meta["labels"] = {**(meta.get("labels") or {}), **names, RUN_LABEL: spec.run, NODE_LABEL: node}
    meta["annotations"] = {**(meta.get("annotations") or {}), "netlayer/job": spec.name, "netlayer/out": str(out)}
    if owner is not None:
        reference = {"apiVersion": "batch/v1", "kind": "Job", "name": owner.name, "uid": owner.uid}
        meta["ownerReferences"] = [reference]
    own["restartPolicy"] = "Never"  # an executor that is gone is for the driver to judge
    own.setdefault("automountServiceAccountToken", False)  # an executor asks the API server for nothing
    own.setdefault("enableServiceLinks", False)
    own.setdefault("terminationGracePeriodSeconds", 30)
    # The run's key is readable by its user alone.
    own.setdefault("securityContext", user_of(os.geteuid(), os.getegid()))
    if settings.node_selector:
        own["nodeSelector"] = {**(own.get("nodeSelector") or {}), **settings.node_selector}
    own["affinity"] = _affinity(own.get("affinity") or {}, spec, blocked)
    _add_volumes(own, settings)
    containers = [dict(each) for each in own["containers"]]
    index = next((number for number, each in enumerate(containers) if each.get("name") == CONTAINER), 0)
    containers[index] = _container(containers[index], spec, out, node)
    own["containers"] = containers
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": own}


def _container(container: Tree, spec: Spec, out: Path, node: str) -> Tree:
    settings = spec.resilience.kubernetes
    if settings.image:
        container["image"] = settings.image
    container["command"] = [settings.python, "-m", _MODULE, str(out), node, "$(NETLAYER_ADDRESS)"]
    container.pop("args", None)
    fields = {"NETLAYER_ADDRESS": "status.podIP", "NETLAYER_POD": "metadata.name"}
    container["env"] = [each for each in container.get("env") or [] if each["name"] not in fields] + [
        {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()
    ]
    if spec.environ.get("NETLAYER_RUN_BACKEND") == "nccl":
        resources = dict(container.get("resources") or {})
        limits = dict(resources.get("limits") or {})
        limits.setdefault(settings.gpu_resource, str(spec.ranks_per_node))
        container["resources"] = resources | {"limits": limits}
    container.setdefault("securityContext", {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}})
    mounts = list(container.get("volumeMounts") or [])
    paths = {each["mountPath"] for each in mounts}
    if settings.claim and settings.mount not in paths:
        mounts.append({"name": "netlayer-out", "mountPath": settings.mount})
    if "/dev/shm" not in paths:
        mounts.append({"name": "netlayer-shm", "mountPath": "/dev/shm"})
    container["volumeMounts"] = mounts
    return container


def _add_volumes(own: Tree, settings: KubernetesConfig) -> None:
    """Add the shared folder, and shared memory: a container's own 64 MiB are too few for NCCL and data loaders."""
    volumes = list(own.get("volumes") or [])
    names = {each["name"] for each in volumes}
    if settings.claim and "netlayer-out" not in names:
        volumes.append({"name": "netlayer-out", "persistentVolumeClaim": {"claimName": settings.claim}})
    if "netlayer-shm" not in names:
        volumes.append({"name": "netlayer-shm", "emptyDir": {"medium": "Memory"}})
    own["volumes"] = volumes


def _affinity(affinity: Mapping[str, Any], spec: Spec, blocked: Iterable[str]) -> Tree:
    """Add to a template's affinity: off the blocked machines, and not where another pod of the run is."""
    affinity, hosts = dict(affinity), sorted(blocked)
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    if hosts:
        # By the machine's name and not its hostname label, which need not be the same; the API takes one name each.
        fields = [{"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in hosts]
        by_node = dict(affinity.get("nodeAffinity") or {})
        terms = (by_node.get(required) or {}).get("nodeSelectorTerms") or [{}]
        # Any one term is enough for the scheduler, so each must name them all.
        terms = [{**term, "matchFields": [*(term.get("matchFields") or []), *fields]} for term in terms]
        affinity["nodeAffinity"] = by_node | {required: {"nodeSelectorTerms": terms}}
    if spec.resilience.kubernetes.exclusive:
        apart = dict(affinity.get("podAntiAffinity") or {})
        term = {"labelSelector": {"matchLabels": {RUN_LABEL: spec.run}}, "topologyKey": "kubernetes.io/hostname"}
        apart[required] = [*(apart.get(required) or []), term]
        affinity["podAntiAffinity"] = apart
    return affinity
