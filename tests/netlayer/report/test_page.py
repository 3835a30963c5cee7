"""The page: everything on it, nothing fetched by it, hostile text kept as text, files whole or not at all."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import sys
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pandas as pd
import pytest

import netlayer
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.report import Axis, Chart, Figure, Report, charts
from netlayer.report.plots import Plot
from netlayer.report.tables import MISSING, columns_of, number_text
from tests.browser import browse, drawn_plots, needs_chromium

HOSTILE = "</script><script>alert('\"1\"')</script><img src=x onerror=alert(1)>&{{ 7*7 }}"
BENCH = pd.DataFrame(
    {
        "size_bytes": [2**16, 2**20, 2**24, 2**26],
        "bus_bw": [3.5, 20.25, 41.0, 45.5],
        "collective": ["all_gather", "all_gather", "sendrecv", "sendrecv"],
    }
)


@dataclass
class Page(HTMLParser):
    """What a browser would find: elements with their attributes, texts, and the contents of scripts."""

    source: str
    elements: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scripts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.feed(self.source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            self.scripts[-1] += data
        else:
            self.texts.append(data)

    def count(self, tag: str) -> int:
        return sum(name == tag for name, _ in self.elements)

    def values(self, *attributes: str) -> list[str]:
        return [attrs[name] for _, attrs in self.elements for name in attributes if name in attrs]

    def data(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found


def line() -> Chart:
    return charts.line(
        BENCH, Axis("size_bytes", "Message size", "bytes", log=True), Axis("bus_bw", unit="GB/s"), colour="collective"
    )


def example() -> Report:
    report = Report("quickstart", "2 gloo ranks", commit="abc1234", created=datetime(2026, 1, 2, 3, 4, tzinfo=UTC))
    report.verdict("PASS", "All thresholds met.")
    bench = report.section("Acceptance bench", "Each collective in turn.", source="measured")
    bench.figures(Figure("Bus bandwidth", 45.5, "GB/s", "at 64 MiB"))
    bench.chart(line(), name="bus_bandwidth", caption="It rises with size.")
    bench.table(BENCH, caption="All sizes").code("all_gather_perf -b 8").text("Run it twice.")
    fabric = report.section("Fabric", source="simulated")
    fabric.chart(
        charts.histogram(BENCH, "bus_bw", counted="flows", title="Collisions"), name="collisions", alt="A histogram."
    )
    fabric.chart(charts.heatmap(BENCH, "size_bytes", "collective", "bus_bw"), name="load", caption="Load.")
    fabric.note("A model, not a switch.")
    report.section("Environment").keyvalues({"host": "laptop", "versions": {"torch": "2.13"}, "gpus": [], "algo": None})
    return report


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return example().write(tmp_path_factory.mktemp("report") / "out")


@pytest.fixture(scope="module")
def page(written: Path) -> Page:
    return Page(written.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "said",
    [
        "quickstart",
        "2 gloo ranks",
        "2026-01-02 03:04 UTC",
        f"netlayer {netlayer.__version__}",
        "commit abc1234",
        "PASS",
        "All thresholds met.",
        "Acceptance bench",
        "Each collective in turn.",
        "45.5",
        "at 64 MiB",
        "It rises with size.",
        "all_gather_perf -b 8",
        "Run it twice.",
        "67,108,864",
        "A model, not a switch.",
        "versions.torch",
        "none",
    ],
)
def test_everything_added_is_on_the_page(page: Page, said: str) -> None:
    assert said in " ".join(text.strip() for text in page.texts)


def test_sections_are_linked_from_the_contents(page: Page) -> None:
    anchors = [attrs["id"] for tag, attrs in page.elements if tag == "section"]
    assert anchors == ["1-acceptance-bench", "2-fabric", "3-environment"]
    assert [link for link in page.values("href") if link.startswith("#")] == [f"#{anchor}" for anchor in anchors]


def test_the_page_fetches_nothing(page: Page) -> None:
    links = [link for link in page.values("src", "href", "srcset", "poster", "data", "action") if link]
    assert all(re.match(r"#|data:|plots/[a-z_]+\.png$", link) for link in links), links
    assert [tag for tag, attrs in page.elements if tag == "link"] == ["link"]
    style = page.source[page.source.index("<style>") : page.source.index("</style>")]
    assert "@import" not in style
    assert "url(" not in style
    assert not re.search(r'"url":"', json.dumps(page.data(), separators=(",", ":")))


def test_a_list_of_sections_fills_a_page_in_its_order() -> None:
    def first(report: Report, names: list[str]) -> None:
        report.section(names[0])

    def without_a_subject(_report: Report, _names: list[str]) -> None:
        """Opens none, as a page's section does where nothing was measured for it."""

    def second(report: Report, names: list[str]) -> None:
        report.section(names[1])

    report = Report("Page").fill(["Runs", "Limits"], [first, without_a_subject, second])
    assert [section.title for section in report.sections] == ["Runs", "Limits"]


