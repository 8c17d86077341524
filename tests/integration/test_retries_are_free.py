"""Waiting uses up no retry, and a failure of the message's own costs exactly one."""

from __future__ import annotations

import pytest

from guard_middleware.testing.model_server import FakeEndpoint, Fault, Step

pytestmark = pytest.mark.slow


def test_a_hundred_messages_without_a_single_retry_all_run_through_a_ceiling_of_one(deploy):
    """max_retries=0, one permit, eight threads: a limiter that raises would kill them; here all run, none is dead."""
    deployment = deploy(
        endpoints=[FakeEndpoint(name="chat", base_ms=20), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": 1}, "embed": {}},
        env={"APP_MAX_RETRIES": "0", "dramatiq_worker_timeout": "100"},
    )
    ids = deployment.send("orchestrate", 100)
    deployment.start(processes=1, threads=8)
    deployment.wait_done(ids, 30)
    deployment.check_everything_once(retries=0)
    assert deployment.server.stats()["chat"].most_in_flight == 1


def test_one_failure_of_each_message_costs_each_one_retry_however_often_it_waited(deploy):
    """Each message's first real call fails: retries is 1 for all, however long they wait in line."""
    # Given a server that answers each message's first call with a plain fault, which says nothing about capacity
    deployment = deploy(
        endpoints=[FakeEndpoint(name="chat", base_ms=20), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": 2}, "embed": {}},
        env={"APP_MAX_RETRIES": "3", "APP_MIN_BACKOFF_MS": "100", "dramatiq_worker_timeout": "100"},
    )
    deployment.server.script([Step(fault=Fault.STATUS, status=500, body="a bug", message_calls=(1, 1))])
    ids = deployment.send("orchestrate", 60)
    # When they wait behind a ceiling of 2, with twelve threads asking
    deployment.start(processes=2, threads=6)
    deployment.wait_done(ids, 30)
    # Then each has burned the one retry of its own failure
    deployment.check_everything_once(retries=1)
    assert [entry["retries"] for entry in deployment.done()] == [1] * 60
    calls = deployment.server.log()
    assert len(calls) == 120
    assert deployment.server.stats()["chat"].most_in_flight == 2
