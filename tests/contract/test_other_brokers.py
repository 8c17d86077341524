"""Where messages cannot be parked, a copy comes back later: other brokers, and a guard on a Redis of its own."""

from __future__ import annotations

import json
import threading
from collections import Counter

import pytest
from dramatiq.composition import group, pipeline
from dramatiq.message import Message
from dramatiq.middleware import CurrentMessage, Middleware
from dramatiq.results import ResultMissing

from guard_middleware.core.commands import Action, Operate
from guard_middleware.testing.valkey import EmbeddedValkey
from tests.support.deployment import wait_until


class Copies(Middleware):
    """Writes down every enqueue and every ack, in order."""

    def __init__(self):
        self.events = []
        self.copies = []

    def before_enqueue(self, broker, message, delay):
        self.copies.append((message, delay))

    def after_enqueue(self, broker, message, delay):
        self.events.append(("stored", message.message_id, message.queue_name))

    def before_ack(self, broker, message):
        self.events.append(("ack", message.message_id, message.queue_name))

    def postponed(self):
        """(queue without .DQ, delay in ms) of each copy that was stored to come back later."""
        return [(message.queue_name.removesuffix(".DQ"), delay) for message, delay in self.copies if delay is not None]


@pytest.fixture(scope="module")
def elsewhere():
    """A second server, for the guard alone."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture(params=["stub", "redis elsewhere"])
def make_other(request, elsewhere, make_bench):
    """Make a bench on a broker that cannot park."""

    def make(**options):
        copies = Copies()
        where = {"stub": True} if request.param == "stub" else {"guard_url": elsewhere.url}
        bench = make_bench(before=[copies], **where, **options)
        bench.copies = copies
        return bench

    return make


def warm(bench, actor):
    """Let one short call succeed, so that slots are reserved milliseconds apart and not a second."""
    bench.wait_ended(actor.send())
    bench.wait_idle()
    bench.copies.copies.clear()
    bench.copies.events.clear()
    bench.begun.clear()
    bench.ended.clear()


def test_nothing_is_parked_there(make_other):
    """Whether the guard shares the broker's server is proved at boot; if not, lines stay empty."""
    bench = make_other()
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=1)
    assert not bench.member.parks()
    with bench.full():
        message = work.send()
        wait_until(bench.copies.postponed, 5)
        assert bench.parked() == []
    bench.wait_ended(message)


def test_reroute_stores_a_copy_in_the_low_queue_which_the_worker_consumes(make_other):
    """An endpoint that is full sends the message to <queue>.low, to come back after its reserved slot."""
    # Given a worker that was told to consume one queue only
    bench = make_other()
    work = bench.actor(lambda: None, actor_name="work", queue_name="mine")
    bench.start(threads=2, queues={"mine"})
    warm(bench, work)
    # When the endpoint is full
    with bench.full():
        message = work.send()
        wait_until(bench.copies.postponed, 5)
        assert bench.copies.postponed()[0][0] == "mine.low"
    # Then it runs from there, once, and nothing is left over
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)
    assert {queue for queue, _ in bench.copies.postponed()} == {"mine.low"}  # never mine.low.low


def test_delay_stores_a_copy_in_the_same_queue_for_at_least_the_rest_of_the_cooldown(make_other):
    """While the breaker is open there is no other queue to be in: the copy comes back when the cooldown is over."""
    bench = make_other()
    work = bench.actor(lambda: None, actor_name="work", queue_name="mine")
    bench.start(threads=2)
    warm(bench, work)
    bench.store.operate(Operate(action=Action.OPEN, target="chat", value=700))
    message = work.send()
    wait_until(bench.copies.postponed, 5)
    ((queue, delay_ms),) = bench.copies.postponed()
    assert queue == "mine"
    left_ms = bench.snapshot().endpoints["chat"].open_for_ms
    assert left_ms <= delay_ms <= 700 * 1.1 + 10  # never earlier; later by a spread of at most a tenth
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)