def test_the_policy_lets_only_the_pages_own_scripts_run(page: Page) -> None:
    policy = next(attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs)
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    assert "unsafe-eval" not in policy
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    own = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[1:]}
    assert len(own) == 2
    assert allowed == own


def test_the_page_stays_small(written: Path) -> None:
    assert written.stat().st_size < 1_200_000


@pytest.mark.parametrize("name", ["bus_bandwidth", "collisions", "load"])
def test_each_plot_has_a_picture_that_is_not_blank(written: Path, page: Page, name: str) -> None:
    assert page.values("href").count(f"plots/{name}.png") == 1
    width, height, colours = png(written.parent / "plots" / f"{name}.png")
    assert width > 1200
    assert height > 300
    assert colours > 50


def png(path: Path) -> tuple[int, int, int]:
    """Width, height and the number of different bytes in the picture; a blank one has no more than a few."""
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, position = b"", 8
    while position < len(content):
        length = int.from_bytes(content[position : position + 4])
        if content[position + 4 : position + 8] == b"IDAT":
            chunks += content[position + 8 : position + 8 + length]
        position += length + 12
    width, height = (int.from_bytes(content[at : at + 4]) for at in (16, 20))
    return width, height, len(set(zlib.decompress(chunks)))


def test_a_picture_says_where_its_numbers_come_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    titles: list[dict[str, Any]] = []

    def drawn(spec: dict[str, Any], **_: object) -> bytes:
        titles.append(spec["title"])
        return b""

    monkeypatch.setattr("vl_convert.vegalite_to_png", drawn)
    example().write(tmp_path)
    stamp = "simulated · quickstart · 2026-01-02 03:04 UTC"
    assert titles[1] == {"text": "Collisions", "subtitle": [stamp]}
    assert titles[2]["text"] == stamp


def test_a_machine_that_cannot_draw_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(HardwareMissing, match="pip install vl-convert-python"):
        example().write(tmp_path / "page")
    assert not list(tmp_path.rglob("*.html"))


def test_numbers_are_tagged_with_their_source_wherever_they_stand() -> None:
    report = Report("r")
    section = report.section("s", source="simulated")
    section.figures(Figure("a", 1)).table(BENCH).chart(line(), name="one", caption="c")
    section.figures(Figure("b", 2), source="predicted")
    section.chart(line(), name="both", caption="c", source=("measured", "predicted"))
    tags = Page(report.html()).values("class")
    assert tags.count("tag simulated") == 3 + 1  # heading, table, chart, and the legend at the page's end
    assert tags.count("tag predicted") == 2 + 1
    assert tags.count("tag measured") == 1 + 1
    assert tags.count("card tile simulated") == 1
    assert tags.count("card tile predicted") == 1


