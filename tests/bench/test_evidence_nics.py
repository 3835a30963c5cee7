"""RDMA ports (ibstat, ibstatus, ibv_devinfo, rdma link), perftest, and Fabric Manager's log."""

from __future__ import annotations

import pytest

from netlayer.errors import ConfigError
from tests.bench.evidence_helpers import bad, read, verdicts


def ibstat(*ports: tuple[str, str, float, str], kind: str = "MT4129", firmware: str = "28.39.1002") -> str:
    """Ports as (state, physical state, rate, link layer), each of a device of its own."""
    return "".join(
        f"CA 'mlx5_{at}'\n\tCA type: {kind}\n\tNumber of ports: 1\n\tFirmware version: {firmware}\n"
        f"\tPort 1:\n\t\tState: {state}\n\t\tPhysical state: {physical}\n\t\tRate: {rate:g}\n\t\tBase lid: 7\n"
        f"\t\tLink layer: {layer}\n"
        for at, (state, physical, rate, layer) in enumerate(ports)
    )


UP = ("Active", "LinkUp", 400.0, "InfiniBand")
POLLING = ("Down", "Polling", 10.0, "InfiniBand")
ROCE = ("Active", "LinkUp", 400.0, "Ethernet")
ETH_DOWN = ("Down", "Disabled", 40.0, "Ethernet")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (ibstat(*[UP] * 8), {}),
        (ibstat(*[UP] * 7, POLLING), {("mlx5_7", "port state"): "FAIL"}),
        # A port that was switched off may be meant so.
        (ibstat(*[UP] * 7, ("Down", "Disabled", 10.0, "InfiniBand")), {("mlx5_7", "port state"): "WARN"}),
        (ibstat(*[UP] * 7, ("Initializing", "LinkUp", 400.0, "InfiniBand")), {("mlx5_7", "port state"): "FAIL"}),
        # No subnet manager at all is no fault of one port.
        (ibstat(*[("Initializing", "LinkUp", 400.0, "InfiniBand")] * 2),
         {("mlx5_0", "port state"): "WARN", ("mlx5_1", "port state"): "WARN"}),
        # An Ethernet port that is down is normal: it is never failed, and alone it is not even judged.
        (ibstat(*[ROCE] * 7, ETH_DOWN), {("mlx5_7", "port state"): "WARN"}),
        (ibstat(ROCE, ETH_DOWN), {("mlx5_1", "port state"): None}),
        (ibstat(*[UP] * 8) + ibstat(ROCE, ETH_DOWN, kind="MT4125").replace("mlx5_", "mlx5_1"),
         {("mlx5_11", "port state"): None}),
        # Most are down: nobody is odd.
        (ibstat(*[POLLING] * 6, UP, UP), {(f"mlx5_{at}", "port state"): None for at in range(6)}),
        (ibstat(*[UP] * 7, ("Active", "LinkUp", 200.0, "InfiniBand")), {("mlx5_7", "port rate"): "FAIL"}),
        # Two slow ones may be another network.
        (ibstat(*[UP] * 6, *[("Active", "LinkUp", 200.0, "InfiniBand")] * 2),
         {("mlx5_6", "port rate"): "WARN", ("mlx5_7", "port rate"): "WARN"}),
        (ibstat(UP, ("Active", "LinkUp", 200.0, "InfiniBand")), {}),
    ],
)  # fmt: skip
def test_ports_are_judged_among_their_like(content: str, expected: dict[tuple[str, str], str | None]) -> None:
    assert bad(content) == expected


def test_a_device_that_the_tool_cannot_read_warns() -> None:
    content = (
        ibstat(*[UP] * 8) + "ibpanic: [1400444] main: stat of IB device 'mlx5_8' failed: No such file or directory\n"
    )
    assert bad(content) == {("mlx5_8", "port state"): "WARN"}


def test_firmware_is_a_trait_of_its_device_type() -> None:
    traits = read(ibstat(UP, UP) + ibstat(UP, kind="MT4125", firmware="22.1").replace("mlx5_0", "mlx5_9")).traits
    assert traits["MT4129 firmware 28.x", "mlx5_1"] == "28.39.1002"
    assert traits["MT4125 firmware 22.x", "mlx5_9"] == "22.1"


