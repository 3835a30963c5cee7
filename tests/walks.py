"""Counts the modules of this project that a reader passes who follows one thing through it: thirteen walks.

    python -m tests.walks                # all of them (a minute, once the simulator's kernels are compiled)
    python -m tests.walks gradient packet

Each walk is a real run in processes of its own, with `sys.setprofile` in each of them. Counted is every module of the
six packages of which a function was called between the start and the end that the walk names; not what an import calls,
nor functions that no file holds (a dataclass's `__init__`), nor what numba runs to compile, nor packages of others.

[Note: three counts] `entered` has every module, those too that answer one question and are left again: a unit's parser,
the layout, the log. `path` has those that hand the thing on: with a function on the stack, called since the start, at
one of the walk's handovers (it is read, resolved, sent to another process, or has come to `via`). `receivers` are those
that get it as a whole, as an argument; who computes something of it is one of them, and need not hand it on.

Not covered: GPUs (gloo carries, and torch's own AdamW steps), several machines, what a compiled kernel calls at run
time (`compiled_modules` reads that from their sources).
"""

from __future__ import annotations

import argparse
import atexit
import functools
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netlayer.launch.rank import RankContext

ROOT = Path(__file__).parents[1]
_PREFIX = f"{ROOT}{os.sep}"
PACKAGES = ("netlayer", "topology", "congestion", "collectives", "trainer", "bench")
_SPEC = "NETLAYER_WALK"  # of a profiled process: its points and the folder of what it has noted, as JSON
_HOOK = "from tests.walks import profile_this_process\nprofile_this_process()\n"  # run before the program's own code


@dataclass(frozen=True)
class Walk:
    """One thing on its way through the project.

    Args:
        thing: what is followed, from where to where, in words.
        starts: points at which a process begins to count, as `call module:function`; the first that comes.
        ends: points at which it stops, `call` or `return`.
        handovers: points whose stacks are the `path`: see [Note: three counts].
        via: a point on the way, up to which modules are counted too; empty: none.
        carriers: names of the classes that carry the thing, for `receivers`.
        after: points that come first, in this order; no start counts before the last of them.
    """

    thing: str
    starts: Sequence[str]
    ends: Sequence[str]
    handovers: Sequence[str] = ()
    via: str = ""
    carriers: Sequence[str] = ()
    after: Sequence[str] = ()


@dataclass(frozen=True)
class Outcome:
    """Modules of a walk in order of entry: see [Note: three counts]; `to_via` and `receivers` end at its `via`."""

    entered: list[str]
    to_via: list[str]
    path: list[str]
    receivers: list[str]


