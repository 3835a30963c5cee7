"""Manifests with which a cluster runs a driver: namespace, rights, the job's file, and a Job (or a JobSet) for it.

A Job starts the driver again after a kill or the loss of its machine, and the new one takes the run over; it does not
after an exit code of its own (given up, a wrong file). The rights are what `KubernetesBackend` uses and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from netlayer.config.file import to_toml
from netlayer.errors import ConfigError
from netlayer.results import hide_passwords, write_text
from trainer.resilience.kubernetes.pods import Owner, Tree, checked, load_template, user_of

if TYPE_CHECKING:
    from netlayer.config.tree import Config

POD_VERBS = ("get", "list", "watch", "create", "delete")
_FILES = "/etc/netlayer"
_UID = 1000
_OWN_EXITS = [1, 2, 3]  # netlayer.errors: given up, a wrong file, hardware missing
_MODELS = {
    "Namespace": "V1Namespace",
    "ServiceAccount": "V1ServiceAccount",
    "Role": "V1Role",
    "RoleBinding": "V1RoleBinding",
    "ClusterRole": "V1ClusterRole",
    "ClusterRoleBinding": "V1ClusterRoleBinding",
    "ConfigMap": "V1ConfigMap",
    "Job": "V1Job",
}


def check_settings(config: Config) -> None:
    """Refuse what cannot work in a cluster.

    Raises:
        ConfigError: a setting is missing, or does not go with the others.
    """
    settings, job = config.job.resilience.kubernetes, config.job
    prefix = "job.resilience.kubernetes"
    if not settings.image and not settings.template:
        raise ConfigError(f"{prefix}.image", "", "is needed: the executor's container", "give one, or a template")
    if bool(settings.claim) != bool(settings.mount):
        remedy = "give both, or neither and a template that mounts --out"
        raise ConfigError(f"{prefix}.mount", settings.mount, f"does not go with claim = {settings.claim!r}", remedy)
    if settings.mount and not PurePosixPath(settings.mount).is_absolute():
        raise ConfigError(f"{prefix}.mount", settings.mount, "is no absolute path", "give one, such as /netlayer")
    if not job.store.url.startswith(("redis://", "rediss://")):
        rule = "is no Redis that pods reach"
        raise ConfigError("job.store.url", job.store.url, rule, "give its address, such as redis://redis.ns:6379")
    if job.launch.backend == "auto":
        remedy = "set it to nccl (GPUs) or gloo"
        raise ConfigError("job.launch.backend", "auto", "cannot be chosen by the driver's machine for pods", remedy)


def check_out(config: Config, out: Path) -> None:
    """Refuse a folder that pods would not find.

    Raises:
        ConfigError: it does not lie under the mount.
    """
    mount = config.job.resilience.kubernetes.mount
    if mount and not out.is_relative_to(mount):
        remedy = "give a folder on the claim's volume"
        raise ConfigError("--out", out, f"does not lie under job.resilience.kubernetes.mount = {mount}", remedy)


def manifests(config: Config, name: str, run_out: Path, seed: int, *, is_jobset: bool = False) -> dict[str, list[Tree]]:
    """Return the objects of a driver by file name.

    Args:
        config: with job.resilience.backend = kubernetes.
        name: of the driver's objects.
        run_out: --out of the run, in the pods.
        seed: --seed of the run.
        is_jobset: the driver's Job in a JobSet (sigs.k8s.io/jobset), which clusters with queues know.

    Raises:
        ConfigError: as `check_settings` and `check_out`; or the store's address has a password.
    """
    check_settings(config)
    check_out(config, run_out)
    url = config.job.store.url
    if hide_passwords(url) != url:
        remedy = "give a Redis without one, which a NetworkPolicy keeps to the namespace"
        raise ConfigError("job.store.url", hide_passwords(url), "has a password, and manifests hold no secret", remedy)
    namespace = config.job.resilience.kubernetes.namespace or "default"
    files = {"rbac.yaml": _rights(name, namespace), "job.yaml": [_job_file(config, name, namespace)]}
    if namespace != "default":
        made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        files = {"namespace.yaml": [made], **files}
    if config.job.resilience.kubernetes.cordon:
        files["cordon.yaml"] = _cordon_rights(name, namespace)
    job = _driver(config, name, namespace, run_out, seed)
    for trees in files.values():
        for tree in trees:
            checked(tree, _MODELS[tree["kind"]], f"{tree['kind']} of {name}")
    checked(job, "V1Job", f"Job of {name}")
    files["driver.yaml"] = [_jobset(job)] if is_jobset else [job]
    listed = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": list(files)}
    return {**files, "kustomization.yaml": [listed]}


def write(files: Mapping[str, list[Tree]], folder: Path) -> None:
    """Write the objects as YAML."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Text of several lines as such, so that a person can read the job's file."""

        def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - of the base
            return True

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    folder.mkdir(parents=True, exist_ok=True)
    for name, trees in files.items():
        write_text(folder / name, yaml.dump_all(trees, Dumper=Dumper, sort_keys=False, default_flow_style=False))


