"""Retries, limits, callbacks and composition (rows 14 to 25): waiting is invisible to all of them."""

from __future__ import annotations

import json
import os
import threading

import prometheus_client  # before Dramatiq's Prometheus asks for files: it decides about them once, when imported
import pytest
from dramatiq.composition import group, pipeline
from dramatiq.errors import Retry
from dramatiq.middleware import CurrentMessage, Middleware, TimeLimitExceeded
from dramatiq.middleware.prometheus import Prometheus
from dramatiq.middleware.shutdown import Shutdown
from dramatiq.threading import raise_thread_exception

from guard_middleware import ConfigurationError
from guard_middleware.core.commands import Action, Operate
from guard_middleware.errors import StoreUnavailable
from tests.support.bench import interruptible_wait
from tests.support.deployment import wait_until

assert prometheus_client


class Enqueues(Middleware):
    """Writes down every enqueue, as tracing, rate metrics or a table of tasks would."""

    def __init__(self):
        self.before = []
        self.after = []
        self.delayed = []

    def before_enqueue(self, broker, message, delay):
        self.before.append((message.actor_name, delay))

    def after_enqueue(self, broker, message, delay):
        self.after.append((message.actor_name, delay))

    def before_delay_message(self, broker, message):
        self.delayed.append(message.actor_name)


@pytest.mark.parametrize("wait", ["parked", "delayed"])
def test_row_14_waiting_burns_no_retry_even_with_none_allowed(make_bench, wait):
    """Exception-based deferral counts against max_retries; waiting in line does not, for a permit or a breaker."""
    bench = make_bench()
    seen = []
    work = bench.actor(
        lambda: seen.append(CurrentMessage.get_current_message().options.get("retries", 0)),
        actor_name="work",
        max_retries=0,
    )
    bench.start(threads=2)
    if wait == "parked":
        with bench.full():
            messages = [work.send() for _ in range(10)]
            bench.wait_parked(10)
    else:
        bench.store.operate(Operate(action=Action.OPEN, target="chat", value=60_000))
        messages = [work.send() for _ in range(10)]
        bench.wait_parked(10)
        bench.store.operate(Operate(action=Action.CLOSE, target="chat"))
    bench.wait_ended(*messages)
    bench.wait_idle()
    assert seen == [0] * 10
    assert bench.dead() == []


def test_row_14_retries_of_its_own_count_as_ever(make_bench):
    """An actor's failure and its Retry each cost one retry, however often the message waited in between."""
    bench = make_bench()
    seen = []

    def body():
        message = CurrentMessage.get_current_message()
        seen.append(message.options.get("retries", 0))
        bench.pause()  # so that the next delivery parks
        if len(seen) == 1:
            raise ValueError
        if len(seen) == 2:
            raise Retry(delay=10)

    work = bench.actor(body, actor_name="work", max_retries=2)
    bench.start(threads=1)
    bench.pause()
    work.send()
    for attempt in range(3):
        bench.wait_parked(1)
        bench.resume()
        wait_until(lambda wanted=attempt + 1: len(seen) == wanted, 5)
    bench.wait_idle()
    assert seen == [0, 1, 2]
    assert bench.dead() == []


