"""Culprits of hung jobs: random jobs with an injected fault, small hand-made ones, and real dumps of two ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.blame.worlds import FAULTS, FaultKind, random_world, write_dumps
from netlayer.observe import Blame, Evidence, Group, Launch, RankLog, diagnose, read_files
from tests.forked import start_module

SEEDS = range(8)
_EXPECTED = {"hang": "hang", "dead": "dead", "size": "mismatch", "dtype": "mismatch", "op": "mismatch"}


@pytest.mark.parametrize("kind", FAULTS)
def test_only_the_rank_with_the_injected_fault_is_named(kind: FaultKind, tmp_path: Path) -> None:
    for seed in SEEDS:
        world = random_world(seed, kind)
        blame = read_files(write_dumps(world, tmp_path / str(seed), seed, "json" if seed % 2 else "pickle"))
        assert world.fault is not None
        assert blame.culprits == (world.fault.rank,), (seed, [finding.line for finding in blame.findings])
        assert all(finding.kind == _EXPECTED.get(kind, finding.kind) for finding in blame.findings)
        assert world.fault.rank not in blame.findings[0].waiting


def test_half_of_the_dumps_accuse_nobody_of_the_other_half() -> None:
    """Those of one host of two: the files of the other were not collected, and its ranks may be well."""
    group = Group("dp", "dp", "dp", (0, 1, 2, 3))
    launch = Launch(1, "all_reduce", 0, False, ((4,),), ((4,),), ("Float",), ("Float",), None, 1)
    for present, is_certain in (((0, 1, 2), True), ((0, 1), False)):
        logs = {rank: RankLog(rank, f"trace_{rank}", {"dp": {1: launch}}) for rank in present}
        findings = diagnose(Evidence({"dp": group}, logs, range(4))).findings
        assert {finding.kind for finding in findings} == {"dead"}
        assert [finding.certain for finding in findings] == [is_certain] * (4 - len(present))


def test_a_healthy_job_has_no_findings(tmp_path: Path) -> None:
    for seed in SEEDS:
        blame = read_files(write_dumps(random_world(seed, None), tmp_path / str(seed), seed))
        assert not blame.findings
        assert not blame.groups


def test_random_jobs_have_orders_that_differ_between_groups() -> None:
    worlds = [random_world(seed, "order") for seed in SEEDS]
    crossing = 0
    for world in worlds:
        assert world.fault is not None
        one, other = world.programs[world.fault.rank][world.fault.position : world.fault.position + 2]
        crossing += one.group != other.group
    assert 0 < crossing < len(worlds)


def _job(groups: dict[str, tuple[int, ...]], ranks: dict[int, list[tuple[str, str, int, bool]]]) -> Blame:
    """Diagnose a job, given each rank's launches in order as (group, kind, number of elements, is complete)."""
    logs = {}
    for rank, launches in ranks.items():
        logs[rank] = log = RankLog(rank, f"trace_{rank}")
        for order, (key, kind, size, done) in enumerate(launches):
            of_group = log.launches.setdefault(key, {})
            seq = len(of_group) + 1
            of_group[seq] = Launch(
                seq, kind, order, done, ((size,),), ((size,),), ("Float",), ("Float",), None, order + 1
            )
    world = range(1 + max(rank for members in groups.values() for rank in members))
    named = {key: Group(key, key, key, members) for key, members in groups.items()}
    return diagnose(Evidence(named, logs, world))


def test_a_victim_of_a_victim_is_no_culprit() -> None:
    blame = _job(
        {"a": (0, 1), "b": (1, 2), "c": (2, 3)},
        {
            0: [("a", "all_reduce", 4, False)],
            1: [("b", "all_reduce", 4, False)],
            2: [("c", "all_reduce", 4, False)],
            3: [],
        },
    )
    assert blame.culprits == (3,)
    assert blame.findings[0].waiting == (0, 1, 2)
    assert "rank 3 has not arrived at all_reduce #1 ([4] Float) of group c (ranks 2,3)" in blame.findings[0].line
    assert len(blame.groups) == 3


