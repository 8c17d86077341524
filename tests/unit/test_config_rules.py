"""What must hold between fields: refused at start-up, all of it in one message; and what is only warned about."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard_middleware.config import GuardSettings
from guard_middleware.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.upper().startswith(("GUARD_", "MODEL_", "GPU_", "KG_")):
            monkeypatch.delenv(variable)


def problems(**values: object) -> list[str]:
    """The lines of the message with which these keywords are refused; none if they are accepted."""
    try:
        GuardSettings(**values)
    except ConfigurationError as error:
        return [line.removeprefix("  - ") for line in str(error).splitlines()[1:]]
    return []


def only_problem(**values: object) -> str:
    """The one line with which these keywords are refused."""
    (line,) = problems(**values)
    return line


# --- durations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lease", "heartbeat"), [(15, 5), (0.3, 0.1), (0.9, 0.3), (6, 2), (0.003, 0.001)])
def test_lease_of_three_heartbeats_is_enough(lease: float, heartbeat: float) -> None:
    """Exactly three is accepted, whatever binary fractions make of it."""
    assert problems(lease_s=lease, heartbeat_s=heartbeat) == []


@pytest.mark.parametrize(("lease", "heartbeat"), [(15, 5.001), (5, 2), (2, 2), (1, 3)])
def test_lease_of_fewer_than_three_heartbeats_is_refused(lease: float, heartbeat: float) -> None:
    """One late heartbeat must not end a lease."""
    line = only_problem(lease_s=lease, heartbeat_s=heartbeat)
    assert line.startswith("GUARD_HEARTBEAT_S must be at most a third of GUARD_LEASE_S")


def test_base_cooldown_above_the_longest_is_refused() -> None:
    """The first cooldown is not longer than the longest."""
    assert problems(model_breaker_base_cooldown_s=30, model_breaker_max_cooldown_s=30) == []
    line = only_problem(model_breaker_base_cooldown_s=31)
    assert line.startswith("MODEL_BREAKER_BASE_COOLDOWN_S must be at most MODEL_BREAKER_MAX_COOLDOWN_S")


# --- bounds of ceilings and costs ----------------------------------------------------------------------------------


def test_usual_ceiling_above_the_bound_is_refused() -> None:
    """MODEL_MAX_CONCURRENCY bounds the ceiling of endpoints that declare nothing."""
    assert problems(model_max_concurrency=32) == []
    assert only_problem(model_max_concurrency=31).startswith(
        "MODEL_MAX_CONCURRENT_REQUESTS is above MODEL_MAX_CONCURRENCY (31)"
    )


def test_ceiling_above_the_bound_is_refused() -> None:
    """MODEL_MAX_CONCURRENCY bounds every explicit ceiling."""
    assert problems(models=[{"id": "a", "max_concurrent_requests": 512}]) == []
    line = only_problem(models=[{"id": "a"}, {"id": "b", "max_concurrent_requests": 513}])
    assert line.startswith("GUARD_MODELS[1].max_concurrent_requests is above MODEL_MAX_CONCURRENCY (512)")


def test_declared_capacity_above_the_bound_is_refused() -> None:
    """MODEL_MAX_CONCURRENCY bounds the product, unless an explicit ceiling caps it."""
    model = {"id": "a", "parallel_instances": 2, "max_parallel_calls": 300}
    assert only_problem(models=[model]).startswith(
        "GUARD_MODELS[0].max_parallel_calls makes a declared capacity of 600, above MODEL_MAX_CONCURRENCY (512)"
    )
    assert only_problem(models=[{"id": "a", "parallel_instances": 600}]).startswith(
        "GUARD_MODELS[0].parallel_instances makes a declared capacity of 600"
    )
    assert problems(models=[{**model, "max_concurrent_requests": 4}]) == []


@pytest.mark.parametrize("cost", [1, 2, 512])
def test_cost_within_the_bound_is_accepted(cost: int) -> None:
    """A call may cost from one permit to MODEL_MAX_CONCURRENCY."""
    assert GuardSettings().check_cost(cost) == cost


@pytest.mark.parametrize("cost", [0, -1, True, False, 1.0, 4.5, "4", None, 513, 1e12, float("nan")])
def test_cost_out_of_the_bound_is_refused(cost: object) -> None:
    """Everything else is refused, booleans and digits in quotes included."""
    with pytest.raises(ConfigurationError, match=re.escape("from 1 to 512 (MODEL_MAX_CONCURRENCY)")):
        GuardSettings().check_cost(cost)


# --- reserves ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ceiling", "reserve"), [(4, 4), (4, 5), (1, 1)])
def test_reserve_that_stops_background_for_good_is_refused(ceiling: int, reserve: int) -> None:
    """A reserve as large as the ceiling leaves background work nothing, ever."""
    line = only_problem(models=[{"id": "a", "max_concurrent_requests": ceiling, "reserve": reserve}])
    assert line.startswith(f"GUARD_MODELS[0].reserve must be below the endpoint's ceiling of {ceiling}")
    assert problems(models=[{"id": "a", "max_concurrent_requests": ceiling, "reserve": ceiling - 1}]) == []


def test_reserve_is_measured_against_the_effective_ceiling() -> None:
    """The ceiling may be the declared capacity or the usual one."""
    assert "ceiling of 32" in only_problem(models=[{"id": "a", "reserve": 32}])
    assert problems(models=[{"id": "a", "reserve": 32, "max_parallel_calls": 33}]) == []


def test_shared_reserve_is_measured_against_each_ceiling() -> None:
    """KG_LLM_PRIORITY_RESERVE applies where a model has no reserve of its own."""
    models = [{"id": "a", "max_concurrent_requests": 4}, {"id": "b", "max_concurrent_requests": 4, "reserve": 1}]
    line = only_problem(models=models, kg_llm_priority_reserve=4)
    assert line.startswith("KG_LLM_PRIORITY_RESERVE must be below the ceiling of GUARD_MODELS[0], which is 4")
    assert problems(models=models, kg_llm_priority_reserve=3) == []
    assert problems(models=models[1:], kg_llm_priority_reserve=4) == []


def test_shared_reserve_without_models_is_measured_against_the_usual_ceiling() -> None:
    """With no models configured, every id has the usual ceiling."""
    line = only_problem(kg_llm_priority_reserve=32)
    assert line.startswith("KG_LLM_PRIORITY_RESERVE must be below MODEL_MAX_CONCURRENT_REQUESTS (32)")
    assert problems(kg_llm_priority_reserve=31) == []


# --- the same thing twice ------------------------------------------------------------------------------------------


def test_duplicate_ids_are_refused() -> None:
    """Two endpoints of one id would share one state; case makes another id."""
    line = only_problem(models=[{"id": "a"}, {"id": "b"}, {"id": "a"}])
    assert line.startswith("GUARD_MODELS[2].id is the same as that of GUARD_MODELS[0]")
    assert problems(models=[{"id": "X"}, {"id": "x"}]) == []


@pytest.mark.parametrize("spelling", ["http://h:8000", "http://h:8000/v1/", "HTTP://H:8000/v1", "http://u:S3cr@h:8000"])
def test_same_server_with_the_same_model_is_refused(spelling: str) -> None:
    """Two spellings of one server would give it two ceilings, whatever their groups."""
    models = [
        {"id": "a", "model": "m", "base_url": "http://h:8000/v1"},
        {"id": "b", "model": "m", "base_url": spelling, "gpu_group": "other"},
    ]
    line = only_problem(models=models)
    assert line.startswith("GUARD_MODELS[1].base_url is the same server, with the same model, as that of GUARD_MODELS")
    assert "S3cr" not in line


def test_same_server_with_other_models_is_fine() -> None:
    """One server may serve several models, and servers that are not named are not the same."""
    assert problems(models=[{"id": "a", "base_url": "http://h"}, {"id": "b", "base_url": "http://h"}]) == []
    assert problems(models=[{"id": "a", "model": "m"}, {"id": "b", "model": "m"}]) == []


# --- fallbacks -----------------------------------------------------------------------------------------------------


def model(name: str, fallback: str = "", **fields: object) -> dict[str, object]:
    """A copy of model m."""
    return {"id": name, "model": "m", "fallback": fallback, **fields}


def test_fallback_to_a_copy_of_the_same_model_is_fine() -> None:
    """A and B may both fall back to C, which has none."""
    assert problems(models=[model("a", "c"), model("b", "c"), model("c")]) == []


def test_fallback_that_is_not_configured_is_refused_with_the_nearest() -> None:
    """An unknown id is named, with the nearest that exists."""
    line = only_problem(models=[model("embed-a", "embed-x"), model("embed-b")])
    assert line.startswith(
        'GUARD_MODELS[0].fallback names "embed-x", which is not configured; the nearest id is "embed'
    )
    assert "leave it out" in only_problem(models=[model("a", "b")])


def test_fallback_written_as_a_url_is_not_repeated() -> None:
    """Who writes a URL there does not find its password in the log."""
    line = only_problem(models=[model("a", "http://h/v1?key=S3cr"), model("b")])
    assert 'names "http://h/v1?***"' in line


@pytest.mark.parametrize(
    ("models", "ring"),
    [
        ([model("a", "a")], '"a" -> "a"'),
        ([model("a", "b"), model("b", "a")], '"a" -> "b" -> "a"'),
        ([model("x"), model("a", "b"), model("b", "c"), model("c", "a")], '"a" -> "b" -> "c" -> "a"'),
    ],
)
def test_ring_of_fallbacks_is_refused_once_and_named(models: list[dict[str, object]], ring: str) -> None:
    """A ring is one problem, however many are in it."""
    assert f".fallback makes a ring, {ring}: break it" in only_problem(models=models)


def test_chain_of_fallbacks_is_refused() -> None:
    """One level only: a fallback has none itself, also if it leads into a ring."""
    line = only_problem(models=[model("a", "b"), model("b", "c"), model("c")])
    assert line.startswith('GUARD_MODELS[0].fallback names "b", which has a fallback itself')
    lines = problems(models=[model("a", "b"), model("b", "c"), model("c", "b")])
    assert [line.partition(" ")[0] for line in lines] == ["GUARD_MODELS[0].fallback", "GUARD_MODELS[1].fallback"]
    assert "has a fallback itself" in lines[0]
    assert 'a ring, "b" -> "c" -> "b"' in lines[1]


def test_fallback_to_another_model_is_refused_unless_allowed() -> None:
    """Embeddings of two models never meet in one index by accident."""
    other = {"id": "embed-b", "model": "m2"}
    line = only_problem(models=[model("embed-a", "embed-b"), other])
    assert line.startswith('GUARD_MODELS[0].fallback names "embed-b", which serves another model')
    assert problems(models=[model("embed-a", "embed-b", fallback_other_model=True), other]) == []
    assert problems(models=[model("embed-a", "embed-b"), {"id": "embed-b", "model": "m"}]) == []


@given(st.lists(st.one_of(st.just(""), st.sampled_from("abcdefx")), min_size=1, max_size=6))
def test_fallbacks_are_accepted_only_if_one_step_ends(targets: list[str]) -> None:
    """Among any fallbacks, accepted are exactly those whose every step leads to one that leads nowhere."""
    ids = "abcdef"[: len(targets)]
    following = dict(zip(ids, targets, strict=True))
    fine = all(not target or following.get(target) == "" for target in targets)
    assert (problems(models=[model(name, target) for name, target in following.items()]) == []) is fine


# --- budgets -------------------------------------------------------------------------------------------------------


def reserved(name: str, floor: int, **fields: object) -> dict[str, object]:
    """A model in a reserved role with this floor."""
    return {"id": name, "role": "chat", "max_parallel_calls": floor, "gpu_group": "g", **fields}


PLAIN = {"id": "plain", "role": "embedding", "max_parallel_calls": 8, "gpu_group": "g"}


def test_budget_below_the_floors_is_refused() -> None:
    """What is set aside must fit the budget."""
    models = [reserved("a", 4), reserved("b", 6)]
    assert problems(models=models, gpu_concurrency_budgets={"g": 10}) == []
    line = only_problem(models=models, gpu_concurrency_budgets={"g": 9})
    assert line.startswith("GPU_CONCURRENCY_BUDGETS.g is 9, less than the 10 calls that are set aside")


def test_budget_without_room_for_the_others_is_refused() -> None:
    """Floors that take the whole budget would starve the members that have none."""
    models = [reserved("a", 4), reserved("b", 6), PLAIN]
    assert problems(models=models, gpu_concurrency_budgets={"g": 11}) == []
    line = only_problem(models=models, gpu_concurrency_budgets={"g": 10})
    assert 'leaves no room for "plain"' in line
    undeclared = {"id": "u", "role": "chat", "gpu_group": "g"}
    assert 'no room for "u"' in only_problem(models=[reserved("a", 4), undeclared], gpu_concurrency_budgets={"g": 4})


def test_budget_counts_floors_as_they_are() -> None:
    """An explicit ceiling caps the floor; roles that are not reserved, and other groups, have none."""
    assert problems(models=[reserved("a", 40, max_concurrent_requests=4)], gpu_concurrency_budgets={"g": 4}) == []
    assert problems(models=[PLAIN, {**PLAIN, "id": "p2"}], gpu_concurrency_budgets={"g": 1}) == []
    assert problems(models=[reserved("a", 40, gpu_group="other")], gpu_concurrency_budgets={"g": 1}) == []
    assert problems(models=[reserved("a", 40)], gpu_concurrency_budgets={"g": 1}, gpu_reserved_roles=[]) == []


def test_budget_group_defaults_to_the_host() -> None:
    """Endpoints of one host share it, whatever their ports."""
    models = [
        reserved("a", 4, gpu_group="", base_url="http://GB10:8001/v1"),
        reserved("b", 6, gpu_group="", base_url="http://u:p@gb10:8002"),
    ]
    assert "less than the 10" in only_problem(models=models, gpu_concurrency_budgets={"gb10": 9})


@given(
    floors=st.lists(st.integers(1, 9), max_size=4),
    plain=st.booleans(),
    budget=st.integers(1, 30),
)
def test_budget_is_accepted_exactly_if_everybody_can_run(floors: list[int], budget: int, *, plain: bool) -> None:
    """Accepted if and only if the floors fit and leave a call for a member without one."""
    models = [reserved(f"r{n}", floor) for n, floor in enumerate(floors)] + ([PLAIN] if plain else [])
    fits = sum(floors) + (1 if plain else 0) <= budget
    assert (problems(models=models, gpu_concurrency_budgets={"g": budget}) == []) is fits


# --- all in one message --------------------------------------------------------------------------------------------


def test_everything_that_is_wrong_stands_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fields, members, rules between them and stray variables are told at once, each by its path."""
    monkeypatch.setenv("GUARD_MODLES", "x")
    monkeypatch.setenv("GUARD_LEASE_S", "nan")
    lines = problems(
        cieling=3,
        heartbeat_s=9,
        model_breaker_base_cooldown_s=40,
        redis_url="http://u:S3cr@h",
        gpu_concurrency_budgets={"gb10": 0, "g": 3},
        models=[
            {"id": "a", "max_concurrent_requests": 0},
            {"id": "a"},
            reserved("b", 4),
            model("c", "nobody"),
            model("d", "a"),
            {"id": "e", "roel": "chat", "reserve": 99},
            {"id": "f", "reserve": 99},
        ],
    )
    assert sorted(line.partition(" ")[0] for line in lines) == sorted(
        [
            "GuardSettings.cieling",
            "GUARD_MODLES",
            "GUARD_LEASE_S",
            "GUARD_REDIS_URL",
            "MODEL_BREAKER_BASE_COOLDOWN_S",
            "GPU_CONCURRENCY_BUDGETS.gb10",
            "GPU_CONCURRENCY_BUDGETS.g",
            "GUARD_MODELS[0].max_concurrent_requests",
            "GUARD_MODELS[1].id",
            "GUARD_MODELS[3].fallback",
            "GUARD_MODELS[4].fallback",
            "GUARD_MODELS[5].roel",
            "GUARD_MODELS[6].reserve",
        ]
    )


