"""What in Dramatiq's processing of a message a guard can break (rows 1 to 8): hooks, skips, and the thread itself."""

from __future__ import annotations

import logging
import threading

import pytest
import redis
from dramatiq.errors import RateLimitExceeded
from dramatiq.middleware import Middleware, SkipMessage, TimeLimitExceeded
from dramatiq.results import ResultFailure

from guard_middleware.core.commands import Action, Operate
from guard_middleware.errors import StoreUnavailable
from guard_middleware.queueing import options
from guard_middleware.queueing.middleware import GuardMiddleware
from tests.support.deployment import wait_until


class Spy(Middleware):
    """Writes down which hooks ran for which message."""

    def __init__(self):
        self.seen = []

    def before_process_message(self, broker, message):
        self.seen.append(("before", message.message_id, None))

    def after_process_message(self, broker, message, *, result=None, exception=None):
        self.seen.append(("after", message.message_id, exception))

    def after_skip_message(self, broker, message):
        self.seen.append(("skip", message.message_id, None))

    def of(self, message):
        return [kind for kind, message_id, _ in self.seen if message_id == message.message_id]


@pytest.mark.parametrize(
    "fault",
    [RuntimeError("a bug"), redis.ConnectionError("gone"), RateLimitExceeded("one of Dramatiq's own"), KeyError("key")],
    ids=lambda fault: type(fault).__name__,
)
@pytest.mark.parametrize("place", ["admit", "options", "ask"])
def test_row_01_an_exception_in_the_hook_never_lets_the_actor_run_unguarded(make_bench, monkeypatch, fault, place):
    """Dramatiq swallows what a before-hook raises and runs the actor; the guard starts nothing, and loses nothing.

    `Bench` asserts in each body that it has a permit; here the body must not even begin while the fault lasts.
    """
    # Given a worker whose hook fails at some place with an exception that Dramatiq would swallow
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_retries=0)
    bench.start(threads=1)
    broken = True
    member = bench.member
    owner, name = {
        "admit": (member.heartbeat, "admit"),
        "options": (options, "read"),
        "ask": (member.turns, "_ask"),
    }[place]
    sound = getattr(owner, name)
    struck = threading.Event()

    def unsound(*args, **kwargs):
        if broken and threading.current_thread() in bench.worker.workers:
            struck.set()
            raise fault
        return sound(*args, **kwargs)

    monkeypatch.setattr(owner, name, unsound)
    # When a message is delivered
    message = work.send()
    assert struck.wait(5)
    # Then its body does not begin; and once the fault is over it runs, once, without a retry burned
    assert bench.begun == []
    broken = False
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)
    assert bench.dead() == []
    assert bench.threads_alive()


def test_row_01_a_store_without_an_answer_keeps_the_message_and_the_permit_comes_first(make_bench, monkeypatch):
    """While the store does not answer, nothing starts; the hook asks again until there is an answer."""
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_retries=0)
    bench.start(threads=1)
    asked = []
    sound = bench.member.heartbeat.store.admit

    def away(command):
        asked.append(command.lease)
        if len(asked) <= 3:
            msg = "away"
            raise StoreUnavailable(msg)
        return sound(command)

    monkeypatch.setattr(bench.member.heartbeat.store, "admit", away)
    message = work.send()
    bench.wait_ended(message)
    assert len(set(asked)) == 1  # always with the same ids
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)


