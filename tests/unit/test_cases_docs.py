"""The page of known faults names tests that exist."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
PAGE = TESTS.parent / "docs" / "cases.md"
NAMED = re.compile(r"`([\w/]+\.py)::(test_\w+)`")
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and not line.startswith("| case ")]


@functools.cache
def functions_of(file):
    """The names of all functions of a test file."""
    tree = ast.walk(ast.parse((TESTS / file).read_text()))
    return {one.name for one in tree if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef))}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_case_names_tests_that_exist(row):
    """Whoever renames a test renames it there, too; and a case without a test is no case."""
    named = NAMED.findall(row)
    assert len(named) == row.count("`test_") + row.count("::test_") > 0
    for file, name in named:
        assert name in functions_of(file), f"{file} has no {name}"