def test_rules_do_not_rely_on_what_was_refused() -> None:
    """A refused value does not bring up a second problem that its default would have."""
    assert only_problem(lease_s="x", heartbeat_s=9).startswith("GUARD_LEASE_S ")
    assert only_problem(model_breaker_max_cooldown_s=0, model_breaker_base_cooldown_s=40).startswith(
        "MODEL_BREAKER_MAX"
    )
    assert only_problem(model_max_concurrency=0, model_max_concurrent_requests=600).startswith("MODEL_MAX_CONCURRENCY ")
    assert only_problem(model_max_concurrent_requests=0, models=[{"id": "a", "reserve": 40}]).startswith("MODEL_MAX_")
    assert only_problem(gpu_reserved_roles=5, models=[reserved("a", 4)], gpu_concurrency_budgets={"g": 1}).startswith(
        "GPU_RESERVED_ROLES "
    )
    assert only_problem(models="[", kg_llm_priority_reserve=40).startswith("GUARD_MODELS ")
    assert only_problem(models=[{"id": "a", "reserve": -1}, model("b", "a", fallback_other_model=True)]).startswith(
        "GUARD_MODELS[0].reserve"
    )


# --- warnings ------------------------------------------------------------------------------------------------------


def warnings(**values: object) -> list[str]:
    """What these keywords are warned about."""
    return GuardSettings(**values).warnings()