def test_two_that_differ_from_each_other_alone_are_both_named() -> None:
    blame = _job({"a": (0, 1)}, {0: [("a", "all_reduce", 4, False)], 1: [("a", "all_reduce", 8, False)]})
    assert blame.culprits == (0, 1)
    assert not blame.findings[0].certain
    assert "nothing tells which is wrong" in blame.findings[0].line


def test_a_wait_cycle_of_two_names_both() -> None:
    blame = _job({"a": (0, 1), "b": (0, 1)}, {0: [("a", "all_reduce", 4, False)], 1: [("b", "all_reduce", 4, False)]})
    assert (blame.findings[0].kind, blame.culprits, blame.findings[0].certain) == ("order", (0, 1), False)


def test_two_that_wait_for_each_other_are_named_with_what_each_waits_in() -> None:
    blame = _job(
        {"a": (0, 1), "b": (0, 1, 2)},
        {0: [("a", "recv", 4, False)], 1: [("b", "all_reduce", 4, False)], 2: [("b", "all_reduce", 4, False)]},
    )
    assert (blame.findings[0].kind, blame.culprits, blame.findings[0].certain) == ("order", (0, 1), False)
    assert "rank 0 in recv #1 ([4] Float) of group a (ranks 0,1) for rank 1" in blame.findings[0].line
    assert "rank 1 in all_reduce #1 ([4] Float) of group b (ranks 0-2) for rank 0" in blame.findings[0].line


def _launched(*keys: str) -> list[tuple[str, str, int, bool]]:
    return [(key, "all_reduce", 4, False) for key in keys]


def test_groups_launched_the_other_way_round_are_named_though_all_have_launched() -> None:
    blame = _job({"a": (0, 1), "b": (0, 1)}, {0: _launched("a", "b"), 1: _launched("b", "a")})
    assert (blame.findings[0].kind, blame.culprits, blame.findings[0].certain) == ("order", (0, 1), False)
    line = blame.findings[0].line
    assert "rank 0 launched all_reduce #1 of group a (ranks 0,1) before all_reduce #1 of group b (ranks 0,1)" in line
    assert "rank 1 launched all_reduce #1 of group b (ranks 0,1) before all_reduce #1 of group a (ranks 0,1)" in line


