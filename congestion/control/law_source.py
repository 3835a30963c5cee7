"""Check of what a law's file does with flow, state and parameters, read from its source before anything is compiled.

A field that is not there, and a field of the flow that the engine alone may write, are told with their line. Names are
followed through plain assignments (`f = flow`) and into functions of the same file. Not covered: what a law does
through containers, closures or other modules; there the compiler and `laws` see to it that no engine's field changes.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from pathlib import Path

from netlayer.errors import ConfigError

_RECORDS = ("p", "own", "flow")  # what the first arguments of each call are
_CALLS = ("start", "advance", "on_ack", "on_loss")
Fields = Mapping[str, tuple[str, ...]]


def check_fields(path: Path, text: str, fields: Fields, sets: tuple[str, ...]) -> None:
    """
    Args:
        fields: names of the fields of `p`, `own` and `flow`.
        sets: fields of `flow` that a law may write.

    Raises:
        ConfigError: a field is not there, or is written and may not be.
    """
    tree = ast.parse(text)
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    done: set[tuple[str, tuple[tuple[str, str], ...]]] = set()
    waiting = [
        (name, dict(zip([one.arg for one in functions[name].args.args], _RECORDS, strict=False)))
        for name in _CALLS
        if name in functions
    ]
    while waiting:
        name, records = waiting.pop()
        key = name, tuple(sorted(records.items()))
        if key in done:
            continue
        done.add(key)
        function = functions[name]
        _follow_names(function, records)
        for node in ast.walk(function):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in records:
                _check(path, node, records[node.value.id], fields, sets)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in functions:
                names = [one.arg for one in functions[node.func.id].args.args]
                arguments = dict(zip(names, node.args, strict=False)) | {
                    one.arg: one.value for one in node.keywords if one.arg
                }
                passed = {
                    arg: records[value.id]
                    for arg, value in arguments.items()
                    if isinstance(value, ast.Name) and value.id in records
                }
                if passed:
                    waiting.append((node.func.id, passed))


def _follow_names(function: ast.FunctionDef, records: dict[str, str]) -> None:
    """Add other names of the records that a function has."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in records:
            records |= {one.id: records[node.value.id] for one in node.targets if isinstance(one, ast.Name)}


def _check(path: Path, node: ast.Attribute, record: str, fields: Fields, sets: tuple[str, ...]) -> None:
    known, where = fields[record], f"LAW {path}, line {node.lineno}"
    if node.attr not in known:
        near = difflib.get_close_matches(node.attr, known, n=1, cutoff=0.5)
        owner = {"p": "PARAMETERS", "own": "STATE", "flow": "the flow"}[record]
        remedy = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise ConfigError(where, ast.unparse(node), f"is no field of {owner}", remedy)
    if record == "flow" and node.attr not in sets and not isinstance(node.ctx, ast.Load):
        rule = "is written, and is the engine's: laws read it"
        raise ConfigError(where, ast.unparse(node), rule, f"a law sets {' and '.join(sets)} alone")