_LOOP = "call trainer.loop:Trainer.__init__"
_READ, _RESOLVED = "call netlayer.config.tree:build_config", "return trainer.plan:resolve"
_FIRST_HOOK = "call collectives.sharded.reduce:GradientReduce.watch.<locals>.before"
_HAS_SHARD = "return collectives.sharded.optimizer_steps:OptimizerSteps._before"
_LAUNCHED = "return collectives.transport.communicator:Communicator.reduce_scatter"
_FREED = "return collectives.sharded.bucket:Bucket.free"
# The second step of the model that reshards, which goes as all later ones do.
_RESHARDS = ("return collectives.sharded.wrapped:ReshardHooks.attach_hooks", _HAS_SHARD)
_OF_UNITS = "(two ranks on gloo, three units of torch's linears that reshard)"
_STARTED = "call netlayer.launch.launcher:_Crew.watch"
WALKS: Mapping[str, Walk] = {
    "gradient": Walk(
        "a gradient, from the first autograd hook of a backward pass of ShardedDataParallel (two ranks on gloo, "
        "torch's linears and AdamW) to the collective that was launched for it",
        [_FIRST_HOOK],
        [_LAUNCHED],
    ),
    "reduced gradient": Walk(
        "a reduced gradient, from the optimiser's step that asks for it, over the completion of its collective, to "
        "where the optimiser has the shard (the same program)",
        ["call collectives.sharded.optimizer_steps:OptimizerSteps._before"],
        [_HAS_SHARD],
    ),
    "gradient to optimiser": Walk(
        "a gradient, all the way: both of the above, and what lies between",
        [_FIRST_HOOK],
        [_HAS_SHARD],
    ),
    "parameter in stage 3": Walk(
        f"a unit's parameters, from the hook before its forward pass to the unit that computes with them {_OF_UNITS}",
        ["call collectives.sharded.wrapped:WrappedModule._before_module"],
        ["return collectives.sharded.wrapped:WrappedModule._before_module"],
        after=_RESHARDS,
    ),
    "reshard in stage 3": Walk(
        "a unit's parameters, from the hook after its forward pass to their memory freed (the same program)",
        ["call collectives.sharded.wrapped:ReshardHooks._after_unit"],
        [_FREED],
        after=_RESHARDS,
    ),
    "parameter in stage 3, backward": Walk(
        "the same from the hook before its backward pass (the same program)",
        ["call collectives.sharded.wrapped:ReshardHooks._before_backward"],
        ["return collectives.sharded.wrapped:ReshardHooks._before_backward"],
        after=_RESHARDS,
    ),
    "gradient in stage 3": Walk(
        "a gradient of a unit that reshards, from the first hook of a backward pass to the collective that was "
        "launched for it (the same program)",
        [_FIRST_HOOK],
        [_LAUNCHED],
        after=_RESHARDS,
    ),
    "reduced gradient in stage 3": Walk(
        "a reduced gradient there, as above (the same program)",
        ["call collectives.sharded.optimizer_steps:OptimizerSteps._before"],
        [_HAS_SHARD],
        after=_RESHARDS,
    ),
    "packet": Walk(
        "a packet, from the fabric, its flows and the law (Simulation) to the return of the kernel that carries it",
        ["call congestion.simulation.simulate:Simulation.__init__"],
        ["return congestion.simulation.simulate:Simulation.advance"],
    ),
    "flow": Walk(
        "a flow, from `netlayer simulate incast` with its options read to the printed row",
        ["call congestion.commands.simulate:simulate"],
        ["return congestion.commands.simulate:_print_rows"],
    ),
    "nic apply": Walk(
        "a profile, from `netlayer nic apply --profile FILE` with its options read to the plan printed, on a simulated "
        "host",
        ["call congestion.nic.commands.change:apply"],
        ["return congestion.nic.commands.shown:print_plan"],
    ),
    "nccl-tests row": Walk(
        "a row of `all_reduce_perf --backend gloo` on one rank of a launcher, from the calls that are bound for its "
        "size to the printed line",
        ["call bench.perf.driver:_Bench._row"],
        ["return bench.perf.table:LiveTable.add"],
    ),
    "job file": Walk(
        "a job file, from `netlayer train --config FILE` reading it, over the loop, to the end of the first optimiser "
        "step, on rank 0 of two ranks on gloo",
        ["call netlayer.config.file:load_config", "call netlayer.launch.rank:run_rank"],
        [_STARTED, "return trainer.step:Steps.run"],
        handovers=[_READ, _RESOLVED, _STARTED, _LOOP],
        via=_LOOP,
        carriers=["Config", "JobConfig", "Draft", "Plan", "Work"],
    ),
}


def follow(name: str, folder: Path) -> Outcome:
    """Run a walk, with its files in `folder`, and return its modules.

    Raises:
        RuntimeError: the run failed, or never came to the walk's end.
    """
    return follow_all([name], folder)[name]


