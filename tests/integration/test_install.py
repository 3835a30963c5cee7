"""A clean install from a wheel, alone and beside a distribution that also has a top-level `bench`."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, cwd=cwd, timeout=240, check=False
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, ROOT)
    assert done.returncode == 0, done.stderr
    return next(folder.glob("netlayer-*.whl"))


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A distribution of somebody else's with a top-level package `bench`."""
    path = tmp_path / "other_bench-1.0-py3-none-any.whl"
    files = {
        "bench/__init__.py": "OTHER = True\n",
        "other_bench-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: other-bench\nVersion: 1.0\n",
        "other_bench-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "other_bench-1.0.dist-info/top_level.txt": "bench\n",
    }
    record = "other_bench-1.0.dist-info/RECORD"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
        archive.writestr(record, "".join(f"{name},,\n" for name in [*files, record]))
    return path


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An empty environment that sees this one's libraries, but not this checkout."""
    folder = tmp_path / "venv"
    assert run(sys.executable, "-m", "venv", "--without-pip", folder).returncode == 0
    site = next(folder.glob("lib/python*/site-packages"))
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def install(environment: Path, *wheels: Path) -> None:
    for wheel in wheels:
        done = run(
            sys.executable, "-m", "pip", "--python", environment / "bin/python", "install", "--no-deps", "--no-index",
            "--force-reinstall", wheel,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_a_wheel_carries_what_the_commands_need(wheel: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, wheel)
    shown = run(environment / "bin/netlayer", "doctor", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    script = (
        "from netlayer.config.file import example, load_config\n"
        "print(load_config(example('megascale-12288')).cluster.name)"
    )
    assert run(environment / "bin/python", "-c", script, cwd=tmp_path).stdout == "megascale-12288\n"
    assert run(environment / "bin/all_gather_perf", "--help", cwd=tmp_path).returncode == 0
    names = zipfile.ZipFile(wheel).namelist()
    assert "netlayer/py.typed" in names
    assert not [name for name in names if name.startswith("tests/")]


# Where ours comes first, a file of it is overwritten: the harder one to tell.
@pytest.mark.parametrize("order", [pytest.param("theirs first", marks=pytest.mark.slow), "ours first"])
def test_a_clash_of_package_names_is_said(
    order: str, wheel: Path, other: Path, environment: Path, tmp_path: Path
) -> None:
    install(environment, *([other, wheel] if order == "theirs first" else [wheel, other]))
    found = run(environment / "bin/netlayer", "doctor", cwd=tmp_path)
    assert found.returncode == 2
    assert "other-bench" in found.stdout
    said = run(environment / "bin/all_gather_perf", "--help", cwd=tmp_path)
    assert "warning: package bench: is also in the distribution other-bench" in said.stderr
    assert "pip uninstall" not in said.stderr
    overwritten = "which has overwritten or removed bench/__init__.py; give netlayer an environment of its own"
    assert (overwritten in said.stderr) == (order == "ours first")


def test_a_foreign_package_in_front_of_ours_is_refused(wheel: Path, environment: Path, tmp_path: Path) -> None:
    install(environment, wheel)
    (tmp_path / "front" / "bench").mkdir(parents=True)
    (tmp_path / "front" / "bench" / "__init__.py").touch()
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "a-front.pth").write_text(f"import sys; sys.path.insert(0, {str(tmp_path / 'front')!r})\n")
    refused = run(environment / "bin/all_gather_perf", "--help", cwd=tmp_path)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: package bench: is found at")
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.parametrize("is_current", [True, False])
@pytest.mark.parametrize("target", ["sdist", "wheel"])
def test_the_page_is_packed_unless_it_is_older_than_its_sources(tmp_path: Path, target: str, is_current: bool) -> None:
    """A source archive has it too, for who has no npm; of this project's own build, with no other files."""
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, tmp_path)
    web = tmp_path / "netlayer/observe/page/web"
    dist = [web / "dist" / name for name in ("index.html", "app.js", "app.css")]
    others = [web / name for name in ("src/main.js", "package.json", "package-lock.json")]
    for file in (*dist, *others, tmp_path / "netlayer/__init__.py", tmp_path / "examples/laptop.toml"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for file in dist:
        os.utime(file, (0, web.stat().st_mtime + (60 if is_current else -60)))
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", tmp_path / "out"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PATH": ""}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert ("without the page" in done.stdout + done.stderr) is not is_current
    file = next((tmp_path / "out").iterdir())
    if target == "sdist":
        with tarfile.open(file) as archive:
            names = archive.getnames()
    else:
        names = zipfile.ZipFile(file).namelist()
    assert sum("/web/dist/" in name for name in names) == (3 if is_current else 0)
    assert any(name.endswith("netlayer/__init__.py") for name in names)