def test_virtual_functions_of_two_chips_are_not_compared() -> None:
    """All have the type MT4126; the firmware's first number tells ConnectX-6 Dx (22) from ConnectX-7 (28)."""
    functions = ibstat(*(UP,) * 9, kind="MT4126", firmware="28.37.1014").replace("28.37.1014", "22.35.2302", 1)
    traits = read(functions).traits
    assert {name for name, _ in traits} == {"MT4126 firmware 22.x", "MT4126 firmware 28.x"}


def ibstatus(*states: str) -> str:
    return "\n".join(
        f"Infiniband device 'mlx5_{at}' port 1 status:\n\tdefault gid:\t fe80::1\n\tbase lid:\t 0x1\n"
        f"\tstate:\t\t {state}\n\tphys state:\t 5: LinkUp\n"
        "\trate:\t\t 400 Gb/sec (4X NDR)\n\tlink_layer:\t InfiniBand\n"
        for at, state in enumerate(states)
    )


def devinfo(*states: str) -> str:
    return "".join(
        f"hca_id:\tmlx5_{at}\n\tfw_ver:\t\t\t\t28.40.1702\n\tvendor_part_id:\t\t\t4129\n"
        f"\tphys_port_cnt:\t\t\t1\n\t\tport:\t1\n\t\t\tstate:\t\t\t{state}\n\t\t\tmax_mtu:\t\t4096 (5)\n"
        f"\t\t\tactive_width:\t\t4X (2)\n\t\t\tactive_speed:\t\t100.0 Gbps (128)\n\t\t\tlink_layer:\t\tInfiniBand\n\n"
        for at, state in enumerate(states)
    )


def test_the_other_tools_are_read_alike() -> None:
    good, down = "4: ACTIVE", "1: DOWN"
    assert bad(ibstatus(*[good] * 5)) == {}
    assert bad(ibstatus(*[good] * 4, down)) == {("mlx5_4", "port state"): "FAIL"}
    assert bad(devinfo(*["PORT_ACTIVE (4)"] * 5)) == {}
    assert "5 at 400 Gb/s" in read(devinfo(*["PORT_ACTIVE (4)"] * 5)).findings[0].figure
    assert bad(devinfo(*["PORT_ACTIVE (4)"] * 4, "PORT_DOWN (1)")) == {("mlx5_4", "port state"): "FAIL"}
    assert bad(devinfo(*["PORT_ACTIVE (4)"] * 4, "PORT_INIT (2)")) == {("mlx5_4", "port state"): "FAIL"}
    links = [f"link mlx5_{at}/1 state ACTIVE physical_state LINK_UP netdev ens{at}np0\n" for at in range(5)]
    assert bad("".join(links)) == {}
    assert bad("".join(links) + "link mlx5_9/1 state DOWN physical_state DISABLED netdev ens9\n") == {
        ("mlx5_9", "port state"): "WARN"
    }


def test_a_port_without_a_state_is_refused() -> None:
    with pytest.raises(ConfigError, match="a port without its state"):
        read(ibstat(UP).partition("\t\tState")[0])


def perftest(device: str = "mlx5_0", rows: str = " 65536      5000             389.51             388.42\n") -> str:
    return (
        "---------------------------------------------------------------------------------------\n"
        "                    RDMA_Write BW Test\n"
        f" Dual-port       : OFF\t\tDevice         : {device}\n Number of qps   : 1\t\tTransport type : IB\n"
        " Connection type : RC\t\tUsing SRQ      : OFF\n Mtu             : 4096[B]\n Link type       : IB\n"
        "---------------------------------------------------------------------------------------\n"
        " #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]\n"
        f"{rows}"
    )


@pytest.mark.parametrize(
    ("unit", "gbps"), [("Gb/sec", 100.0), ("MB/sec", 100 * 8 * 2**20 / 1e9), ("MiB/sec", 100 * 8 * 2**20 / 1e9)]
)
def test_the_unit_of_a_bandwidth_is_that_of_its_column(unit: str, gbps: float) -> None:
    content = perftest(rows=" 65536      5000             120.00             100.00\n").replace("Gb/sec", unit)
    [figure] = read(content).figures
    assert figure.value == pytest.approx(gbps)
    assert (figure.subject, figure.unit) == ("mlx5_0", "Gb/s")