def test_row_02_nothing_but_a_skip_leaves_the_hook_and_no_retry_is_burned(make_bench, monkeypatch):
    """A MiddlewareError other than SkipMessage would cost a retry and a failure callback for each deferral."""
    # Given messages that are parked behind a full endpoint, held by an open breaker, gone, impossible, or malformed
    bench = make_bench(models={"chat": {"max_concurrent_requests": 2}, "ill": {}})
    failures = []
    bench.actor(lambda message, exception: failures.append(exception), actor_name="on_failure", model=None)
    work = bench.actor(lambda: None, actor_name="work", on_failure="on_failure", max_retries=0)
    ill = bench.actor(lambda: None, actor_name="ill", model="ill", on_failure="on_failure", max_retries=0)
    left = []
    sound = GuardMiddleware.before_process_message

    def watched(self, broker, message):
        try:
            sound(self, broker, message)
        except BaseException as exc:
            left.append(type(exc).__mro__)
            raise

    monkeypatch.setattr(GuardMiddleware, "before_process_message", watched)
    bench.start(threads=1)
    bench.store.operate(Operate(action=Action.OPEN, target="ill", value=60_000))
    with bench.full():
        parked = work.send()
        delayed = ill.send()
        bench.wait_parked(2)
        # When a malformed one and one that can never be admitted come too, as another program would enqueue them
        for number, bad in enumerate(({"guard_cost": 99}, {"guard_priority": "urgent"})):
            raw = work.message().copy(options={**bad, "redis_message_id": f"raw-{number}"})
            bench.broker.do_enqueue("default", raw.options["redis_message_id"], raw.encode())
        wait_until(lambda: len(bench.dead()) == 2, 5)
    bench.wait_ended(parked)
    bench.store.operate(Operate(action=Action.CLOSE, target="ill"))
    bench.wait_ended(delayed)
    # Then every exception that left the hook was a skip; nobody failed, nobody was retried
    assert left
    assert all(SkipMessage in mro for mro in left)
    bench.wait_idle()
    assert failures == []
    assert bench.count_of(parked) == bench.count_of(delayed) == (1, 1)


def test_row_03_interrupt_in_after_hook_runs_nothing_twice(make_bench, monkeypatch):
    """An interrupt in an after-hook would let all hooks run again, and Retries store a copy of a finished message.

    In the guard's own after-hook it does neither: the body has ended, so there is nothing left to interrupt.
    """
    # Given a worker, and a time limit that strikes just when the guard's after-hook lets go of the lease
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_retries=3)
    bench.start(threads=1)
    sound = bench.member.turns._let_go_of
    struck = []

    def late(ident):
        if bench.ended and not struck:
            struck.append(ident)
            raise TimeLimitExceeded
        return sound(ident)

    monkeypatch.setattr(bench.member.turns, "_let_go_of", late)
    # When a message runs to its end
    message = work.send()
    bench.wait_ended(message)
    wait_until(lambda: struck, 5)
    # Then it ran once, the permit is back, and the thread lives
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)
    assert bench.threads_alive()
    other = work.send()
    bench.wait_ended(other)
    assert bench.count_of(message) == (1, 1)


def test_row_03_hooks_that_run_twice_release_only_their_own_lease(make_bench):
    """An interrupt in somebody else's after-hook runs the guard's again: it takes nothing from anybody."""

    # Given a middleware whose after-hook is interrupted once, after the guard's own has run
    class Interrupted(Middleware):
        struck = 0

        def after_process_message(self, broker, message, *, result=None, exception=None):
            if message.actor_name == "work" and not self.struck:
                self.struck += 1
                raise TimeLimitExceeded

    # ... and a second message that holds a permit all the while
    bench = make_bench(models={"chat": {"max_concurrent_requests": 2}}, before=[Interrupted()])
    gate = bench.gate()
    hold = bench.actor(lambda: gate.wait(10), actor_name="hold")
    work = bench.actor(lambda: None, actor_name="work", max_retries=3)
    bench.start(threads=2)
    held = hold.send()
    wait_until(lambda: bench.begun, 5)
    # When the message runs: Dramatiq itself runs its hooks twice, and a second time from a retry copy
    message = work.send()
    wait_until(lambda: bench.count_of(message) == (2, 2), 5)
    # Then the other message's lease is there as before, and nothing else is
    wait_until(lambda: bench.leases() == 1, 5)
    gate.set()
    bench.wait_ended(held)
    bench.wait_idle()
    assert bench.threads_alive()


