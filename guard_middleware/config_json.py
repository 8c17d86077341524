"""JSON in an environment variable or a file: read strictly, and refused in words that help and repeat nothing."""

from __future__ import annotations

import json
import math
import re

from guard_middleware.config_parse import shown

_STRING_OR_BRACE = re.compile(r'("(?:[^"\\]|\\.)*")(\s*:)?|[{}]', re.DOTALL)
_LONGEST_INTEGER = 18


class Unreadable(Exception):  # a private signal, turned into a problem at once
    """The text is not the JSON that is expected. Its message follows on the variable's name."""


class _RepeatedKey(Exception):  # a private signal
    def __init__(self, key: str, objects_before: int) -> None:
        super().__init__()
        self.key = key
        self.objects_before = objects_before


def parse_json(text: str, *, file_variable: str = "") -> object:
    """Read JSON. A byte-order mark before it is tolerated, a key that stands twice in one object is not.

    Numbers that JSON does not have (NaN, Infinity) and whole numbers beyond any bound are let through as floats, so
    that the field they stand in refuses them by its path.

    Args:
        text: the value of a variable or the content of a file.
        file_variable: the variable to name to somebody who wrote a path instead.

    Returns:
        What `json.loads` returns.

    Raises:
        Unreadable: with line and column and a hint, without any part of the text.
    """
    body = text.removeprefix("\ufeff")
    closed = 0

    def pairs(items: list[tuple[str, object]]) -> dict[str, object]:
        nonlocal closed
        found: dict[str, object] = {}
        for key, value in items:
            if key in found:
                raise _RepeatedKey(key, closed)
            found[key] = value
        closed += 1
        return found

    def whole(digits: str) -> float:
        return int(digits) if len(digits) <= _LONGEST_INTEGER else math.inf

    # The refusal is raised outside of the except blocks: the decoder's error holds the whole text, and a chained
    # exception is carried along to whoever reports it.
    try:
        return json.loads(body, object_pairs_hook=pairs, parse_int=whole)
    except json.JSONDecodeError as error:
        where, what = error.pos, f"JSON is expected{_hint(body, error.pos, file_variable)}"
    except _RepeatedKey as error:
        where = _position_of_repeated(body, error)
        what = f"JSON without repeated keys is expected, and {shown(error.key)} stands twice in one object"
    except RecursionError:
        where, what = 0, "JSON is expected, and this is nested too deeply"
    line = body.count("\n", 0, where) + 1
    column = where - body.rfind("\n", 0, where)
    msg = f"cannot be read at line {line}, column {column}: {what}"
    raise Unreadable(msg)


def _hint(body: str, where: int, file_variable: str) -> str:
    text = body.strip()
    start = text[:1]
    if start == "'" or (start == '"' and text[1:2] in "[{"):
        return "; remove the quotes around it, which compose and env files pass on as part of the value"
    if start in {"[", "{"}:
        before = body[:where].rstrip()
        if body[where : where + 1] == "'":
            return "; keys and texts stand in double quotes, not in single ones"
        if before.endswith(",") or body[where : where + 1] == ",":
            return "; remove the comma before the closing bracket"
        return ""
    if file_variable and (text.lower().endswith(".json") or re.match(r"[./~]|[A-Za-z]:[\\/]", text)):
        return f"; to read it from a file, set {file_variable} to the path"
    if "," in text:
        return "; a comma list is not JSON: write a list in brackets with its texts in double quotes"
    return "; it begins with [ or {"


def _position_of_repeated(body: str, error: _RepeatedKey) -> int:
    """Where the second key stands. Objects are reported as they close, so count closing braces up to the culprit."""
    open_objects: list[list[tuple[str, int]]] = []
    closed = 0
    for token in _STRING_OR_BRACE.finditer(body):
        if token[0] == "{":
            open_objects.append([])
        elif token[0] == "}":
            keys = open_objects.pop()
            if closed == error.objects_before:
                return [position for key, position in keys if key == error.key][1]
            closed += 1
        elif token[2] is not None:
            open_objects[-1].append((json.loads(token[1]), token.start()))
    return 0
