"""Checks the wording of product code: how docstrings open, names that say nothing, comments where they are needed.

    python -m tests.wording              # counts a package, and what is over a limit; exit 1 then
    python -m tests.wording --list       # also every place
    python -m tests.wording --list bench/accept

Not covered: whether a word is the right one, and tests.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("netlayer", "topology", "congestion", "collectives", "trainer", "bench")
MOST_ODD_SHARE = 0.02
MOST_EMPTY_NAMES = 20
# A docstring opens with a verb or a noun. `Whether` is fine for a predicate.
_ODD = re.compile(
    r"(Of|What|Where|Who|Whoever|As|To|Around|Beside|Behind|That|In|On|By|With|From|Until|Before|After|Those|So|Else"
    r"|How|Which|When|If|For|At|Under|Since|These|This|It|They|Also)\b"
)
_EMPTY = frozenset(
    (
        "found",
        "said",
        "told",
        "asked",
        "given",
        "mine",
        "held",
        "shown",
        "words",
        "heard",
        "wanted",
        "taken",
        "came",
        "went",
    )
)


class Place(NamedTuple):
    """A line that breaks a rule."""

    kind: str
    path: Path
    line: int
    text: str


def find_places(path: Path) -> Iterator[Place]:
    """Yield the odd docstring openings and the empty names of one file."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            doc = ast.get_docstring(node)
            if doc and _ODD.match(doc):
                yield Place("docstring", path, node.body[0].lineno, doc.splitlines()[0])
        for name, line in _stored_names(node):
            if name.lstrip("_") in _EMPTY:
                yield Place("name", path, line, name)


def count_docstrings(path: Path) -> int:
    """Return the number of docstrings in one file."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return sum(isinstance(node, kinds) and ast.get_docstring(node) is not None for node in ast.walk(tree))


def comment_share(path: Path) -> float:
    """Return the share of non-empty lines that have a comment, block or at the end of a line."""
    with path.open("rb") as file:
        tokens = [token for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]
    lines = sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())
    return len({token.start[0] for token in tokens}) / max(lines, 1)


def _stored_names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield variables that a node assigns, its parameters and its attributes, each with its line."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id, node.lineno
    elif isinstance(node, ast.arg):
        yield node.arg, node.lineno
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr, node.lineno


def product_files(folders: Sequence[str] = PACKAGES) -> list[Path]:
    """Return the tracked Python files under these folders."""
    done = subprocess.run(["git", "ls-files", *folders], capture_output=True, text=True, check=True)
    return [Path(name) for name in done.stdout.split() if name.endswith(".py")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the counts, and return 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("folders", nargs="*", default=PACKAGES)
    parser.add_argument("--list", action="store_true", help="also every place")
    options = parser.parse_args(arguments)
    files = product_files(options.folders)
    places = [place for path in files for place in find_places(path)]
    if options.list:
        for place in places:
            print(f"{place.path}:{place.line}: {place.kind}: {place.text}")
    docstrings = dict.fromkeys(PACKAGES, 0)
    for path in files:
        docstrings[path.parts[0]] += count_docstrings(path)
    kinds = Counter((place.path.parts[0], place.kind) for place in places)
    for package, number in docstrings.items():
        if number:
            odd, names = kinds[package, "docstring"], kinds[package, "name"]
            print(
                f"{package:<12} {number:>5} docstrings, {odd:>4} odd openings ({odd / number:.1%}), {names} empty names"
            )
    odd = sum(place.kind == "docstring" for place in places)
    names = len(places) - odd
    failures = []
    if odd > MOST_ODD_SHARE * sum(docstrings.values()):
        failures.append(f"{odd} docstrings open oddly: begin with a verb or a noun (limit {MOST_ODD_SHARE:.0%})")
    if names > MOST_EMPTY_NAMES:
        failures.append(f"{names} names say nothing: name the thing (limit {MOST_EMPTY_NAMES})")
    for failure in failures:
        print(f"error: {failure}; python -m tests.wording --list shows where", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