def test_row_04_a_skip_before_the_guard_gives_back_the_permit_that_came_with_the_message(make_bench):
    """after_skip_message also runs on middleware whose before-hook never did: the guard's own copes with that."""

    # Given a middleware before the guard that skips one message when it comes the second time, with its permit
    class SkipSecond(Middleware):
        seen = 0

        def before_process_message(self, broker, message):
            if message.actor_name == "skipped":
                self.seen += 1
                if self.seen == 2:
                    raise SkipMessage

    bench = make_bench(before=[SkipSecond()], heartbeat_s=8.0)  # no beat explains that the permit is back
    skipped = bench.actor(lambda: None, actor_name="skipped")
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=1)
    with bench.full():
        first = skipped.send()
        bench.wait_parked(1)
        second = work.send()
        bench.wait_parked(2)
    # When both are taken, Then the first never begins, and its permit goes to the second
    bench.wait_ended(second, timeout_s=4)
    bench.wait_idle()
    assert bench.count_of(first) == (0, 0)


def test_row_05_the_proxy_keeps_its_queue_so_the_thread_lives_and_the_task_is_done(make_bench):
    """A queue name changed in place would be a KeyError in the worker's `finally`: a dead thread, and no ack."""

    class Watch(Middleware):
        def before_ack(self, broker, message):
            seen.append((message.actor_name, message.queue_name))

    seen, bench = [], make_bench(after=[Watch()])
    work = bench.actor(lambda: None, actor_name="work", queue_name="own")
    worker = bench.start(threads=2)
    with bench.full():
        messages = [work.send() for _ in range(5)]
        bench.wait_parked(5)
        wait_until(lambda: len(seen) == 5, 5)
        assert set(seen) == {("work", "own")}
        wait_until(lambda: worker.work_queue.unfinished_tasks == 0, 5)
    bench.wait_ended(*messages)
    bench.wait_idle()
    wait_until(lambda: worker.work_queue.unfinished_tasks == 0, 5)
    assert bench.threads_alive()


def test_row_06_a_parked_messages_arguments_are_not_in_the_log_and_other_skips_still_are(make_bench, caplog):
    """The worker warns about each skip with all arguments: the guard's own skips would put prompts in the log."""

    class SkipOther(Middleware):
        def before_process_message(self, broker, message):
            if message.actor_name == "other":
                raise SkipMessage

    bench = make_bench(before=[SkipOther()])
    work = bench.actor(lambda prompt: None, actor_name="work")
    other = bench.actor(lambda word: None, actor_name="other", model=None)
    bench.start(threads=1)
    with caplog.at_level(logging.INFO):
        with bench.full():
            message = work.send("my secret prompt")
            bench.wait_parked(1)
            other.send("not ours")
            wait_until(lambda: "not ours" in caplog.text, 5)
        bench.wait_ended(message)
    assert "my secret prompt" not in caplog.text
    assert caplog.text.count("was skipped") == 1


def test_row_07_a_message_that_can_never_run_fires_no_success_callback(make_bench):
    """`fail()` without a skip would report success with None for a message that never ran; the guard does both."""
    bench = make_bench()
    called = []
    bench.actor(lambda message, result: called.append(result), actor_name="on_success", model=None)
    work = bench.actor(lambda: None, actor_name="work", on_success="on_success")
    bench.start(threads=1)
    message = work.send_with_options(guard_cost=2)  # the ceiling is 1
    wait_until(lambda: [one.message_id for one in bench.dead()] == [message.message_id], 5)
    fine = work.send()
    bench.wait_ended(fine)
    wait_until(lambda: called == [None], 5)  # the sound one's, alone
    assert bench.count_of(message) == (0, 0)
    bench.wait_idle()


def test_row_08_a_dead_lettered_message_has_an_exception_for_its_result_and_no_failure_callbacks(make_bench):
    """Failed and skipped: the message is dead-lettered, its result is an exception that says why; no callback fires."""
    bench = make_bench()
    called = []
    bench.actor(lambda message, detail: called.append(detail), actor_name="callback", model=None)
    work = bench.actor(
        lambda: None, actor_name="work", store_results=True, on_failure="callback", on_retry_exhausted="callback"
    )
    bench.start(threads=1)
    message = work.send_with_options(guard_cost=2)
    with pytest.raises(ResultFailure, match="can never be admitted"):
        message.get_result(backend=bench.backend, block=True, timeout=5_000)
    assert [one.message_id for one in bench.dead()] == [message.message_id]
    work.send()
    bench.wait_idle()
    assert called == []
    assert bench.dead()[0].options.get("retries", 0) == 0
