"""The probe command on a real network: nine Linux namespaces, two ECMP stages, no packet outside of them.

    src - a - b0, b1 - c0, c1, c2 - d - dst        link n has 10.0.n.1 at its left and 10.0.n.2 at its right end

Routers answer with the address of the link that a probe came by, so an address names router and link.
"""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.integration.namespaces import Lab, lab, why_not
from topology.ecmp.hashing import Headers
from topology.probe.capture import answers, probes, read_pcap
from topology.probe.kernel_hash import LAYER4, FibField, Policy, choose, multipath_hash
from topology.probe.paths import PathSpread
from topology.probe.spread import spread

_LACKS = why_not()
pytestmark = pytest.mark.skipif(bool(_LACKS), reason=_LACKS)

_LINKS = (
    ("src", "a"), ("a", "b0"), ("a", "b1"), ("b0", "c0"), ("b0", "c1"), ("b0", "c2"), ("b1", "c0"), ("b1", "c1"),
    ("b1", "c2"), ("c0", "d"), ("c1", "d"), ("c2", "d"), ("d", "dst"),
)  # fmt: skip
_NAMES = tuple(dict.fromkeys(name for link in _LINKS for name in link))
_SRC, _DST = "10.0.1.1", "10.0.13.2"
_PORTS = range(49152, 49408)
_SEED_KEY = "/proc/sys/net/ipv4/fib_multipath_hash_seed"
# Every figure below is judged at this; the test reads fewer than 100 of them.
_FALSE_ALARM = 1e-11


@pytest.fixture(scope="module")
def network() -> Iterator[Lab]:
    with lab() as made:
        made.ip([f"netns add {name}" for name in _NAMES])
        for name in _NAMES:
            made.sysctl(name, ip_forward=1, icmp_ratelimit=0, icmp_ratemask=0, icmp_errors_use_inbound_ifaddr=1)
            made.sysctl(name, conf__all__rp_filter=0, conf__default__rp_filter=0, fib_multipath_hash_policy=1)
        made.ip([f"link add l{n} netns {left} type veth peer name r{n} netns {right}" for n, (left, right) in _links()])
        for name in _NAMES:
            made.ip([*_addresses(name), *_routes(name)], name)
        yield made


def test_every_flow_goes_where_the_kernel_hash_says(network: Lab, tmp_path: Path) -> None:
    _require_seed()
    _configure(network, seeds={"a": 7, "b0": 8, "b1": 4_000_000_000})
    asked = ["--rounds", "2", "--members", "2=2", "--members", "3=3", "--linux", "10.0.1.2=7:10.0.2.2,10.0.3.2"]
    rows, measured = _probe(network, tmp_path, *asked)
    flows = [line.split(",")[-2:] for line in (tmp_path / "forecast.csv").read_text().splitlines()[1:]]
    assert len(flows) == len(_PORTS)
    assert all(predicted == went for predicted, went in flows)
    assert (measured.router == _predicted({"a": 7, "b0": 8, "b1": 4_000_000_000})).all()
    summary = rows[0]
    assert (summary["flows"], summary["hops"], summary["paths"]) == (len(_PORTS), 5, 6)
    assert (summary["unanswered_share"], summary["flows_that_moved"], summary["reached"]) == (0, 0, True)
    assert summary["uneven_choices"] == 0
    assert all(row["rtt_us"] > 0 for row in rows if row["table"] == "hop")


def test_weights_and_addresses_and_chosen_fields_are_modelled(network: Lab, tmp_path: Path) -> None:
    _require_seed()
    seeds = {"a": 1, "b0": 2, "b1": 3}
    _configure(network, seeds, weights=(1, 3))
    rows, measured = _probe(network, tmp_path / "weights", "--weight", "10.0.3.2=3")
    assert (measured.router == _predicted(seeds, weights=(1, 3))).all()
    shares = {(row["table"], row["router"]): row["share"] for row in rows if row["table"] in ("hop", "expected")}
    assert shares["hop", "10.0.3.2"] == pytest.approx(0.75, abs=0.1)
    assert shares["expected", "10.0.3.2"] == pytest.approx(0.75)

    _configure(network, seeds, policy=0)
    _, measured = _probe(network, tmp_path / "addresses")
    assert (measured.router == _predicted(seeds, policy=0)).all()
    assert len(np.unique(measured.router, axis=0)) == 1

    fields = FibField.SRC_PORT | FibField.DST_IP
    _configure(network, seeds, policy=3, fields=fields)
    _, measured = _probe(network, tmp_path / "fields")
    assert (measured.router == _predicted(seeds, policy=3, fields=fields)).all()
    assert len(np.unique(measured.router, axis=0)) == 6


