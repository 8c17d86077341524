"""A worker that could not run its actors does not start, and says what to add."""

from __future__ import annotations

import dramatiq
import pytest
from dramatiq.middleware import AsyncIO

from guard_middleware.queueing.middleware import RefusedAtBoot


def test_guarded_coroutine_without_an_event_loop_is_refused_at_boot(make_bench):
    """Without AsyncIO each of its messages would fail at run time; with it, the worker starts and runs it."""
    bench = make_bench()

    @bench.actor
    async def answer(): ...

    worker = dramatiq.Worker(bench.broker, worker_threads=1)
    with pytest.raises(RefusedAtBoot, match=r"'answer' is a coroutine .* add AsyncIO\(\)"):
        worker.start()
    assert bench.member_is_gone()

    other = make_bench(coroutines=True)

    @other.actor
    async def answer_too(): ...

    other.start()
    other.wait_ended(answer_too.send())


def test_function_that_wraps_no_coroutine_needs_no_event_loop(make_bench):
    """An ordinary actor, and one under somebody's own wrapper, start as ever."""
    bench = make_bench()
    assert not any(isinstance(one, AsyncIO) for one in bench.broker.middleware)

    @bench.actor
    def work(): ...

    bench.start()
    bench.wait_ended(work.send())


def test_store_that_is_away_at_boot_is_named_without_its_credentials(make_bench, caplog):
    """The worker waits for its store, and its log says which one: host and port, never a password."""
    bench = make_bench(guard_url="redis://user:S3cr3t@127.0.0.1:1/2")
    worker = dramatiq.Worker(bench.broker, worker_threads=1)
    bench.workers.append(worker)
    worker.start()
    (told,) = [one.getMessage() for one in caplog.records if "store=" in one.getMessage()]
    assert "guard.store_unavailable" in told
    assert "redis://***@127.0.0.1:1/2" in told
    assert "S3cr3t" not in caplog.text