def _meta(name: str, namespace: str = "") -> Tree:
    labels = {"app.kubernetes.io/name": "netlayer", "app.kubernetes.io/component": "driver"}
    return {"name": name, "labels": labels} | ({"namespace": namespace} if namespace else {})


def _rights(name: str, namespace: str) -> list[Tree]:
    group = "rbac.authorization.k8s.io"
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": list(POD_VERBS)}
    meta = _meta(name, namespace)
    subject = {"kind": "ServiceAccount", "name": name, "namespace": namespace}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": meta},
        {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": meta,
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [subject],
        },
    ]


def _cordon_rights(name: str, namespace: str) -> list[Tree]:
    """Machines belong to no namespace; and who may patch them may do more than cordon, so this file is apart."""
    group, own = "rbac.authorization.k8s.io", f"{namespace}-{name}-cordon"
    rule = {"apiGroups": [""], "resources": ["nodes"], "verbs": ["patch"]}
    return [
        {"apiVersion": f"{group}/v1", "kind": "ClusterRole", "metadata": _meta(own), "rules": [rule]},
        {
            "apiVersion": f"{group}/v1",
            "kind": "ClusterRoleBinding",
            "metadata": _meta(own),
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": own},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        },
    ]


def _job_file(config: Config, name: str, namespace: str) -> Tree:
    """The job's file, and the template beside it, as the driver finds them."""
    template = config.job.resilience.kubernetes.template
    data = {"job.toml": to_toml(config)}
    if template:
        load_template(template)  # or it says what is wrong with it here, and not in the cluster
        data["pod.yaml"] = Path(template).read_text(encoding="utf-8")
        own = config.job.resilience.kubernetes.model_copy(update={"template": f"{_FILES}/pod.yaml"})
        resilience = config.job.resilience.model_copy(update={"kubernetes": own})
        job = config.job.model_copy(update={"resilience": resilience})
        data["job.toml"] = to_toml(config.model_copy(update={"job": job}))
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": _meta(f"{name}-job", namespace), "data": data}


def _driver(config: Config, name: str, namespace: str, run_out: Path, seed: int) -> Tree:
    """The driver's Job: tried again where its pod was killed or lost, and not after an exit code of its own."""
    settings = config.job.resilience.kubernetes
    command = [
        settings.python,
        "-m",
        "netlayer",
        "run",
        "start",
        f"{_FILES}/job.toml",
        "--out",
        str(run_out),
        "--leave-on-sigterm",
    ]
    container: dict[str, Any] = {
        "name": "driver",
        "command": [*command, "--seed", str(seed)],
        "env": Owner.environ(),
        "resources": {"requests": {"cpu": "500m", "memory": "1Gi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "job", "mountPath": _FILES, "readOnly": True}],
    }
    if settings.image:
        container["image"] = settings.image
    volumes: list[Tree] = [{"name": "job", "configMap": {"name": f"{name}-job"}}]
    user = user_of(_UID, _UID) | {"runAsNonRoot": True}
    if settings.template:  # as the nodes have it: the same image, user and volumes
        template = load_template(settings.template)["spec"]
        first = template["containers"][0]
        container.setdefault("image", first.get("image"))
        container["volumeMounts"] += first.get("volumeMounts") or []
        volumes += template.get("volumes") or []
        user = template.get("securityContext") or user
    if settings.claim and settings.mount not in {each["mountPath"] for each in container["volumeMounts"]}:
        container["volumeMounts"].append({"name": "netlayer-out", "mountPath": settings.mount})
        volumes.append({"name": "netlayer-out", "persistentVolumeClaim": {"claimName": settings.claim}})
    pod = {
        "serviceAccountName": name,
        "restartPolicy": "Never",
        "securityContext": user,
        "containers": [container],
        "volumes": volumes,
    }
    exits = {"containerName": "driver", "operator": "In", "values": _OWN_EXITS}
    lost = {"type": "DisruptionTarget", "status": "True"}
    rules: list[Tree] = [
        {"action": "Ignore", "onPodConditions": [lost]}, {"action": "FailJob", "onExitCodes": exits},
    ]  # fmt: skip
    meta = _meta(name, namespace)
    labels = {"metadata": {"labels": meta["labels"]}}
    spec = {"backoffLimit": 20, "podFailurePolicy": {"rules": rules}, "template": labels | {"spec": pod}}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec}


def _jobset(job: Tree) -> Tree:
    replicated = {"name": "driver", "replicas": 1, "template": {"spec": job["spec"]}}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job["metadata"],
        "spec": {"replicatedJobs": [replicated]},
    }
