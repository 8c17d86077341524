"""The garbage collector may run anywhere, also where the same thread holds a lock of the guard: it must not wait there.

What is collected then, a permit that was dropped or a call that was thrown away, goes back with the next beats.
"""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from contextlib import closing

import pytest

from guard_middleware import AsyncGuard, Guard, Priority
from guard_middleware import threads as life_lines
from guard_middleware.calls import acquire, release
from guard_middleware.core.commands import Ask
from guard_middleware.core.outcome import Classified, Outcome
from guard_middleware.holdings import new_id
from tests.support.deployment import wait_until
from tests.support.faces import AT_ONCE_S, Truth, settings_of


@pytest.fixture
def settings(redis_url, namespace):
    """One endpoint with one unit."""
    return settings_of(redis_url, namespace, {"chat": {"max_concurrent_requests": 1}})


@pytest.fixture
def guard(settings):
    """A guard whose life line is there already."""
    with closing(Guard(settings)) as guard:
        guard.permit("chat").release()
        yield guard


@pytest.fixture
def truth(settings):
    """The store itself."""
    with closing(Truth(settings)) as truth:
        yield truth


class Garbage:
    """What nobody refers to but itself."""

    def __init__(self, what):
        self.what, self.self = what, self


def a_permit(guard):
    """One that was got and is never released."""
    return guard.permit("chat")


def an_ask(guard):
    """One that is answered by a place in the line, or by a lease, when nobody waits for the answer any more."""
    heartbeat = guard.heartbeat()
    ask = Ask(process=heartbeat.process, lease=new_id(), endpoint="chat", rank=1, cost=1, wait=True)
    steps = acquire(heartbeat, ask, Priority.ORCHESTRATION, time.monotonic() + 20)
    heartbeat.carry_out(next(steps))
    return steps


def a_release(guard):
    """One that was begun, and is carried on by nobody."""
    heartbeat = guard.heartbeat()
    permit = guard.permit("chat")
    steps = release(
        heartbeat, heartbeat.holdings.find(permit.lease), Classified(outcome=Outcome.SUCCESS, reason="returned")
    )
    next(steps)
    permit._settled()
    return steps


def a_coroutine(guard):
    """One that stands in line, and whose event loop has ended without it."""

    async def asks():
        coming = AsyncGuard(guard=guard).permit("chat", timeout=20)._coming
        awaited = coming.send(None)
        while True:
            awaited._asyncio_future_blocking = False  # as a task does that waits for it
            await asyncio.wait({awaited}, timeout=0.2)
            if not awaited.done() and sum(guard.snapshot().endpoints["chat"].waiting.values()) == 1:
                return coming
            await asyncio.wait({awaited})
            awaited = coming.send(None)

    return asyncio.run(asks())


@pytest.mark.parametrize(
    ("make", "full"), [(a_permit, False), (an_ask, False), (an_ask, True), (a_release, False), (a_coroutine, True)]
)
def test_what_is_collected_under_a_lock_of_its_own_thread_does_not_wait_for_it(guard, truth, make, full):
    """No deadlock; and with the next beats nothing is leased, and nobody waits."""
    holdings = guard.heartbeat().holdings
    held = guard.permit("chat") if full else None
    gc.disable()
    try:
        Garbage(make(guard))

        def collect():
            with holdings._lock:
                gc.collect()

        collecting = threading.Thread(target=collect, daemon=True)
        collecting.start()
        collecting.join(3)
        if collecting.is_alive():
            holdings._lock.release()  # or this test could not end
            pytest.fail("it waits for a lock that its own thread holds")
    finally:
        gc.enable()
    if held is not None:
        held.release()
    wait_until(truth.nothing_left, AT_ONCE_S)
    wait_until(lambda: not holdings._held and not holdings._outstanding, AT_ONCE_S)


def test_a_beat_that_is_under_way_at_the_goodbye_leaves_no_process_behind(guard, truth, monkeypatch):
    """Its answer would be that nobody knows this process, and it would publish it again, for nobody."""
    monkeypatch.setattr(life_lines, "_JOIN_S", 0.05)
    heartbeat, inside = guard.heartbeat(), threading.Event()
    sound = heartbeat.store.beat

    def slow(beat):
        inside.set()
        time.sleep(0.4)  # longer than the thread is waited for
        return sound(beat)

    monkeypatch.setattr(heartbeat.store, "beat", slow)
    heartbeat.poke()
    assert inside.wait(5)
    heartbeat.stop()
    heartbeat._beats._thread.join(5)
    assert not heartbeat._beats._thread.is_alive()
    assert truth.snapshot().processes == {}
