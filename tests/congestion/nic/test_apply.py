"""Plan, apply, verify, roll back on every vendor's files: what fails, and what dies, leaves nothing in between."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from congestion.nic.profile.apply import apply_plan, roll_back
from congestion.nic.profile.file import build_profile
from congestion.nic.profile.journal import State
from congestion.nic.profile.parameters import PARAMETERS
from congestion.nic.profile.plan import Plan
from congestion.nic.profile.steps import FileStep
from congestion.nic.vendors.tools import ToolFailed
from netlayer.errors import CheckFailed, ConfigError
from tests.congestion.nic.changes import EXAMPLES, Host, profile_of, quick_folder
from tests.congestion.nic.death import Dead, Life, living
from tests.congestion.nic.simulated import VENDORS, pci_of, put

_CC = f"sys/kernel/debug/mlx5/{pci_of(0)}/cc_params"


_SWITCHES = ("adaptive", "slow_restart", "slow_restart_idle", "tx_window", "ack_floor", "selective_repeat")


def host_of(folder: Path, *vendors: str, groups: bool = True) -> Host:
    return Host(folder, vendors, groups)


@st.composite
def firmwares(draw: st.DrawFn, *, programmable: bool) -> dict[str, Any]:
    """Some switches of the firmware."""
    names = ("pcc_int", "adaptive_routing", "selective_repeat", *(("user_programmable_cc",) if programmable else ()))
    words = {name: draw(st.booleans()) for name in draw(st.sets(st.sampled_from(names), max_size=2))}
    shaper = draw(st.sampled_from([None, "device", "destination", "5-tuple"]))
    mode = draw(st.sampled_from([None, "fixed", "copied"]))
    return words | {name: word for name, word in (("shaper", shaper), ("cnp_dscp_mode", mode)) if word}


@st.composite
def parameters(draw: st.DrawFn) -> list[dict[str, int]]:
    """Parameters of programmable control: in the NIC's range, out of it, read-only, and of none."""
    values = draw(st.dictionaries(st.integers(0, 4), st.integers(0, 1100) | st.just(2**32 - 1), max_size=3))
    return [{"slot": 0, "parameter": parameter, "value": value} for parameter, value in values.items()]


@st.composite
def profiles(draw: st.DrawFn) -> dict[str, Any]:
    """Any profile that may be loaded."""
    names = draw(st.sets(st.sampled_from(sorted(PARAMETERS)), max_size=8))
    values = {name: draw(st.integers(PARAMETERS[name].low, PARAMETERS[name].high)) for name in sorted(names)}
    if 0 < values.get("rp_max_rate", 0) < values.get("rp_min_rate", 0):
        values["rp_max_rate"] = 0
    laws = [("dcqcn", ""), ("hybrid", "dcqcn"), ("rttcc", "dcqcn")]
    laws += [] if values else [(law, "") for law in ("rttcc", "timely", "dctcp", "swift", "hybrid", "none")]
    law, fallback = draw(st.sampled_from(laws))
    priority = draw(st.integers(0, 7))
    lossless = draw(st.sampled_from([[], [priority]]))
    switches = st.sampled_from([None, True, False])
    retransmission = {name: draw(switches) for name in _SWITCHES}
    given = {
        "law": law,
        "fallback": fallback,
        "rtt_response_dscp": draw(st.none() | st.integers(0, 63)),
        "dcqcn": values,
        "traffic": {"dscp": draw(st.integers(0, 63)), "priority": priority, "ecn": draw(st.booleans())},
        "cnp": {"dscp": draw(st.integers(0, 63)), "priority": draw(st.integers(0, 7))},
        "pfc": {"priorities": lossless},
        "retransmission": {name: value for name, value in retransmission.items() if value is not None},
        "link_pause": draw(st.sampled_from([False, None] if lossless else [False, None, True])),
        "firmware": {"persist": draw(st.booleans()), **draw(firmwares(programmable=(law, fallback) == ("rttcc", "")))},
        "ppcc": draw(parameters()) if law == "rttcc" else None,
    }
    return {name: value for name, value in given.items() if value is not None or name == "link_pause"}


@pytest.mark.parametrize("groups", [True, False], ids=["", "no-groups"])
@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("vendor", VENDORS)
def test_what_was_applied_is_verified_and_rolled_back_to_the_byte(vendor, example, groups, tmp_path):
    host = host_of(tmp_path, vendor, groups=groups)
    done = host.apply(profile_of(example))
    assert done.rows
    assert host.now() != host.before
    again = host.plan(profile_of(example))
    assert not again.differences
    assert not again.unknown
    host.roll_back()
    assert host.now() == host.before
    host.check_ranges()