def test_one_seed_for_all_routers_polarises_and_others_cure_it(network: Lab, tmp_path: Path) -> None:
    _require_seed()
    seeds = {"a": 5, "b0": 5, "b1": 5}
    _configure(network, seeds)
    rows, measured = _probe(network, tmp_path, "--members", "2=2", "--members", "3=3")
    assert (measured.router == _predicted(seeds)).all()
    verdicts = {row["from"]: (row["verdict"], row["used"]) for row in rows if row["table"] == "choice"}
    assert verdicts["10.0.1.2"] == ("even", 2)
    assert verdicts["10.0.2.2"] == verdicts["10.0.3.2"] == ("polarised", 2)


def test_with_the_kernels_own_seed_flows_stay_and_shares_are_binomial(network: Lab, tmp_path: Path) -> None:
    _configure(network, seeds={"a": 0, "b0": 0, "b1": 0})
    rows, _ = _probe(network, tmp_path, "--rounds", "3")
    assert rows[0]["flows_that_moved"] == 0
    flows = {row["router"]: row["flows"] for row in rows if row["table"] == "hop"}
    assert _chance(flows["10.0.2.2"], len(_PORTS), 1 / 2) > _FALSE_ALARM
    # One seed in all namespaces of a kernel: b0 sees the lower half of the hashes only, b1 the upper half.
    assert not {"10.0.6.2", "10.0.7.2"} & set(flows)
    for before, full, part in (("10.0.2.2", "10.0.4.2", "10.0.5.2"), ("10.0.3.2", "10.0.9.2", "10.0.8.2")):
        assert flows[full] + flows[part] == flows[before]
        assert _chance(flows[full], flows[before], 2 / 3) > _FALSE_ALARM


def test_the_capture_alone_gives_the_same_rows(network: Lab, tmp_path: Path) -> None:
    live, _ = _probe(network, tmp_path)
    read = _command("--read", str(tmp_path / "seen.pcap"), "--out", str(tmp_path), "--json", "-")
    assert json.loads(subprocess.run(read, capture_output=True, check=True).stdout)["rows"] == live


def test_where_nobody_answers_the_command_fails_in_one_line(network: Lab, tmp_path: Path) -> None:
    asked = ["--dst", "192.0.2.1", "--iface", "l1", "--ports", "50000", "--ttl", "1-3", "--timeout", "0.1"]
    with pytest.raises(RuntimeError, match=r"(?s)exit 1: .*error: no router answered: 9 probes"):
        network.inside("src", _command(*asked, "--out", str(tmp_path), "--json", "-"))


def test_a_router_without_a_route_is_named(network: Lab, tmp_path: Path) -> None:
    network.ip(["route del 10.0.13.0/24"], "c1")
    try:
        asked = ["--dst", _DST, "--iface", "l1", "--ports", "50000-50031", "--ttl", "1-6", "--out", str(tmp_path)]
        with pytest.raises(RuntimeError, match=r"exit 1: (?s:.*)10.0.13.2 is unreachable for \d+ of 32 flows, says"):
            network.inside("src", _command(*asked))
    finally:
        network.ip(["route add 10.0.13.0/24 via 10.0.11.2"], "c1")


