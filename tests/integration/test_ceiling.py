"""The server never sees more than the ceiling, and reaches it: counted by the server itself."""

from __future__ import annotations

import pytest

from guard_middleware.testing.model_server import FakeEndpoint

pytestmark = pytest.mark.slow


def test_three_kinds_of_work_reach_the_ceiling_of_one_endpoint_and_never_exceed_it(deploy, measured):
    """Embeddings, enrichment and orchestration from 3 processes of 8 threads share one endpoint's ceiling of 6."""
    # Given one server that all three kinds of work call, and the reserve switched off so that background can fill it
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=40), FakeEndpoint(name="embed")],
        models={
            "chat": {"max_concurrent_requests": 6, "reserve": 0},
            "embed": {"max_concurrent_requests": 6},
        },
    )
    # When each kind sends more than the ceiling can hold
    deployment.start(processes=3, threads=8)
    ids = [
        *deployment.send("enrich", 120),
        *deployment.send("orchestrate", 120),
        *deployment.send("orchestrate_async", 60),
        *deployment.send("embed", 60, guard_model="chat", args=(None,)),
    ]
    deployment.wait_done(ids, 60)
    # Then the server itself counted the ceiling as its most, and everything ran once
    deployment.check_everything_once()
    stats = deployment.server.stats()["chat"]
    measured("use", round(stats.use(6), 3))
    assert stats.most_in_flight == 6
    assert stats.statuses == {"200": len(ids)}


def test_group_budget_caps_both_endpoints_together(deploy, measured):
    """Two endpoints with ceilings of 6 each and a budget of 8: the sum reaches 8 and never exceeds it."""
    # Given two endpoints of one accelerator
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=40), FakeEndpoint(name="embed", base_ms=40)],
        models={
            "chat": {"max_concurrent_requests": 6, "gpu_group": "box", "reserve": 0},
            "embed": {"max_concurrent_requests": 6, "gpu_group": "box", "reserve": 0},
        },
        env={"GPU_CONCURRENCY_BUDGETS": '{"box": 8}', "KG_LLM_PRIORITY_RESERVE_FRACTION": "0.1"},
    )
    # When three kinds of work want both of them at once
    deployment.start(processes=3, threads=8)
    ids = [
        *deployment.send("orchestrate", 110),
        *deployment.send("enrich", 40),
        *deployment.send("embed", 150, guard_priority="orchestration"),
    ]
    deployment.wait_done(ids, 60)
    # Then the server counted the budget as its most over both, and each stayed below its own ceiling
    deployment.check_everything_once()
    stats = deployment.server.stats()
    measured("use of the budget", round(stats.host.use(8), 3))
    assert stats.host.most_in_flight == 8
    assert stats["chat"].most_in_flight <= 6
    assert stats["embed"].most_in_flight <= 6


def test_ceilings_follow_the_published_rule_from_configuration_to_server(deploy):
    """Explicit wins, also below the declared capacity; else the larger of declared and default; by default 32."""
    # Given four endpoints of which different things are said, and 44 threads
    said = {
        "chat": ({}, 32),
        "embed": ({"max_concurrent_requests": 3, "parallel_instances": 2, "max_parallel_calls": 4}, 3),
        "large": ({"parallel_instances": 10, "max_parallel_calls": 8}, 80),
        "small": ({"parallel_instances": 2}, 32),
    }
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name=name, base_ms=1_500) for name in said],
        models={name: fields for name, (fields, _) in said.items()},
    )
    deployment.start(processes=2, threads=22)
    # When one gets more than 32 calls
    ids = deployment.send("orchestrate", 60)
    # Then the store has these ceilings in force, and the server counted 32
    deployment.wait_done(ids, 30)
    store = deployment.store()
    assert {one.id: one.ceiling for one in store.snapshot().endpoints.values()} == {
        name: ceiling for name, (_, ceiling) in said.items()
    }
    store.close()
    assert deployment.server.stats()["chat"].most_in_flight == 32
    deployment.check_everything_once()


def test_default_ceiling_is_a_setting_that_never_goes_below_the_declared_capacity(deploy):
    """With a default of 3, the server counts 3 where nothing is said, the declared 6, and an explicit 2."""
    # Given a small default
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name=name, base_ms=150) for name in ("chat", "embed", "small")],
        models={
            "chat": {},
            "embed": {"parallel_instances": 2, "max_parallel_calls": 3},
            "small": {"max_concurrent_requests": 2, "parallel_instances": 2, "max_parallel_calls": 3},
        },
        env={"MODEL_MAX_CONCURRENT_REQUESTS": "3"},
    )
    # When all three get more than they can hold, from 24 threads
    deployment.start(processes=3, threads=8)
    for _ in range(10):
        deployment.send("orchestrate", 3)
        deployment.send("embed", 4, guard_priority="orchestration")
        deployment.send("orchestrate", 3, guard_model="small")
    # Then each was filled, and never more than that
    deployment.wait_done(deployment.sent, 30)
    deployment.check_everything_once()
    stats = deployment.server.stats()
    assert {name: one.most_in_flight for name, one in stats.endpoints.items()} == {"chat": 3, "embed": 6, "small": 2}


def test_full_endpoint_blocks_nobody_behind_it_in_the_same_queue(deploy, measured):
    """Behind 20 calls for a full endpoint, an idle endpoint's messages and unguarded ones run at once."""
    # Given one queue, and an endpoint that takes one call of 300 ms at a time
    deployment = deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=300), FakeEndpoint(name="embed", base_ms=20)],
        models={"chat": {"max_concurrent_requests": 1}, "embed": {"max_concurrent_requests": 4}},
    )
    deployment.start(processes=1, threads=8, module="tests.support.sharing_app")
    full = deployment.send("orchestrate", 20)
    # When others come behind it
    others = [*deployment.send("orchestrate", 5, guard_model="embed"), *deployment.send("unguarded", 5)]
    # Then they are done while most of the calls before them still wait
    deployment.wait_done(others, 10)
    before = sum(entry["id"] in full for entry in deployment.done())
    measured("calls of the full endpoint done before the others", before)
    assert before <= 10
    deployment.wait_done(full, 20)
    deployment.check_everything_once()
    assert deployment.server.stats()["chat"].most_in_flight == 1
