"""The lab's cable over a `tc` that refuses what it is told to, as a kernel without the filter does."""

from __future__ import annotations

from pathlib import Path

import pytest

from lab.cable import Cable

# As iproute2's in batch mode: it ends at the first command that fails, and goes on with -force.
_TC = """#!/bin/sh
case " $* " in *" -batch "*) ;; *) echo "$*" >> {log}; exit 0 ;; esac
while read -r line; do
    echo "$line" >> {log}
    case "$line" in
        *"{refused}"*)
            case " $* " in *" -force "*) ;; *) exit 1 ;; esac ;;
        "qdisc show"*) echo "qdisc noqueue 0: dev lo root" ;;
    esac
done
"""


def _install(folder: Path, monkeypatch: pytest.MonkeyPatch, refused: str) -> Path:
    program, log = folder / "tc", folder / "log"
    program.write_text(_TC.format(log=log, refused=refused))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return log


def test_a_cut_that_failed_is_not_taken_for_one(tmp_path, monkeypatch):
    log = _install(tmp_path, monkeypatch, "filter add")
    with pytest.raises(RuntimeError, match="tc ended at one of: filter add dev veth0"), Cable() as cable:
        cable.cut()
    left = ["qdisc del dev veth0 ingress", "qdisc del dev veth1 ingress"]
    assert log.read_text().splitlines()[-2:] == left


def test_a_cable_that_cannot_be_had_is_said(tmp_path, monkeypatch):
    _install(tmp_path, monkeypatch, "qdisc add")
    with pytest.raises(RuntimeError, match="tc ended at one of: qdisc add"), Cable():
        pytest.fail("there is no such cable")


def test_a_cable_is_cut_and_mended(tmp_path, monkeypatch):
    log = _install(tmp_path, monkeypatch, "nothing")
    with Cable() as cable:
        cable.cut()
        cable.mend()
    told = [line for line in log.read_text().splitlines() if not line.startswith("qdisc show")]
    assert [line.split(" dev")[0] for line in told] == [
        word for word in ("qdisc add", "filter add", "filter del", "qdisc del") for _ in range(2)
    ]
