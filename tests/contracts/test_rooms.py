"""The house: folders of one subject that a reader can take in, and names in prose and strings that lead somewhere."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("netlayer", "topology", "congestion", "collectives", "trainer", "bench")
MOST_MODULES = 20
MOST_LINES = 700
FOLDERS = sorted({path.parent for name in PACKAGES for path in (ROOT / name).rglob("*.py")})
MODULES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))
# `package.module`, `package.module.Name.attribute` or package.module:attribute.
_TARGET = re.compile(rf"(?:{'|'.join(PACKAGES)})(?:\.\w+)+:\w+")
_MENTION = re.compile(rf"`((?:{'|'.join(PACKAGES)})(?:\.\w+)+)[`:(]")
_RECORDS = {"bench.accept.judge", "bench.all_gather"}  # names of records, which begin like modules
_SETTINGS = ROOT / "congestion" / "simulation" / "settings.py"  # whose keys a user writes as `congestion.KEY`


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_folder_holds_few_modules_and_says_what_they_are_about(folder: Path) -> None:
    names = [path.name for path in folder.glob("*.py")]
    assert "__init__.py" in names
    assert len(names) - 1 <= MOST_MODULES
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_a_module_has_few_lines() -> None:
    lines = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8").count("\n") for path in MODULES}
    assert not {name: count for name, count in lines.items() if count > MOST_LINES}


LAZY = [folder for folder in FOLDERS if "= lazy_names(" in (folder / "__init__.py").read_text(encoding="utf-8")]


@pytest.mark.parametrize("folder", LAZY, ids=lambda path: str(path.relative_to(ROOT)))
def test_public_names_of_a_room_are_the_same_to_readers_checkers_and_python(folder: Path) -> None:
    tree = ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    checked = {alias.name: each.module for each in imports for alias in each.names if alias.asname}
    [listed] = [node.value for node in tree.body if isinstance(node, ast.Assign) and _targets(node) == ["__all__"]]
    [call] = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "lazy_names"]
    table = call.args[1]
    assert isinstance(table, ast.Dict)
    pairs = zip(table.keys, table.values, strict=True)
    homes = {ast.literal_eval(key): ast.literal_eval(value) for key, value in pairs if key is not None}
    package = ".".join(folder.relative_to(ROOT).parts)
    absolute = {name: home.replace(".", f"{package}.", 1) if home[0] == "." else home for name, home in homes.items()}
    # A part of the table may be computed, which mypy alone reads; a name may also be an older one, which none lists.
    assert None in table.keys or set(ast.literal_eval(listed)) <= set(homes)
    assert {name: checked.get(name) for name in homes if name in checked} == {
        name: home for name, home in absolute.items() if name in checked
    }


def _targets(node: ast.Assign) -> list[str]:
    return [ast.unparse(target) for target in node.targets]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_dotted_names_in_strings_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    strings = [
        node.value
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    comments = re.findall(r"#.*", text)
    targets = {found for string in strings if _TARGET.fullmatch(string) for found in [string]}
    mentions = {found for one in (*strings, *comments) for found in _MENTION.findall(one)}
    missing = [name for name in targets if not _exists(name.replace(":", "."))]
    missing += [name for name in mentions if not _exists(name) and not _is_key(name) and name not in _RECORDS]
    assert not missing


def _exists(dotted: str) -> bool:
    """Return True if this is a module, or a name that stands in one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                rest = parts[length:]
                return not rest or rest[0] in _names(file)
    return False


def _is_key(dotted: str) -> bool:
    package, key, *_ = dotted.split(".")
    return package == "congestion" and key in _names(_SETTINGS)


@cache
def _names(file: Path) -> frozenset[str]:
    return frozenset(_top_level(ast.parse(file.read_text(encoding="utf-8"))))


def _top_level(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


@pytest.mark.parametrize(
    "path", [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))], ids=lambda path: path.name
)
def test_pages_name_and_link_what_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    missing = [name for name in _MENTION.findall(text) if not _exists(name) and not _is_key(name)]
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", text) if not link.startswith(("http:", "https:"))]
    missing += [link for link in links if not (path.parent / link).exists()]
    assert not missing


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 680