def test_both_ends_in_one_file_are_read_though_their_lines_are_mixed() -> None:
    one, other = perftest("ib0", rows=""), perftest("ib0", rows="")
    mixed = "".join(f"{a}\n{b}\n" for a, b in zip(one.split("\n"), other.split("\n"), strict=True) if a)
    rows = "".join(f" {size}      2000             {size / 10}             {size / 11}\n" for size in (1024, 65536))
    log = read("* Waiting for client to connect... *\n" + mixed + rows)
    assert [figure.at for figure in log.figures] == ["1 KiB", "64 KiB"]
    assert {finding.verdict for finding in log.findings} == {"PASS"}
    assert len(read(perftest() + perftest()).figures) == 2


def test_a_latency_table_is_read_with_and_without_its_title() -> None:
    table = (
        " #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   "
        "99% percentile[usec]   99.9% percentile[usec]\n"
        "Conflicting CPU frequency values detected: 2400.000000 != 1873.463000. CPU Frequency is not max.\n"
        " 2       1000          1.76           6.12         1.79                1.80          0.06      1.88     6.12\n"
    )
    for title in ("", "                    RDMA Read Latency Test\n", "                    RDMA_Read Latency Test\n"):
        [figure] = read(title + table).figures
        assert (figure.value, figure.unit, figure.higher_is_better) == (1.79, "us", False)


@pytest.mark.parametrize(
    ("lines", "verdict", "step"),
    [
        (" Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\n", "FAIL", "cable"),
        (" Completion with error at client\n Failed status 13: wr_id 0 syndrom 0x87\n", "FAIL", "cable"),
        # The other end refused the access: another program, or -a on one side only.
        (" Completion with error at client\n Failed status 9: wr_id 0 syndrom 0x8a\n", "WARN", "same program"),
        (" Completion with error at client\n Failed status 10: wr_id 0 syndrom 0x88\n", "WARN", "same program"),
        ("Couldn't connect to 10.0.0.2:18515\n", "WARN", "firewall"),
        ("Unexpected CM event bl blka 8\n", "WARN", "firewall"),
        (" Port number 1 state is Down\n", "WARN", "ibstat"),
        ("IB device mlx5_7 not found\n", "WARN", "-d"),
        ("Couldn't allocate MR\n", "WARN", "ulimit"),
    ],
)
def test_how_a_run_ended_says_whom_it_speaks_of(lines: str, verdict: str, step: str) -> None:
    findings = read(perftest("mlx5_3", rows="") + lines).findings
    assert {finding.verdict for finding in findings} == {verdict}
    assert all(step in finding.next_step for finding in findings)
    assert {finding.subject for finding in findings} == {"mlx5_3"}


def test_an_error_without_the_head_of_the_output_blames_no_cable() -> None:
    content = " Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\n"
    assert set(bad(content).values()) == {"WARN"}


FABRIC = "[Feb 27 2025 15:10:0{}] [{}] [tid 12727] {}\n"
SWITCH = "detected NVSwitch {} error {} on fid 0 on NVSwitch pci bus id 00000000:86:00.0 physical id 3 port 61"


def test_fabric_managers_switch_errors_go_by_the_catalogue() -> None:
    quiet = FABRIC.format(1, "INFO", "multicast group 0 is freed.")
    assert verdicts(quiet) == {("log", "fabric"): "PASS"}
    assert bad(quiet + FABRIC.format(2, "ERROR", SWITCH.format("non-fatal", 12028))) == {
        ("NVSwitch 3", "SXid 12028"): "WARN"
    }
    assert bad(quiet + FABRIC.format(2, "ERROR", SWITCH.format("fatal", 20034))) == {
        ("NVSwitch 3", "SXid 20034"): "FAIL"
    }
    twice = FABRIC.format(2, "ERROR", SWITCH.format("fatal", 20034)) * 2
    assert "(2 times)" in read(twice).findings[0].figure
    assert bad(FABRIC.format(2, "ERROR", "failed to initialize all the NVSwitches")) == {("log", "fabric"): "WARN"}