def test_the_launch_order_of_the_minority_is_wrong() -> None:
    orders = {rank: _launched("a", "b") for rank in (0, 1, 3)} | {2: _launched("b", "a")}
    blame = _job({"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}, orders)
    assert (blame.findings[0].kind, blame.culprits, blame.findings[0].certain) == ("order", (2,), True)
    assert blame.findings[0].waiting == (0, 1, 3)


def test_no_single_rank_is_named_if_most_ranks_changed_their_order() -> None:
    before = [("a", "all_reduce", 4, True), ("b", "all_reduce", 4, True)]
    orders = {rank: [*before, *_launched("b", "a")] for rank in (0, 1, 3)} | {2: [*before, *_launched("a", "b")]}
    blame = _job({"a": (0, 1, 2, 3), "b": (0, 1, 2, 3)}, orders)
    assert (blame.culprits, blame.findings[0].certain) == ((0, 1, 2, 3), False)
    assert "in the rounds before all launched them as rank 2 did" in blame.findings[0].line


def test_three_groups_in_a_circle_of_orders_are_named() -> None:
    blame = _job(
        {"a": (0, 2), "b": (0, 1), "c": (1, 2)},
        {0: _launched("a", "b"), 1: _launched("b", "c"), 2: _launched("c", "a")},
    )
    assert (blame.findings[0].kind, blame.culprits, blame.findings[0].certain) == ("order", (0, 1, 2), False)
    assert blame.findings[0].line.endswith("each holds up the next")


def test_collectives_that_both_run_hold_each_other_up_in_no_order() -> None:
    def log(rank: int, *keys: str) -> RankLog:
        launches = {key: {1: Launch(1, "all_reduce", order, False, started=True)} for order, key in enumerate(keys)}
        return RankLog(rank, "", launches)

    groups = {key: Group(key, key, key, (0, 1)) for key in "ab"}
    blame = diagnose(Evidence(groups, {0: log(0, "a", "b"), 1: log(1, "b", "a")}, range(2)))
    assert {finding.kind for finding in blame.findings} == {"stalled"}


@pytest.mark.parametrize(("numbers", "kind"), [((1, 2), "order"), ((1, 1), "stalled")])
def test_a_batch_of_sends_and_receives_has_no_order(numbers: tuple[int, int], kind: str) -> None:
    def log(rank: int, *ends: tuple[str, str]) -> RankLog:
        pairs = zip(ends, numbers, strict=True)
        launches = {
            key: {1: Launch(1, name, order, False, recorded=number)}
            for order, ((key, name), number) in enumerate(pairs)
        }
        return RankLog(rank, "", launches)

    groups = {key: Group(key, key, key, (0, 1), sender) for key, sender in (("0->1", 0), ("1->0", 1))}
    logs = {0: log(0, ("0->1", "send"), ("1->0", "recv")), 1: log(1, ("1->0", "send"), ("0->1", "recv"))}
    blame = diagnose(Evidence(groups, logs, range(2)))
    assert {finding.kind for finding in blame.findings} == {kind}


def test_a_rank_that_alone_has_not_completed_an_older_collective_is_worth_a_note() -> None:
    launches = {rank: [("a", "all_reduce", 4, rank != 1), ("a", "all_reduce", 4, False)] for rank in range(3)}
    blame = _job({"a": (0, 1, 2)}, launches)
    assert blame.culprits == ()
    assert blame.notes == [
        "on rank 1 all_reduce #1 of group a (ranks 0-2) is not complete, on its peers it is: "
        "look at its GPU as well (Xid, ECC)"
    ]
    one_way = {rank: [("a", "broadcast", 4, rank == 0), ("a", "broadcast", 4, False)] for rank in range(3)}
    assert _job({"a": (0, 1, 2)}, one_way).notes == []


def test_no_rank_is_named_if_all_have_arrived() -> None:
    blame = _job({"a": (0, 1)}, {rank: [("a", "all_reduce", 4, False)] for rank in (0, 1)})
    assert (blame.findings[0].kind, blame.culprits) == ("stalled", ())


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("_allgather_base", 4), ("all_gather_into_tensor", 4)),
        (("all_to_all", 4), ("all_to_all", 8)),
        (("alltoall_base", 4), ("ALLTOALL_BASE", 8)),  # as backends that are not NCCL spell it
    ],
)
def test_spellings_and_uneven_parts_are_no_mismatch(one: tuple[str, int], other: tuple[str, int]) -> None:
    blame = _job({"a": (0, 1)}, {0: [("a", *one, False)], 1: [("a", *other, False)]})
    assert blame.findings[0].kind == "stalled"


def test_a_rank_without_a_dump_is_not_named_if_another_one_is_late() -> None:
    blame = _job({"a": (0, 1, 2)}, {0: [("a", "all_reduce", 4, False)], 1: []})
    assert blame.culprits == (1,)
    assert blame.notes == ["no dump of rank 2"]


def test_real_dumps_of_gloo_ranks(tmp_path: Path) -> None:
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        job = "tests.netlayer.observe.gloo_dumps"
        ranks = [start_module(job, rank, tmp_path, stdout=log, stderr=log, env=environment) for rank in range(2)]
        codes = [rank.wait(180) for rank in ranks]
    assert codes == [0, 0], (tmp_path / "log").read_text()
    for prefix in ("trace", "json"):
        blame = read_files(sorted(tmp_path.glob(f"{prefix}_*")))
        assert blame.culprits == (1,)
        assert "has not arrived at all_reduce #2 ([4] Float) of group 1:dp (ranks 0,1)" in blame.findings[0].line
        assert "or waits in a send or receive" in blame.findings[0].line
        assert blame.notes == [
            "gloo's dumps hold no send and no receive (one rank has done at least 1): who waits in one is not seen"
        ]
