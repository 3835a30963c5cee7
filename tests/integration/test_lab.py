"""The scripts of the RDMA lab, as far as they run without a compiler: what runs in its machine is marked `rdma`."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]

# build.sh without its last lines, which choose what to build; make and the kernel's merge_config.sh do nothing here.
_FUNCTIONS = f"""
source <(sed '/^mkdir -p "$lab.state"$/,$d' {REPOSITORY}/lab/build.sh)
here={REPOSITORY}/lab
make() {{ :; }}
nice() {{ "$@"; }}
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The files of a kernel's source that the build edits or runs."""
    files = {
        "arch/um/Kconfig": "config HZ\n\tint\n\tdefault 100\n",
        "scripts/kconfig/merge_config.sh": "#!/bin/sh\n",
        ".config": (REPOSITORY / "lab" / "kernel.config").read_text(encoding="utf-8"),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    (tmp_path / "scripts/kconfig/merge_config.sh").chmod(0o755)
    return tmp_path


def _bash(words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", _FUNCTIONS + words], capture_output=True, text=True, timeout=60, check=False)


def test_the_build_does_not_stay_in_the_folder_that_it_removes(source: Path) -> None:
    """pip, which comes next on a fresh machine, ends with FileNotFoundError in a folder that is gone."""
    done = _bash(f"cd /; compile {source} && rm -rf {source} && pwd")
    assert (done.returncode, done.stdout) == (0, "/\n"), done.stderr


def test_a_source_that_does_not_take_an_option_is_not_compiled(source: Path) -> None:
    (source / ".config").write_text("CONFIG_HZ=100\n")
    done = _bash(f"make() {{ echo make $*; }}; compile {source}")
    assert done.returncode != 0
    assert "does not take: " in done.stdout
    assert not done.stdout.endswith("linux\n")


@pytest.mark.parametrize(
    ("has_amx", "asked", "vm"), [(True, "", "qemu"), (False, "", "uml"), (True, "uml", "uml"), (False, "qemu", "qemu")]
)
def test_a_processor_with_amx_takes_qemu_and_says_so(has_amx: bool, asked: str, vm: str) -> None:
    """User-Mode Linux 6.1 panics there; what is asked for goes first."""
    done = _bash(f"grep() {{ {str(has_amx).lower()}; }}; NETLAYER_LAB_VM={asked}; source $here/machine.sh; echo $vm")
    assert done.stdout == f"{vm}\n"
    assert len(done.stderr.splitlines()) == (1 if has_amx and not asked else 0)
    assert ("AMX" in done.stderr) is (has_amx and not asked)


def test_tests_are_collected_without_xdist() -> None:
    """The lab's machine has pytest without it, and a marker that nobody registered is an error there."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only", "-q"]
    file = str(REPOSITORY / "tests" / "netlayer" / "test_units.py")
    done = subprocess.run([*command, file], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