def test_applying_twice_changes_nothing_and_leaves_one_journal(tmp_path):
    host = host_of(tmp_path, "mlx5", "irdma")
    host.apply(profile_of())
    written = len(host.kernel.written)
    assert not host.apply(profile_of()).rows
    assert len(host.kernel.written) == written
    assert [path.name for path in (tmp_path / "state").glob("*.json")] == ["applied-1.json"]


def test_changes_are_undone_one_by_one_the_last_first(tmp_path):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of())
    between = host.now()
    host.apply(profile_of("tuned-dcqcn"))
    host.roll_back()
    assert host.now() == between
    host.roll_back()
    assert host.now() == host.before
    assert roll_back(host.kernel, host.programs, host.state) is None


def test_a_file_that_the_kernel_changes_besides_is_restored_too(tmp_path):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of(cnp={"dscp": 40, "priority": 5}))
    assert host.kernel.text(f"{_CC}/np_cnp_prio_mode") == "0"
    host.roll_back()
    assert host.kernel.text(f"{_CC}/np_cnp_prio") == "6"
    assert host.kernel.text(f"{_CC}/np_cnp_prio_mode") == "1"


def test_broadcoms_values_are_handed_over_last_and_again_after_a_rollback(tmp_path):
    host = host_of(tmp_path, "bnxt")
    host.apply(profile_of())
    trigger = "sys/kernel/config/bnxt_re/bnxt_re0/ports/1/cc/apply"
    assert host.kernel.applied == [trigger]
    host.roll_back()
    assert host.kernel.applied == [trigger, trigger]


def test_intels_other_laws_are_switched_off_before_the_wanted_one_is_on(tmp_path):
    host = host_of(tmp_path, "irdma")
    host.apply(profile_of())
    switched = [path.rpartition("/")[2] for path, _ in host.kernel.written if "irdma/" in path]
    assert switched == ["roce_timely_enable", "roce_dcqcn_enable"]


def test_a_value_that_does_not_hold_stops_everything_and_is_undone(tmp_path, monkeypatch):
    host = host_of(tmp_path, "mlx5")
    write = host.kernel.write
    monkeypatch.setattr(host.kernel, "write", lambda path, data: write(path, b"7\n" if data == b"10000\n" else data))
    with pytest.raises(CheckFailed, match=r"rp_hai_rate: 10000 was written, '7' is read back; everything is as it was"):
        host.apply(profile_of("tuned-dcqcn"))
    assert host.now() == host.before
    assert host.state.find_open() is None


def test_a_write_that_a_later_one_takes_back_is_noticed(tmp_path, monkeypatch):
    host = host_of(tmp_path, "mlx5")
    write = host.kernel.write

    def entangled(path: str, data: bytes) -> None:
        write(path, data)
        if path.endswith("rp_hai_rate"):
            write(f"{_CC}/rp_ai_rate", b"5\n")

    monkeypatch.setattr(host.kernel, "write", entangled)
    with pytest.raises(CheckFailed, match=r"rp_ai_rate: 1000 was written, '5' is read back"):
        host.apply(profile_of("tuned-dcqcn"))
    assert host.now() == host.before


def test_an_interrupt_on_the_way_is_undone(tmp_path, monkeypatch):
    host = host_of(tmp_path, "mlx5")
    write = host.kernel.write

    def interrupted(path: str, data: bytes) -> None:
        write(path, data)
        if data == b"1000\n":
            raise KeyboardInterrupt

    monkeypatch.setattr(host.kernel, "write", interrupted)
    with pytest.raises(KeyboardInterrupt):
        host.apply(profile_of("tuned-dcqcn"))
    assert host.now() == host.before


def test_a_change_while_a_journal_is_open_is_refused_with_the_remedy(tmp_path):
    host = host_of(tmp_path, "mlx5")
    with living(Life(12), host.programs), pytest.raises(Dead):
        host.apply(profile_of("tuned-dcqcn"))
    with pytest.raises(ConfigError, match=r"did not end; run `netlayer nic rollback --apply` first"):
        host.apply(profile_of())
    host.roll_back()
    assert host.now() == host.before
    assert host.apply(profile_of()).rows


