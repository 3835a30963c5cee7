"""The typed tree of a cluster and a job, its files, and errors in them.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.config.checkpoint import CheckpointConfig as CheckpointConfig
    from netlayer.config.observe import ObserveConfig as ObserveConfig
    from netlayer.config.resilience import ResilienceConfig as ResilienceConfig
    from netlayer.config.tree import BatchConfig as BatchConfig
    from netlayer.config.tree import ClusterConfig as ClusterConfig
    from netlayer.config.tree import Config as Config
    from netlayer.config.tree import DataConfig as DataConfig
    from netlayer.config.tree import EvaluationConfig as EvaluationConfig
    from netlayer.config.tree import JobConfig as JobConfig
    from netlayer.config.tree import LaunchConfig as LaunchConfig
    from netlayer.config.tree import LoopConfig as LoopConfig
    from netlayer.config.tree import MetricsConfig as MetricsConfig
    from netlayer.config.tree import ModelConfig as ModelConfig
    from netlayer.config.tree import NcclConfig as NcclConfig
    from netlayer.config.tree import OptimizerConfig as OptimizerConfig
    from netlayer.config.tree import OverlapConfig as OverlapConfig
    from netlayer.config.tree import ParallelConfig as ParallelConfig
    from netlayer.config.tree import PricesConfig as PricesConfig
    from netlayer.config.tree import RopeScalingConfig as RopeScalingConfig
    from netlayer.config.tree import Section as Section
    from netlayer.config.tree import StoreConfig as StoreConfig
    from netlayer.config.tree import WatchConfig as WatchConfig
    from netlayer.config.tree import build_config as build_config
    from netlayer.config.tree import build_section as build_section

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "JobConfig",
    "LaunchConfig",
    "LoopConfig",
    "MetricsConfig",
    "ModelConfig",
    "NcclConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "OverlapConfig",
    "ParallelConfig",
    "PricesConfig",
    "ResilienceConfig",
    "RopeScalingConfig",
    "Section",
    "StoreConfig",
    "WatchConfig",
    "build_config",
    "build_section",
]

__getattr__ = lazy_names(
    __name__,
    {
        "BatchConfig": ".tree",
        "CheckpointConfig": ".checkpoint",
        "ClusterConfig": ".tree",
        "Config": ".tree",
        "DataConfig": ".tree",
        "EvaluationConfig": ".tree",
        "JobConfig": ".tree",
        "LaunchConfig": ".tree",
        "LoopConfig": ".tree",
        "MetricsConfig": ".tree",
        "ModelConfig": ".tree",
        "NcclConfig": ".tree",
        "ObserveConfig": ".observe",
        "OptimizerConfig": ".tree",
        "OverlapConfig": ".tree",
        "ParallelConfig": ".tree",
        "PricesConfig": ".tree",
        "ResilienceConfig": ".resilience",
        "RopeScalingConfig": ".tree",
        "Section": ".tree",
        "StoreConfig": ".tree",
        "WatchConfig": ".tree",
        "build_config": ".tree",
        "build_section": ".tree",
    },
)
