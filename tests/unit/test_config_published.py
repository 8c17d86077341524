"""Ceilings, floors and what one process tells the store."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard_middleware.config import EndpointConfig, GuardSettings, server_ceiling
from guard_middleware.core.values import EndpointSpec, Published, Rules
from guard_middleware.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.upper().startswith(("GUARD_", "MODEL_", "GPU_", "KG_")):
            monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("fields", "ceiling"),
    [
        ({}, 32),
        ({"max_concurrent_requests": 4}, 4),
        ({"max_concurrent_requests": 4, "parallel_instances": 2, "max_parallel_calls": 16}, 4),
        ({"max_concurrent_requests": 100}, 100),
        ({"parallel_instances": 2, "max_parallel_calls": 24}, 48),
        ({"parallel_instances": 2, "max_parallel_calls": 8}, 32),
        ({"parallel_instances": 40}, 40),
        ({"max_parallel_calls": 40}, 40),
        ({"max_parallel_calls": 4}, 32),
    ],
)
def test_ceiling_follows_the_rule(fields: dict[str, Any], ceiling: int) -> None:
    """Explicit wins absolutely, also downwards; else the larger of declared capacity and the usual ceiling."""
    assert server_ceiling("a", GuardSettings(models=[{"id": "a", **fields}])) == ceiling


COUNT = st.none() | st.integers(1, 64)


@given(explicit=COUNT, instances=COUNT, calls=st.none() | st.integers(1, 8), usual=st.integers(1, 512))
def test_ceiling_and_floor_agree_with_ten_lines(
    explicit: int | None, instances: int | None, calls: int | None, usual: int
) -> None:
    """Any combination gives what the rule says, and the floor is never above the ceiling."""
    fields = {"max_concurrent_requests": explicit, "parallel_instances": instances, "max_parallel_calls": calls}
    settings = GuardSettings(models=[{"id": "a", "role": "chat", **fields}], model_max_concurrent_requests=usual)
    declared = 0 if instances is None and calls is None else (instances or 1) * (calls or 1)
    ceiling = explicit if explicit is not None else max(declared, usual)
    (spec,) = settings.published().endpoints
    assert (server_ceiling("a", settings), spec.ceiling, spec.floor) == (ceiling, ceiling, min(declared, ceiling))


def test_ceiling_of_an_unknown_model_is_the_usual_one() -> None:
    """Also with models configured: sizing a pool is no reason to fail."""
    settings = GuardSettings(models=[{"id": "a"}], model_max_concurrent_requests=8)
    assert server_ceiling("b", settings) == 8
    assert server_ceiling("b", GuardSettings()) == 32


def test_ceiling_reads_the_environment_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without settings, the present environment counts."""
    assert server_ceiling("a") == 32
    monkeypatch.setenv("GUARD_MODELS", '{"a": {"max_concurrent_requests": 5}}')
    monkeypatch.setenv("MODEL_MAX_CONCURRENT_REQUESTS", "7")
    assert (server_ceiling("a"), server_ceiling("b")) == (5, 7)


