"""Verdicts on nccl-tests tables: pairs of hosts, mixed collectives, repeats, fleets that are slow as a whole."""

from __future__ import annotations

from pathlib import Path

from bench.accept.judge.logs import Judgement, judge_files

H100 = "NVIDIA H100 80GB HBM3"
GIB = 1 << 30


def table(
    hosts: tuple[str, ...], bus_bw: float, collective: str = "all_reduce", device: str = H100, names: bool = True
) -> str:
    """Return the output of a run on 8 GPUs a host for 1 and 8 GiB, with or without the collective's name."""
    num_ranks = 8 * len(hosts)
    factor = {"all_reduce": 2.0}.get(collective, 1.0) * (num_ranks - 1) / num_ranks
    redop = "sum" if collective in ("all_reduce", "reduce_scatter") else "none"
    per_rank = 1 if collective == "all_reduce" else num_ranks
    lines = [f"# Collective test starting: {collective}_perf"] if names else []
    lines += [
        f"# nThread 1 nGpus 8 minBytes {GIB} maxBytes {8 * GIB} step: 8(factor) warmup iters: 1 iters: 20 graph: 0"
    ]
    lines += ["#", "# Using devices"]
    for rank in range(num_ranks):
        host = hosts[rank // 8]
        lines.append(
            f"#  Rank {rank:2} Group  0 Pid {4000 + rank} on {host:>10} device {rank % 8:2} [0x{rank:02x}] {device}"
        )
    lines += [
        "#",
        "#                                                              out-of-place                       in-place",
        "#       size         count      type   redop    root" + "     time   algbw   busbw #wrong" * 2,
        "#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)",
    ]
    for size in (GIB, 8 * GIB):
        alg_bw = bus_bw / factor
        side = f"{size / alg_bw / 1e3:9.1f} {alg_bw:7.2f} {bus_bw:7.2f}      0"
        lines.append(f"{size:12} {size // 4 // per_rank:13} {'float':>9} {redop:>7} {-1:7} {side} {side}")
    return "\n".join([*lines, "# Out of bounds values : 0 OK", f"# Avg bus bandwidth    : {bus_bw} ", "#", ""])


def judged(folder: Path, **texts: str) -> Judgement:
    for name, text in texts.items():
        (folder / f"{name}.log").write_text(text)
    judgement = judge_files([folder])
    assert judgement.damaged == ()
    return judgement


def bad(judgement: Judgement) -> list[tuple[str | None, str]]:
    return [(one.verdict, one.subject) for one in judgement.findings if one.verdict in ("WARN", "FAIL")]


def test_of_pairs_the_common_host_is_bad_and_a_lone_pair_drains_nobody(tmp_path: Path) -> None:
    speeds = {("p1", "p2"): 51, ("p3", "p4"): 90, ("p5", "p6"): 91, ("p6", "p7"): 50, ("p7", "p4"): 52}
    judgement = judged(tmp_path, **{f"pair_{a}_{b}": table((a, b), speed) for (a, b), speed in speeds.items()})
    assert bad(judgement) == [("FAIL", "p7"), ("WARN", "either of p1 and p2")]
    assert [node.node for node in judgement.nodes if node.verdict == "FAIL"] == ["p7"]


def test_mixed_collectives_are_never_held_against_each_other(tmp_path: Path) -> None:
    texts = {f"ar_{at}": table((f"n{at}",), 470, names=False) for at in range(4)}
    texts |= {f"ag_{at}": table((f"n{at}",), 365, "all_gather", names=False) for at in range(3)}
    texts |= {f"rs_{at}": table((f"n{at}",), 360, "reduce_scatter", names=False) for at in range(2)}
    texts |= {"a2a": table(("n3",), 330, "alltoall", names=False)}
    assert bad(judged(tmp_path, **texts)) == []


def test_a_fleet_that_is_slow_alike_does_not_pass(tmp_path: Path) -> None:
    judgement = judged(tmp_path, **{f"n{at}": table((f"n{at}",), 12 + at / 100) for at in range(6)})
    assert judgement.verdict == "FAIL"
    assert {verdict for verdict, _ in bad(judgement)} == {"FAIL"}
    assert {node.node: node.verdict for node in judgement.nodes} == {f"n{at}": "FAIL" for at in range(6)}


def test_unknown_machines_alike_pass_by_their_peers_and_alone_have_no_verdict(tmp_path: Path) -> None:
    texts = {f"n{at}": table((f"n{at}",), 40, device="GPU of next year") for at in range(4)}
    assert judged(tmp_path, **texts).verdict == "PASS"
    assert judge_files([tmp_path / "n0.log"]).verdict == "NO VERDICT"
    assert judge_files([tmp_path / f"n{at}.log" for at in range(3)]).verdict == "NO VERDICT"


def test_five_repeats_of_one_node_are_one_node(tmp_path: Path) -> None:
    texts = {f"again{at}": table(("n0",), 40 + at / 10, device="GPU of next year") for at in range(5)}
    assert judged(tmp_path, **texts).verdict == "NO VERDICT"
    # The same in one file.
    (tmp_path / "all").mkdir()
    assert judged(tmp_path / "all", runs="\n".join(texts.values())).verdict == "NO VERDICT"


def test_two_nodes_that_differ_by_far_do_not_pass(tmp_path: Path) -> None:
    texts = {"a": table(("a",), 79, device="GPU of next year"), "b": table(("b",), 44, device="GPU of next year")}
    judgement = judged(tmp_path, **texts)
    assert bad(judgement) == [("WARN", "b and a")]
    assert all(node.findings == () for node in judgement.nodes)  # nobody knows which


def test_other_gpus_are_no_peers(tmp_path: Path) -> None:
    texts = {f"n{at}": table((f"n{at}",), 470) for at in range(4)} | {
        "n4": table(("n4",), 232, device="NVIDIA A100-SXM4-80GB")
    }
    judgement = judged(tmp_path, **texts)
    assert (judgement.verdict, bad(judgement)) == ("PASS", [])
