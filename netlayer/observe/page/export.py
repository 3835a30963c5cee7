"""Export of the page as one HTML file that fetches nothing: front end, style, and the payloads that fit a limit.

Payloads are blocks of data, which a browser does not run; a security policy in the file allows its one script and its
one style by their hashes, and no connection. The page says of what is omitted that it is, where somebody asks for it.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from netlayer.observe.events import format_ranks
from netlayer.observe.page.payload import squeeze
from netlayer.observe.page.server import front_end
from netlayer.observe.page.source import PageSource
from netlayer.observe.page.view import RunView
from netlayer.results import write_text

NAME = "page.html"
MAX_BYTES = 16 << 20
_MOST_NAMED = 6
_ALL_RANKS = 64
_ORDER = ("pp", "dp", "tp", "cp", "dp_replicate")


@dataclass(frozen=True)
class Exported:
    """File of an export: its size, how many payloads are in it, and how many its limit omits."""

    path: Path
    num_bytes: int
    num_payloads: int
    num_omitted: int


def export_page(source: PageSource, folder: Path, max_bytes: int = MAX_BYTES) -> Exported:
    """Write FOLDER/page.html, whole or not at all.

    Args:
        max_bytes: of the payloads, packed; the overview goes in whatever its size.

    Raises:
        ConfigError: the front end is not built, or the folder cannot be written.
    """
    built = front_end()
    blocks: dict[str, bytes] = {}
    size = omitted = 0
    for name, query in _wanted(source.view):
        key = f"{name}?{urlencode(query)}" if query else name
        if key in blocks:
            continue
        try:
            data = squeeze(source.get(name, query))
        except LookupError:
            continue
        if blocks and size + len(data) > max_bytes:
            omitted += 1
            continue
        blocks[key] = data
        size += len(data)
    text = _html(source.view.title, built, blocks)
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / NAME, text)
    return Exported(folder / NAME, len(text), len(blocks), omitted)


def _wanted(view: RunView) -> Iterator[tuple[str, dict[str, str]]]:
    """Payloads by use: the overview, what is named by a verdict, then the rest of maps, ranks, counters."""
    yield "overview", {}
    yield from (("map", {"of": str(number)}) for number in range(min(3, len(view.measures))))
    ranks = named_ranks(view)
    for rank in ranks:
        yield "rank", {"rank": str(rank)}
    counters = [str(row["name"]) for row in view.counters()]
    yield from (("counters", {"name": name}) for name in counters)
    for rank in ranks:
        for group in _groups(view, rank):
            for step in _steps(view, rank):
                query = {"ranks": group}
                if step is not None:
                    query |= {"first": str(step), "last": str(step)}
                yield "events", query
        yield from (("counters", {"name": name, "rank": str(rank)}) for name in counters)
    yield from (("map", {"of": str(number)}) for number in range(3, len(view.measures)))
    if len(view.ranks) <= _ALL_RANKS:
        yield from (("rank", {"rank": str(rank)}) for rank in view.ranks)


def named_ranks(view: RunView) -> list[int]:
    """Ranks that a verdict names, worst first; without any the first one."""
    ranks = [*view.stop.silent, *(rank for one in (view.blame.findings if view.blame else ()) for rank in one.ranks)]
    ranks += [row.rank for row in view.stragglers]
    known = set(view.ranks)
    return [rank for rank in dict.fromkeys(ranks) if rank in known][:_MOST_NAMED] or view.ranks[:1]


def _groups(view: RunView, rank: int) -> list[str]:
    """Groups of a rank as the page names them: along each dimension of the layout, of its collectives, and alone."""
    groups = [format_ranks(ranks) for ranks in (view.group(name, rank) for name in _ORDER) if len(ranks) > 1]
    if not groups and len(view.ranks) <= _ALL_RANKS:
        groups.append(format_ranks(view.ranks))
    return [*groups, str(rank)]


def _steps(view: RunView, rank: int) -> list[int | None]:
    """The step that the timeline opens with, and for a straggler the one before."""
    if not view.run.steps:
        return [None]
    steps: list[int | None] = [view.default_step]
    place = view.stop.places.get(rank)
    if place is not None and place.step in view.run.steps:
        steps.append(place.step)
    if len(view.run.steps) > 1:
        steps.append(view.run.steps[-2])
    return list(dict.fromkeys(steps))


def _html(title: str, built: dict[str, bytes], blocks: dict[str, bytes]) -> str:
    """Return the file: script, style and blocks of data, and a policy that allows these alone."""
    # A `</script` inside would end the element; in a minified bundle it can stand in a text alone.
    script = built["app.js"].decode().replace("</script", "<\\/script")
    style = built["app.css"].decode().replace("</style", "<\\/style")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    begin = '<script type="application/octet-stream" data-key="'
    data = "\n".join(
        f'{begin}{html.escape(key)}">{base64.b64encode(block).decode()}</script>' for key, block in blocks.items()
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
<style>{style}</style>
</head>
<body>
<noscript>This page draws a run with JavaScript, which is switched off.</noscript>
<div id="netlayer-data" hidden>
{data}
</div>
<script>{script}</script>
</body>
</html>
"""


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