def test_ordinary_configuration_is_not_warned_about() -> None:
    """Silence is the rule."""
    assert warnings() == []
    assert warnings(models=[reserved("a", 4), PLAIN], gpu_concurrency_budgets={"g": 30}) == []


def test_ceilings_far_above_their_budget_are_warned_about() -> None:
    """More than three times the budget looks like a mistake; exactly three does not."""
    models = [{"id": name, "gpu_group": "g", "max_concurrent_requests": 6} for name in "ab"]
    assert warnings(models=models, gpu_concurrency_budgets={"g": 4}) == []
    (line,) = warnings(models=models, gpu_concurrency_budgets={"g": 3})
    assert line.startswith("GPU_CONCURRENCY_BUDGETS.g is 3, but the ceilings of its endpoints sum to 12")


def test_one_server_in_two_groups_is_warned_about() -> None:
    """One server is on one accelerator, however its address is spelled."""
    models = [
        {"id": "a", "base_url": "http://h:8000/v1", "gpu_group": "g"},
        {"id": "b", "base_url": "HTTP://u:S3cr@H:8000/", "gpu_group": "k"},
    ]
    (line,) = warnings(models=models, gpu_concurrency_budgets={"g": 30, "k": 30})
    assert line == '"a" and "b" are on one server but in different GPU groups'


