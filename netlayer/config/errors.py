"""Translation of pydantic's errors in a section to one line: field, value, rule, remedy.

An unknown key gets the nearest one that is known, here or elsewhere in the tree.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from netlayer.errors import ConfigError


def translate(error: ValidationError, root: type[BaseModel], prefix: str) -> ConfigError:
    """Return one line for pydantic's report: the first error in full, the others by name and rule.

    Args:
        root: the section that was read.
        prefix: goes before each field's name.
    """
    first, *others = [_read_error(detail, root) for detail in error.errors()]
    also = "".join(f"; also {prefix}{field}: {rule}" for field, _, rule, _ in others)
    return ConfigError(prefix + first.field, first.value, first.rule, first.remedy + also)


class _Broken(NamedTuple):
    field: str
    value: object
    rule: str
    remedy: str


def _read_error(error: ErrorDetails, root: type[BaseModel]) -> _Broken:
    """Translate one of pydantic's errors."""
    names = [str(part) for part in error["loc"]]
    field = ".".join(names)
    if error["type"] == "extra_forbidden":
        return _Broken(field, None, "unknown key", _nearest(names, root))
    if error["type"] == "missing":
        return _Broken(field, None, "is needed", "add it")
    template = _RULES.get(error["type"])
    rule = template.format(**error.get("ctx", {})) if template else error["msg"].removeprefix("Value error, ")
    return _Broken(field, error["input"], rule, _how_to_write(error["input"], rule))


def _how_to_write(value: object, rule: str) -> str:
    """The remedy; how TOML has it where a value is right and only written otherwise."""
    text = str(value).lower()
    if rule == _TEXT and not isinstance(value, dict | list):
        return """quote it, in a shell twice: '"..."'"""
    if rule in (_SWITCH, SWITCH_OR_AUTO) and text in ("true", "false"):
        return f"write {text}"
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if rule == _NUMBER and math.isfinite(number) and number != 0:
        return f"write {number!r}"
    if rule == _WHOLE_NUMBER and number.is_integer() and 0 < abs(number) < 2**53:
        return f"write {number:.0f}"
    return "correct the value"


_WHOLE_NUMBER, _NUMBER = "must be a whole number", "must be a number"
_SWITCH, _TEXT = "must be true or false", "must be text"
SWITCH_OR_AUTO = "must be true, false or auto"
# pydantic's kinds of errors, with what each knows of its rule.
_RULES = {
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), _WHOLE_NUMBER),
    **dict.fromkeys(("float_type", "float_parsing"), _NUMBER),
    **dict.fromkeys(("bool_type", "bool_parsing"), _SWITCH),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a table of keys, not one value"),
    "string_type": _TEXT,
    "finite_number": "must be finite",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_pattern_mismatch": "must match {pattern}",
}


def _nearest(names: list[str], root: type[BaseModel]) -> str:
    """The key that was meant: the nearest one here, else where in the tree that name is a key."""
    section: Any = root
    for name in names[:-1]:
        if get_origin(section) in (dict, tuple):  # of sections: by a name that the user chooses, or one after the other
            section = get_args(section)[get_origin(section) is dict]
        else:
            section = _plain(section.model_fields[name].annotation)
    known = list(section.model_fields)
    elsewhere = [path for path in _paths(root) if path.rpartition(".")[2] == names[-1]]
    close = difflib.get_close_matches(names[-1], known, n=1, cutoff=0.5)
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    if not close and len(names) == 1:
        paths = list(_paths(root))
        sections = (path.rpartition(".")[0] for path in paths)
        keys = {path.rpartition(".")[2]: path for path in (*paths, *sections)}
        close = [keys[name] for name in difflib.get_close_matches(names[-1], keys, n=1, cutoff=0.7)]
    return f"did you mean {close[0]}?" if close else f"known keys here: {', '.join(known)}"


def _plain(annotation: Any) -> Any:
    """Return what an optional or annotated type is of."""
    while get_origin(annotation) in (Annotated, Union, UnionType):
        annotation = get_args(annotation)[0]
    return annotation


def _paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every key below a section that holds a value, dotted."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _paths(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