def test_a_result_a_pipeline_or_a_group_keeps_the_message_in_its_own_queue(make_other):
    """Results are looked up under the queue's name; who waits for one finds it, and never None first."""
    bench = make_other(models={"chat": {"max_concurrent_requests": 1}})
    called = []
    value = bench.actor(lambda number: number + 1, actor_name="value", store_results=True, queue_name="mine")
    silent = bench.actor(lambda: 5, actor_name="silent", queue_name="mine")
    last = bench.actor(called.append, actor_name="last", model=None, queue_name="plain")
    done = bench.actor(lambda: called.append("group"), actor_name="done", model=None, queue_name="plain")
    bench.start(threads=4)
    warm(bench, silent)
    with bench.full():
        message = value.send(1)
        pipeline([silent.message(), last.message()], broker=bench.broker).run()
        all_of_them = group([silent.message() for _ in range(3)], broker=bench.broker)
        all_of_them.add_completion_callback(done.message())
        all_of_them.run()
        wait_until(lambda: len(bench.copies.postponed()) >= 5, 5)
        with pytest.raises(ResultMissing):
            message.get_result(backend=bench.backend)
    assert message.get_result(backend=bench.backend, block=True, timeout=10_000) == 2
    wait_until(lambda: len(called) == 2, 10)
    bench.wait_idle()
    assert sorted(called, key=str) == [5, "group"]
    assert {queue for queue, _ in bench.copies.postponed()} == {"mine"}


def test_the_copy_is_the_message_but_for_its_way(make_other):
    """message_id, timestamp, arguments and options stay byte for byte; `retries` is never touched."""
    bench = make_other()
    seen = []
    work = bench.actor(
        lambda *_args, **_kwargs: seen.append(CurrentMessage.get_current_message().options),
        actor_name="work",
        max_retries=0,
    )
    bench.start(threads=1)
    with bench.full():
        message = work.send_with_options(
            args=("ä", 1.5, None, {"deep": [1, "x"]}), kwargs={"word": "ü"}, guard_priority="interactive", mine=[1, 2]
        )
        wait_until(bench.copies.postponed, 5)
    bench.wait_ended(message)

    def essence(one):
        fields = json.loads(Message.encode(one))
        fields["options"] = {key: fields["options"][key] for key in ("guard_priority", "mine")}
        return json.dumps({**fields, "queue_name": ""})

    assert {essence(one) for one, _ in bench.copies.copies} == {essence(message)}
    assert "retries" not in seen[0]
    assert len(seen) == 1
    assert bench.dead() == []


def test_the_copy_is_stored_before_the_original_is_acked_and_a_failing_enqueue_is_repeated(make_other, monkeypatch):
    """I3: until a copy is stored the message is unacked where it was; a broker that fails is tried again."""
    bench = make_other()
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=1)
    warm(bench, work)
    sound, tries = bench.broker.enqueue, []

    def enqueue(message, *, delay=None):
        if threading.current_thread() in bench.worker.workers and len(tries) < 3:
            tries.append(list(bench.copies.events))
            msg = "the broker is away"
            raise ConnectionError(msg)
        return sound(message, delay=delay)

    monkeypatch.setattr(bench.broker, "enqueue", enqueue)
    with bench.full():
        message = work.send()
        wait_until(bench.copies.postponed, 5)
        wait_until(lambda: ("ack", message.message_id, "default") in bench.copies.events, 5)
    assert len(tries) == 3
    assert all(kind != "ack" for events in tries for kind, _, _ in events)
    kinds = [kind for kind, message_id, _ in bench.copies.events if message_id == message.message_id]
    assert kinds[:3] == ["stored", "stored", "ack"]  # sent, copied, and only then acked
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.count_of(message) == (1, 1)


def test_a_fault_of_the_guard_itself_loses_no_message(make_other, monkeypatch):
    """Where nothing can be put back into an ack set, a message set aside is copied, not acked away."""
    bench = make_other()
    work = bench.actor(lambda: None, actor_name="work", max_retries=0)
    bench.start(threads=1)
    heartbeat = bench.member.heartbeat
    sound, struck = heartbeat.admit, []

    def unsound(ask):
        if not struck:
            struck.append(1)
            raise RuntimeError
        return sound(ask)

    monkeypatch.setattr(heartbeat, "admit", unsound)
    message = work.send()
    bench.wait_ended(message)
    bench.wait_idle()
    assert struck
    assert bench.count_of(message) == (1, 1)


def test_many_messages_all_run_once_under_the_ceiling_without_spinning(make_other):
    """50 messages through a ceiling of 2: each once, never three at a time, no retry, few copies each."""
    bench = make_other(models={"chat": {"max_concurrent_requests": 2}})
    work = bench.actor(lambda: threading.Event().wait(0.01), actor_name="work", max_retries=0)
    bench.start(threads=8)
    warm(bench, work)
    messages = [work.send() for _ in range(50)]
    bench.wait_ended(*messages, timeout_s=20)
    bench.wait_idle()
    assert Counter(bench.ended) == Counter(one.message_id for one in messages)
    assert bench.most == 2
    assert bench.dead() == []
    assert len(bench.copies.postponed()) < 8 * len(messages)
