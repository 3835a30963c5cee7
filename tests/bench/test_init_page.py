"""Lines and page of `bench.init_time` from made rows."""

from __future__ import annotations

import pytest

from bench.init_time.page import build_page, exponents, summary
from bench.init_time.ranks import Parts
from bench.init_time.rows import RealRow, ShareRow, describe


def share(method: str, ranks: int, seconds: float, source: str = "measured", store: str = "tcp", **more):
    counts = {"operations": 100 * ranks, "backend_operations": 0, "bytes": 1000 * ranks}
    return ShareRow(ranks, method, store, **{"think_s": 0.0, "source": source, "seconds": seconds, **counts, **more})


def real(method: str, store: str, factor: float):
    parts = ("gate", "groups", "groups_cpu", "backend", "first", "checkpoint", "step")
    figures = {f"{name}_s": 0.01 * factor for name in parts}
    wholes = {"start_s": 3.0, "whole_s": 0.05 * factor, "launched_s": 3.0 + 0.06 * factor}
    return RealRow(8, method, store, 0, Parts(**figures, **wholes))


def test_one_size_alone_has_no_exponent():
    assert not exponents([share("ours", 128, 0.1), share("ours", 128, 0.2)])


def test_an_exponent_leaves_thinking_out():
    rows = [share("ours", 128, 2.1, think_s=2.0), share("ours", 512, 2.4, think_s=2.0)]
    assert exponents(rows) == pytest.approx({"ours on TCPStore": 1.0})
    assert summary(rows)[0] == "ours on TCPStore: time but thinking grows with the ranks to the power 1.00"


def test_every_line_of_a_summary_ends_in_a_figure():
    alone = [share("ours", 128, 0.1, store="redis"), real("ours", "redis", 1.0)]
    both = [*alone, share("torch", 128, 0.2), real("torch", "tcp", 2.0)]
    assert all(said[-1].isdigit() or said.endswith(" s") for said in summary(alone))
    assert "ours on Redis, time from launch to the end of the first step: 3.0600 s" in summary(alone)
    compared = summary(both)
    assert all(said.endswith("of torch on TCPStore") for said in compared), compared
    assert (
        "ours on Redis, time from launch to the end of the first step, over ours: 1.02 of torch on TCPStore" in compared
    )


def test_a_line_has_both_wholes_and_what_was_thought():
    assert "3.060 s from launch, 0.050 behind the gate" in describe(real("ours", "redis", 1.0))
    assert "2.500 s, 2 s of it thinking" in describe(share("ours", 128, 2.5, think_s=2.0))


def test_the_page_names_its_columns_stacks_the_parts_and_marks_what_is_predicted():
    rows = [real("torch", "tcp", 2.0), real("ours", "redis", 1.0)]
    rows += [share("ours", 128, 0.1, server_cpu_s=0.1), share("ours", 2048, 400.0, "predicted")]
    report = build_page(rows)
    assert "_s<" not in report.html()
    specs = {plot.name: plot.spec for plot in report.plots}
    stacks = [layer["encoding"]["y"]["stack"] for name in ("launch", "parts") for layer in layers(specs[name])]
    assert stacks == ["zero", "zero"]
    marks = [layer["mark"] for layer in layers(specs["share"])]
    assert any(mark.get("shape") == "diamond" for mark in marks if isinstance(mark, dict))
    assert "diamond" not in str(build_page(rows[:3]).plots)


def layers(spec):
    return spec.get("layer", [spec])
