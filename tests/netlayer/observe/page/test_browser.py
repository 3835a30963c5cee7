"""The page in a browser: every view by keyboard, hostile text, who is named; needs a Chromium and the built page."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.page.browser import Browser
from bench.page.synthetic import Faults, write_run
from netlayer.errors import ConfigError
from netlayer.layout import ParallelLayout
from netlayer.observe.page.export import export_page
from netlayer.observe.page.server import Actions, PageServer, front_end
from netlayer.observe.page.source import PageSource
from tests.browser import needs_chromium

HOSTILE = '<img src=x onerror="document.title=1"><script>document.title=2</script>\x1b[31m'


def _is_built() -> bool:
    try:
        return bool(front_end())
    except ConfigError:
        return False


pytestmark = [
    pytest.mark.browser,
    needs_chromium,
    pytest.mark.skipif(not _is_built(), reason="the page is not built: make page (needs npm)"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> PageSource:
    folder = tmp_path_factory.mktemp("run")
    faults = Faults(straggler=5, silent=21, silent_step=12, restart_step=6, text=HOSTILE)
    write_run(folder, ParallelLayout(tp=2, pp=4, dp=4), 12, faults)
    return PageSource([folder])


@pytest.fixture(scope="module")
def evicted() -> list[str]:
    return []


@pytest.fixture(scope="module")
def server(source: PageSource, evicted: list[str]) -> Iterator[PageServer]:
    nodes = [{"node": HOSTILE, "role": "member", "ranks": [{"rank": 0, "state": "running"}], "reason": ""}]
    facts = {"nodes": nodes, "state": "run", "has_driver": True}
    running = PageServer(source, actions=Actions(lambda: facts, evicted.append))
    thread = threading.Thread(target=running.serve)
    thread.start()
    yield running
    running.end()
    thread.join(10)
    running.server_close()


@pytest.fixture(scope="module")
def browser(server: PageServer) -> Iterator[Browser]:
    with Browser() as opened:
        opened.open(server.url)
        yield opened


def read(browser: Browser, selector: str) -> str:
    return str(browser.evaluate(f"document.querySelector({selector!r})?.innerText ?? ''"))


def press(browser: Browser, *keys: str) -> None:
    for key in keys:
        browser.press(key)
    browser.settle()


def test_a_reader_finds_the_silent_rank_and_the_straggler_at_once(browser: Browser) -> None:
    findings = read(browser, ".findings")
    assert "rank 21 (host-0002) is silent, in forward of micro-batch 0 of step 12; 30 ranks wait for it" in findings
    assert "rank 5 (host-0000) is" in findings
    # One next step, under the verdict on the rank that holds the run up.
    cards = browser.evaluate("[...document.querySelectorAll('.findings > .card')].map((card) => card.innerText)")
    [number] = [number for number, text in enumerate(cards) if text.startswith("Next step")]
    assert "rank 21 (host-0002) is silent" in cards[number - 1]
    assert "rank 21 on host host-0002" in cards[number]
    assert "11 steps completed" in read(browser, ".subtitle")
    assert "failure at step 6: kernel log: Xid 79: GPU has fallen off the bus" in findings
    assert "eviction at step 6: host-0001: Xid 79 is a hardware fault" in findings


def test_the_heat_map_by_keyboard(browser: Browser) -> None:
    # A run that stands still opens with who waits for whom, the silent rank and its like first.
    press(browser, "1")
    assert browser.evaluate("document.querySelector('main select').selectedOptions[0].text") == "who waits for whom"
    rows = browser.evaluate("[...document.querySelectorAll('main tbody tr')].map((row) => row.innerText)")
    assert rows[0].startswith("rank 21\tsilent\thost-0002")
    assert "in the same operation as rank 21, but its readings go on" in rows[1]
    browser.evaluate("location.hash = 'measure=0'")
    press(browser, "1", "Home", "ArrowRight", "ArrowRight")
    assert "rank 2 · host-0000 · tp 0, pp 0, dp 1 · slower than its peers" in read(browser, ".readout")
    press(browser, "ArrowDown")
    assert "rank 10 · host-0001" in read(browser, ".readout")
    press(browser, "m", "s")
    assert "step:" in read(browser, ".readout")
    assert "measure=1" in browser.evaluate("location.hash")
    assert "stat=median" in browser.evaluate("location.hash")
    press(browser, "Enter")
    assert "view=parallel" in browser.evaluate("location.hash")


def test_the_map_of_steps_by_keyboard(browser: Browser) -> None:
    browser.evaluate("location.hash = 'view=steps&rank=5&step=3'")
    browser.settle()
    press(browser, "2")
    # The line of a rank is fetched after the view is drawn.
    browser.wait_for("document.querySelector('.u-legend')?.innerText.includes('busy time, rank 5') ?? false")
    assert "busy time (without waits), slowest rank" in read(browser, ".u-legend")
    press(browser, "ArrowRight", "ArrowDown")
    assert "rank 6" in read(browser, ".readout")
    assert "step 4" in read(browser, ".readout")
    press(browser, "+", "-", "0")
    browser.press("ArrowLeft", shift=True)
    press(browser, "Enter")
    assert "view=timeline" in browser.evaluate("location.hash")


def test_the_timeline_shows_what_an_event_waits_for(browser: Browser) -> None:
    browser.evaluate("location.hash = 'view=timeline&rank=13&step=5'")
    browser.settle()
    press(browser, "3")
    assert "Pipeline: ranks 5, 13, 21, 29" in read(browser, "select")
    for _ in range(12):
        if "recv (pipeline forward)" in read(browser, ".detail h3"):
            break
        press(browser, "ArrowLeft")
    assert "it waited for rank" in read(browser, ".detail")
    press(browser, "d")
    assert "send (pipeline forward)" in read(browser, ".detail h3")
    press(browser, "]")
    assert "step=6" in browser.evaluate("location.hash")
    press(browser, "+", "+", "0", "ArrowDown", "ArrowUp")


def test_an_operation_that_never_ended_is_drawn_open(browser: Browser) -> None:
    browser.evaluate("location.hash = 'view=timeline&rank=21'")
    browser.settle()
    press(browser, "3")
    assert "has no end in the record" in read(browser, ".legend.kinds")
    assert "rank 21: in forward of micro-batch 0, without an end in the record" in read(browser, ".detail h3")
    press(browser, "2", "3")
    assert browser.evaluate("document.activeElement.tagName") == "CANVAS"
    press(browser, "ArrowUp")
    assert not read(browser, ".detail h3").startswith("rank 21: in forward")
    # A click on the dashed bar chooses it again: it is the last row of rank 21, at the right edge.
    browser.evaluate(
        "(() => { const canvas = document.querySelector('main canvas'), box = canvas.getBoundingClientRect();"
        "const title = () => document.querySelector('.detail h3').innerText;"
        "for (let y = box.top; y < box.bottom && !title().includes('rank 21: in'); y += 5)"
        " for (const type of ['pointerdown', 'pointerup']) canvas.dispatchEvent(new PointerEvent(type,"
        " {clientX: box.right - 20, clientY: y, pointerId: 1, bubbles: true})); })()"
    )
    assert "rank 21: in forward of micro-batch 0" in read(browser, ".detail h3")
    press(browser, "ArrowDown", "ArrowUp", "+", "0")  # over rows that have no event
    assert browser.problems() == []


def test_the_parallel_view_says_who_waits_for_whom(browser: Browser) -> None:
    browser.evaluate("location.hash = 'view=parallel&rank=21'")
    browser.settle()
    press(browser, "4")
    detail = read(browser, ".detail")
    assert "silent" in detail
    assert "30 ranks wait for it" in detail
    assert "Where its record ends, it is in: forward of micro-batch 0" in detail
    assert "reduce_scatter" in detail
    assert "in forward of micro-batch 0\t12\tno end in the record" in detail  # first of the last operations
    press(browser, "ArrowRight")
    assert "rank 23 · host-0002" in read(browser, ".detail h3")
    press(browser, "w")
    assert "rank 21" in read(browser, ".detail h3")
    press(browser, "t")
    assert "view=timeline" in browser.evaluate("location.hash")


def test_counters_by_keyboard(browser: Browser) -> None:
    browser.evaluate("location.hash = 'view=counters&rank=3'")
    browser.settle()
    press(browser, "5")
    assert "gpu.power in W" in read(browser, ".readout")
    press(browser, "+")
    assert "from=" in browser.evaluate("location.hash")
    press(browser, "0", "c")
    assert "nic.xmit_bytes in bytes/s" in read(browser, ".readout")
    assert browser.evaluate("document.querySelector('.uplot canvas').width") > 100


def test_life_has_evidence_as_text_and_evicts_after_a_question(browser: Browser, evicted: list[str]) -> None:
    browser.evaluate("location.hash = 'view=life'")
    browser.settle()
    press(browser, "6")
    browser.wait_for("[...document.querySelectorAll('h3')].some((title) => title.innerText.startsWith('Nodes'))")
    text = read(browser, "main")
    assert "Xid 79 is a hardware fault" in text
    assert '<img src=x onerror="document.title=1">' in text
    browser.evaluate("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Evict…').focus()")
    browser.press("Enter")
    browser.wait_for("document.querySelector('dialog[open]')")
    assert not evicted
    assert browser.evaluate("document.activeElement.innerText") == "Close"
    browser.press("Escape")
    browser.wait_for("!document.querySelector('dialog')")
    assert not evicted
    browser.evaluate("[...document.querySelectorAll('button')].find((each) => each.innerText === 'Evict…').click()")
    browser.evaluate("document.querySelector('dialog .danger').focus()")
    browser.press("Enter")
    browser.wait_for("document.querySelector('dialog [role=status]').innerText.includes('was asked')")
    assert evicted == [HOSTILE]
    browser.press("Escape")


def test_nothing_of_a_run_became_markup(browser: Browser) -> None:
    assert browser.evaluate("document.title") not in ("1", "2")
    assert browser.evaluate("document.querySelectorAll('main img, main script, .findings img').length") == 0
    assert browser.problems() == []
    assert "token" not in browser.evaluate("location.href")


def test_the_printed_address_opens_the_page_and_a_bare_one_says_what_it_needs(server: PageServer) -> None:
    with Browser() as browser:
        bare, _, token = server.url.partition("#")
        browser.call("Page.navigate", url=bare)
        browser.wait_for("document.querySelector('[role=alert]')")
        assert "open the whole address that the command printed" in read(browser, "[role=alert]")
        browser.evaluate(f"location.hash = {token!r}")  # into the same tab, which only changes what is behind the #
        browser.wait_for("document.querySelector('.findings')?.innerText.includes('is silent')")
        assert browser.evaluate("location.href").rstrip("#") == bare


def test_a_page_says_at_the_top_what_it_cannot_tell_and_draws_all_dimensions(browser: Browser, tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, dp_replicate=2)
    write_run(tmp_path / "run", layout, 3, Faults())
    exported = export_page(PageSource([tmp_path / "run"]), tmp_path)
    browser.open(exported.path.as_uri() + "#view=parallel&rank=6")
    findings = browser.evaluate("[...document.querySelectorAll('.findings > .card')].map((card) => card.innerText)")
    assert any(line.startswith("None\nsilent rank\nthe run ended as intended") for line in findings), findings
    assert any(line.startswith("Cannot tell\nstraggler\n") for line in findings), findings
    detail = read(browser, ".detail")
    assert "tp 0, pp 0, dp 1, cp 1, replica 0" in detail
    for name, ranks in (
        ("Data-parallel group", "0, 2, 4, 6"),
        ("Context-parallel group", "4, 6"),
        ("Replicas", "6, 14"),
    ):
        assert f"{name}\nranks {ranks}" in detail
    # Nobody can be compared: the heat map opens with a duration, and says why.
    press(browser, "1")
    chosen = browser.evaluate(
        "[...document.querySelectorAll('main select')].map((each) => each.selectedOptions[0].text)"
    )
    assert chosen[:2] == ["forward", "median"]
    assert "No comparison with peers is shown, for nobody can be judged by it" in read(browser, "main .hint")
    press(browser, "4")
    for key, rank in (("ArrowRight", 8), ("ArrowLeft", 6), ("ArrowDown", 7)):
        press(browser, key)
        assert f"rank {rank} · " in read(browser, ".detail h3")
    assert browser.problems() == []


def test_an_exported_page_needs_no_server_and_fits(source: PageSource, tmp_path: Path, browser: Browser) -> None:
    exported = export_page(source, tmp_path)
    # The page of the test before may still ask its server.
    browser.call("Page.navigate", url="about:blank")
    browser.wait_for("location.href === 'about:blank'")
    first = len(browser.events)
    for width, scheme in ((1280, "light"), (420, "dark")):
        browser.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        browser.call("Page.navigate", url="about:blank")
        browser.open(exported.path.as_uri() + "#view=parallel&rank=21")
        assert "30 ranks wait for it" in read(browser, ".detail")
        for key in "123456":
            press(browser, key)
            assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (width, key)
    # Readings of a rank that are not in it are not those of other ranks.
    browser.evaluate("location.hash = 'view=counters&counter=gpu.power&rank=9'")
    browser.wait_for("document.querySelector('main .problem').innerText.includes('not in the exported page')")
    assert read(browser, "main .problem").startswith("The readings of rank 9 are not in the exported page")
    assert "rank 0" not in read(browser, "main")
    assert browser.problems() == []
    urls = [
        event["params"]["request"]["url"]
        for event in browser.events[first:]
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert urls
    assert all(url.startswith(("file:", "data:", "blob:", "about:")) for url in urls)
