"""Results, pipelines and groups of messages that had to wait: as in an unguarded run, and never None first."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager

import pytest
from dramatiq.brokers.redis import RedisBroker
from dramatiq.composition import group, pipeline
from dramatiq.message import Message
from dramatiq.middleware import GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend as Barriers
from dramatiq.results import ResultMissing, Results
from dramatiq.results.backends import RedisBackend

from guard_middleware import drain
from guard_middleware.testing.model_server import FakeEndpoint
from tests.support.deployment import Deployment, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def deployment(valkey, tmp_path_factory):
    """Two worker processes of four threads, and a ceiling of 2."""
    with Deployment(
        valkey.database_url(0),
        tmp_path_factory.mktemp("workers"),
        endpoints=[FakeEndpoint(name="chat", base_ms=30), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": 2}, "embed": {}},
        env={"dramatiq_worker_timeout": "100"},
    ) as made:
        made.start(processes=2, threads=4)
        yield made


@pytest.fixture
def client(deployment):
    """The application that sends: a broker of its own, with results and group callbacks and without a guard."""
    broker = RedisBroker(url=deployment.redis_url, namespace=deployment.broker_namespace, middleware=[])
    broker.add_middleware(Results(backend=RedisBackend(client=broker.client, namespace=results_of(deployment))))
    broker.add_middleware(GroupCallbacks(Barriers(client=broker.client)))
    yield broker
    broker.client.connection_pool.disconnect()


def results_of(deployment):
    """The namespace of the application's results."""
    return f"{deployment.broker_namespace}-results"


def message_of(actor, *args, queue="orchestration", **options):
    """A message to one of the application's actors."""
    return Message(queue_name=queue, actor_name=actor, args=args, kwargs={}, options=options)


def parked(deployment):
    """Ids of all that stand in a line."""
    return [one for ids in deployment.guard.snapshot().lines.values() for one in ids]


@contextmanager
def full(deployment):
    """Hold the whole ceiling, as callers do."""
    with deployment.guard.permit("chat", cost=2, priority="interactive", timeout=20):
        yield


def callbacks(deployment):
    """What the callback actors have written down."""
    return [json.loads(one) for one in deployment.redis.lrange(f"{deployment.broker_namespace}:called", 0, -1)]


def test_a_message_that_was_parked_five_times_gives_its_value_and_none_never_stood_there(deployment, client):
    """get_result(block=True) waits through five parks and returns the value; block=False finds nothing meanwhile."""
    # Given a caller that waits for the result, and a watch on what is stored for it
    backend = client.get_results_backend()
    message = message_of("answer", 41)
    key = backend.build_message_key(message)
    got, seen, over = [], [], threading.Event()

    def watch():
        while not over.is_set():
            seen.extend(deployment.redis.lrange(key, 0, -1))
            time.sleep(0.002)

    threads = [
        threading.Thread(target=lambda: got.append(message.get_result(backend=backend, block=True, timeout=60_000))),
        threading.Thread(target=watch),
    ]
    with full(deployment):
        for thread in threads:
            thread.start()
        client.enqueue(message)
        # When it is parked, put back at the tail of its queue and parked again, five times
        store = deployment.store()
        for attempt in range(5):
            wait_until(lambda: parked(deployment), 10)
            with pytest.raises(ResultMissing):
                message.get_result(backend=backend)
            if attempt < 4:
                queue = "orchestration"
                assert drain(store, [queue], namespace=deployment.broker_namespace, force=True) == 1
        store.close()
        assert got == []
    # Then the value comes first, and it is all that ever stood there
    threads[0].join(20)
    wait_until(lambda: seen, 5)
    over.set()
    threads[1].join(20)
    assert got == [42]
    assert {json.loads(one) for one in seen} == {42}
    deployment.sent.append(message.message_id)
    deployment.check_everything_once()


def test_a_pipeline_whose_middle_had_to_wait_runs_its_end_once_with_the_middles_value(deployment, client):
    """A | b | c with b parked: c runs once, with b's value."""
    chain = pipeline(
        [
            message_of("plain_value", 1, queue="plain"),
            message_of("answer"),
            message_of("plain_value", queue="plain"),
        ],
        broker=client,
    )
    with full(deployment):
        chain.run()
        wait_until(lambda: parked(deployment), 10)
        with pytest.raises(ResultMissing):
            chain.get_result()
    # 1, and one more at each of the three
    assert chain.get_result(block=True, timeout=30_000) == 4
    deployment.sent += [one.message_id for one in chain.messages]
    deployment.check_everything_once()


def test_a_group_of_twenty_at_a_ceiling_of_two_completes_once_after_all_of_them(deployment, client):
    """The completion callback fires once, when all twenty have run; each result stands under its own id."""
    members = [message_of("answer", number) for number in range(20)]
    all_of_them = group(members, broker=client)
    all_of_them.add_completion_callback(message_of("group_done", queue="callbacks"))
    with full(deployment):
        all_of_them.run()
        wait_until(lambda: len(parked(deployment)) >= 8, 10)
        assert callbacks(deployment) == []
    assert list(all_of_them.get_results(block=True, timeout=30_000)) == list(range(1, 21))
    wait_until(lambda: callbacks(deployment), 10)
    deployment.sent += [one.message_id for one in members]
    deployment.check_everything_once()
    assert callbacks(deployment) == [{"group": True}]
    assert deployment.server.stats()["chat"].most_in_flight == 2