def test_hostile_text_stays_text() -> None:
    report = Report(HOSTILE, HOSTILE, commit=HOSTILE)
    report.verdict("FAIL", HOSTILE)
    section = report.section(HOSTILE, HOSTILE, source="measured")
    section.text(HOSTILE).note(HOSTILE).code(HOSTILE).keyvalues({HOSTILE: HOSTILE})
    section.figures(Figure(HOSTILE, HOSTILE, HOSTILE, HOSTILE))
    frame = pd.DataFrame({HOSTILE: [HOSTILE, "b"], "x": [1, 2], "y": [3, 4]})
    section.table(frame, caption=HOSTILE)
    section.chart(charts.line(frame, "x", "y", colour=HOSTILE, title=HOSTILE), name="a", caption=HOSTILE, alt=HOSTILE)
    page = Page(report.html())
    assert page.count("script") == 3
    assert [attrs["src"] for tag, attrs in page.elements if tag == "img"] == ["plots/a.png"]
    assert not any("onerror" in attrs for _, attrs in page.elements)
    assert sum(HOSTILE in text for text in page.texts) >= 12
    assert HOSTILE in json.dumps(page.data()["specs"]["a"], ensure_ascii=False).replace('\\"', '"')
    assert not re.search("[<>&]", page.scripts[0])


def test_backticks_make_code_and_nothing_else() -> None:
    report = Report("r")
    report.section("s").text("set `NCCL_ALGO=<Ring>` *here*")
    assert "set <code>NCCL_ALGO=&lt;Ring&gt;</code> *here*" in report.html()


def test_a_second_report_replaces_the_first(tmp_path: Path) -> None:
    for title in ("first", "second"):
        report = Report(title)
        report.section("s", source="measured").chart(line(), name="plot", caption=title)
        report.write(tmp_path)
    assert "<h1>second</h1>" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["plot.png", "plots", "report.html"]


def test_a_report_that_cannot_be_drawn_leaves_the_old_one_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(self: Plot, stamp: str) -> bytes:
        raise RuntimeError("no picture")

    (tmp_path / "report.html").write_text("old")
    monkeypatch.setattr(Plot, "png", broken)
    with pytest.raises(RuntimeError, match="no picture"):
        example().write(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert (tmp_path / "report.html").read_text() == "old"


def test_a_rename_that_fails_leaves_nothing_half_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"--out = .*No space left on device"):
        Report("r").write(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(ConfigError, match="--out") as caught:
        Report("r").write(tmp_path / "out")
    assert caught.value.exit_code == 2


def test_the_commit_is_found_where_none_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("netlayer.environ.snapshot", lambda: {"commit": "0123456789ab+"})
    assert "commit 0123456789ab+" in Report("r").html()
    assert "<li>commit unknown</li>" in Report("r", commit="").html()


def test_bad_arguments_are_refused() -> None:
    report = Report("r", commit="")
    section = report.section("s", source="measured").chart(line(), name="taken", caption="c")
    with pytest.raises(ValueError, match="'taken': already in this report"):
        report.section("other", source="measured").chart(line(), name="taken", caption="c")
    with pytest.raises(ValueError, match="source = 'guessed': one of measured, simulated, predicted"):
        report.section("t", source="guessed")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="verdict = 'GOOD'"):
        report.verdict("GOOD", "")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="say where the numbers come from"):
        report.section("t").figures(Figure("a", 1))
    with pytest.raises(ValueError, match="give an alt text or a caption"):
        section.chart(line(), name="mute")
    with pytest.raises(ValueError, match="max_rows = 0"):
        section.table(BENCH, max_rows=0)
    with pytest.raises(ValueError, match=r"formats = \['time'\]"):
        section.table(BENCH, formats={"time": ".2f"})
    assert [plot.name for plot in report.plots] == ["taken"]


def test_a_name_is_free_again_after_its_chart_was_refused() -> None:
    section = Report("r", commit="").section("s", source="measured")
    with pytest.raises(ValueError, match="would load"):
        section.chart(alt.Chart("https://example.com/a.csv").mark_point(), name="a", caption="c")
    section.chart(line(), name="a", caption="c")


