"""Checks the wording of product code: how docstrings open, names that say nothing, long functions without a docstring.

    python -m tests.wording              # counts a package, and what is over a limit; exit 1 then
    python -m tests.wording --list       # also every place
    python -m tests.wording --list bench/accept
    python -m tests.wording --draw 20 --seed 37    # functions to explain in a sentence each, seeing nothing else

Not covered: whether a word is the right one, and tests.
"""

from __future__ import annotations

import argparse
import ast
import random
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
MOST_EMPTY_NAMES = 5
MOST_OTHER_FORMS = 3
MOST_BARE = 4
LONG_LINES = 25  # a function of so many has a docstring
DRAWN_LINES = 6  # what is shorter is not drawn
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
# Words that the glossary replaces: commit or mark verified; slowest rank; failed; resumes from; interrupted; omitted;
# candidate; reduce-scatter queue; copy-in; ParallelModel; communicators; shard and unsharded; init_process_groups.
_REPLACED = re.compile(
    r"\b(vouch\w*|hindmost|spoilt|goes on from|broken off|left out|leaves out|(?<!-)entrants?|Departures|Handover"
    r"|SplitModel|open_lanes|LanePair|own_S|full_N|tell_texts|meet_at)\b"
)
# What a module does not cover is said in one form: `Not covered: ...`.
_OTHER_FORM = re.compile(
    r"(?:^|[.:)`] )(Omitted|Omits|Not here|Not handled|Leaves out|Left out|Not supported|Not included|Not measured"
    r"|Not checked|Not modelled|Out of scope):"
)
_RULES = {
    "docstring": "docstrings open oddly: begin with a verb or a noun",
    "name": "names say nothing: name the thing",
    "word": "words are replaced by the glossary",
    "form": "docstrings have another form for what is not covered: write `Not covered: ...`",
    "bare": f"functions of {LONG_LINES} lines or more have no docstring",
}


class Place(NamedTuple):
    """A line that breaks a rule."""

    kind: str
    path: Path
    line: int
    text: str


def find_places(path: Path) -> Iterator[Place]:
    """Yield the places of one file that break a rule."""
    text = path.read_text(encoding="utf-8")
    for number, line in enumerate(text.splitlines(), 1):
        if match := _REPLACED.search(line):
            yield Place("word", path, number, match[0])
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            yield from _docstring_places(path, node)
        if isinstance(node, ast.ClassDef) and node.name.lstrip("_").lower() in _EMPTY | {"seen"}:
            yield Place("name", path, node.lineno, node.name)
        for name, line in _stored_names(node):
            if name.lstrip("_") in _EMPTY:
                yield Place("name", path, line, name)


def _docstring_places(
    path: Path, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module
) -> Iterator[Place]:
    doc = ast.get_docstring(node)
    if doc:
        if _ODD.match(doc):
            yield Place("docstring", path, node.body[0].lineno, doc.splitlines()[0])
        # On one line, for a form may be wrapped inside.
        if match := _OTHER_FORM.search(" ".join(doc.split())):
            yield Place("form", path, node.body[0].lineno, match[1])
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_bare(node):
        yield Place("bare", path, node.lineno, node.name)


def _is_bare(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return True for a long function that needs a docstring; a Triton kernel has a comment above it instead."""
    is_kernel = any(ast.unparse(decorator) == "triton.jit" for decorator in node.decorator_list)
    return not is_kernel and _num_lines(node) >= LONG_LINES and node.name != "__init__"


def _num_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def draw_functions(files: Sequence[Path], number: int, seed: int) -> Iterator[str]:
    """Yield functions drawn by seed, each with its decorators and the place that it has, as text."""
    known = []
    for path in sorted(files):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _num_lines(node) >= DRAWN_LINES:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                known.append((path.as_posix(), first, node.end_lineno or first))
    for count, (name, first, last) in enumerate(random.Random(seed).sample(sorted(known), number), 1):
        lines = Path(name).read_text(encoding="utf-8").splitlines()[first - 1 : last]
        yield "\n".join([f"# {count}. {name}:{first}", *lines, ""])


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
    parser.add_argument("--draw", type=int, metavar="N", help="print N functions instead, drawn by --seed")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    files = product_files(options.folders)
    if options.draw:
        print("\n".join(draw_functions(files, options.draw, options.seed)))
        return 0
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
            odd, names, bare = (kinds[package, kind] for kind in ("docstring", "name", "bare"))
            counts = f"{odd:>4} odd openings ({odd / number:.1%}), {names} empty names, {bare} bare functions"
            print(f"{package:<12} {number:>5} docstrings, {counts}")
    most = {
        "docstring": round(MOST_ODD_SHARE * sum(docstrings.values())),
        "name": MOST_EMPTY_NAMES,
        "word": 0,
        "form": MOST_OTHER_FORMS,
        "bare": MOST_BARE,
    }
    numbers = Counter(place.kind for place in places)
    failures = [
        f"{numbers[kind]} {_RULES[kind]} (limit {limit})" for kind, limit in most.items() if numbers[kind] > limit
    ]
    for failure in failures:
        print(f"error: {failure}; python -m tests.wording --list shows where", file=sys.stderr)
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
