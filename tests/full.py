"""Run every command that README.md and docs/ show, once, from nothing: `make full`, before a release.

Everything happens in a fresh clone of the last commit, with a home and a cache that are empty, so that what only works
where somebody has worked before comes to light. `COMMANDS` says of each command what is done with it: it runs as it
stands, or with other words (why is said), or it is only parsed, because it needs GPUs, a cluster or a day. A command of
these pages that is not in the list is an error; tests/integration/test_readme.py holds the two together in every CI
run.

Needs Python alone: the clone makes its own environment. On two cores it takes hours, `make test` alone half of one.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
_LIMIT_S = 7200.0  # of one command; `make test` is the longest


@dataclass(frozen=True)
class Command:
    """A command as README shows it, and what is done with it.

    Args:
        shown: without comments, one space between words.
        instead: what runs in its place; empty: the command as it stands.
        why: the reason for other words, or for parsing it alone.
        exit_codes: that are right.
        gpus: with fewer it is only parsed.
        only_parsed: on every machine.
    """

    shown: str
    instead: str = ""
    why: str = ""
    exit_codes: tuple[int, ...] = (0,)
    gpus: int = 0
    only_parsed: bool = False

    def parsed(self) -> str:
        """The command with `--help` behind it: unknown options are still refused, and nothing starts."""
        if self.shown.startswith("make "):
            return f"make -n {self.shown.removeprefix('make ')}"
        return self.shown[self.shown.rindex(".venv/bin/") :] + " --help"

    def runs(self, num_gpus: int) -> bool:
        return not self.only_parsed and num_gpus >= self.gpus

    def says(self, num_gpus: int) -> str:
        """What is done with it, and why, in a few words."""
        if not self.runs(num_gpus):
            return f"only parsed: {self.why or f'needs {self.gpus} GPUs'}"
        return f"runs as `{self.instead}`: {self.why}" if self.instead else "runs as shown"


def _gpus(shown: str, gpus: int) -> Command:
    return Command(shown, gpus=gpus)


def _only_parsed(shown: str, why: str) -> Command:
    return Command(shown, why=why, only_parsed=True)


_NO_NIC = (0, 3)  # a machine without an RDMA NIC says so, and ends with 3

COMMANDS: tuple[Command, ...] = (
    Command("make quickstart"),
    Command("make test"),
    Command(".venv/bin/netlayer doctor"),
    Command(".venv/bin/netlayer quickstart --set data.folder=$HOME/src --set 'data.pattern=*.c' --steps 500"),
    Command(".venv/bin/all_reduce_perf -g 2 --backend gloo -b 1K -e 64M -f 4"),
    _gpus(".venv/bin/all_reduce_perf -g 8 -b 1K -e 4G -f 4 -R 2", 8),
    Command(
        ".venv/bin/torchrun --nproc-per-node 8 .venv/bin/all_gather_perf -b 1K -e 1G -f 2",
        instead=".venv/bin/torchrun --nproc-per-node 8 .venv/bin/all_gather_perf -b 1K -e 1M -f 2",
        why="eight CPU ranks of 1 GiB are half an hour",
    ),
    Command(".venv/bin/netlayer config show --config examples/megascale-12288.toml"),
    Command("cp examples/megascale-12288.toml my-fabric.toml"),
    Command(".venv/bin/netlayer topology describe --config my-fabric.toml"),
    Command(".venv/bin/netlayer topology ecmp --config my-fabric.toml --set cluster.oversubscription=2"),
    Command(".venv/bin/netlayer topology report --config my-fabric.toml"),
    Command(".venv/bin/netlayer topology import configs/ --out fabric/"),
    Command(".venv/bin/netlayer topology ecmp --fabric fabric/fabric.graphml --flows flows.csv --hash crc16"),
    Command(".venv/bin/netlayer topology whatif --fabric fabric/fabric.graphml --flows flows.csv --fail spine"),
    Command(".venv/bin/netlayer topology report --fabric fabric/fabric.graphml"),
    Command(".venv/bin/netlayer simulate --list"),
    Command(".venv/bin/netlayer simulate incast --cc dcqcn,swift,nscc,hybrid --html incast.html"),
    Command(
        ".venv/bin/netlayer simulate incast --switch-config config_db.json --strict",
        instead=".venv/bin/netlayer nic switch --profile examples/profiles/lossless-dcqcn.toml --format sonic "
        "--base config_db.json --chip tomahawk-5 --out configured && "
        ".venv/bin/netlayer simulate incast --switch-config configured/config_db.json --strict",
        why="with what `nic switch` writes for the switch",
    ),
    Command(
        ".venv/bin/netlayer simulate poisson --cc none --warmup-us 500 --until-flows 95% --sample-us 10 "
        "--out runs/poisson"
    ),
    Command(".venv/bin/netlayer simulate --topo topo.txt --flows flow.txt --cc none,dcqcn --seed 3 --json result.json"),
    Command(".venv/bin/netlayer step --set scenario.bucket_bytes=1MiB"),
    Command(".venv/bin/netlayer arena --template > my_law.py"),
    Command(".venv/bin/netlayer arena my_law.py --quick"),
    Command(".venv/bin/netlayer retransmit"),
    Command(
        ".venv/bin/netlayer observe blame /tmp/nccl_trace_rank_*",
        instead=".venv/bin/netlayer observe blame traces/nccl_trace_rank_*",
        why="a made-up hang, in a folder of its own",
        exit_codes=(1,),
    ),
    Command(".venv/bin/netlayer train examples/laptop.toml --set optimizer.steps=20 --out runs/observed"),
    Command(
        ".venv/bin/netlayer observe query runs/observed "
        '"select rank, segment, count(*) as n, round(avg(end_ns - start_ns) / 1e6, 3) as ms from events '
        "where kind = 'segment' group by all order by rank, ms desc\""
    ),
    Command(".venv/bin/netlayer observe report runs/observed --out runs/observed/observe"),
    Command(
        ".venv/bin/netlayer observe serve runs/observed",
        instead="timeout --signal=INT 20 .venv/bin/netlayer observe serve runs/observed --port 0",
        why="it serves until Ctrl-C, which comes after 20 s",
        exit_codes=(124,),
    ),
    Command(".venv/bin/netlayer observe page runs/observed --out runs/observed/observe"),
    Command(".venv/bin/netlayer observe export runs/observed --perfetto trace.json --steps 3-5"),
    Command(".venv/bin/netlayer observe export runs/observed --prometheus run.prom"),
    Command(".venv/bin/netlayer observe export --grafana netlayer.json"),
    _gpus(".venv/bin/python -m bench.data_idle --ranks 8 --model 125m --runs 5", 8),
    Command(".venv/bin/netlayer estimate step --config examples/megascale-12288.toml --device A100"),
    Command(
        ".venv/bin/netlayer estimate step --precision fp8 --zero 3 --set model.preset=llama3-8b "
        "--set model.dtype=bfloat16 --set cluster.gpus_per_server=8 --set parallel.dp=8 --set batch.micro_batch_size=1"
    ),
    Command(".venv/bin/netlayer estimate search --config examples/megascale-12288.toml --device A100"),
    Command(".venv/bin/netlayer estimate arena --out runs/arena"),
    Command(".venv/bin/netlayer estimate arena --no-page --residuals"),
    _only_parsed(".venv/bin/netlayer estimate arena my_estimator.py --no-page", "the file is the user's"),
    Command(".venv/bin/netlayer estimate check reports/trainer_2xh200_202611.{dp2,tp2,pp2vp2}.json"),
    Command(".venv/bin/netlayer estimate paper"),
    Command(".venv/bin/netlayer estimate step --config examples/h200x8.toml --device my_card.toml"),
    Command(".venv/bin/netlayer run whatif --config examples/megascale-12288.toml --html whatif.html"),
    Command(
        ".venv/bin/netlayer run whatif --config examples/megascale-12288.toml --standbys 0,4,8 "
        "--checkpoint-every 60,600,1800 --restart reschedule --restart requeue"
    ),
    Command(".venv/bin/netlayer run whatif --config examples/megascale-12288.toml --replicas 1,12 --detect 10,600"),
    _only_parsed(
        ".venv/bin/netlayer run whatif --config examples/megascale-12288.toml --life my_life.toml",
        "the file is the user's",
    ),
    Command(".venv/bin/netlayer run whatif --published"),
    Command(".venv/bin/netlayer tune plan --config examples/megascale-12288.toml --device A100"),
    Command(
        ".venv/bin/netlayer tune plan --config examples/megascale-12288.toml --device A100 --simulate "
        "--export runs/plan --nic ConnectX-6 --switches nvue"
    ),
    Command(".venv/bin/netlayer tune explain examples/tuning/h200x8.toml job.overlap.bucket_mib"),
    Command(
        ".venv/bin/netlayer tune plan --config examples/megascale-12288.toml --device A100 --nccl 2.21.5 "
        "--out runs/older"
    ),
    Command(".venv/bin/netlayer tune diff runs/plan/profile.toml runs/older/profile.toml"),
    Command(".venv/bin/netlayer tune probe --backend gloo --max-bytes 4MiB --json probe.json"),
    Command(".venv/bin/netlayer tune plan --config examples/laptop.toml --device none --measured probe.json"),
    Command(".venv/bin/python -m bench.tune.study --config examples/megascale-12288.toml --device A100"),
    *(
        _only_parsed(shown, "of a run of the user's; tests/trainer/test_convert.py runs it")
        for shown in (
            ".venv/bin/netlayer checkpoint ls runs/a",
            ".venv/bin/netlayer checkpoint verify runs/a",
            ".venv/bin/netlayer checkpoint export runs/a exported/a --to safetensors",
            ".venv/bin/netlayer checkpoint import exported/a imported/a --from safetensors",
            ".venv/bin/netlayer train imported/a/job.toml --resume imported/a --set parallel.dp=1 "
            "--set cluster.gpus_per_server=1 --set optimizer.steps=5",
            ".venv/bin/netlayer checkpoint reshard runs/a/checkpoints/step-000250 kept/step-000250 --file-size 50GiB",
        )
    ),
    _only_parsed(
        ".venv/bin/netlayer observe collect redis://10.0.0.1:6379 --run tiny-gpt --out events",
        "collects until it is ended, from a server that is not there",
    ),
    Command(".venv/bin/netlayer accept judge tests/bench/logs/nccl_node*.txt", exit_codes=(1,)),
    Command(
        ".venv/bin/netlayer accept judge --nvls off logs/ --html verdict.html --junit verdict.xml", exit_codes=(1,)
    ),
    Command(".venv/bin/netlayer accept publish node*.log --nvls off --out ours.toml"),
    Command(
        "redis-server --daemonize yes && .venv/bin/torchrun --nproc-per-node 2 train.py",
        instead=".venv/bin/python -m pytest -q tests/integration/test_readme.py",
        why="the test runs README's programs on a Redis of its own",
    ),
    Command(".venv/bin/netlayer train examples/laptop.toml --set checkpoint.every_steps=50 --out runs/a"),
    Command(
        ".venv/bin/netlayer train examples/laptop.toml --set parallel.tp=2 --set parallel.dp=1 "
        "--resume runs/a/checkpoints/step-000250 --out runs/b"
    ),
    Command(".venv/bin/netlayer train examples/laptop.toml --set parallel.cp=2 --set parallel.dp=1"),
    Command(
        ".venv/bin/netlayer train examples/laptop.toml --set model.recompute=selective "
        "--set 'model.recompute_modules=mlp_act layernorm'"
    ),
    Command(
        ".venv/bin/netlayer train examples/laptop.toml --resume runs/a --out runs/a",
        instead=".venv/bin/netlayer train examples/laptop.toml --resume runs/a --out runs/a --set optimizer.steps=310",
        why="runs/a was not stopped: it has taken all of its steps",
    ),
    Command(
        ".venv/bin/netlayer train examples/laptop.toml --resume runs/a --out runs/c",
        instead=".venv/bin/netlayer train examples/laptop.toml --resume runs/a --out runs/c --set optimizer.steps=320",
        why="runs/a was not stopped: it has taken all of its steps",
    ),
    Command(".venv/bin/netlayer train examples/laptop.toml --set model.parallel_block=true --set optimizer.name=lamb"),
    Command(
        ".venv/bin/netlayer train examples/laptop.toml --set data.folder=my-text --set 'data.pattern=*.md' "
        "--set data.max_mib=200"
    ),
    Command(".venv/bin/netlayer train examples/laptop.toml --trace 3-5 --set metrics.prometheus_port=9400"),
    _gpus(
        ".venv/bin/netlayer train --set model.preset=125m --set model.dtype=bfloat16 --set parallel.dp=1 "
        "--set cluster.gpus_per_server=1",
        1,
    ),
    Command(".venv/bin/netlayer train --dry-run examples/megascale-12288.toml"),
    Command('.venv/bin/netlayer sample runs/a --prompt "def " --tokens 100 --temperature 0.8'),
    Command(".venv/bin/netlayer data prepare documents.jsonl --out tokens/mine --tokenizer train --vocab-size 512"),
    Command(".venv/bin/netlayer data inspect tokens/mine --verify"),
    Command(".venv/bin/netlayer data export tokens/mine web_text_document"),
    Command(".venv/bin/netlayer data import web_text_document --out tokens/web --tokenizer tokens/mine"),
    _only_parsed(
        ".venv/bin/netlayer data prepare corpus/ --out tokens/corpus --tokenizer tokenizer.json --on-error skip "
        "--dask tcp://10.0.0.1:8786",
        "needs a Dask cluster",
    ),
    _gpus(".venv/bin/torchrun --nproc-per-node 8 .venv/bin/netlayer train job.toml", 8),
    _gpus(
        ".venv/bin/torchrun --max-restarts 3 --nproc-per-node 8 .venv/bin/netlayer train job.toml --resume auto "
        "--out runs/a",
        8,
    ),
    _only_parsed(
        ".venv/bin/torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint host0:29400 "
        ".venv/bin/netlayer train job.toml",
        "needs two hosts with GPUs",
    ),
    _only_parsed(
        "MASTER_ADDR=host0 srun -K -N2 --ntasks-per-node=8 .venv/bin/netlayer train job.toml",
        "needs a Slurm cluster with GPUs",
    ),
    _gpus(".venv/bin/python -m bench.mfu --model 7b --layout dp8 --profile", 8),
    _gpus(".venv/bin/python -m bench.mfu.floor --model llama3-8b --layout cp2dp2 --set model.seq_len=8192", 1),
    _gpus(".venv/bin/python -m bench.operators --model llama3-8b --only product,rotary", 1),
    _gpus(".venv/bin/python -m bench.fp8_gradients --model 125m --set model.fp8=tensorwise --micro 4", 1),
    _gpus(
        ".venv/bin/python -m bench.mfu.blocks --model llama3-8b --set model.seq_len=8192 --set model.fp8=tensorwise",
        1,
    ),
    _gpus(
        ".venv/bin/python -m bench.mfu --model 7b --layout tp2pp2vp2 --micro-batches 16 "
        "--peers native3d,mcore_no_overlap",
        4,
    ),
    _only_parsed(
        ".venv/bin/python -m bench.mfu.page runs/*/records/bench.mfu-*.json --out page",
        "needs records of bench.mfu, which GPUs make",
    ),
    Command(".venv/bin/python -m bench.convergence --model 1m --tokens 200k"),
    Command(".venv/bin/python -m bench.init_time --ranks 128,2048,12288 --real 8"),
    Command(".venv/bin/netlayer accept"),
    # 4, where the fault is not found, is wrong here: 200 ms are far above what other work adds.
    Command(".venv/bin/netlayer accept --ranks 8 --backend gloo --inject slowlink:2-3:200", exit_codes=(1,)),
    _only_parsed(
        ".venv/bin/netlayer accept --hosts hosts.txt --html run.html --junit run.xml --out run/",
        "needs hosts that ssh reaches",
    ),
    _only_parsed(
        ".venv/bin/netlayer accept --hosts hosts.txt --only verbs --verbs require",
        "needs hosts that ssh reaches, with RDMA NICs",
    ),
    Command(
        ".venv/bin/netlayer accept --soak 24 --json soak.json",
        instead=".venv/bin/netlayer accept --soak 0.01 --json soak.json",
        why="24 hours",
    ),
    _only_parsed(
        ".venv/bin/netlayer accept --runner nccl-tests --nccl-tests ~/nccl-tests/build",
        "needs nccl-tests and GPUs",
    ),
    Command(".venv/bin/netlayer bench compare before.json after.json --within 0.02"),
    Command(".venv/bin/netlayer nic plan --profile examples/profiles/lossless-dcqcn.toml", exit_codes=_NO_NIC),
    _only_parsed(
        ".venv/bin/netlayer nic apply --profile examples/profiles/lossless-dcqcn.toml --apply",
        "would change this host's NICs",
    ),
    _only_parsed(
        ".venv/bin/netlayer nic inventory --hosts hosts.txt --cluster examples/megascale-12288.toml "
        "--json inventory.json",
        "needs hosts that ssh reaches, with RDMA NICs",
    ),
    Command(
        ".venv/bin/netlayer nic fabric --cluster examples/megascale-12288.toml "
        "--profile examples/profiles/lossless-dcqcn.toml --inventory inventory.json --switches sonic "
        "--chip tomahawk-5 --out plan",
        instead=".venv/bin/netlayer nic fabric --cluster examples/megascale-12288.toml "
        "--profile examples/profiles/lossless-dcqcn.toml --nic ConnectX-7 --switches sonic --chip tomahawk-5 "
        "--out plan",
        why="without an inventory, as its comment says",
    ),
    Command(
        ".venv/bin/netlayer nic switch --profile examples/profiles/lossless-dcqcn.toml --format sonic "
        "--base config_db.json --chip tomahawk-5 --out sw"
    ),
    Command(".venv/bin/netlayer nic timers --flap 5s"),
    Command(
        'eval "$(.venv/bin/netlayer nic env --job job.toml --profile examples/profiles/lossless-dcqcn.toml)"',
        instead=".venv/bin/netlayer nic env --job job.toml --profile examples/profiles/lossless-dcqcn.toml > env.sh "
        "&& . ./env.sh",
        why="eval hides the exit code of what it is given",
    ),
    Command(
        ".venv/bin/netlayer nic watch",
        instead=".venv/bin/netlayer nic watch --seconds 3",
        why="it ends by Ctrl-C",
        exit_codes=_NO_NIC,
    ),
    Command(".venv/bin/netlayer nic pcap capture.pcapng"),
    Command("make rdma-lab"),
    _gpus(".venv/bin/python -m bench.overlap --technique all --out overlap", 2),
    _gpus(
        ".venv/bin/torchrun --max-restarts 3 --nproc-per-node 8 .venv/bin/netlayer train job.toml "
        "--set checkpoint.every_steps=500 --resume auto --out runs/a",
        8,
    ),
    Command(
        ".venv/bin/netlayer run start examples/laptop.toml --set cluster.servers=2 --set cluster.gpus_per_server=1 "
        "--set job.checkpoint.every_steps=50 --out runs/kept"
    ),
    Command(".venv/bin/netlayer run status runs/kept"),
    _only_parsed(".venv/bin/netlayer run serve runs/kept", "it serves until Ctrl-C"),
    Command(".venv/bin/netlayer run logs runs/kept node-1 -n 50"),
    Command(".venv/bin/netlayer run evict runs/kept node-1"),
    Command(".venv/bin/netlayer run pause runs/kept"),
    Command(".venv/bin/netlayer run resume runs/kept"),
    Command(".venv/bin/netlayer run stop runs/kept"),
    Command(
        ".venv/bin/netlayer run manifests examples/laptop.toml --out runs/deploy --set job.checkpoint.every_steps=50 "
        "--set job.store.url=redis://redis.train:6379 --set job.launch.backend=gloo "
        "--set job.resilience.backend=kubernetes --set job.resilience.kubernetes.image=registry/netlayer:1 "
        "--set job.resilience.kubernetes.claim=shared --set job.resilience.kubernetes.mount=/netlayer"
    ),
    # Named in its text.
    Command("make help"),
    Command("make setup"),
    Command("make page"),
    Command("make check"),
    Command("make reports"),
    Command("make clean"),
)


def shown_commands(text: str) -> list[str]:
    """The commands of a page in Markdown: those of its sh blocks in order, then the `make` targets of its text.

    Without comments; one space between words.
    """
    blocks = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    found = [" ".join(_uncommented(line).split()) for line in lines]
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    found += [f"make {target}" for target in re.findall(r"`make ([a-z-]+)`", prose)]
    return list(dict.fromkeys(line for line in found if line))


def read_pages() -> str:
    """Return the text of all pages that show commands, README first."""
    return "\n".join(page.read_text(encoding="utf-8") for page in PAGES)


def _uncommented(line: str) -> str:
    """The line up to a `#` that begins a word outside quotes."""
    quote = ""
    for place, letter in enumerate(line):
        if letter == quote:
            quote = ""
        elif not quote and letter in "'\"":
            quote = letter
        elif not quote and letter == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def unlisted(text: str) -> tuple[list[str], list[str]]:
    """Commands of the page that are not in `COMMANDS`, and those of `COMMANDS` that it does not show."""
    shown, listed = shown_commands(text), [command.shown for command in COMMANDS]
    return [one for one in shown if one not in listed], [one for one in listed if one not in shown]


def main() -> int:
    """Parse the command line, run, and print a line a command; 1 where one failed."""
    parser = argparse.ArgumentParser(description="Run README's commands once, in a fresh clone with an empty home.")
    parser.add_argument("--list", action="store_true", help="say what is done with each command, and run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="TEXT", help="commands that hold it; repeatable")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="TEXT", help="not those that hold it; repeatable"
    )
    parser.add_argument("--venv", type=Path, help="use this environment in place of a new one; `make` is not run then")
    arguments = parser.parse_args()
    missing, gone = unlisted(read_pages())
    if missing or gone:
        lines = [*(f"README shows, COMMANDS has not: {one}" for one in missing)]
        lines += [f"COMMANDS has, README shows not: {one}" for one in gone]
        print("\n".join(lines), "error: bring COMMANDS in tests/full.py up to README.md", sep="\n", file=sys.stderr)
        return 2
    num_gpus = _num_gpus()
    chosen = [
        command
        for command in COMMANDS
        if (not arguments.only or any(text in command.shown for text in arguments.only))
        and not any(text in command.shown for text in arguments.skip)
    ]
    if arguments.list or not chosen:
        for command in chosen:
            print(f"{command.shown}\n    {command.says(num_gpus)}")
        return 0 if chosen else 2
    return _run_all(chosen, num_gpus, arguments.venv.absolute() if arguments.venv else None)


def _run_all(commands: list[Command], num_gpus: int, venv: Path | None) -> int:
    folder = Path(tempfile.mkdtemp(prefix="netlayer-full-"))
    clone, logs = folder / "netlayer", folder / "logs"
    logs.mkdir()
    environment = _environment(folder, clone, own_venv=venv is None)
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", REPOSITORY, clone], check=True)
    if subprocess.run(["git", "-C", REPOSITORY, "diff", "--quiet", "HEAD"], check=False).returncode:
        print("note: changes that are not committed are omitted", file=sys.stderr)
    if venv is not None:
        (clone / ".venv").symlink_to(venv)
        # As `make setup` does: the page's front end lies in the checkout, not in the environment.
        subprocess.run([".venv/bin/python", "hatch_build.py"], cwd=clone, env=environment, check=True)
        commands = [command for command in commands if not command.shown.startswith("make ")]
    elif commands[0].shown != "make quickstart":
        subprocess.run(["make", "setup"], cwd=clone, env=environment, check=True, stdout=sys.stderr)
    failed, has_inputs = 0, False
    for number, command in enumerate(commands):
        if ".venv/" in command.shown and not has_inputs:
            subprocess.run([".venv/bin/python", "-m", "tests.full_inputs"], cwd=clone, env=environment, check=True)
            has_inputs = True
        runs = command.runs(num_gpus)
        words = (command.instead or command.shown) if runs else command.parsed()
        expected = command.exit_codes if runs else (0,)
        start_s, log = time.monotonic(), logs / f"{number:02}.txt"
        code = _run(words, clone, environment, log)
        good = code in expected
        failed += not good
        state = ("ran" if runs else "parsed") if good else f"FAILED, exit {code}, see {log}"
        print(f"{state:8} {time.monotonic() - start_s:7.1f} s  {words}", flush=True)
    print(f"{len(commands) - failed} of {len(commands)} commands did as README says; logs in {logs}")
    if not failed:
        shutil.rmtree(clone)
        shutil.rmtree(folder / "home")
    return 1 if failed else 0


def _run(words: str, clone: Path, environment: dict[str, str], log: Path) -> int:
    with log.open("wb") as file:
        file.write(f"$ {words}\n".encode())
        file.flush()
        try:
            return subprocess.run(
                ["bash", "-o", "pipefail", "-c", words],
                cwd=clone,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return 124


def _environment(folder: Path, clone: Path, *, own_venv: bool) -> dict[str, str]:
    """This one with an empty home and cache; pip's own settings stay, they may name the only index that is reached."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("NETLAYER_", "PYTHON", "VIRTUAL_ENV", "XDG_", "MAKE"))
    }
    home = folder / "home"
    (home / "src").mkdir(parents=True)
    for path in (Path.home() / ".pip/pip.conf", Path.home() / ".config/pip/pip.conf"):
        if path.exists():
            kept.setdefault("PIP_CONFIG_FILE", str(path))
    code = {} if own_venv else {"PYTHONPATH": str(clone)}
    return {**kept, **code, "HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache")}


def _num_gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


if __name__ == "__main__":
    sys.exit(main())
