"""The files of `examples/`: one small one of every kind that the commands of the documentation read."""

from __future__ import annotations

import shutil
from pathlib import Path

from netlayer.errors import ConfigError

EXAMPLES = {
    "laptop.toml": "job: a small GPT on this machine",
    "h200x8.toml": "job and cluster: eight H200",
    "megascale-12288.toml": "job and cluster: the paper's 175B on 12,288 GPUs",
    "megascale-530b-11200.toml": "job and cluster: the paper's 530B on 11,200 GPUs",
    "documents.jsonl": "twelve short texts for `data prepare`",
    "profiles": "NIC profiles for `netlayer nic`: lossless DCQCN, its tuned values, lossy with NVIDIA's ZTR",
    "tuning": "profile that `tune plan` wrote for eight H200, for `tune explain` and `tune diff`",
    "hosts.txt": "host file for `--hosts` and `--ssh`",
    "configs": "SONiC config_db.json of a fabric's switches for `topology import`",
    "flows.csv": "flows of that fabric for `topology ecmp --flows`",
    "config_db.json": "configuration of one switch for `nic switch --base`",
    "topo.txt": "fabric in HPCC's form for `simulate --topo`",
    "flow.txt": "flows in HPCC's form for `simulate --flows`",
    "logs": "outputs of nccl-tests of five nodes, one of them slow, for `accept judge`",
    "traces": "made-up Flight Recorder dumps of eight ranks, one of which hangs, for `observe blame`",
    "before.json": "record of all_reduce_perf for `bench compare`",
    "after.json": "record of all_reduce_perf for `bench compare`",
    "capture.pcapng": "made-up capture of RoCEv2 for `nic pcap`",
    "train.py": "program: sharded data parallel, ranks that meet on Redis",
    "linears.py": "program: tensor-parallel linears",
    "lightning_sharded.py": "program: sharded data parallel under Lightning",
    "accelerate_sharded.py": "program: sharded data parallel under Accelerate",
    "calculon_estimator.py": "estimator for `estimate arena`: Calculon, from its own checkout",
}


def examples_folder() -> Path:
    """Return the folder of the examples, in a checkout or as the installed package carries it."""
    package = Path(__file__).parents[1]
    folders = (package.parent / "examples", package / "examples")
    for folder in folders:
        if (folder / "laptop.toml").is_file():
            return folder
    raise ConfigError("examples", None, f"are in neither {folders[0]} nor {folders[1]}", "install netlayer again")


def copy_examples(target: Path) -> list[Path]:
    """Copy all examples into a folder, which is created.

    Raises:
        ConfigError: the folder holds one of them already; nothing is copied then.
    """
    folder = examples_folder()
    present = [name for name in EXAMPLES if (target / name).exists()]
    if present:
        raise ConfigError("--copy", str(target), f"holds {present[0]} already", "name a new folder")
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name in EXAMPLES:
            source = folder / name
            if source.is_dir():
                shutil.copytree(source, target / name)
            else:
                shutil.copy(source, target / name)
    except OSError as exc:
        rule = f"cannot be written ({exc.strerror or exc})"
        raise ConfigError("--copy", str(target), rule, "name a folder that this user may write") from exc
    return [target / name for name in EXAMPLES]
