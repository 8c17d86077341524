"""One guard and one worker for a broker in a process: what would be there twice is refused at boot."""

from __future__ import annotations

import threading

import dramatiq
import pytest

from guard_middleware import GuardMiddleware
from guard_middleware.queueing.middleware import RefusedAtBoot


def guard_threads():
    """The threads of life lines in this process."""
    return [one for one in threading.enumerate() if one.name.startswith("guard-")]


@pytest.mark.filterwarnings("ignore:.*more than once")
def test_a_middleware_that_was_added_twice_is_refused_at_boot(make_bench):
    """By the settings and by the code, say: each message would ask for two permits."""
    bench = make_bench()
    bench.broker.add_middleware(GuardMiddleware(bench.guard), after=GuardMiddleware)
    bench.actor(lambda: None, actor_name="work")
    worker = dramatiq.Worker(bench.broker, worker_threads=1)
    with pytest.raises(RefusedAtBoot, match=r"added to the broker more than once: add it once"):
        worker.start()
    assert bench.member_is_gone()
    assert guard_threads() == []


def test_a_second_worker_of_a_broker_is_refused_and_the_first_goes_on(make_bench):
    """There is one life line for a broker: the second worker's end would be the first one's too."""
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=1)
    member = bench.member
    second = dramatiq.Worker(bench.broker, worker_threads=1)
    with pytest.raises(RefusedAtBoot, match=r"runs in this process already: give each its own broker"):
        second.start()
    # The first one is still a member, its messages wait in line and run
    assert bench.member is member
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.member.heartbeat.process in bench.snapshot().processes


def test_a_worker_may_follow_one_that_has_stopped(make_bench):
    """One after the other they use the same broker."""
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=1).stop()
    bench.workers.clear()
    bench.start(threads=1)
    bench.wait_ended(work.send())
    bench.wait_idle()
