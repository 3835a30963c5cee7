"""Verbs without a NIC: what is checked before one is touched, how a device is found, and what peers say to another."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from congestion.nic.commands.verbs import verbs
from congestion.verbs import job as verbs_job
from congestion.verbs.device import devices, find_device, load_pyverbs
from congestion.verbs.gpu import open_gpu_memory
from congestion.verbs.job import do, look
from congestion.verbs.measure import MOST_BYTES, Plan, pattern, wrong_bytes
from congestion.verbs.queue_pair import Address, QpSettings
from congestion.verbs.remote import PROTOCOL, Wire, measure_remote, serve
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing

ADDRESS = {"qpn": 17, "psn": 5, "gid": "::ffff:10.0.0.1", "rkey": 1, "addr": 4096, "num_bytes": 4096}


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Two devices: rxe0 is down, mlx5_0 has four addresses in use."""
    root = tmp_path / "sys/class/infiniband"
    for name, state in (("rxe0", "1: DOWN"), ("mlx5_0", "4: ACTIVE")):
        port = root / name / "ports" / "1"
        for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
            (port / folder).mkdir(parents=True)
        (port / "state").write_text(f"{state}\n")
        (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
        (port / "link_layer").write_text("Ethernet\n")
        for index in range(6):
            (port / "gids" / str(index)).write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    port = root / "mlx5_0" / "ports" / "1"
    entries = [
        (0, "fe80::1", "IB/RoCE v1"),
        (1, "fe80::1", "RoCE v2"),
        (3, "2001:db8::5", "RoCE v2"),
        (4, "::ffff:10.0.0.5", "RoCE v2"),
    ]
    for index, address, kind in entries:
        (port / "gids" / str(index)).write_text(address)
        (port / "gid_attrs/types" / str(index)).write_text(f"{kind}\n")
        (port / "gid_attrs/ndevs" / str(index)).write_text("eth5\n")
    return root


def test_devices_are_read_without_a_library(sysfs):
    found = devices(sysfs)
    assert [(one.name, one.state, one.netdev) for one in found] == [("mlx5_0", "ACTIVE", "eth5"), ("rxe0", "DOWN", "")]
    assert [(gid.index, gid.ip) for gid in found[0].gids][-1] == (4, "10.0.0.5")


def test_the_first_active_device_and_its_ipv4_address_are_taken(sysfs):
    device = find_device(sysfs=sysfs)
    assert (device.name, device.choose_gid().index) == ("mlx5_0", 4)


def test_a_device_or_address_that_is_not_there_is_refused_with_those_that_are(sysfs):
    with pytest.raises(ConfigError, match="mlx5_0, rxe0"):
        find_device("mlx5_9", sysfs)
    with pytest.raises(ConfigError, match="in use are 0, 1, 3, 4"):
        find_device("mlx5_0", sysfs).choose_gid(2)
    with pytest.raises(ConfigError, match="no RoCEv2 address"):
        find_device("rxe0", sysfs).choose_gid()


def test_no_device_and_none_that_is_active_are_missing_hardware(sysfs, tmp_path):
    with pytest.raises(HardwareMissing, match="no RDMA device below"):
        find_device(sysfs=tmp_path / "none")
    (sysfs / "mlx5_0/ports/1/state").write_text("2: INIT\n")
    with pytest.raises(HardwareMissing, match="mlx5_0 is INIT, rxe0 is DOWN"):
        find_device(sysfs=sysfs)


def test_pyverbs_that_is_not_there_is_missing_hardware(monkeypatch):
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    with pytest.raises(HardwareMissing, match="python3-pyverbs"):
        load_pyverbs("qp")


@pytest.mark.parametrize(
    ("name", "value"),
    [("timeout", 32), ("timeout", -1), ("retry_cnt", 8), ("retry_cnt", 13), ("rnr_retry", 8), ("min_rnr_timer", 32),
     ("mtu", 1500), ("traffic_class", 256), ("flow_label", 2**20), ("udp_sport", 0), ("udp_sport", 65536),
     ("timeout", "14"), ("timeout", True), ("mtu", "1024"), ("mtu", [1024]), ("mtu", {}), ("mtu", 1024.0)],
)  # fmt: skip
def test_a_number_out_of_its_range_is_refused_by_us(name, value):
    with pytest.raises(ValueError, match=name):
        QpSettings(**{name: value})


def test_settings_travel_and_unknown_ones_do_not():
    wanted = QpSettings(timeout=18, retry_cnt=3, udp_sport=50_000)
    assert QpSettings.read(json.loads(json.dumps(wanted.to_dict()))) == wanted
    with pytest.raises(ValueError, match="colour"):
        QpSettings.read({"colour": 1})


LARGEST = {"qpn": 2**24 - 1, "psn": 2**24 - 1, "rkey": 2**32 - 1, "addr": 2**64 - 1, "num_bytes": 2**63 - 1}
NUMBERS = st.one_of(st.integers(), *(st.integers(most - 1, most + 1) for most in LARGEST.values()), st.booleans())


@given(st.dictionaries(st.sampled_from([*ADDRESS, "x"]), st.one_of(NUMBERS, st.text(), st.none(), st.lists(st.none()))))
def test_an_address_is_whole_and_within_its_fields_or_refused(changed):
    told = {**ADDRESS, **changed}
    names = [name for name in ADDRESS if name != "gid"]
    right = told["gid"] == ADDRESS["gid"] and all(type(told[name]) is int for name in names)
    if right and all((name == "num_bytes") <= told[name] <= LARGEST[name] for name in names):
        assert vars(Address.read(told)) == {name: told[name] for name in ADDRESS}
    else:
        with pytest.raises(ValueError):
            Address.read(told)


@pytest.mark.parametrize("missing", ADDRESS)
def test_a_part_of_an_address_that_is_missing_is_named(missing):
    with pytest.raises(ValueError, match=f"address without {missing}"):
        Address.read({name: value for name, value in ADDRESS.items() if name != missing})


@pytest.mark.parametrize(
    "wrong",
    [{"sizes": []}, {"sizes": [0]}, {"kinds": ["read"]}, {"window": 129}, {"window": 0}, {"pings": 0},
     {"sizes": [MOST_BYTES], "window": 2}],
)  # fmt: skip
def test_a_plan_that_cannot_be_run_is_refused(wrong):
    with pytest.raises(ValueError):
        Plan(**wrong)


@given(st.integers(0, 10**9), st.integers(1, 3_000_000))
def test_a_pattern_is_the_same_everywhere_and_differs_by_seed(seed, size):
    found = pattern(seed, size)
    assert len(found) == size
    assert found == pattern(seed, size)
    assert size < 16 or found != pattern(seed + 1, size)


def test_slots_of_a_pattern_differ():
    found = pattern(3, 4 << 20)
    slots = {found[at : at + 65_536] for at in range(0, len(found), 65_536)}
    assert len(slots) == 64


@given(st.binary(max_size=50), st.binary(max_size=50))
def test_wrong_bytes_are_those_that_differ_or_are_missing(got, wanted):
    count = wrong_bytes(got, wanted)
    assert (count == 0) == (got == wanted)
    assert abs(len(got) - len(wanted)) <= count <= max(len(got), len(wanted))


def test_no_gpu_is_asked_for_and_none_is_touched():
    with open_gpu_memory(None, 4096) as memory:
        assert memory is None


def test_a_gpu_without_its_driver_is_missing_hardware(monkeypatch):
    monkeypatch.setattr("congestion.verbs.gpu._LIBRARY", "libcuda-is-not-here.so")
    with pytest.raises(HardwareMissing, match="cannot be loaded"), open_gpu_memory(0, 4096):
        pass


def test_verbs_need_neither_torch_nor_pydantic_nor_numpy():
    code = "import sys, congestion.verbs.remote; print({'torch', 'pydantic', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    "line",
    [b"no json\n", b"[1]\n", b'{"error": "sorry"}\n', b"x" * 200_000, b"", b"\xff\xfe\n",
     b"[" * 60_000 + b"\n"],
)  # fmt: skip
def test_a_peer_that_talks_nonsense_is_a_failed_check(line):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        feeding = threading.Thread(target=lambda: (theirs.sendall(line), theirs.shutdown(socket.SHUT_WR)))
        feeding.start()
        with pytest.raises(CheckFailed):
            Wire(ours).receive()
        feeding.join()