def test_group_and_budget_that_miss_each_other_are_warned_about() -> None:
    """A misspelled group has no budget, which is what the budget was meant to prevent."""
    lines = warnings(models=[{"id": "a", "gpu_group": "gb-10"}], gpu_concurrency_budgets={"gb10": 30})
    unused = "GPU_CONCURRENCY_BUDGETS.gb10 caps no endpoint, as no configured model is in that GPU group"
    assert lines == [
        f'{unused}; the nearest group in use is "gb-10"',
        'gpu_group "gb-10" of "a" has no entry in GPU_CONCURRENCY_BUDGETS: it has no budget',
    ]


def test_budget_of_a_group_without_a_model_is_warned_about_only_if_there_are_models() -> None:
    """The host is the group of a model that names none; without models, who is in a group is not known here."""
    hosts = [{"id": "a", "base_url": "http://gb10:8001/v1"}]
    assert warnings(models=hosts, gpu_concurrency_budgets={"gb10": 30}) == []
    assert warnings(gpu_concurrency_budgets={"bg10": 30}) == []
    (line,) = warnings(models=hosts, gpu_concurrency_budgets={"gb10": 30, "bg10": 30})
    assert line.startswith("GPU_CONCURRENCY_BUDGETS.bg10 caps no endpoint")
    assert line.endswith('the nearest group in use is "gb10"')
    (line,) = warnings(models=[{"id": "a"}], gpu_concurrency_budgets={"gb10": 30})
    assert line.endswith("no configured model is in that GPU group")


def test_role_that_resembles_a_reserved_one_is_warned_about() -> None:
    """A misspelled role loses its floor without a word; another role does not resemble one."""
    (line,) = warnings(models=[{"id": "a", "role": "genrator"}, {"id": "b", "role": "Embedding"}])
    assert line == 'role "genrator" of "a" is not reserved; did you mean "generator"?'


def test_slow_store_and_missing_controller_are_warned_about() -> None:
    """A time-out as long as a lease, and a controller that is asked for and not there."""
    assert "GUARD_STORE_TIMEOUT_S" in warnings(lease_s=2, heartbeat_s=0.5)[0]
    assert "no controller yet" in warnings(kg_adaptive_concurrency=True)[0]
