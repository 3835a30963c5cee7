"""Nodes of a run as pods of a Kubernetes cluster: the backend, a node's pod, and manifests for the driver itself."""

from trainer.resilience.kubernetes.backend import KubernetesBackend, connect

__all__ = ["KubernetesBackend", "connect"]