def test_a_long_table_says_what_it_leaves_out() -> None:
    report = Report("r", commit="")
    report.section("s").table(pd.DataFrame({"n": range(1500)}), max_rows=2)
    page = Page(report.html())
    assert page.count("tr") == 1 + 2
    assert any("The first 2 of 1,500 rows." in text for text in page.texts)


def test_columns_line_up() -> None:
    frame = pd.DataFrame(
        {
            "time_us": [12.345, 1234.5, np.nan],
            "rate": [1e-5, 3e-5, np.inf],
            "count": [1234567, 2, 3],
            "name": ["a", None, "b"],
            "good": [True, False, True],
            "mixed": pd.array([1, None, 3], dtype="Int64"),
        }
    ).rename_axis("run")
    cells = {column.title: column.cells for column in columns_of(frame, {"count": "d"})}
    assert cells == {
        "run": ("0", "1", "2"),
        "time_us": ("12.3", "1,234.5", MISSING),
        "rate": ("1e-05", "3e-05", "∞"),
        "count": ("1234567", "2", "3"),
        "name": ("a", MISSING, "b"),
        "good": ("yes", "no", "yes"),
        "mixed": ("1", MISSING, "3"),
    }
    assert [column.title for column in columns_of(frame, {}) if column.numeric] == [
        "run",
        "time_us",
        "rate",
        "count",
        "mixed",
    ]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (18432, "18,432"),
        (46.2, "46.2"),
        (0.11401, "0.114"),
        (18432.7, "18,433"),
        (0.0, "0"),
        (3e-7, "3.000e-07"),
        (float("-inf"), "-∞"),
        (float("nan"), MISSING),
        (None, MISSING),
        (np.float32(2.5), "2.5"),
        (True, "yes"),
        ("4.1", "4.1"),
    ],
)
def test_single_values_are_written_as_people_write_them(value: Any, text: str) -> None:
    assert number_text(value) == text


@pytest.mark.browser
@needs_chromium
def test_a_browser_draws_every_chart_and_has_nothing_to_complain_about(written: Path, tmp_path: Path) -> None:
    document, console = browse(written, tmp_path / "profile")
    assert console == []
    assert drawn_plots(document) == {"bus_bandwidth": True, "collisions": True, "load": True}


@pytest.mark.browser
@needs_chromium
def test_the_pointer_shows_values_and_the_legend_singles_out(written: Path, tmp_path: Path) -> None:
    """A copy of the page without its policy, which forbids the script that plays the reader."""
    reader = """
    setTimeout(() => {
      const box = document.querySelector('[data-plot="bus_bandwidth"]');
      const touch = (element, ...kinds) => kinds.forEach((kind) => element.dispatchEvent(
        new PointerEvent(kind, {bubbles: true, ...element.getBoundingClientRect().toJSON()})));
      touch(box.querySelector('.role-legend-symbol path'), 'pointerdown', 'pointerup', 'click');
      touch([...box.querySelectorAll('.mark-symbol.role-mark')].pop().lastChild, 'pointerover', 'pointermove');
    }, 2000);"""
    head, tail = written.read_text(encoding="utf-8").rsplit("</body>", 1)
    copy = tmp_path / "copy.html"
    copy.write_text(re.sub("<meta http-equiv[^>]*>", "", f"{head}<script>{reader}</script></body>{tail}", count=1))
    document, console = browse(copy, tmp_path / "profile")
    assert console == []
    tooltip = document[document.index('id="vg-tooltip-element"') :]
    assert re.findall(r'<td class="value">([^<]*)', tooltip) == ["sendrecv", "64 MiB", "45.5 GB/s"]
    lines = re.findall(r'<g class="mark-line role-mark.*?series: (\w+)".*?opacity="([\d.]+)"', document)
    assert dict(lines) == {"all_gather": "1", "sendrecv": "0.12"}