@pytest.fixture
def prometheus(monkeypatch):
    """Dramatiq's Prometheus middleware as its CLI boots it, without the files and variables that it leaves behind."""
    for name in ("PROMETHEUS_MULTIPROC_DIR", "prometheus_multiproc_dir"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
        monkeypatch.delenv(name)
    found = Prometheus()
    found.after_process_boot(None)
    found.after_worker_shutdown = lambda broker, worker: None
    return found


def value_of(metric, *labels):
    """The present value of a counter or gauge."""
    return metric.labels(*labels)._value.get()


def test_row_15_16_17_prometheus_before_the_guard_stays_balanced(make_bench, prometheus):
    """Its in-progress gauge returns to 0, a wait is no retry, and nothing goes through the delay queue.

    A skip counts as one processed message there, as with any skip of Dramatiq's.
    """
    bench = make_bench(before=[prometheus])
    attempts = []

    def body():
        attempts.append(1)
        if len(attempts) == 1:
            bench.pause()  # so that the retry's copy parks
            raise ValueError

    work = bench.actor(body, actor_name="work", max_retries=1)
    bench.start(threads=1)
    bench.pause()
    message = work.send()
    for number in (1, 2):
        bench.wait_parked(1)
        bench.resume()
        wait_until(lambda number=number: len(attempts) == number, 5)
    bench.wait_ended(message)
    bench.wait_idle()
    labels = ("default", "work")
    wait_until(lambda: value_of(prometheus.inprogress_messages, *labels) == 0, 5)
    assert value_of(prometheus.total_retried_messages, *labels) == 1  # the failure's, not one for each wait
    assert value_of(prometheus.total_errored_messages, *labels) == 1
    assert value_of(prometheus.total_messages, *labels) >= 2


def test_row_15_a_guard_on_the_wrong_side_of_prometheus_says_so_at_boot(make_bench, prometheus, caplog):
    """Placed after the guard, Prometheus would count each park down to a negative gauge: the guard warns at boot."""
    bench = make_bench(after=[prometheus])
    bench.actor(lambda: None, actor_name="work")
    bench.start(threads=1)
    assert "on the wrong side of it: Prometheus" in caplog.text


def test_row_18_waiting_counts_as_age_and_a_message_too_old_takes_no_permit(make_bench):
    """AgeLimit counts from the message's timestamp: past it, a parked message is dead-lettered, without a permit."""
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_age=300)
    patient = bench.actor(lambda: None, actor_name="patient")
    bench.start(threads=1)
    with bench.full():
        message = work.send()
        other = patient.send()
        bench.wait_parked(2)
        # The endpoint is full all the while: nobody gives it a permit, and still it ends
        wait_until(lambda: [one.message_id for one in bench.dead()] == [message.message_id], 6)
        assert bench.leases() == 1
        assert len(bench.parked()) == 1
    bench.wait_ended(other)
    bench.wait_idle()
    assert bench.count_of(message) == (0, 0)
    assert len(bench.dead()) == 1


def test_row_18_a_message_too_old_whose_reply_is_lost_is_handed_over_again(make_bench, monkeypatch):
    """I11 for what has no permit: its worker lives on and never heard of it, and it ends all the same."""
    # Given a worker that does not get the answers with which an old message comes, three times
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_age=300)
    bench.start(threads=1)
    store = bench.member.heartbeat.store
    sound, lost = store.beat, []

    def beat(command):
        reply = sound(command)
        if reply.takes and len(lost) < 3:
            lost.append(reply.takes)
            msg = "the reply is lost"
            raise StoreUnavailable(msg)
        return reply

    monkeypatch.setattr(store, "beat", beat)
    # When the message becomes too old, Then it ends among the dead letters, and nothing is left of it
    with bench.full():
        message = work.send()
        wait_until(lambda: [one.message_id for one in bench.dead()] == [message.message_id], 10)
        assert len(lost) == 3
        assert bench.leases() == 1
    bench.wait_idle()
    assert bench.count_of(message) == (0, 0)


ODD_AGES = [
    *({"max_age": age} for age in ("10", float("inf"), float("nan"), -5, True, [10], 1.5)),
    *({"max_age": 10, "timestamp": timestamp} for timestamp in ("x", None, 1.5, 10**18)),
]
"""What other tools may write into a message."""


