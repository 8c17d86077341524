"""The server never sees more than the ceiling, and reaches it: counted by the server itself."""

from __future__ import annotations

import pytest

from guard_middleware.testing.model_server import FakeEndpoint

pytestmark = pytest.mark.slow


def test_three_kinds_of_work_reach_the_ceiling_of_one_endpoint_and_never_exceed_it(deploy):
    """Embeddings, enrichment and orchestration from 3 processes of 8 threads share one endpoint's ceiling of 6."""
    # Given one server that all three kinds of work call, and the reserve switched off so that background can fill it
    deployment = deploy(
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
    deployment.wait_done(ids[:300], 60)
    # Then the server itself counted the ceiling as its most, and everything ran once
    stats = deployment.server.stats()["chat"]
    assert stats.most_in_flight == 6


def test_group_budget_caps_both_endpoints_together(deploy):
    """Two endpoints with ceilings of 6 each and a budget of 8: the sum reaches 8 and never exceeds it."""
    deployment = deploy(
        endpoints=[FakeEndpoint(name="chat", base_ms=40), FakeEndpoint(name="embed", base_ms=40)],
        models={
            "chat": {"max_concurrent_requests": 6, "gpu_group": "box", "reserve": 0},
            "embed": {"max_concurrent_requests": 6, "gpu_group": "box", "reserve": 0},
        },
        env={"GPU_CONCURRENCY_BUDGETS": '{"box": 8}', "KG_LLM_PRIORITY_RESERVE_FRACTION": "0.1"},
    )
    deployment.start(processes=3, threads=8)
    ids = [*deployment.send("orchestrate", 150), *deployment.send("embed", 150, guard_priority="orchestration")]
    deployment.wait_done(ids, 60)
    deployment.check_everything_once()
    stats = deployment.server.stats()
    assert stats.host.most_in_flight == 8
    assert stats["chat"].most_in_flight <= 6
    assert stats["embed"].most_in_flight <= 6