def follow_all(names: Sequence[str], folder: Path) -> dict[str, Outcome]:
    """Run walks of one program in one run of it, with its files in `folder`, and return the modules of each.

    Raises:
        RuntimeError: the run failed, or never came to the end of a walk.
    """
    notes, hook = folder / "notes", folder / "hook"
    for each in (notes, hook):
        each.mkdir(parents=True)
    (hook / "sitecustomize.py").write_text(_HOOK)
    [make] = {_COMMANDS[name] for name in names}
    command, more = make(folder)
    specs = {}
    for name in names:
        walk = WALKS[name]
        specs[name] = {"starts": walk.starts, "ends": walk.ends, "handovers": walk.handovers, "via": walk.via}
        specs[name] |= {"carriers": walk.carriers, "after": walk.after}
    environ = {name: value for name, value in os.environ.items() if not name.startswith("COV_")}
    environ |= {
        "PYTHONPATH": os.pathsep.join([str(hook), str(ROOT)]),
        _SPEC: json.dumps({"walks": specs, "notes": str(notes)}),
        **more,
    }
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ, capture_output=True, text=True, check=False, timeout=900
    )
    every = [json.loads(file.read_text()) for file in notes.iterdir()]
    outcomes = {}
    for name in names:
        # The process that was started first, then rank 0 of those that it started; the others do the same.
        records = [each for each in every if each["walk"] == name and each["rank"] in ("", "0")]
        records.sort(key=lambda each: each["rank"])
        if done.returncode or not records or not all(each["ended"] for each in records):
            raise RuntimeError(f"{name}: exit code {done.returncode}, {len(records)} records\n{done.stderr[-2000:]}")
        keys = ("entered", "to_via", "path", "receivers")
        outcomes[name] = Outcome(*(_once(each[key] for each in records) for key in keys))
    return outcomes


def _once(lists: Iterable[Sequence[str]]) -> list[str]:
    return list(dict.fromkeys(each for one in lists for each in one))


def _train(folder: Path) -> tuple[list[str], dict[str, str]]:
    text = folder / "text"
    text.mkdir()
    for index in range(6):
        (text / f"{index}.py").write_text((ROOT / "netlayer" / "config" / "tree.py").read_text() + f"# {index}\n")
    keys = [
        f"data.folder={text}",
        "data.pattern=*.py",
        "model.layers=2",
        "optimizer.steps=2",
        "optimizer.warmup_steps=1",
    ]
    keys += ["model.vocab_size=300", "evaluation.global_batches=1"]
    overrides = [word for key in keys for word in ("--set", key)]
    job = ["--config", str(ROOT / "examples" / "laptop.toml"), *overrides, "--out", str(folder / "run")]
    # A cache of its own: with the text in it already, the walk would be another one the second time.
    return ["-m", "netlayer", "train", *job], {"XDG_CACHE_HOME": str(folder / "cache")}


def _simulate(_folder: Path) -> tuple[list[str], dict[str, str]]:
    command = ["-m", "netlayer", "simulate", "incast", "--set", "scenario.senders=2", "--cc", "dcqcn"]
    # Once without a profile, under which numba would take several times as long to compile what is not kept yet.
    subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, check=True)
    return command, {}


def _apply(folder: Path) -> tuple[list[str], dict[str, str]]:
    from tests.congestion.nic.programs import install_programs
    from tests.congestion.nic.simulated import build_host

    host = ["--root", str(build_host(folder / "root", "mlx5")), "--tools", str(install_programs(folder / "tools"))]
    profile = ROOT / "examples" / "profiles" / "lossless-dcqcn.toml"
    return ["-m", "netlayer", "nic", "apply", "--profile", str(profile), *host], {}


def _all_reduce(folder: Path) -> tuple[list[str], dict[str, str]]:
    # By the name of a binary: that is how it knows its collective.
    binary = folder / "all_reduce_perf"
    binary.write_text("from netlayer.cli import perf\nperf()\n")
    one = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    flags = ["--backend", "gloo", "-b", "1K", "-e", "1K", "-n", "2", "-w", "1"]
    return [str(binary), *flags], {**one, "MASTER_PORT": str(_free_port())}


def _free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


OF_RANKS = tuple(name for name, walk in WALKS.items() if walk.starts[0].startswith("call collectives.sharded."))
"""Walks of one program, whose processes are profiled once for all of them."""
_COMMANDS = {
    **dict.fromkeys(
        OF_RANKS,
        lambda _folder: (["-m", "tests.walks", "--ranks-of-gradient"], {}),
    ),
    "packet": _simulate,
    "flow": _simulate,
    "nic apply": _apply,
    "nccl-tests row": _all_reduce,
    "job file": _train,
}