def test_lines_that_come_in_pieces_and_together_are_told_apart():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire = Wire(ours)
        theirs.sendall(b'{"a": 1}\n{"b"')
        assert wire.receive() == {"a": 1}
        theirs.sendall(b": 2}\n")
        assert wire.receive() == {"b": 2}


@pytest.mark.parametrize(
    ("hello", "said"),
    [
        ({"netlayer": 99}, "protocol 99"),
        ({"netlayer": PROTOCOL}, "address without"),
        ({"netlayer": PROTOCOL, **ADDRESS}, "settings"),
        ({"netlayer": PROTOCOL, **ADDRESS, "settings": {"timeout": 99}}, "timeout = 99"),
        ({"netlayer": PROTOCOL, **ADDRESS, "settings": {"mtu": [1024]}}, "mtu = "),
        ({"netlayer": PROTOCOL, **ADDRESS, "qpn": 2**24, "settings": {}}, "qpn = 16777216"),
        ({"netlayer": PROTOCOL, **ADDRESS, "addr": -1, "settings": {}}, "addr = -1"),
        ({"netlayer": PROTOCOL, **ADDRESS, "gid": "10.0.0.1", "settings": {}}, "10.0.0.1"),
        ({"netlayer": PROTOCOL, **ADDRESS, "num_bytes": 1 << 60, "settings": {}}, "num_bytes"),
        ({"netlayer": PROTOCOL, **ADDRESS, "settings": {}}, "no RDMA device"),
    ],
)
def test_a_server_tells_a_client_why_it_refuses(monkeypatch, hello, said, tmp_path):
    monkeypatch.setattr("congestion.verbs.device.find_device.__defaults__", (None, tmp_path / "none"))
    ports: list[int] = []
    listening = threading.Event()

    def ready(port: int) -> None:
        ports.append(port)
        listening.set()

    serving = threading.Thread(target=lambda: serve("127.0.0.1", 0, clients=1, ready=ready))
    serving.start()
    assert listening.wait(10)
    with socket.create_connection(("127.0.0.1", ports[0])) as client:
        wire = Wire(client)
        wire.send(hello)
        with pytest.raises(CheckFailed, match=said):
            wire.receive()
    serving.join(10)
    assert not serving.is_alive()