def test_two_changes_at_once_are_refused(tmp_path):
    host = host_of(tmp_path, "mlx5")
    with host.state.locked(), pytest.raises(ConfigError, match="another change of this host runs"):
        host.apply(profile_of())


def test_what_a_nic_cannot_do_is_refused_unless_partial(tmp_path):
    host = host_of(tmp_path, "bnxt")
    plan = host.plan(profile_of())
    with pytest.raises(ConfigError, match=r"bnxt_re0 cannot do dcqcn .*nearest: .*--partial"):
        apply_plan(lambda: plan, host.kernel, host.programs, host.state)
    assert host.now() == host.before


def test_what_cannot_be_read_is_refused_before_the_first_write(tmp_path):
    host = host_of(tmp_path, "mlx5")
    (tmp_path / f"root/{_CC}/rp_ai_rate").write_text("fast\n")
    with pytest.raises(ConfigError, match=r"mlx5_0 rp_ai_rate: its old value is not known \(holds no number\)"):
        apply_plan(lambda: host.plan(profile_of("tuned-dcqcn")), host.kernel, host.programs, host.state)
    assert not host.kernel.written


def test_a_value_out_of_its_range_is_never_written(tmp_path):
    host = host_of(tmp_path, "mlx5")
    plan = host.plan(profile_of("tuned-dcqcn"))
    for row in plan.rows:
        if isinstance(row.step, FileStep) and row.step.name == "rp_ai_rate":
            object.__setattr__(row.step, "new", "131072")
    with pytest.raises(ConfigError, match=r"rp_ai_rate = 131072: is out of this NIC's range 1\.\.131071"):
        apply_plan(lambda: plan, host.kernel, host.programs, host.state)
    assert not host.kernel.written


@pytest.mark.parametrize(("key", "value"), [("RPG_AI_RATE_P1", "131072"), ("CNP_DSCP_P1", "64"), ("RPG_GD_P1", "16")])
def test_a_firmware_value_out_of_its_range_is_never_written(key, value, tmp_path):
    host = host_of(tmp_path, "mlx5")
    plan = host.plan(profile_of("tuned-dcqcn", firmware={"persist": True}, dcqcn={"rp_ai_rate": 5, "rp_gd": 11}))
    object.__setattr__(next(row.step for row in plan.rows if row.step.name == key), "new", value)
    with pytest.raises(ConfigError, match=rf"{key} = {value}: is out of its documented range"):
        apply_plan(lambda: plan, host.kernel, host.programs, host.state)
    assert host.now() == host.before


def test_the_plan_is_drawn_up_once_nobody_else_changes_the_host(tmp_path):
    host = host_of(tmp_path, "mlx5")

    def draw() -> Plan:
        with pytest.raises(ConfigError, match="another change of this host runs"), State(host.state.folder).locked():
            pass
        return host.plan(profile_of())

    assert apply_plan(draw, host.kernel, host.programs, host.state).rows


def test_what_another_hand_has_set_since_is_named_and_left(tmp_path):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of("tuned-dcqcn"))
    (tmp_path / f"root/{_CC}/rp_ai_rate").write_text("777\n")
    host.programs.run(["mlnx_qos", "-i", "eth0", "--pfc=1,1,1,1,1,1,1,1"])
    with pytest.raises(CheckFailed, match=r"rp_ai_rate: changed since by another hand: 777 .*eth0: .* hand: 11111111"):
        host.roll_back()
    assert host.kernel.text(f"{_CC}/rp_ai_rate") == "777"
    assert host.kernel.text(f"{_CC}/rp_hai_rate") == "50"
    undone = roll_back(host.kernel, host.programs, host.state, force=True)
    assert undone is not None
    assert not undone[1]
    assert host.now() == host.before


def test_a_folder_that_holds_another_hands_value_stays(tmp_path):
    host = host_of(tmp_path, "rxe", groups=False)
    host.apply(profile_of(law="none", dcqcn={}))
    tos = "sys/kernel/config/rdma_cm/rxe0/ports/1/default_roce_tos"
    (tmp_path / "root" / tos).write_text("77\n")
    undone = roll_back(host.kernel, host.programs, host.state, partial=True)
    assert undone is not None
    assert "changed since by another hand: 77" in undone[1][0]
    assert host.kernel.text(tos) == "77"


def test_a_rollback_after_a_reboot_says_so(tmp_path):
    boot = tmp_path / "root/proc/sys/kernel/random/boot_id"
    put(boot, "one")
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of("tuned-dcqcn"))
    put(boot, "two")
    (tmp_path / f"root/{_CC}/rp_ai_rate").write_text("6\n")
    with pytest.raises(CheckFailed, match=r"the host was started again since; not restored: .*another hand: 6"):
        host.roll_back()