@pytest.mark.parametrize(
    "text", ["[", "null", '[{"id": "a", "max_concurrent_requests": 0}]', '[{"id": "a"}, {"id": "a"}]']
)
def test_ceiling_never_raises(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that start-up refuses counts as none."""
    monkeypatch.setenv("GUARD_MODELS", text)
    with pytest.raises(ConfigurationError):
        GuardSettings()
    assert server_ceiling("a") == 32


@pytest.mark.parametrize("model", ["", "a\nb", "x" * 1000, None, 5, [], b"a"])
def test_ceiling_never_raises_for_what_is_no_id(model: Any) -> None:  # anything is the point
    """Whatever is asked for, there is an answer."""
    assert server_ceiling(model, GuardSettings(models=[{"id": "a", "max_concurrent_requests": 3}])) == 32
    assert server_ceiling(model) == 32


def test_published_says_everything_about_an_endpoint() -> None:
    """Every setting reaches the frozen values that the rule works on, seconds as milliseconds."""
    settings = GuardSettings(
        models=[
            {
                "id": "a",
                "model": "m",
                "role": "Chat",
                "base_url": "http://h:8000",
                "max_concurrent_requests": 10,
                "parallel_instances": 2,
                "max_parallel_calls": 3,
                "gpu_group": "g",
                "reserve": 2,
                "fallback": "b",
            },
            {"id": "b", "model": "m", "base_url": "http://H2:8000"},
        ],
        gpu_concurrency_budgets={"g": 12, "h2": 9},
        config_revision=7,
        model_circuit_breaker=False,
        model_breaker_fail_threshold=3,
        model_breaker_base_cooldown_s=0.25,
        model_breaker_max_cooldown_s=60,
        model_breaker_backoff_factor=1.5,
        lease_s=9.5,
        heartbeat_s=0.7,
        hold_ms=20,
        background_ageing_s=30,
        max_overloads=5,
        kg_llm_priority_reserve_fraction=0.5,
    )
    breaker = {"breaker": False, "fail_threshold": 3, "base_cooldown_ms": 250, "max_cooldown_ms": 60_000}
    assert settings.published() == Published(
        endpoints=(
            EndpointSpec(
                id="a", ceiling=10, floor=6, reserve=2, group="g", fallback="b", backoff_factor=1.5, **breaker
            ),
            EndpointSpec(id="b", ceiling=32, group="h2", backoff_factor=1.5, **breaker),
        ),
        budgets={"g": 12, "h2": 9},
        rules=Rules(
            lease_ms=9_500, heartbeat_ms=700, hold_ms=20, ageing_ms=30_000, max_overloads=5, reserve_fraction=0.5
        ),
        revision=7,
    )


def test_published_defaults_are_those_of_the_rule() -> None:
    """With nothing configured, the settings and the frozen values have the same defaults."""
    assert GuardSettings().published() == Published()
    assert GuardSettings().published(["any"]).endpoints == (EndpointSpec(id="any", ceiling=32),)


def test_published_floor_is_kept_for_reserved_roles_only() -> None:
    """A model without a role, or with another, is not reserved."""
    models = [
        {"id": role or "none", "role": role, "max_parallel_calls": 4} for role in ("chat", "SUPER", "embedding", "")
    ]
    floors = {spec.id: spec.floor for spec in GuardSettings(models=models).published().endpoints}
    assert floors == {"chat": 4, "SUPER": 4, "embedding": 0, "none": 0}
    changed = GuardSettings(models=models, gpu_reserved_roles="Embedding").published().endpoints
    assert {spec.id: spec.floor for spec in changed} == {"chat": 0, "SUPER": 0, "embedding": 4, "none": 0}


def test_published_group_is_empty_without_a_budget() -> None:
    """Only groups with a budget matter to the rule; the host is the group of who names none."""
    models = [
        {"id": "a", "gpu_group": "g", "base_url": "http://h:1"},
        {"id": "b", "base_url": "http://H:2"},
        {"id": "c"},
        {"id": "d", "gpu_group": "other", "base_url": "http://h:3"},
    ]
    settings = GuardSettings(models=models, gpu_concurrency_budgets={"h": 40})
    assert {spec.id: spec.group for spec in settings.published().endpoints} == {"a": "", "b": "h", "c": "", "d": ""}


def test_published_reserve_is_the_models_then_the_shared_one() -> None:
    """A reserve of 0 is a reserve of 0 and hides the shared one; none at all leaves it to the fraction."""
    models = [{"id": "a", "reserve": 0}, {"id": "b", "reserve": 5}, {"id": "c"}]
    shared = GuardSettings(models=models, kg_llm_priority_reserve=3).published().endpoints
    assert [spec.reserve for spec in shared] == [0, 5, 3]
    assert [spec.reserve for spec in GuardSettings(models=models).published().endpoints] == [0, 5, None]
    assert GuardSettings(kg_llm_priority_reserve=0).published(["x"]).endpoints[0].reserve == 0


def test_published_takes_the_ids_in_use() -> None:
    """With no models configured, the ids that a process uses are its endpoints, each once."""
    assert [spec.id for spec in GuardSettings().published(["a", "b", "a"]).endpoints] == ["a", "b"]
    configured = GuardSettings(models=[{"id": "a"}])
    assert [spec.id for spec in configured.published(["a"]).endpoints] == ["a"]
    with pytest.raises(ConfigurationError, match="nearest"):
        configured.published(["b"])


def test_published_budgets_are_a_copy() -> None:
    """Who changes what was published does not change the settings."""
    settings = GuardSettings(gpu_concurrency_budgets={"g": 4})
    settings.published().budgets["g"] = 1
    assert settings.gpu_concurrency_budgets == {"g": 4}


@pytest.mark.parametrize(("seconds", "ms"), [(0.001, 1), (0.0014, 1), (0.1, 100), (1.001, 1001), (86_400, 86_400_000)])
def test_seconds_become_whole_milliseconds(seconds: float, ms: int) -> None:
    """The nearest millisecond, never 0 of them."""
    assert GuardSettings(background_ageing_s=seconds).rules().ageing_ms == ms


def test_declared_capacity_is_zero_if_nothing_is_declared() -> None:
    """One factor alone counts once; no factor is no declaration."""
    assert EndpointConfig(id="a").declared == 0
    assert EndpointConfig(id="a", parallel_instances=3).declared == 3
    assert EndpointConfig(id="a", max_parallel_calls=4).declared == 4
    assert EndpointConfig(id="a", parallel_instances=3, max_parallel_calls=4).declared == 12