def test_nobody_at_the_address_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(ConfigError, match="cannot be reached"):
        measure_remote("127.0.0.1", port)


def test_an_address_that_cannot_be_listened_at_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as listener, pytest.raises(ConfigError, match="--listen"):
        serve("127.0.0.1", listener.getsockname()[1])


@pytest.mark.parametrize("arguments", [["list"], ["pair"], ["serve"]])
def test_commands_without_a_device_end_with_missing_hardware(monkeypatch, arguments, tmp_path):
    monkeypatch.setattr("congestion.verbs.device.find_device.__defaults__", (None, tmp_path / "none"))
    result = CliRunner().invoke(verbs, arguments)
    assert isinstance(result.exception, HardwareMissing)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["pair", "--size", "lots"], "lots"),
        (["pair", "--size", "1G"], "bytes each"),
        (["run", "host:port"], "is no address"),
        (["run", ""], "is no address"),
        (["run", "10.0.0.1:99999"], "is no address"),
    ],
)
def test_bad_arguments_are_refused_before_a_device_is_looked_for(arguments, said):
    result = CliRunner().invoke(verbs, arguments)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize("name", verbs.commands)
def test_the_help_of_each_command_has_examples_that_it_takes(monkeypatch, name, tmp_path):
    monkeypatch.setattr("congestion.verbs.device.find_device.__defaults__", (None, tmp_path / "none"))
    monkeypatch.setattr("congestion.verbs.remote.measure_remote", _no_hardware)
    shown = CliRunner().invoke(verbs, [name, "--help"]).stdout
    examples = [line.split()[3:] for line in shown.splitlines() if line.strip().startswith("netlayer nic verbs")]
    assert examples
    monkeypatch.chdir(tmp_path)
    for words in examples:
        assert words[0] == name
        assert isinstance(CliRunner().invoke(verbs, words).exception, HardwareMissing)


