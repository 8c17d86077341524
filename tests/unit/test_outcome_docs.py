"""The published table of outcomes is the one that the code follows.

Run as a program, this file rewrites the tables in `docs/outcomes.md` from the code.
"""

from __future__ import annotations

import pkgutil
import re
import sys
from itertools import groupby
from pathlib import Path

import httpcore
import httpx
import ollama
import openai
import pytest
import requests
import urllib3

from guard_middleware.core import outcome_table as table
from guard_middleware.core.outcome import classify_status
from guard_middleware.core.retry_after import RETRY_AFTER_CAP_MS

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "outcomes.md"


def ranges(numbers):
    """Write 400, 401, 402, 404 as "400-402, 404"."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(numbers)), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def code(names):
    """Write names as code, one after the other."""
    return ", ".join(f"`{name}`" for name in names)


def statuses():
    """Render the table of statuses, in their order."""
    listed = [status for row in table.STATUS_ROWS for status in row.statuses]
    rows = sorted((row for row in table.STATUS_ROWS if row.statuses), key=lambda row: min(row.statuses))
    yield from ("| status | outcome | why |", "|---|---|---|")
    for row in rows:
        yield f"| {ranges(row.statuses)} | {row.outcome} | {row.why} |"
    for row in sorted((row for row in table.STATUS_ROWS if row.hundred), key=lambda row: row.hundred):
        left = "any other " if any(status // 100 == row.hundred for status in listed) else ""
        yield f"| {left}{row.hundred}xx | {row.outcome} | {row.why} |"


def types():
    """Render the table of types."""
    yield from ("| error | outcome | why | yields to its cause |", "|---|---|---|---|")
    for row in table.TYPE_ROWS:
        yield f"| {code(row.names)} | {row.outcome} | {row.why} | {'yes' if row.looks_inside else 'no'} |"


def others():
    """Render the roots and names that have rules of their own."""
    yield f"- Model clients: {code(sorted(table.MODEL_CLIENTS))}. HTTP clients: {code(sorted(table.HTTP_CLIENTS))}."
    same = ", ".join(f"`{name}` as `{like}`" for name, like in table.SAME_FAMILY.items())
    yield f"- Same class names, same rows: {same}."
    yield f"- Catch-all wrappers: {code(sorted(table.CATCH_ALL))}."
    yield f"- Cancelled, though an ordinary exception: {code(sorted(table.CANCELLED))}."
    yield f"- Signals, judged only by what stands behind them: {code(sorted(table.SIGNALS))}."
    yield f"- Out of something on our own host: {code(table.LOCAL_ERRNOS)}."
    yield f"- Network not reached: {code(table.UNREACHABLE_ERRNOS)}."
    yield f"- Other systems: {code(sorted(table.OTHER_SYSTEMS, key=str.lower))}."


def words():
    """Render the list of overload texts."""
    yield code(table.OVERLOAD_WORDS)


PARTS = {"statuses": statuses, "types": types, "others": others, "words": words}


def block(name):
    """Find the part of the document that stands between its two marks."""
    return re.compile(rf"(?<=<!-- {name}: made from the code -->\n).*?(?=<!-- end of {name} -->)", re.DOTALL)


def rendered(name):
    """Render one part, with the blank lines that Markdown wants around it."""
    return "\n".join(["", *PARTS[name](), "", ""])


def rewritten(text):
    """Put the code's tables in the places of the document's."""
    for name in PARTS:
        text = block(name).sub(lambda _, name=name: rendered(name), text, count=1)
    return text


@pytest.mark.parametrize("name", PARTS)
def test_document_has_the_table_of_the_code(name):
    """Each table in the document is what the code says; running this file brings the document up to date."""
    assert block(name).findall(DOCUMENT.read_text("utf-8")) == [rendered(name)]


def test_document_states_the_numbers_of_the_code():
    """The two bounds that the prose names."""
    text = DOCUMENT.read_text("utf-8")
    assert f"first {table.SCANNED_CHARACTERS} characters" in text
    assert f"{RETRY_AFTER_CAP_MS // 1_000} s" in text


def test_table_has_one_row_for_each_thing():
    """A status, a type or a text that stands in two rows would mean two things."""
    for listed in (
        [status for row in table.STATUS_ROWS for status in row.statuses],
        [name for row in table.TYPE_ROWS for name in row.names],
        list(table.OVERLOAD_WORDS),
    ):
        assert len(listed) == len(set(listed))
    assert {row.hundred for row in table.STATUS_ROWS if row.hundred} == {1, 2, 3, 4, 5}
    assert all(bool(row.statuses) != bool(row.hundred) for row in table.STATUS_ROWS)
    assert set(table.WORST_FIRST) == set(table.Outcome)


def test_table_is_what_the_code_follows():
    """Each status of each row has the row's outcome."""
    for row in table.STATUS_ROWS:
        assert {classify_status(status).outcome for status in row.statuses} <= {row.outcome}


INSTALLED = {
    "httpx": [httpx, httpcore],
    "requests": [requests.exceptions],
    "urllib3": [urllib3.exceptions],
    "openai": [openai],
    "ollama": [ollama],
}


@pytest.mark.parametrize("name", [name for row in table.TYPE_ROWS for name in row.names])
def test_table_names_errors_that_exist(name):
    """A misspelled name would never match: each one is found in the library that it names, where that is installed."""
    root, label = name.split(".")
    if root in {"aiohttp", "anthropic"}:
        pytest.skip("not a dependency of the tests")
    modules = INSTALLED.get(root)
    if modules is None:
        path = {"http": "http.client", "urllib": "urllib.error", "dramatiq": "dramatiq.middleware"}.get(root, root)
        modules = [pkgutil.resolve_name(path)]
    kinds = [getattr(module, label) for module in modules if hasattr(module, label)]
    assert kinds
    for kind in kinds:
        own = kind.__module__.partition(".")[0]
        assert table.SAME_FAMILY.get(own, own) == root
        assert kind.__name__ == label


if __name__ == "__main__":
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text("utf-8")), "utf-8")
    sys.exit(0)
