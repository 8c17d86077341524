"""Who goes first over real workers: interactive ahead of a saturating background, which still gets its turn."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from guard_middleware.testing.model_server import FakeEndpoint, use_of_ceiling
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

APP = "tests.support.sharing_app"
BACKGROUND = {"guard_priority": "background_ingestion"}
INTERACTIVE = {"guard_priority": "interactive"}


def serving(deploy, *, ceiling, base_ms, reserve=1, **env):
    """One endpoint with a reserve; a slow process's turn is kept for it, so that only the rule decides the order."""
    return deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": ceiling, "reserve": reserve}, "embed": {}},
        env={"GUARD_HOLD_MS": "2000", **env},
    )


@pytest.mark.parametrize("actor", ["orchestrate", "enrich"], ids=["own queue", "same queue"])
def test_interactive_starts_at_once_while_a_reserve_permit_is_free(deploy, measured, actor):
    """Background fills what it may have and waits in line: an interactive message starts before any of it ends."""
    # Given 3 background calls of 2 s in flight, 4 parked, and one permit of 4 in reserve
    deployment = serving(deploy, ceiling=4, base_ms=2_000)
    deployment.start(processes=2, threads=4, module=APP)
    deployment.send("enrich", 7, **BACKGROUND)
    deployment.wait_parked(4)
    assert deployment.server.stats()["chat"].in_flight == 3
    # When an interactive message comes, in a queue of its own or behind the background's
    [urgent] = deployment.send(actor, 1, kwargs={"ms": 50}, **INTERACTIVE)
    deployment.wait_done([urgent], 10)
    # Then its call began while all 3 that it found were still running
    calls = deployment.calls()
    started = next(one for one in calls if one.message_id == urgent)
    measured("from worker to server, s", round(started.t_start - deployment.arrivals()[urgent], 3))
    running = [one for one in calls if one.t_start < started.t_start and not 0 < one.t_end < started.t_start]
    assert [one.message_id for one in calls[:4]][-1] == urgent
    assert len(running) == 3
    # And the background finishes, without ever touching the reserve
    deployment.wait_done(deployment.sent, 15)
    deployment.check_everything_once()
    assert deployment.server.stats()["chat"].most_by_priority["background_ingestion"] == 3


def test_interactive_takes_the_next_release_and_background_goes_on_after_it(deploy, measured):
    """With nothing free, an interactive message is the first to start after the next release; then the others go on."""
    # Given all 4 permits in the hands of interactive calls of 2 s, and background messages parked
    deployment = serving(deploy, ceiling=4, base_ms=500)
    deployment.start(processes=2, threads=6, module=APP)
    background = deployment.send("enrich", 18, **BACKGROUND)
    deployment.wait_parked(12)
    long = deployment.send("orchestrate", 4, kwargs={"ms": 2_000}, **INTERACTIVE)
    wait_until(lambda: {one.message_id for one in deployment.calls() if not one.t_end} == set(long), 10)
    # When an interactive message comes into the line behind them
    [urgent] = deployment.send("orchestrate", 1, kwargs={"ms": 50}, **INTERACTIVE)
    store = deployment.store()
    wait_until(lambda: store.snapshot().endpoints["chat"].waiting.get(0) == 1, 5)
    store.close()
    deployment.wait_done(deployment.sent, 20)
    # Then the first call after the first release was that message
    calls = deployment.calls()
    released = min(one.t_end for one in calls if one.message_id in long)
    after = [one for one in calls if one.t_start >= released]
    measured("from the release to its start, s", round(after[0].t_start - released, 3))
    assert after[0].message_id == urgent
    assert set(long) < {one.message_id for one in calls if one.t_start < released}
    # And background used what it may have while nothing better ran
    rest = [one for one in after if one.message_id in background]
    use = use_of_ceiling(rest, 3, trim_s=0.5)
    measured("background's use of its 3 permits", round(use, 3))
    assert len(rest) >= 6
    assert use > 0.6
    assert deployment.server.stats()["chat"].most_in_flight == 4
    deployment.check_everything_once()


def test_interactive_stream_against_a_batch_waits_less_than_one_call_whatever_is_prefetched(deploy, measured):
    """Ceiling 4, reserve 1. Batch never uses more than 3; interactive ones run within one call's time."""
    # Given workers that prefetch as usual, 1 and 1,000 messages, and a batch that is far more than they can hold
    deployment = serving(deploy, ceiling=4, base_ms=600)
    groups = [
        deployment.start(threads=4, wait=False, module=APP, env=env)
        for env in ({}, {"dramatiq_queue_prefetch": "1"}, {"dramatiq_queue_prefetch": "1000"})
    ]
    for group in groups:
        group.wait_ready(1)
    batch = deployment.send("enrich", 24, **BACKGROUND)
    deployment.wait_parked(15)
    # When an interactive message comes now and then, in the batch's queue and in another one by turns
    urgent = []
    for number in range(8):
        urgent += deployment.send("orchestrate" if number % 2 else "enrich", 1, kwargs={"ms": 50}, **INTERACTIVE)
        deployment.wait_done(urgent, 10)
    left = len(set(batch) - set(deployment.done_ids()))
    deployment.wait_done(deployment.sent, 20)
    # Then each ran within one call's time of its arrival at a worker, and the batch stayed out of the reserve
    arrivals = deployment.arrivals()
    starts = {one.message_id: one.t_start for one in deployment.calls()}
    waits = [starts[one] - arrivals[one] for one in urgent]
    measured("longest wait, s", round(max(waits), 3))
    measured("batch left when the last one was done", left)
    assert max(waits) < 0.6
    assert left > 0
    assert deployment.server.stats()["chat"].most_by_priority["background_ingestion"] == 3
    deployment.check_everything_once()


def test_background_finishes_although_interactive_traffic_never_pauses(deploy, measured):
    """Interactive work at full rate: background goes once in each ageing time, not more, and so it finishes."""
    # Given interactive work for many seconds, always more than can run
    deployment = serving(deploy, ceiling=2, base_ms=100, GUARD_BACKGROUND_AGEING_S="0.8")
    deployment.start(processes=2, threads=4, module=APP)
    urgent = deployment.send("orchestrate", 150, **INTERACTIVE)
    deployment.wait_parked(100)
    # When five background messages come
    background = deployment.send("enrich", 5, **BACKGROUND)
    deployment.wait_done(background, 20)
    left = len(set(urgent) - set(deployment.done_ids()))
    # Then they are done while interactive work still waits, one per ageing time
    starts = [one.t_start for one in deployment.calls() if one.priority == "background_ingestion"]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    measured("gaps between background starts, s", [round(gap, 2) for gap in gaps])
    measured("interactive left", left)
    assert left > 10
    assert min(gaps) > 0.7
    assert max(gaps) < 0.8 + 0.7
    assert time.time() - deployment.arrivals()[background[0]] < 8
    deployment.wait_done(urgent, 20)
    deployment.check_everything_once()
    assert deployment.server.stats()["chat"].most_in_flight == 2