def test_nothing_is_left_when_the_maker_is_killed() -> None:
    code = (
        "import sys, time\nfrom tests.integration.namespaces import lab\n"
        "with lab() as made:\n made.ip(['netns add x'])\n print(made.pid, flush=True)\n time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout is not None
        holder = Path("/proc", maker.stdout.readline().strip())
        assert holder.exists()
        maker.send_signal(signal.SIGKILL)
    end = time.monotonic() + 20
    while _alive(holder) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(holder)
    assert not Path("/run/netns/x").exists()


def _require_seed() -> None:
    if not Path(_SEED_KEY).exists():
        pytest.skip("needs net.ipv4.fib_multipath_hash_seed (Linux 6.11)")


def _links() -> list[tuple[int, tuple[str, str]]]:
    return list(enumerate(_LINKS, start=1))


def _addresses(name: str) -> list[str]:
    lines = ["link set lo up"]
    for n, (left, right) in _links():
        if name in (left, right):
            device, host = (f"l{n}", 1) if name == left else (f"r{n}", 2)
            lines += [f"addr add 10.0.{n}.{host}/24 dev {device}", f"link set {device} up"]
    return lines


def _routes(name: str) -> list[str]:
    """Towards dst by every link to the right, towards src by the first to the left."""
    right = [f"nexthop via 10.0.{n}.2" for n, (left, _) in _links() if left == name]
    left = [f"via 10.0.{n}.1" for n, (_, end) in _links() if end == name]
    lines = [f"route add 10.0.13.0/24 {' '.join(right)}"] if right and name != "d" else []
    return lines + ([f"route add 10.0.1.0/24 {left[0]}"] if left and name != "a" else [])


def _configure(
    network: Lab,
    seeds: dict[str, int],
    weights: Sequence[int] = (1, 1),
    policy: Policy = 1,
    fields: FibField = LAYER4,
) -> None:
    for name, seed in seeds.items():
        keys = {"fib_multipath_hash_policy": policy, "fib_multipath_hash_fields": int(fields)}
        network.sysctl(name, **keys, **({"fib_multipath_hash_seed": seed} if Path(_SEED_KEY).exists() else {}))
    hops = " ".join(f"nexthop via 10.0.{2 + i}.2 weight {weight}" for i, weight in enumerate(weights))
    network.ip([f"route replace 10.0.13.0/24 {hops}"], "a")


def _command(*arguments: str) -> list[str]:
    code = "from netlayer.cli import run; from topology.probe.command import command; run(command, 'probe')"
    return [sys.executable, "-c", code, *arguments]


def _probe(network: Lab, out: Path, *more: str) -> tuple[list[dict[str, Any]], PathSpread]:
    """Sweep from src to dst; the rows of the record, and the path of every flow as the capture has it."""
    out.mkdir(exist_ok=True)
    seen = out / "seen.pcap"
    ports = f"{_PORTS[0]}-{_PORTS[-1]}"
    asked = ["--dst", _DST, "--iface", "l1", "--ports", ports, "--ttl", "1-6", "--rate", "10000", "--pcap", str(seen)]
    record = json.loads(network.inside("src", _command(*asked, *more, "--out", str(out), "--json", "-")))
    assert record["source"] == "measured"
    capture = read_pcap(seen)
    (measured,) = spread(probes(capture), answers(capture))
    return record["rows"], measured


def _predicted(
    seeds: dict[str, int], weights: Sequence[int] = (1, 1), policy: Policy = 1, fields: FibField = LAYER4
) -> NDArray[np.int64]:
    """The address that answers each flow at each of the five hops."""
    ports = np.array(_PORTS, dtype=np.uint16)
    ends = (np.full(len(ports), int(IPv4Address(ip)), dtype=np.uint32) for ip in (_SRC, _DST))
    headers = Headers(*ends, ports)
    first = choose(multipath_hash(headers, seeds["a"], policy, fields), weights)
    second = [choose(multipath_hash(headers, seeds[name], policy, fields), (1, 1, 1)) for name in ("b0", "b1")]
    middle = np.where(first == 0, *second)
    links = np.stack([np.ones_like(first), 2 + first, 4 + 3 * first + middle, 10 + middle, np.full_like(first, 13)])
    return (10 << 24 | links << 8 | 2).T


def _chance(count: int, total: int, share: float) -> float:
    """Probability of a binomial count at least as far from its mean on the same side."""
    side = range(count, total + 1) if count > total * share else range(count + 1)
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        + k * math.log(share) + (total - k) * math.log1p(-share)
        for k in side
    ]  # fmt: skip
    return math.fsum(math.exp(term) for term in logs)


def _alive(process: Path) -> bool:
    """It runs, and does not only wait to be buried by whoever inherited it."""
    try:
        return " Z" not in (process / "status").read_text().partition("State:\t")[2][:3]
    except OSError:
        return False
