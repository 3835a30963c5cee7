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
        "arch/x86/um/user-offsets.c": "\tDEFINE_LONGS(HOST_FP_SIZE, 2696);\n",
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


def test_the_kernel_has_room_for_the_registers_of_amx(source: Path) -> None:
    """Its own 2,696 bytes end at AVX-512; with AMX the host's set has 11,008, and half of a stack holds it."""
    assert _bash(f"compile {source}").returncode == 0
    assert "HOST_FP_SIZE, 16384" in (source / "arch/x86/um/user-offsets.c").read_text()
    assert "default 1000" in (source / "arch/um/Kconfig").read_text()
    assert "CONFIG_KERNEL_STACK_ORDER=3\n" in (source / ".config").read_text()


@pytest.mark.parametrize(
    ("file", "message"),
    [("arch/x86/um/user-offsets.c", "its source does not take: HOST_FP_SIZE"), (".config", "does not take: ")],
)
def test_a_source_that_does_not_take_an_edit_is_not_compiled(source: Path, file: str, message: str) -> None:
    (source / file).write_text("another version\n")
    done = _bash(f"make() {{ echo make $*; }}; compile {source}")
    assert done.returncode != 0
    assert message in done.stdout
    assert not done.stdout.endswith("linux\n")


def test_tests_are_collected_without_xdist() -> None:
    """The lab's machine has pytest without it, and a marker that nobody registered is an error there."""
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--collect-only", "-q"]
    file = str(REPOSITORY / "tests" / "netlayer" / "test_units.py")
    done = subprocess.run([*command, file], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