def what_becomes_of(bench, odd, waiting=0):
    """Let the broker have messages of other tools, and return which of them ran and which are dead, by number."""
    work = bench.actor(lambda: None, actor_name="work", max_retries=0)
    for number, fields in enumerate(odd):
        made = work.message_with_options(redis_message_id=f"m{number}", max_age=fields["max_age"]).asdict()
        made["message_id"] = f"m{number}"
        made["message_timestamp"] = fields.get("timestamp", made["message_timestamp"] - 60)
        bench.broker.client.hset(f"{bench.namespace}:default.msgs", f"m{number}", json.dumps(made))
        bench.broker.client.rpush(f"{bench.namespace}:default", f"m{number}")
    bench.start(threads=1)
    if waiting:
        bench.wait_parked(waiting)
        bench.resume()
    wait_until(lambda: not bench.stored(), 10)
    assert bench.threads_alive()
    return sorted(bench.ended), sorted(one.message_id for one in bench.dead())


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "from the line"])
def test_row_18_an_age_or_a_time_of_an_odd_type_is_dramatiqs_own_business(make_bench, namespace, waits):
    """What the age limit cannot compare it lets run, and what it can it dead-letters: with a guard or without."""
    ended, dead = what_becomes_of(make_bench(is_guarded=False, namespace=f"{namespace}-plain"), ODD_AGES)
    assert len(ended) == 7
    assert len(dead) == len(ODD_AGES) - 7
    bench = make_bench()
    if waits:
        bench.pause()
    assert what_becomes_of(bench, ODD_AGES, waiting=len(ended) if waits else 0) == (ended, dead)
    bench.wait_idle()


def test_row_19_a_time_limit_inside_the_admission_strands_neither_message_nor_permit(make_bench, monkeypatch):
    """The time limit is raised anywhere, also while the store is asked: what was given is released at once."""
    # Given an admission that is interrupted after the store has carried it out, before its answer is read
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_retries=1)
    bench.start(threads=1)
    store = bench.member.heartbeat.store
    sound = store.admit
    struck = []

    def interrupted(command):
        reply = sound(command)
        if not struck:
            struck.append(reply.status)
            raise_thread_exception(threading.get_ident(), TimeLimitExceeded)
            interruptible_wait(threading.Event(), 1)
        return reply

    monkeypatch.setattr(store, "admit", interrupted)
    # When a message is admitted like that, Then Dramatiq retries it, as any that is cut off; it runs and all is free
    message = work.send()
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)
    assert bench.threads_alive()


def test_row_19_a_time_limit_inside_a_park_does_not_double_the_message(make_bench, monkeypatch):
    """If the store has parked the message, the interrupted hook learns it and skips: there is no retry copy."""
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", max_retries=1)
    bench.start(threads=1)
    store = bench.member.heartbeat.store
    sound = store.admit
    struck = []

    def interrupted(command):
        reply = sound(command)
        if not struck:
            struck.append(reply.status)
            raise_thread_exception(threading.get_ident(), TimeLimitExceeded)
            interruptible_wait(threading.Event(), 1)
        return reply

    monkeypatch.setattr(store, "admit", interrupted)
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
        wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0, 5)
        assert [one.message_id for one in bench.stored()] == [message.message_id]
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)
    assert bench.threads_alive()


def test_row_20_a_shutdown_interrupt_frees_the_permit_and_the_message_is_retried(make_bench):
    """Shutdown is raised in the actor and retried by Retries; the permit is back before the worker has stopped."""
    bench = make_bench()
    never = bench.gate()
    raised = []

    def body():
        try:
            interruptible_wait(never)
        except Shutdown:
            raised.append(1)
            raise

    work = bench.actor(body, actor_name="work", notify_shutdown=True, max_retries=3)
    worker = bench.start(threads=1)
    message = work.send()
    wait_until(lambda: bench.leases() == 1, 5)
    worker.stop(timeout=10_000)
    bench.workers.remove(worker)
    assert raised == [1]
    assert bench.leases() == 0
    (kept,) = bench.stored()
    assert (kept.message_id, kept.options["retries"]) == (message.message_id, 1)


def test_row_21_callbacks_fire_for_runs_and_never_for_waiting(make_bench):
    """on_failure fires for each failed attempt and on_success once; a park in between is neither."""
    bench = make_bench()
    called = []
    bench.actor(lambda message, detail: called.append("failure"), actor_name="on_failure", model=None)
    bench.actor(lambda message, result: called.append(result), actor_name="on_success", model=None)
    attempts = []

    def body():
        attempts.append(1)
        if len(attempts) < 3:
            bench.pause()  # so that the next delivery parks
            raise ValueError
        return "value"

    work = bench.actor(
        body, actor_name="work", max_retries=5, on_failure="on_failure", on_success="on_success", store_results=True
    )
    bench.start(threads=1)
    bench.pause()
    work.send()
    for attempt in range(3):
        wait_until(lambda wanted=attempt: len(called) == wanted, 5)
        bench.wait_parked(1)
        wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0, 5)
        assert called == ["failure"] * attempt
        bench.resume()
        wait_until(lambda wanted=attempt + 1: len(attempts) == wanted, 5)
    wait_until(lambda: len(called) == 3, 5)
    bench.wait_idle()
    assert called == ["failure", "failure", "value"]


