"""What the server counts: levels, areas, and the log."""

from __future__ import annotations

import pytest

from guard_middleware.testing.model_server import Request, use_of_ceiling
from guard_middleware.testing.model_server.ledger import Ledger, Level, Log


def test_a_level_knows_its_value_its_most_and_its_area():
    """2 for one second, then 3 for two, then 1 for one: an area of 9."""
    level = Level(at=10.0)
    level.change(2, 10.0)
    level.change(1, 11.0)
    level.change(-2, 13.0)

    assert (level.now, level.most) == (1, 3)
    assert level.integral(14.0) == pytest.approx(9.0)


def test_the_host_sees_what_is_open_at_all_endpoints_together():
    """Two endpoints with one call each have two in flight on the host."""
    ledger = Ledger(["chat", "embed"], at=0.0, clock_offset=1000.0)
    assert ledger.open("chat", 2, "interactive", 1.0) == 1
    assert ledger.open("embed", 1, "background_ingestion", 2.0) == 1
    ledger.close("chat", 2, "interactive", "200", 3.0)
    assert ledger.open("chat", 2, "interactive", 4.0) == 2

    stats = ledger.snapshot("up", 0, 5.0)
    assert (stats["chat"].calls, stats["chat"].in_flight, stats["chat"].most_in_flight) == (2, 1, 1)
    assert (stats.host.in_flight, stats.host.most_in_flight) == (2, 2)
    assert (stats.host.cost, stats.host.most_cost) == (3, 3)
    assert stats.host.most_by_priority == {"interactive": 1, "background_ingestion": 1}
    assert stats["chat"].statuses == {"200": 1}
    assert stats["chat"].integral_s == pytest.approx(3.0)
    assert (stats["chat"].first_at, stats["chat"].last_at) == (1001.0, 1005.0)


def test_the_use_of_a_ceiling_is_area_over_ceiling_and_time():
    """One of two permits busy all the time is a use of one half; the time before the first call does not count."""
    ledger = Ledger(["chat"], at=0.0, clock_offset=0.0)
    ledger.open("chat", 1, "", 10.0)
    ledger.close("chat", 1, "", "200", 14.0)

    stats = ledger.snapshot("up", 0, 20.0)
    assert stats["chat"].use(2) == pytest.approx(0.5)
    assert stats["chat"].last_at == 14.0


def test_nothing_seen_is_nothing_used():
    """Without calls there is no time to divide by."""
    assert Ledger(["chat"], at=0.0, clock_offset=0.0).snapshot("up", 0, 5.0)["chat"].use(2) == 0.0


def test_running_and_waiting_are_noted_for_the_endpoint_and_the_host():
    """The host's seats are the sum of its endpoints'."""
    ledger = Ledger(["chat", "embed"], at=0.0, clock_offset=0.0)
    ledger.seats("chat", 2, 1, 1.0)
    ledger.seats("embed", 1, 0, 1.0)
    ledger.seats("chat", 1, 0, 2.0)

    stats = ledger.snapshot("up", 0, 3.0)
    assert (stats["chat"].running, stats["chat"].most_running) == (1, 2)
    assert (stats["chat"].waiting, stats["chat"].most_waiting) == (0, 1)
    assert (stats.host.running, stats.host.most_running, stats.host.most_waiting) == (2, 3, 1)


def test_a_restart_forgets_all_but_what_is_open():
    """A call that is open across a reset stays counted, and its end is counted once."""
    ledger = Ledger(["chat"], at=0.0, clock_offset=0.0)
    for _ in range(3):
        ledger.open("chat", 1, "p", 1.0)
    for _ in range(2):
        ledger.close("chat", 1, "p", "200", 2.0)
    ledger.restart(5.0)

    stats = ledger.snapshot("up", 0, 6.0)["chat"]
    assert (stats.in_flight, stats.most_in_flight, stats.cost, stats.most_cost) == (1, 1, 1, 1)
    assert (stats.statuses, stats.most_by_priority) == ({}, {"p": 1})
    assert stats.integral_s == pytest.approx(1.0)
    assert stats.first_at == 5.0
    ledger.close("chat", 1, "p", "200", 7.0)
    assert ledger.snapshot("up", 0, 8.0)["chat"].in_flight == 0


def test_the_log_forgets_its_oldest_and_says_how_many():
    """The log is bounded; what is open comes last."""
    log = Log(length=2)
    for number in (1, 2, 3):
        log.add(request(number, number + 1.0))

    assert [row.t_start for row in log.rows([request(9, 0.0)])] == [2, 3, 9]
    assert log.forgotten == 1
    log.clear()
    assert (log.rows(), log.forgotten) == ([], 0)


def test_the_use_from_the_log_can_leave_out_both_ends():
    """Two calls side by side from 0 to 4, and from 1 to 3: trimmed by a second the ceiling of 2 was full."""
    requests = [request(0.0, 4.0), request(1.0, 3.0)]

    assert use_of_ceiling(requests, 2) == pytest.approx(6 / 8)
    assert use_of_ceiling(requests, 2, trim_s=1.0) == pytest.approx(1.0)
    assert use_of_ceiling(requests, 2, trim_s=2.0) == 0.0


def test_the_use_from_the_log_leaves_out_probes_and_open_calls():
    """Health checks use no permit, and what has not ended has no area yet."""
    noise = [request(0.0, 9.0)._replace(number=0), request(1.0, 0.0)._replace(ending="")]

    assert use_of_ceiling([request(2.0, 4.0), *noise], 1) == pytest.approx(1.0)
    assert use_of_ceiling(noise, 1) == 0.0


def request(t_start: float, t_end: float) -> Request:
    """Return a call that was open for this time."""
    return Request(t_start, t_end, "chat", "/v1/chat/completions", 200, "answered", number=1, cost=1)
