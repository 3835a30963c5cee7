"""The section `job.resilience`: how `netlayer run` finds faults, and what it does about them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from netlayer.config.section import Section


class KubernetesConfig(Section):
    """Nodes of `netlayer run` that are pods; no effect with another job.resilience.backend."""

    namespace: str = Field("", description="where pods are made; empty: the driver pod's own, or the kubeconfig's")
    context: str = Field("", description="of the kubeconfig; empty: the pod's service account, or the current context")
    image: str = Field("", description="of the executor's container: one with netlayer; empty: the template's")
    python: str = Field("python3", min_length=1, description="Python of the image that has netlayer")
    template: str = Field("", description="YAML file of a pod that every node's pod starts from")
    claim: str = Field("", description="PersistentVolumeClaim, of many writers, that --out lies on")
    mount: str = Field("", description="where it is mounted, in the driver's pod too; --out must lie under it")
    node_selector: dict[str, str] = Field({}, description="labels that a machine must have")
    gpu_resource: str = Field("nvidia.com/gpu", description="resource that stands for a GPU, one a rank under NCCL")
    exclusive: bool = Field(True, description="no two pods of a run on one machine")
    cordon: bool = Field(
        False,
        description="mark the machine of an evicted node unschedulable for everybody, too; it needs a ClusterRole. "
        "Pods of this run are kept off it in any case",
    )
    start_s: float = Field(
        600.0, gt=0, description="from the making of a pod to its first heartbeat: queue, image, start; seconds"
    )


class ResilienceConfig(Section):
    """Driver and executors of `netlayer run`; no effect on `netlayer train`."""

    backend: Literal["local", "ssh", "slurm", "kubernetes"] = Field(
        "local",
        description="where nodes are: local: process groups of this machine; ssh: hosts of --hosts; slurm: those "
        "of this allocation; kubernetes: pods",
    )
    kubernetes: KubernetesConfig = Field(default_factory=KubernetesConfig, description="pods of the backend kubernetes")
    spares: int = Field(0, ge=0, le=1024, description="standby nodes beyond cluster.servers, checked and waiting")
    replace: bool = Field(
        True, description="ask the backend for a new node where one was evicted (local: another process group)"
    )
    heartbeat_s: float = Field(0.0, ge=0, le=60, description="seconds between heartbeats; 0: 2 local, 10 else")
    missed: int = Field(4, ge=2, le=100, description="heartbeats that may be missed before a node counts as lost")
    stopped_s: float = Field(3.0, gt=0, description="seconds for which a process may be stopped (SIGSTOP) in training")
    silence_factor: float = Field(10.0, ge=2, description="typical steps without a step before the job counts as hung")
    silence_floor_s: float = Field(30.0, gt=0, description="the least of that, seconds")
    phase_s: float = Field(
        1800.0, gt=0, description="the same in an evaluation, a checkpoint, or before the first step, seconds"
    )
    slow_factor: float = Field(
        1.4, gt=1, description="step time over the job's typical one from which a run counts as slow"
    )
    slow_steps: int = Field(20, ge=3, le=1000, description="steps in a row that must be slow")
    slow_floor_s: float = Field(60.0, ge=0, description="and for how long at least, seconds")
    evict_slow: bool = Field(True, description="evict a node that holds up all others, where it is plain which")
    traffic_fall: float = Field(
        0.2,
        ge=0,
        lt=1,
        description="share of a node's usual traffic, in steps, below which that is noted; 0: never. Not with local",
    )
    loss_spike: float = Field(
        0.0, ge=0, description="loss over the median of the last 32 steps from which it is noted as a spike; 0: never"
    )
    checks: Literal["off", "host", "device", "full"] = Field(
        "full",
        description="self-checks of a node before it joins and after a fault: host: disk, clock, memory, kernel log; "
        "device: GEMM and copies too; full: collectives among its ranks as well",
    )
    checks_s: float = Field(120.0, gt=0, description="longest try of a node's self-check, seconds")
    checks_retries: int = Field(
        1, ge=0, le=10, description="further tries of a self-check that ended with an error, or was not done in time"
    )
    checks_unclear: Literal["use", "evict"] = Field(
        "use",
        description="a node whose self-check could still not be made: use: it trains where no standby has passed, and "
        "is the first suspect of a fault that nobody can place; evict: as one that has failed",
    )
    warm: bool = Field(
        True,
        description="each node keeps a process that has torch and the trainer imported, of which its training "
        "processes and self-checks are forks: a restart imports nothing. False: each is a fresh interpreter",
    )
    survivors: Literal["restart", "keep"] = Field(
        "restart",
        description="processes of nodes that are not to blame for a fault: restart: they are ended and started anew; "
        "keep: they leave the training and go on in the same process, with its imports, CUDA context and kernels; "
        "all of a node or none, and none that has had windows in the memory of its peers (GPUs of one host)",
    )
    survivors_s: float = Field(
        10.0,
        gt=0,
        le=15,
        description="seconds that a kept process has to leave, and to begin again, before it is ended",
    )
    kernel_log: str = Field(
        "auto",
        description="file of the kernel's log, in which {node} stands for the node's name; auto: /dev/kmsg, where that "
        "can be read; off",
    )
    rules: str = Field("", description="TOML file of further log rules, tried before those of the package")
    retries_in_place: int = Field(
        1, ge=0, le=100, description="faults of a node's processes that a restart answers before the node is evicted"
    )
    max_restarts: int = Field(1000, ge=0, description="restarts after which the run is given up")
    max_fruitless: int = Field(5, ge=1, description="restarts in a row without a new step before the run is given up")
    backoff_s: float = Field(1.0, ge=0, description="pause after the second fruitless restart, doubled with each")
    backoff_most_s: float = Field(60.0, ge=0, description="longest pause")
    gather_s: float = Field(600.0, gt=0, description="longest wait for enough nodes, seconds")
    stop_s: float = Field(120.0, gt=0, description="seconds that ranks have to end after a step, with a checkpoint")
    orphan_s: float = Field(
        120.0, gt=0, description="seconds without a driver after which executors end their processes, and themselves"
    )

    @property
    def interval_s(self) -> float:
        """Seconds between two heartbeats of a node: `heartbeat_s`, or the backend's default where that is 0."""
        return self.heartbeat_s or (2.0 if self.backend == "local" else 10.0)