def test_row_22_the_next_of_a_pipeline_is_sent_once_with_the_true_value(make_bench):
    """A park fires no pipe_target; after the run it fires once, with the value and the next message's own delay."""
    enqueues = Enqueues()
    bench = make_bench(before=[enqueues])
    got = []
    first = bench.actor(lambda: 5, actor_name="first")
    last = bench.actor(got.append, actor_name="last", model=None)
    bench.start(threads=1)
    with bench.full():
        pipeline([first.message(), last.message_with_options(delay=70)], broker=bench.broker).run()
        bench.wait_parked(1)
        wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0, 5)
        assert enqueues.before == [("first", None)]
    wait_until(lambda: got, 5)
    bench.wait_idle()
    assert got == [5]
    assert enqueues.before == [("first", None), ("last", 70), ("last", None)]  # delayed, then promoted


@pytest.mark.parametrize(
    "options", [{"guard_priority": "urgent"}, {"guard_cost": 0}, {"guard_model": "chatt"}], ids=str
)
def test_row_22_the_next_of_a_pipeline_with_a_wrong_option_is_dead_lettered_not_lost(make_bench, options):
    """It is enqueued in an after-hook, where an error would be swallowed: the first is done, the next is kept."""
    bench = make_bench()
    first = bench.actor(lambda: 5, actor_name="first")
    last = bench.actor(lambda _: None, actor_name="last")
    bench.start(threads=1)
    message = first.message()
    last_message = last.message_with_options(args=(), **options)
    pipeline([message, last_message], broker=bench.broker).run()
    wait_until(bench.dead, 5)
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)
    assert bench.count_of(last_message) == (0, 0)
    assert [one.message_id for one in bench.dead()] == [last_message.message_id]
    # Who sends such a message by hand is still told at once
    with pytest.raises(ConfigurationError, match="last"):
        last.send_with_options(args=(1,), **options)


def test_row_23_a_groups_completion_fires_once_after_all_members_have_run(make_bench):
    """The barrier counts successful runs; a parked member is none until it has run."""
    bench = make_bench()
    called = []
    member = bench.actor(lambda: None, actor_name="member")
    done = bench.actor(lambda: called.append(len(bench.ended)), actor_name="done", model=None)
    bench.start(threads=4)
    with bench.full():
        all_of_them = group([member.message() for _ in range(8)], broker=bench.broker)
        all_of_them.add_completion_callback(done.message())
        all_of_them.run()
        bench.wait_parked(8)
        wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0, 5)
        assert called == []
    wait_until(lambda: called, 10)
    bench.wait_idle()
    assert called == [8]


def test_row_24_a_parked_message_is_not_the_threads_current_message(make_bench):
    """CurrentMessage is not cleared on a skip, so the guard stands before it: a parked one never is current."""

    class AfterAck(Middleware):
        def __init__(self):
            self.current = []

        def after_ack(self, broker, message):
            self.current.append((message.actor_name, CurrentMessage.get_current_message()))

    watch = AfterAck()
    bench = make_bench(before=[watch])
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=1)
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
        wait_until(lambda: watch.current, 5)
        assert watch.current == [("work", None)]
    bench.wait_ended(message)


def test_row_25_waiting_is_no_enqueue_for_other_middleware(make_bench):
    """before_enqueue and after_enqueue fire once for each send, however often a message was parked and taken."""
    enqueues = Enqueues()
    bench = make_bench(before=[enqueues])
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=2)
    messages = []
    for _ in range(2):
        with bench.full():
            messages += [work.send() for _ in range(5)]
            bench.wait_parked(5)
        bench.wait_ended(*messages)
    bench.wait_idle()
    assert enqueues.before == enqueues.after == [("work", None)] * 10
    assert enqueues.delayed == []