def test_of_a_copy_without_a_boot_id_no_reboot_is_said(tmp_path):
    boot = tmp_path / "root/proc/sys/kernel/random/boot_id"
    put(boot, "one")
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of("tuned-dcqcn"))
    boot.unlink()
    (tmp_path / f"root/{_CC}/rp_ai_rate").write_text("6\n")
    with pytest.raises(CheckFailed, match=r"^not restored: .*another hand: 6"):
        host.roll_back()


def test_a_link_in_the_way_of_a_folder_or_a_trigger_does_not_stop_the_rest(tmp_path, monkeypatch):
    host = host_of(tmp_path, "bnxt", groups=False)
    host.apply(profile_of())
    before = dict(host.before)

    def refused(path: str, *_: bytes) -> None:
        raise ConfigError("--root", path, "leads out of the root", "look")

    write = host.kernel.write
    monkeypatch.setattr(
        host.kernel, "write", lambda path, data: (refused if path.endswith("/apply") else write)(path, data)
    )
    monkeypatch.setattr(host.kernel, "remove_folder", refused)
    with pytest.raises(CheckFailed, match=r"apply: --root .* leads out .*rdma_cm/bnxt_re0: --root"):
        host.roll_back()
    monkeypatch.undo()
    host.roll_back()
    assert host.now() == before


def test_a_rollback_that_fails_keeps_the_journal_and_says_what(tmp_path, monkeypatch):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of("tuned-dcqcn"))
    write = host.kernel.write

    def refusing(path: str, data: bytes) -> None:
        if path.endswith("rp_ai_rate"):
            raise OSError(errno.EINVAL, "Invalid argument")
        write(path, data)

    with monkeypatch.context() as patch:
        patch.setattr(host.kernel, "write", refusing)
        with pytest.raises(CheckFailed, match=r"not restored: .*rp_ai_rate: Invalid argument; the journal stays open"):
            host.roll_back()
    host.roll_back()
    assert host.now() == host.before


def test_a_rollback_after_a_reboot_can_leave_what_is_gone(tmp_path):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of("tuned-dcqcn"))
    (tmp_path / f"root/{_CC}/rp_ai_rate").unlink()
    undone = roll_back(host.kernel, host.programs, host.state, partial=True)
    assert undone is not None
    assert [text.rpartition("/")[2] for text in undone[1]] == ["rp_ai_rate: No such file or directory"]
    assert host.state.find_open() is None


def test_a_journal_of_another_root_is_not_used(tmp_path):
    host = host_of(tmp_path / "one", "mlx5")
    host.apply(profile_of())
    other = host_of(tmp_path / "two", "mlx5")
    other.state = host.state
    with pytest.raises(ConfigError, match="its last change was of --root"):
        other.roll_back()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 2}',
        '{"version": 1, "entries": [{"kind": "tool", "target": "rm"}]}',
        "[" * 100_000,
        '{"version": 1, "entries": ' + "[" * 100_000,
        '{"version": 1, "entries": [' + '{"kind":' * 50_000,
        '{"version": 1, "root": "/", "profile": "p", "started_utc": "", "entries":'
        ' [{"kind": "file", "target": "sys/class/x", "old": [[["1"]]]}]}',
    ],
    ids=lambda text: text[:40],
)
def test_a_journal_that_is_none_is_refused(text, tmp_path):
    host = host_of(tmp_path, "mlx5")
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state/open.json").write_text(text)
    (tmp_path / "state/open.json").chmod(0o600)
    with pytest.raises(ConfigError, match="is no journal"):
        host.roll_back()


@pytest.mark.parametrize(
    "target", ["etc/passwd", "/sys/class/x", "sys/class/../../etc/passwd", "sys/kernel/debugs", ""]
)
@pytest.mark.parametrize("kind", ["file", "folder", "trigger", "touches"])
def test_a_journal_of_other_files_is_refused(kind, target, tmp_path):
    host = host_of(tmp_path, "mlx5")
    beside = {"kind": "file", "target": "sys/class/x", "touches": [[target, "1"]]}
    entry = beside if kind == "touches" else {"kind": kind, "target": target}
    journal = {"version": 1, "root": str(host.kernel.root), "profile": "p", "started_utc": "", "entries": [entry]}
    (tmp_path / "state").mkdir(mode=0o700)
    (tmp_path / "state/open.json").write_text(json.dumps(journal))
    (tmp_path / "state/open.json").chmod(0o600)
    with pytest.raises(ConfigError, match="is no file of a NIC"):
        host.roll_back()


