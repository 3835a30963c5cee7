import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest

from congestion.arena import tune as tuner
from congestion.arena.protocol import SUITE
from congestion.arena.run import published, run_one
from congestion.arena.tune import TRIALS, tune
from congestion.arena.tune_profile import read_profile, write_profile
from congestion.arena.tune_ranges import overrides_of, ranges_of
from congestion.simulation.settings import settings_of
from netlayer.errors import ConfigError
from netlayer.progress import Stages
from tests.congestion.arena_small import SMALL

LAWS = [published(law) for law in ("none", "hybrid")]
NUM_PARAMETERS = {"none": 2, "hybrid": 8}


def _tuned(out: Path, processes: int = 1) -> list[tuner.Tuned]:
    out.mkdir(exist_ok=True)
    with Stages() as stages:
        return tune(LAWS, out, stages, processes, SMALL)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[tuner.Tuned]]:
    out = tmp_path_factory.mktemp("tuned")
    return out, _tuned(out)


def test_searched_are_the_switch_and_the_laws_numbers_that_are_on():
    names = [one.name for one in ranges_of(published("dcqcn"))]
    assert names[:5] == [f"congestion.{name}" for name in SUITE.tuning.switch_parameters]
    assert "congestion.dcqcn.g" in names
    assert "congestion.dcqcn.byte_counter_bytes" not in names  # 0: off
    assert "congestion.dcqcn.clamp_target" not in names
    assert [len(ranges_of(published(law))) for law in ("none", "dcqcn", "swift", "nscc")] == [5, 13, 16, 19]


def test_ranges_are_eightfold_within_what_a_field_allows():
    ranges = {
        one.name.removeprefix("congestion."): one for law in ("dcqcn", "swift") for one in ranges_of(published(law))
    }
    alpha = ranges["dcqcn.alpha_us"]
    assert (alpha.low, alpha.published, alpha.high) == (50 / 8, 50, 400)
    assert (ranges["dcqcn.fast_recovery_steps"].low, ranges["dcqcn.fast_recovery_steps"].high) == (1, 8)
    assert ranges["pmax"].high == 1
    assert 0.99 < ranges["swift.max_mdf"].high < 1
    for law in ("none", "dcqcn", "swift", "nscc", "hybrid"):
        for end in ("low", "high"):
            contender = published(law)
            ends = overrides_of({one.name: getattr(one, end) for one in ranges_of(contender)})
            replace(contender, overrides=ends).settings()  # no field refuses it


def test_kmin_above_kmax_are_exchanged():
    assert overrides_of({"congestion.kmin_bytes": 9, "congestion.kmax_bytes": 3}) == (
        "congestion.kmin_bytes=3",
        "congestion.kmax_bytes=9",
    )
    assert overrides_of({"congestion.pmax": 0.123456}) == ("congestion.pmax=0.1235",)


def test_all_laws_get_trials_by_their_parameters_until_all_have_settled(tuned):
    for one in tuned[1]:
        assert one.num_parameters == NUM_PARAMETERS[one.contender.name]
        assert one.num_trials in (4 * one.num_parameters, 5 * one.num_parameters)
    assert len({one.num_trials / one.num_parameters for one in tuned[1]}) == 1
    assert all(one.settled for one in tuned[1]) or tuned[1][0].num_trials == 10


def test_an_unsettled_law_earns_more_trials_for_all(tmp_path, monkeypatch):
    monkeypatch.setattr(type(SMALL.tuning), "has_settled", lambda _, scores: len(scores) in (10, 40))
    assert [one.num_trials for one in _tuned(tmp_path)] == [10, 40]


def test_the_best_is_no_worse_than_what_was_published_and_is_what_runs(tuned):
    [case] = SMALL.tuning_set.cases
    for one in tuned[1]:
        assert one.score <= one.published_score
        row = run_one(one.contender, case, 3, _buffer(tuned[0]), suite=SMALL)
        assert one.score == pytest.approx(row["completion_us"] * (1 + row["pause_share"]))
    first = run_one(published("hybrid"), case, 3, _buffer(tuned[0]), suite=SMALL)
    assert tuned[1][1].published_score == pytest.approx(first["completion_us"] * (1 + first["pause_share"]), rel=1e-3)


def test_a_second_start_gives_the_same_without_a_run(tuned, tmp_path, monkeypatch):
    for file in tuned[0].glob("*.jsonl"):
        (tmp_path / file.name).write_text(file.read_text())
    monkeypatch.setattr(tuner, "run_one", None)
    assert _tuned(tmp_path) == tuned[1]


def test_a_broken_off_search_goes_on_as_if_it_had_not_been(tuned, tmp_path):
    for file in tuned[0].glob("*.jsonl"):
        lines = file.read_text().splitlines(keepends=True)
        (tmp_path / file.name).write_text("".join(lines[: -9 if file.name == TRIALS else None]))
    assert _tuned(tmp_path, processes=2) == tuned[1]


class _Payload:
    def __reduce__(self):
        return (Path.touch, (Path("payload_ran"),))


def test_a_study_file_of_an_earlier_version_is_never_unpickled(tuned, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in tuned[0].glob("*.jsonl"):
        (tmp_path / file.name).write_text(file.read_text())
    for law in LAWS:
        (tmp_path / f"{law.name}.study").write_bytes(pickle.dumps(_Payload()))
    assert _tuned(tmp_path) == tuned[1]
    assert not (tmp_path / "payload_ran").exists()


def test_trials_of_another_suite_are_refused(tuned, tmp_path):
    row = json.loads((tuned[0] / TRIALS).read_text().splitlines()[0])
    for file in tuned[0].glob("*.jsonl"):
        (tmp_path / file.name).write_text(file.read_text())
    (tmp_path / TRIALS).write_text(json.dumps({**row, "suite": "0" * 64}) + "\n")
    with pytest.raises(ConfigError, match="holds rows of the suite 000"):
        _tuned(tmp_path)


def test_a_profile_is_read_as_it_was_written(tuned):
    for one in tuned[1]:
        read = read_profile(tuned[0] / f"{one.contender.name}.toml")
        assert read.settings() == one.contender.settings()
        assert read.preset == one.contender.preset
    text = (tuned[0] / "hybrid.toml").read_text()
    assert text.startswith("# hybrid: ")
    assert SMALL.digest in text
    assert "[congestion.hybrid]" in text


def test_dcqcns_profile_keeps_its_preset(tmp_path):
    write_profile(tmp_path / "x.toml", replace(published("dcqcn"), overrides=("congestion.kmin_bytes=5",)), [])
    assert read_profile(tmp_path / "x.toml").settings() == settings_of("ns3-paper", ("congestion.kmin_bytes=5",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("law = ", "is no profile"),
        ("law = 'swift'", "is no profile"),
        ("law = 'swift'\npreset = 'ns3'\n[congestion]\nkmni_bytes = 3", "sets nothing that is known"),
    ],
)
def test_a_bad_profile_is_one_line(text, message, tmp_path):
    (tmp_path / "x.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_profile(tmp_path / "x.toml")


def _buffer(out: Path) -> int:
    return int(json.loads((out / "buffers.jsonl").read_text())["buffer_bytes"])
