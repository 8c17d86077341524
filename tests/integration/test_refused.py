"""What cannot be is refused, with a reason that says what to do, and never runs unguarded."""

from __future__ import annotations

import pytest
from dramatiq.message import Message

from guard_middleware import ConfigurationError, GuardMiddleware, guarded
from guard_middleware.testing.model_server import FakeEndpoint
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

ENDPOINTS = [FakeEndpoint(name="chat", base_ms=10), FakeEndpoint(name="embed", base_ms=10)]


@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"GUARD_MODELS": "[{'id': 'sk-S3cr3t'}]"}, "GUARD_MODELS"),
        ({"GUARD_MODELS": '[{"id": "chat", "cieling": 2, "api_key": "sk-S3cr3t"}]'}, "cieling"),
        ({"MODEL_BREAKER_FAIL_TRESHOLD": "3"}, "MODEL_BREAKER_FAIL_THRESHOLD"),
        ({"MODEL_MAX_CONCURRENT_REQUESTS": "0"}, "MODEL_MAX_CONCURRENT_REQUESTS"),
        ({"GUARD_LEASE_S": "-1"}, "GUARD_LEASE_S"),
    ],
)
def test_worker_with_a_wrong_setting_ends_at_start_up_and_names_it(deploy, env, told):
    """One message names the variable or field; the process ends by itself; no secret is printed."""
    deployment = deploy(endpoints=ENDPOINTS)
    group = deployment.start(env=env, wait=False)
    assert group.process.wait(30) != 0
    assert told in group.log
    assert "sk-S3cr3t" not in group.log


def test_worker_with_an_actor_of_an_unknown_model_ends_and_names_the_nearest(deploy):
    """An actor that is guarded by a model which is not configured must not run unguarded: the worker does not start."""
    deployment = deploy(endpoints=[*ENDPOINTS, FakeEndpoint(name="chatt")], models={"chatt": {}, "embed": {}})
    group = deployment.start(wait=False)
    assert group.process.wait(30) != 0
    assert "no configured model" in group.log
    assert "chatt" in group.log


@pytest.mark.parametrize(
    "options",
    [
        {"guard_priority": "urgent"},
        {"guard_priority": 7},
        {"guard_model": "chta"},
        {"guard_model": 3},
        {"guard_cost": 0},
        {"guard_cost": "two"},
        {"guard_cost": True},
    ],
)
def test_message_with_a_wrong_option_is_dead_lettered_and_never_called(deploy, options):
    """However it was sent, a message whose options cannot be goes to the dead letters with a reason in the log."""
    deployment = deploy(endpoints=ENDPOINTS)
    group = deployment.start()
    wrong = deployment.send("orchestrate", 1, **options)
    right = deployment.send("orchestrate", 1)
    deployment.wait_done(right, 20)
    wait_until(lambda: deployment.dead() == {"orchestration": wrong}, 10)
    wait_until(lambda: "guard.refused" in group.log, 5)
    assert next(iter(options)).removeprefix("guard_") in group.log.split("guard.refused", 1)[1]
    assert deployment.server.stats()["chat"].calls == 1


def test_cost_above_the_ceiling_is_dead_lettered_with_a_reason(deploy):
    """A call that no state of its endpoint could admit does not wait for ever."""
    deployment = deploy(endpoints=ENDPOINTS, models={"chat": {"max_concurrent_requests": 2}, "embed": {}})
    group = deployment.start()
    wrong = deployment.send("orchestrate", 1, guard_cost=3)
    wait_until(lambda: deployment.dead() == {"orchestration": wrong}, 10)
    assert "can never be admitted" in group.log
    assert deployment.server.stats()["chat"].calls == 0


def test_send_of_a_wrong_option_fails_at_once(deploy):
    """The sender hears of it, and nothing is enqueued."""
    deployment = deploy(endpoints=ENDPOINTS)
    deployment.broker.add_middleware(GuardMiddleware(deployment.guard))

    @guarded(model="chat", queue_name="orchestration", broker=deployment.broker)
    def work() -> None: ...

    for options in ({"guard_priority": "urgent"}, {"guard_cost": 1.5}, {"guard_model": "chatt"}):
        with pytest.raises(ConfigurationError, match="work"):
            work.send_with_options(**options)
    assert deployment.queued() == 0
    assert isinstance(work.send(), Message)
    assert deployment.queued() == 1


def test_worker_without_the_middleware_refuses_guarded_actors(deploy):
    """I2: an actor that is decorated does not run on a worker that forgot the middleware; it says what to do."""
    deployment = deploy(endpoints=ENDPOINTS, env={"APP_GUARDED": "0", "APP_MAX_RETRIES": "0"})
    group = deployment.start()
    sent = deployment.send("orchestrate", 1)
    wait_until(lambda: deployment.dead() == {"orchestration": sent}, 10)
    assert "add GuardMiddleware() to the broker" in group.log
    assert deployment.server.stats()["chat"].calls == 0


def test_no_retries_at_all_waits_freely_and_is_not_retried_after_a_real_failure(deploy):
    """``max_retries=0``: waiting costs nothing, a real failure ends the message."""
    deployment = deploy(
        endpoints=ENDPOINTS,
        models={"chat": {"max_concurrent_requests": 1}, "embed": {}},
        env={"APP_MAX_RETRIES": "0"},
    )
    deployment.start()
    ids = deployment.send("orchestrate", 20, kwargs={"ms": 20})
    failing = deployment.send("fail_before_call", 1)
    deployment.wait_done(ids, 20)
    wait_until(lambda: deployment.dead() == {"orchestration": failing}, 10)
    assert deployment.done_ids()[failing[0]] == 1