@pytest.mark.parametrize("place", ["state", "state/applied-1.json"])
@pytest.mark.parametrize("mode", [0o020, 0o002])
def test_a_journal_that_others_could_have_written_is_refused(mode, place, tmp_path):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of())
    path = tmp_path / place
    path.chmod(path.stat().st_mode | mode)
    with pytest.raises(ConfigError, match=r"may be written by others .*chmod go-w"):
        host.roll_back()
    with pytest.raises(ConfigError, match="may be written by others"):
        host.state.last_applied()


def test_a_journal_of_another_user_is_refused(tmp_path, monkeypatch):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(ConfigError, match=r"may be written by others \(owner"):
        host.roll_back()


def test_a_journal_that_is_a_link_is_refused(tmp_path):
    host = host_of(tmp_path, "mlx5")
    host.apply(profile_of())
    (tmp_path / "state/applied-1.json").rename(tmp_path / "moved.json")
    (tmp_path / "state/open.json").symlink_to(tmp_path / "moved.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        host.roll_back()


def test_each_folder_made_for_the_journal_is_on_disk(tmp_path, monkeypatch):
    synced: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink()))
    with State(tmp_path / "a/b/state").locked():
        pass
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a/b"]
    assert (tmp_path / "a/b/state").stat().st_mode & 0o777 == 0o700


def test_a_journal_says_how_to_undo_by_hand(tmp_path):
    host = host_of(tmp_path, "ionic")
    host.apply(profile_of())
    entries = json.loads((tmp_path / "state/applied-1.json").read_text())["entries"]
    undo = {tuple(entry["undo"]) for entry in entries if entry["kind"] == "tool"}
    assert ("ethtool", "-A", "eth0", "rx", "on", "tx", "on") in undo
    assert ("dcb", "app", "del", "dev", "eth0", "dscp-prio", "26:3") in undo


_CHANGES = {"set", "--set", "-A", "replace", "del"}


@settings(max_examples=40)
@given(profile=profiles(), vendor=st.sampled_from(VENDORS), groups=st.booleans(), fault=st.integers(0, 40))
def test_any_profile_with_any_failing_write_is_all_or_nothing(profile, vendor, groups, fault):
    with quick_folder() as folder, pytest.MonkeyPatch.context() as patch:
        host = host_of(Path(folder), vendor, groups=groups)
        wanted = build_profile(profile)
        write, run, calls = host.kernel.write, host.programs.run, itertools.count()

        def failing_write(path: str, data: bytes) -> None:
            if next(calls) == fault:
                raise OSError(errno.EIO, "Input/output error")
            write(path, data)

        def failing_run(words: Sequence[str]) -> str:
            if (_CHANGES.intersection(words) or (len(words) > 3 and words[0] == "mlnx_qos")) and next(calls) == fault:
                raise ToolFailed(f"{words[0]}: exit code 1")
            return run(words)

        with patch.context() as broken:
            broken.setattr(host.kernel, "write", failing_write)
            broken.setattr(host.programs, "run", failing_run)
            try:
                host.apply(wanted)
                failed = False
            except CheckFailed:
                failed = True
        assert host.state.find_open() is None
        if not failed:
            assert not host.plan(wanted).differences
            host.roll_back()
        assert host.now() == host.before
        host.check_ranges()


@settings(max_examples=100)
@given(
    profile=profiles(),
    vendor=st.sampled_from(VENDORS),
    groups=st.booleans(),
    deaths=st.lists(st.tuples(st.integers(0, 60), st.booleans()), min_size=1, max_size=3),
)
def test_any_profile_with_deaths_at_any_call_is_undone(profile, vendor, groups, deaths):
    """The first death strikes the change, the others its undoing."""
    with quick_folder() as folder:
        host = host_of(Path(folder), vendor, groups=groups)
        wanted = build_profile(profile)
        plan = host.plan(wanted)
        with living(Life(*deaths[0]), host.programs), contextlib.suppress(Dead):
            host.change(plan)
        for death in deaths[1:]:
            with living(Life(*death), host.programs), contextlib.suppress(Dead):
                host.roll_back()
        host.roll_back()
        assert host.now() == host.before
        assert host.state.find_open() is None
        host.check_ranges()
