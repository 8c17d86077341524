"""Endpoints keep to themselves whatever they are called, and so do namespaces: over the real keys."""

from __future__ import annotations

import pytest

from guard_middleware.testing.model_server import FakeEndpoint

pytestmark = pytest.mark.slow

IDS = (
    "BAAI/bge-m3",
    "qwen3:0.6b",
    "a",
    "a:b",
    "a:b:c",
    "x.y",
    "X",
    "x",
    "two words",
    "mod\N{LATIN SMALL LETTER E WITH ACUTE}le-\N{CJK UNIFIED IDEOGRAPH-6A21}\N{CJK UNIFIED IDEOGRAPH-578B}",
    "*",
    "{x}",
    "l" * 200,
)
LONG = {"MODEL_BREAKER_BASE_COOLDOWN_S": "60", "MODEL_BREAKER_MAX_COOLDOWN_S": "60"}


def breakers(store):
    """Which breakers are not closed."""
    return {one.id for one in store.snapshot().endpoints.values() if one.breaker != "closed"}


def test_opening_one_breaker_changes_no_other_whatever_the_ids(deploy):
    """Ids with slash, colon, dot, space, braces, star, Unicode, case: each has its own state and line."""
    # Given one endpoint of each name, and a worker for all of them
    names = ("chat", "embed", *IDS)
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name=name, base_ms=5) for name in names],
        models={name: {"max_concurrent_requests": 2} for name in names},
        env=LONG,
    )
    deployment.start(processes=1, threads=4)
    store = deployment.store()
    # When every second one's server fails, one after the other
    failing = IDS[::2]
    for number, name in enumerate(failing):
        others = {key: one for key, one in store.snapshot().endpoints.items() if key not in failing[: number + 1]}
        with deployment.guard.permit(name) as permit:
            assert permit.endpoint.id == name
            permit.record(status=503)
        # Then its breaker opens, and no other endpoint has changed in anything
        assert breakers(store) == set(failing[: number + 1])
        assert {key: store.snapshot().endpoints[key] for key in others} == others
    # And messages to those run, while messages to the failing ones wait, each in its own endpoint's line
    waiting = {name: set(deployment.send("orchestrate", 2, guard_model=name)) for name in failing}
    running = {name: set(deployment.send("orchestrate", 2, guard_model=name)) for name in names if name not in failing}
    deployment.wait_done([one for ids in running.values() for one in ids], 20)
    for name in failing:
        deployment.wait_parked(2, name)
    assert not {one for ids in waiting.values() for one in ids} & set(deployment.done_ids())
    assert {line[0]: len(ids) for line, ids in store.snapshot().lines.items() if ids} == dict.fromkeys(failing, 2)
    store.close()
    # And the server of each got its own calls and no other's
    for name, ids in running.items():
        assert {one.message_id for one in deployment.calls(name)} == ids


def test_two_namespaces_share_nothing_and_one_is_shared(deploy):
    """Two guard namespaces on one database, one a prefix of the other, have own breakers and permits; one is one."""
    # Given three guards with the same endpoint of one permit
    options = {"models": {"chat": {"max_concurrent_requests": 1}}, "env": LONG}
    first = deploy(kill_at_end=True, **options)
    other = deploy(kill_at_end=True, server=first.server, namespace=f"{first.namespace}:chat", **options)
    same = deploy(kill_at_end=True, server=first.server, namespace=first.namespace, **options)
    # When the only permit of the first namespace is taken
    permit = first.guard.permit("chat", timeout=5)
    # Then the other namespace has its own, and the guard in the same namespace has none
    other.guard.permit("chat", timeout=5).release()
    assert same.guard.try_permit("chat") is None
    permit.record(status=503)
    permit.release()
    # And the breaker that trips is open in its own namespace alone
    found = {name: breakers(one.store()) for name, one in (("first", first), ("other", other), ("same", same))}
    assert found == {"first": {"chat"}, "other": set(), "same": {"chat"}}
    assert other.guard.try_permit("chat") is not None


def test_permit_of_one_namespace_is_not_lent_in_another(deploy):
    """Inside of one guard's permit, a guard of another namespace gives one of its own, and counts it."""
    # Given two namespaces with an endpoint of the same name
    first = deploy(kill_at_end=True, models={"chat": {"max_concurrent_requests": 1}})
    other = deploy(kill_at_end=True, server=first.server, models={"chat": {"max_concurrent_requests": 1}})
    # When a call under a permit of the first is nested in one under a permit of the other
    with other.guard.permit("chat"), first.guard.permit("chat"):
        # Then both have a unit in flight
        assert first.guard.snapshot().endpoints["chat"].in_flight == 1
        assert other.guard.snapshot().endpoints["chat"].in_flight == 1
    # And the same guard lends its own permit as before
    with first.guard.permit("chat"), first.guard.permit("chat"):
        assert first.guard.snapshot().endpoints["chat"].in_flight == 1