def _no_hardware(*_given: object, **_named: object) -> None:
    raise HardwareMissing("none here")


def test_a_job_tells_devices_and_what_each_of_them_lacks(monkeypatch, sysfs, tmp_path):
    monkeypatch.setattr("congestion.verbs.job.load_pyverbs", lambda _module: None)
    card = tmp_path / "sys/devices/pci0000:00/0000:00:01.0"
    for address, vendor, kind in (("0000:01:00.0", "0x15b3", "0x020700"), ("0000:02:00.0", "0x10de", "0x030200")):
        (card / address).mkdir(parents=True)
        (card / address / "vendor").write_text(f"{vendor}\n")
        (card / address / "class").write_text(f"{kind}\n")
        link = tmp_path / "sys/bus/pci/devices" / address
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(f"../../../devices/pci0000:00/0000:00:01.0/{address}")
    (sysfs / "mlx5_0/device").symlink_to("../../../devices/pci0000:00/0000:00:01.0/0000:01:00.0")
    found = {one["name"]: one for one in look(tmp_path)["devices"]}
    about = {"name": "mlx5_0", "rate": "400 Gb/sec (4X NDR)", "soft": False, "lacks": ""}
    assert found["mlx5_0"] == {**about, "gpus": ["0000:02:00.0"]}
    assert (found["rxe0"]["soft"], found["rxe0"]["gpus"]) == (True, [])
    assert found["rxe0"]["lacks"].partition("; ")[0] == "its port is DOWN"
    port = sysfs / "mlx5_0/ports/1"
    (port / "link_layer").write_text("InfiniBand\n")
    assert "RoCE alone" in look(tmp_path)["devices"][0]["lacks"]
    (port / "link_layer").write_text("Ethernet\n")
    for gid in (port / "gids").iterdir():
        gid.write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")
    assert "no RoCEv2 address" in look(tmp_path)["devices"][0]["lacks"]


@pytest.mark.parametrize(
    ("raised", "guilty"), [(CheckFailed("3 bytes wrong"), True), (HardwareMissing("none"), False), (OSError(), False)]
)
def test_a_job_says_whether_a_nic_is_to_blame(monkeypatch, raised, guilty):
    def fail(*_given: object, **_named: object) -> None:
        raise raised

    monkeypatch.setattr("congestion.verbs.job.measure_pair", fail)
    order = {"do": "pair", "source": "mlx5_0", "target": "mlx5_0", "plan": {"sizes": [64], "settings": {"timeout": 9}}}
    assert do(order) == {"error": str(raised), "guilty": guilty}


class FakeCuda:
    """A driver that says yes to all."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def __getattr__(self, name: str):
        def call(*arguments: object) -> int:
            self.calls.append((name, *arguments))
            return 0

        return call


@pytest.mark.parametrize(
    ("gpu", "asked"), [(1, ("cuDeviceGet", 1)), ("0000:1b:00.0", ("cuDeviceGetByPCIBusId", b"0000:1b:00.0"))]
)
def test_a_gpu_is_found_by_its_index_or_its_address(monkeypatch, gpu, asked):
    cuda = FakeCuda()
    monkeypatch.setattr("congestion.verbs.gpu._load_cuda", lambda: cuda)
    with open_gpu_memory(gpu, 4096):
        assert asked in [(name, *arguments[1:]) for name, *arguments in cuda.calls if name.startswith("cuDeviceGet")]


@pytest.mark.parametrize("able", [True, False])
def test_a_job_goes_on_in_the_systems_python_where_that_has_pyverbs(monkeypatch, tmp_path, able):
    system = tmp_path / "python3"
    system.write_text(f"#!/bin/sh\nexit {int(not able)}\n")
    system.chmod(0o755)
    moved: list[list[str]] = []
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setattr(verbs_job, "_SYSTEM_PYTHON", str(system))
    monkeypatch.setattr(verbs_job.os, "execve", lambda _path, words, _environ: moved.append(words))
    verbs_job.move('{"do": "look"}')
    wanted = [str(system), "-m", "congestion.verbs.job", '{"do": "look"}', "moved"]
    assert moved == ([wanted] if able else [])
