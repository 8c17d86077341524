"""Priorities: their ranks, their names, and the ambient one."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard_middleware.errors import ConfigurationError
from guard_middleware.priority import Priority, current_priority, priority_scope


def test_rank_orders_interactive_first_and_background_last() -> None:
    """Interactive is 0, orchestration and hydration share 1, background ingestion is 3."""
    ranks = {priority.value: priority.rank for priority in Priority}
    assert ranks == {"interactive": 0, "orchestration": 1, "hydration": 1, "background_ingestion": 3}


@pytest.mark.parametrize("priority", Priority)
def test_parse_reads_members_and_their_names(priority: Priority) -> None:
    """A member and its name both give the member."""
    assert Priority.parse(priority) is priority
    assert Priority.parse(priority.value) is priority


@given(st.one_of(st.text(), st.integers(), st.none(), st.booleans(), st.floats(), st.lists(st.text())))
def test_parse_refuses_everything_else(value: object) -> None:
    """What is no name of a priority is refused with the list of names, whatever its type."""
    if isinstance(value, str) and value in set(Priority):
        return
    with pytest.raises(ConfigurationError, match="'interactive', 'orchestration', 'hydration', 'background_ingestion'"):
        Priority.parse(value)


@pytest.mark.parametrize("name", ["Interactive", "INTERACTIVE", " interactive", "interactiv", "", "0"])
def test_parse_is_exact_about_spelling(name: str) -> None:
    """A near miss is refused instead of being taken for the default."""
    with pytest.raises(ConfigurationError):
        Priority.parse(name)


def test_scope_is_none_outside_of_any() -> None:
    """Without a scope there is no ambient priority."""
    assert current_priority() is None


def test_scope_gives_the_innermost_and_restores() -> None:
    """Scopes nest; leaving one brings back the one around it."""
    with priority_scope("background_ingestion") as outer:
        assert (outer, current_priority()) == (Priority.BACKGROUND_INGESTION, Priority.BACKGROUND_INGESTION)
        with priority_scope(Priority.INTERACTIVE):
            assert current_priority() is Priority.INTERACTIVE
        assert current_priority() is Priority.BACKGROUND_INGESTION
    assert current_priority() is None


def test_scope_ends_with_an_exception() -> None:
    """An exception that leaves the block leaves no priority behind."""
    with pytest.raises(ZeroDivisionError), priority_scope("interactive"):
        raise ZeroDivisionError
    assert current_priority() is None


def test_scope_refuses_an_unknown_name_and_changes_nothing() -> None:
    """A misspelled scope raises before the block, and the ambient priority stays."""
    with priority_scope("hydration"):
        with pytest.raises(ConfigurationError, match="unknown priority 'urgent'"), priority_scope("urgent"):
            pytest.fail("the block of a refused scope ran")
        assert current_priority() is Priority.HYDRATION


def test_scope_stays_in_its_thread() -> None:
    """Another thread does not see the scope of this one."""
    seen: list[Priority | None] = []
    with priority_scope("interactive"):
        thread = threading.Thread(target=lambda: seen.append(current_priority()))
        thread.start()
        thread.join()
    assert seen == [None]


def test_scope_stays_in_its_task() -> None:
    """Two coroutines that run in turns each see their own scope."""

    async def look(name: str) -> Priority | None:
        with priority_scope(name):
            await asyncio.sleep(0)
            return current_priority()

    async def both() -> list[Priority | None]:
        return list(await asyncio.gather(look("interactive"), look("hydration")))

    assert asyncio.run(both()) == [Priority.INTERACTIVE, Priority.HYDRATION]