def run_gradient_rank(context: RankContext, init_method: str) -> None:
    """Take two steps as one of two ranks; the walk is in the first one's backward pass."""
    import torch
    import torch.distributed as dist

    from collectives.sharded.data_parallel import ShardedDataParallel
    from collectives.sharded.policies import Reshard
    from netlayer.layout import ParallelLayout
    from netlayer.rendezvous import open_world

    open_world(ParallelLayout(dp=2), backend="gloo", init_method=init_method, rank=context.env.rank)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    units = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(3)]
    for wrap in (
        functools.partial(ShardedDataParallel, layers),
        functools.partial(ShardedDataParallel, torch.nn.Sequential(*units), units=units, reshard=Reshard.of_stage(3)),
    ):
        model = wrap()
        optimizer = model.optimizer(torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.close()
    dist.destroy_process_group()


def _start_gradient_ranks() -> None:
    from netlayer.launch.launcher import launch
    from netlayer.store.meeting import meeting_place

    with meeting_place() as place, tempfile.TemporaryDirectory() as logs:
        launch(run_gradient_rank, 2, args=(place.init_method("gradient"),), log_dir=logs)


def compiled_modules() -> list[str]:
    """Return the modules of the kernels that the simulator's entry consists of, by the names in their code."""
    from congestion.engine.run import _run
    from congestion.kernels.jit import _called

    modules, waiting, seen = list[str](), [_run], set[int]()
    while waiting:
        kernel = waiting.pop(0)
        if id(kernel) not in seen:
            seen.add(id(kernel))
            modules.append(kernel.py_func.__module__)
            waiting += _called(kernel.py_func)
    return list(dict.fromkeys(modules))


# In the profiled processes.


@cache
def _module_of(code: CodeType) -> str | None:
    """Return the module of the project that holds the function in its file; None for other code."""
    # Bodies of modules and of classes have no fast locals.
    if not code.co_flags & inspect.CO_OPTIMIZED or not code.co_filename.startswith(_PREFIX):
        return None
    parts = Path(code.co_filename).relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__") if parts[0] in PACKAGES else None


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame and its callers, innermost first."""
    while frame is not None:
        yield frame
        frame = frame.f_back


class _Profiler:
    """What `sys.setprofile` calls in all threads: hands the project's own calls to walks that have not ended."""

    def __init__(self, walks: Mapping[str, Mapping[str, Any]], notes: str) -> None:
        self._notes = [_Notes(name, Path(notes), **spec) for name, spec in walks.items()]
        self._thread, self._is_over = threading.local(), False

    def __call__(self, frame: FrameType, event: str, _arg: Any) -> None:
        code = frame.f_code
        # Every call of every library comes here, so most of them are told by two comparisons, without a further call.
        if code.co_name in ("<module>", "_compile_for_args"):
            if event in ("call", "return") and self._runs_aside(frame):
                depth = getattr(self._thread, "depth", 0)
                self._thread.depth = depth + 1 if event == "call" else max(depth - 1, 0)
                return
        elif not code.co_filename.startswith(_PREFIX):
            return
        if event not in ("call", "return") or self._is_over or getattr(self._thread, "depth", 0):
            return
        if (module := _module_of(code)) is None:
            return
        for notes in self._notes:
            notes.take(frame, event, module)
        self._is_over = all(notes.state == "after" for notes in self._notes)
        if self._is_over:
            sys.setprofile(None)

    @staticmethod
    def _runs_aside(frame: FrameType) -> bool:
        """Return True for an import, and for numba as it compiles or loads a kernel."""
        code = frame.f_code
        if code.co_name == "<module>":
            return frame.f_globals.get("__name__") not in ("__main__", "__mp_main__")
        return code.co_name == "_compile_for_args" and "numba" in code.co_filename

    def save(self) -> None:
        for notes in self._notes:
            notes.save()


class _Notes:
    """Modules of one walk between its first start and its first end."""

    def __init__(
        self,
        name: str,
        folder: Path,
        starts: Sequence[str],
        ends: Sequence[str],
        handovers: Sequence[str],
        via: str,
        carriers: Sequence[str],
        after: Sequence[str],
    ) -> None:
        self.state = "before"
        self._awaited = list(after)
        self._starts, self._ends, self._handovers, self._via = set(starts), set(ends), set(handovers), via
        self._entered, self._path = dict[str, None](), dict[str, None]()
        self._to_via: list[str] | None = None
        self._carriers, self._receivers = set(carriers), dict[str, None]()
        self._name, self._folder = name, folder
        self._callers = list[FrameType]()  # on the stack at the start: it is not they who pass the thing on

    def take(self, frame: FrameType, event: str, module: str) -> None:
        """Note a call of one of the project's functions, or its return."""
        if self.state == "after":
            return
        point = f"{event} {module}:{frame.f_code.co_qualname}"
        if self._awaited:
            del self._awaited[: point == self._awaited[0]]
            return
        if self.state == "before" and point in self._starts:
            self.state, self._callers = "inside", list(_stack(frame.f_back))
        if self.state == "before":
            return
        self._entered.setdefault(module)
        if self._to_via is None and module not in self._receivers and self._receives(frame):
            self._receivers.setdefault(module)
        if point == self._via and self._to_via is None:
            self._to_via = list(self._entered)
        if point in self._handovers:
            self._note_stack(frame)
        if point in self._ends:
            self.state = "after"
            self.save()

    def _receives(self, frame: FrameType) -> bool:
        """Return True if an argument of the call carries the thing."""
        code = frame.f_code
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        arguments = [frame.f_locals.get(name) for name in names] if self._carriers else []
        kinds = [type(each) for each in arguments]
        return any(kind.__name__ in self._carriers and kind.__module__.startswith(PACKAGES) for kind in kinds)

    def _note_stack(self, frame: FrameType) -> None:
        called = (each for each in _stack(frame) if not any(each is caller for caller in self._callers))
        modules = [module for each in called if (module := _module_of(each.f_code))]
        self._path |= dict.fromkeys(reversed(modules))

    def save(self) -> None:
        """Write what was noted, whether or not the walk has come to its end."""
        if self.state != "before":
            entered, path = list(self._entered), list(self._path)
            notes = {
                "entered": entered,
                "to_via": self._to_via or entered,
                "path": path,
                "receivers": list(self._receivers),
            }
            notes |= {"walk": self._name, "ended": self.state == "after", "rank": os.environ.get("RANK", "")}
            (self._folder / f"{os.getpid()}-{self._name.replace(' ', '-')}.json").write_text(json.dumps(notes))


def profile_this_process() -> None:
    """Profile this process from now on, if a walk has started it; not ranks above 0, which nobody reads."""
    if _SPEC in os.environ and os.environ.get("RANK", "0") == "0":
        profiler = _Profiler(**json.loads(os.environ[_SPEC]))
        # A walk that ends nowhere is an error of the walk, and to be seen.
        atexit.register(profiler.save)
        _pause_in_imports()
        threading.setprofile(profiler)
        sys.setprofile(profiler)


def _pause_in_imports() -> None:
    """Have no profile while a module is imported: that counts for no walk, and torch's makes a million calls."""
    bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
    load = bootstrap._find_and_load

    def load_unprofiled(name: str, import_: Any) -> Any:
        profile = sys.getprofile()
        sys.setprofile(None)
        try:
            return load(name, import_)
        finally:
            sys.setprofile(profile)

    bootstrap._find_and_load = load_unprofiled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("walks", nargs="*", metavar="WALK", help=f"{', '.join(WALKS)} [default: all]")
    parser.add_argument("--ranks-of-gradient", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ranks_of_gradient:
        _start_gradient_ranks()
        return
    for name in options.walks or WALKS:
        with tempfile.TemporaryDirectory() as folder:
            outcome = follow(name, Path(folder))
        print(f"{name}: {len(outcome.entered)} modules")
        _print_wrapped(WALKS[name].thing)
        for start, points in (("from", WALKS[name].starts), ("to", WALKS[name].ends)):
            print(f"  {start}: {'; '.join(points)}")
        lists = {"entered": outcome.entered}
        if WALKS[name].via:
            lists |= {"up to via": outcome.to_via, "path to via": outcome.path, "receivers": outcome.receivers}
        for kind, modules in lists.items():
            _print_wrapped(f"{kind}, {len(modules)}: {', '.join(modules)}")
        if name == "packet":
            _print_wrapped(f"in compiled kernels, by reading: {', '.join(compiled_modules())}")


def _print_wrapped(text: str) -> None:
    print(textwrap.fill(text, 120, initial_indent="  ", subsequent_indent="    "))


if __name__ == "__main__":
    main()
