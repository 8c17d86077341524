"""The host that dies: who runs, who waits, and when it is up again."""

from __future__ import annotations

from guard_middleware.testing.model_server import HostMemory
from guard_middleware.testing.model_server.memory import Host, HostState, Seating


def host(memory: HostMemory | None = None, **max_num_seqs: int | None) -> Host[str]:
    """Return a host with two endpoints without bounds, or with the given ones."""
    return Host(memory or HostMemory(), max_num_seqs or {"chat": None, "embed": None})


def test_calls_up_to_the_edge_run_and_one_more_kills():
    """The edge counts what runs over all endpoints, and is still safe itself."""
    one = host(HostMemory(edge=3))

    assert one.enter("chat", "a", 1, 0.0) is Seating.RUNS
    assert one.enter("embed", "b", 1, 0.0) is Seating.RUNS
    assert one.enter("chat", "c", 1, 0.0) is Seating.RUNS
    assert one.state(0.0) is HostState.UP
    assert one.enter("embed", "d", 1, 0.0) is Seating.KILLS
    assert one.deaths == 1
    assert (one.load, one.running("chat"), one.running("embed")) == (0, 0, 0)


def test_the_edge_is_in_units_of_cost():
    """Two calls of cost 2 are too much for an edge of 3."""
    one = host(HostMemory(edge=3))

    assert one.enter("chat", "a", 2, 0.0) is Seating.RUNS
    assert one.enter("embed", "b", 2, 0.0) is Seating.KILLS


def test_a_dead_host_is_dark_then_loading_then_up():
    """Each state lasts as long as it should, and ends at that very instant."""
    one = host(HostMemory(dark_s=2, loading_s=3))
    one.die(10.0)

    assert [one.state(at) for at in (10.0, 11.9, 12.0, 14.9, 15.0)] == [
        HostState.DARK,
        HostState.DARK,
        HostState.LOADING,
        HostState.LOADING,
        HostState.UP,
    ]
    assert [one.next_change_at(at) for at in (10.0, 12.0, 15.0)] == [12.0, 15.0, None]


def test_what_does_not_fit_into_the_server_waits_in_order():
    """Behind max_num_seqs calls wait, first come first served, and use no memory."""
    one = host(HostMemory(edge=1), chat=1)

    assert one.enter("chat", "a", 1, 0.0) is Seating.RUNS
    assert one.enter("chat", "b", 1, 0.0) is Seating.WAITS
    assert one.enter("chat", "c", 1, 0.0) is Seating.WAITS
    assert (one.running("chat"), one.waiting("chat"), one.load) == (1, 2, 1)
    assert one.leave("chat", "a", 1.0) == (["b"], False)
    assert (one.running("chat"), one.waiting("chat")) == (1, 1)


def test_a_waiter_that_gives_up_leaves_the_line():
    """The place of a waiter whose client is gone goes to nobody."""
    one = host(chat=1)
    for key in ("a", "b", "c"):
        one.enter("chat", key, 1, 0.0)

    assert one.leave("chat", "b", 1.0) == ([], False)
    assert one.leave("chat", "a", 2.0) == (["c"], False)


def test_seating_a_waiter_can_kill():
    """A waiter that needs more than the call whose place it takes is what takes the host down."""
    one = host(HostMemory(edge=2), chat=1)
    one.enter("chat", "a", 1, 0.0)
    one.enter("chat", "b", 3, 0.0)

    assert one.leave("chat", "a", 1.0) == ([], True)
    assert one.state(1.0) is HostState.DARK


def test_after_a_death_late_ends_change_nothing():
    """Calls that died with the host leave an empty host, and none of them wakes a waiter."""
    one = host(HostMemory(edge=9), chat=1)
    for key in ("a", "b"):
        one.enter("chat", key, 1, 0.0)
    one.die(1.0)

    assert one.leave("chat", "a", 1.0) == ([], False)
    assert one.leave("chat", "b", 1.0) == ([], False)
    assert one.load == 0


def test_a_revived_host_is_up_and_has_never_died():
    """A reset makes a host as new."""
    one = host(HostMemory(dark_s=100))
    one.die(0.0)
    one.revive()

    assert (one.state(1.0), one.deaths, one.next_change_at(1.0)) == (HostState.UP, 0, None)
