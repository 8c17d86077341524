"""Results, ids and keys (rows 9 to 13): a parked message has no result until it has run, and then its own."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from dramatiq.composition import group, pipeline
from dramatiq.results import ResultMissing
from dramatiq.results.result import unwrap_result

from tests.support.deployment import wait_until


def test_row_09_a_parked_message_has_no_result_yet_and_never_none(make_bench):
    """Results stores None for a skip: the caller would get None at once, and the true value later or never."""
    bench = make_bench()
    work = bench.actor(lambda: 42, actor_name="work", store_results=True)
    bench.start(threads=1)
    stored = []
    sound = bench.backend._store

    def watched(key, result, ttl):
        stored.append(result)
        sound(key, result, ttl)

    bench.backend._store = watched
    with bench.full():
        message = work.send()
        bench.wait_parked(1)
        wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0, 5)
        with pytest.raises(ResultMissing):
            message.get_result(backend=bench.backend)
    assert message.get_result(backend=bench.backend, block=True, timeout=5_000) == 42
    assert [unwrap_result(one) for one in stored] == [42]


def test_row_10_the_result_is_found_under_the_queue_that_the_message_was_sent_to(make_bench):
    """The key of a result has the queue's name: a parked message keeps its queue, so its caller finds the result."""
    bench = make_bench()
    work = bench.actor(lambda: 42, actor_name="work", store_results=True, queue_name="own")
    bench.start(threads=1)
    with bench.full():
        message = work.send()
        bench.wait_parked(1, queue="own")
        (kept,) = bench.stored()
        assert (kept.queue_name, kept.message_id) == ("own", message.message_id)
        assert bench.backend.build_message_key(kept) == bench.backend.build_message_key(message)
    assert message.get_result(backend=bench.backend, block=True, timeout=5_000) == 42


def test_row_11_a_caller_that_waits_for_the_result_gets_the_true_one_first(make_bench):
    """`get_result(block=True)` takes what is stored first; nothing must be stored before the true result."""
    bench = make_bench()
    work = bench.actor(lambda: 42, actor_name="work", store_results=True)
    bench.start(threads=1)
    got = []
    with bench.full():
        message = work.send()
        waiter = threading.Thread(
            target=lambda: got.append(message.get_result(backend=bench.backend, block=True, timeout=20_000))
        )
        waiter.start()
        bench.wait_parked(1)
        wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0, 5)
        assert got == []
    waiter.join(10)
    assert got == [42]


def test_row_12_two_deliveries_of_one_message_hold_two_permits_and_end_apart(make_bench):
    """message_id is not unique among deliveries: leases are named apart, and one's end does not free the other's."""
    # Given the same message enqueued twice, as Dramatiq's promotion of a delayed message can do
    bench = make_bench(models={"chat": {"max_concurrent_requests": 2}})
    gates = [bench.gate(), bench.gate()]
    turns = iter(gates)
    lock = threading.Lock()

    def body():
        with lock:
            mine = next(turns)
        mine.wait(10)

    work = bench.actor(body, actor_name="work")
    message = work.message()
    bench.broker.enqueue(message)
    bench.broker.enqueue(message)
    # When both run at once
    bench.start(threads=2)
    wait_until(lambda: bench.count_of(message) == (2, 0), 5)
    # Then they hold two permits; the end of one leaves the other's alone
    assert bench.leases() == 2
    gates[0].set()
    wait_until(lambda: bench.count_of(message) == (2, 1), 5)
    wait_until(lambda: bench.leases() == 1, 5)
    gates[1].set()
    wait_until(lambda: bench.count_of(message) == (2, 2), 5)
    bench.wait_idle()


def test_row_12_parked_messages_do_not_count_as_prefetched(make_bench):
    """The consumer fetches only while fewer messages are outstanding than it may prefetch: parked ones are not."""
    # Given many more guarded messages than the worker prefetches (two per thread)
    bench = make_bench()
    work = bench.actor(lambda: None, actor_name="work", queue_name="one")
    plain = bench.actor(lambda: None, actor_name="plain", queue_name="one", model=None)
    worker = bench.start(threads=1)
    with bench.full():
        messages = [work.send() for _ in range(12)]
        bench.wait_parked(12)
        # When an unguarded message comes behind them, Then it is fetched and runs
        behind = plain.send()
        bench.wait_ended(behind)
        wait_until(lambda: worker.consumers["one"].consumer.outstanding_message_count == 0, 5)
    bench.wait_ended(*messages)
    bench.wait_idle()
    assert worker.consumers["one"].consumer.outstanding_message_count == 0
    assert Counter(bench.ended) == Counter(one.message_id for one in [*messages, behind])


def test_row_13_groups_and_pipelines_of_parked_messages_give_their_results(make_bench):
    """Group and pipeline results are looked up by each child's queue and id: neither changes."""
    bench = make_bench()
    add = bench.actor(lambda one, other: one + other, actor_name="add", store_results=True, queue_name="own")
    bench.start(threads=2)
    with bench.full():
        both = group([add.message(1, 2), add.message(3, 4)], broker=bench.broker).run()
        chain = pipeline([add.message(1, 2), add.message(10)], broker=bench.broker).run()
        bench.wait_parked(3)
        for child in both.children:
            with pytest.raises(ResultMissing):
                child.get_result(backend=bench.backend)
    assert list(both.get_results(block=True, timeout=10_000)) == [3, 7]
    assert chain.get_result(block=True, timeout=10_000) == 13
    bench.wait_idle()
