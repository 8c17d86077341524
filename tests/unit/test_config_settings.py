"""The settings: names, defaults, environment, and one meaning for each value."""

from __future__ import annotations

import json
import math
import os

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as with_settings
from hypothesis import strategies as st
from pydantic import SecretStr

from guard_middleware.config import EndpointConfig, GuardSettings
from guard_middleware.errors import ConfigurationError

PREFIXES = ("GUARD_", "MODEL_", "GPU_", "KG_")
DEFAULTS: dict[str, tuple[str, object]] = {
    "GUARD_BACKGROUND_AGEING_S": ("background_ageing_s", 60.0),
    "GUARD_CONFIG_REVISION": ("config_revision", 0),
    "GUARD_FIRST_START_HOLD_S": ("first_start_hold_s", None),
    "GUARD_HEARTBEAT_S": ("heartbeat_s", 2.0),
    "GUARD_HOLD_MS": ("hold_ms", 50),
    "GUARD_IGNORE_VARIABLES": ("ignore_variables", ()),
    "GUARD_LEASE_S": ("lease_s", 15.0),
    "GUARD_MAX_OVERLOADS": ("max_overloads", 3),
    "GUARD_MODELS": ("models", ()),
    "GUARD_MODELS_FILE": ("models_file", None),
    "GUARD_NAMESPACE": ("namespace", "default"),
    "GUARD_STORE_TIMEOUT_S": ("store_timeout_s", 2.0),
    "GUARD_UNKNOWN_SERVERS": ("unknown_servers", "pass"),
    "GPU_CONCURRENCY_BUDGETS": ("gpu_concurrency_budgets", {}),
    "GPU_RESERVED_ROLES": ("gpu_reserved_roles", ("chat", "generator", "default", "lite", "super")),
    "KG_ADAPTIVE_CONCURRENCY": ("kg_adaptive_concurrency", False),
    "KG_LLM_PRIORITY_RESERVE": ("kg_llm_priority_reserve", None),
    "KG_LLM_PRIORITY_RESERVE_FRACTION": ("kg_llm_priority_reserve_fraction", 0.34),
    "MODEL_BREAKER_BACKOFF_FACTOR": ("model_breaker_backoff_factor", 2.0),
    "MODEL_BREAKER_BASE_COOLDOWN_S": ("model_breaker_base_cooldown_s", 0.5),
    "MODEL_BREAKER_FAIL_THRESHOLD": ("model_breaker_fail_threshold", 1),
    "MODEL_BREAKER_MAX_COOLDOWN_S": ("model_breaker_max_cooldown_s", 30.0),
    "MODEL_CIRCUIT_BREAKER": ("model_circuit_breaker", True),
    "MODEL_LATENCY_GRADIENT_TARGET": ("model_latency_gradient_target", 0.9),
    "MODEL_MAX_CONCURRENCY": ("model_max_concurrency", 512),
    "MODEL_MAX_CONCURRENT_REQUESTS": ("model_max_concurrent_requests", 32),
}
WHOLE = {
    "GUARD_CONFIG_REVISION": 0,
    "GUARD_HOLD_MS": 0,
    "GUARD_MAX_OVERLOADS": 1,
    "KG_LLM_PRIORITY_RESERVE": 0,
    "MODEL_BREAKER_FAIL_THRESHOLD": 1,
    "MODEL_MAX_CONCURRENCY": 1,
    "MODEL_MAX_CONCURRENT_REQUESTS": 1,
}
SECONDS = {
    "GUARD_BACKGROUND_AGEING_S",
    "GUARD_FIRST_START_HOLD_S",
    "GUARD_HEARTBEAT_S",
    "GUARD_LEASE_S",
    "GUARD_STORE_TIMEOUT_S",
    "MODEL_BREAKER_BASE_COOLDOWN_S",
    "MODEL_BREAKER_MAX_COOLDOWN_S",
}


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.upper().startswith(PREFIXES):
            monkeypatch.delenv(variable)


def refusal(**values: object) -> str:
    """The message with which these keywords are refused."""
    with pytest.raises(ConfigurationError) as caught:
        GuardSettings(**values)
    return str(caught.value)


def test_defaults_are_the_documented_ones() -> None:
    """With nothing set, every setting has the default that its documentation states."""
    settings = GuardSettings()
    assert {field: getattr(settings, field) for field, _ in DEFAULTS.values()} == dict(DEFAULTS.values())
    assert settings.redis_url.get_secret_value() == "redis://127.0.0.1:6379/0"
    assert set(GuardSettings.model_fields) == {"redis_url", *(field for field, _ in DEFAULTS.values())}


@pytest.mark.parametrize("variable", DEFAULTS)
def test_keyword_is_the_variable_in_lower_case_without_guard(variable: str) -> None:
    """One rule leads from a variable to its name in Python."""
    field = DEFAULTS[variable][0]
    assert field == variable.lower().removeprefix("guard_")
    assert GuardSettings.model_fields[field].validation_alias == variable


@pytest.mark.parametrize("variable", [*DEFAULTS, "GUARD_REDIS_URL"])
@pytest.mark.parametrize("blank", ["", " ", "\t\n"])
def test_blank_variable_counts_as_not_set(variable: str, blank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty or blank variable leaves the default in force."""
    unset = GuardSettings()
    monkeypatch.setenv(variable, blank)
    assert GuardSettings() == unset


def test_environment_is_read_and_keywords_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every variable reaches its setting; a keyword takes its place."""
    given_values = {
        "GUARD_CONFIG_REVISION": "7",
        "GUARD_FIRST_START_HOLD_S": "0",
        "GUARD_HEARTBEAT_S": " 0.5 ",
        "GUARD_HOLD_MS": "0",
        "GUARD_LEASE_S": "1.5",
        "GUARD_MODELS": '[{"id": "a"}]',
        "GUARD_NAMESPACE": "blue",
        "GUARD_UNKNOWN_SERVERS": "Refuse",
        "GPU_CONCURRENCY_BUDGETS": '{"gb10": 4}',
        "GPU_RESERVED_ROLES": "chat, Lite ,",
        "KG_ADAPTIVE_CONCURRENCY": "on",
        "KG_LLM_PRIORITY_RESERVE": "3",
        "KG_LLM_PRIORITY_RESERVE_FRACTION": "0",
        "MODEL_BREAKER_BACKOFF_FACTOR": "1",
        "MODEL_BREAKER_FAIL_THRESHOLD": "4",
        "MODEL_CIRCUIT_BREAKER": "False",
        "MODEL_MAX_CONCURRENCY": "64",
        "MODEL_MAX_CONCURRENT_REQUESTS": "8",
    }
    for variable, value in given_values.items():
        monkeypatch.setenv(variable, value)
    settings = GuardSettings(namespace="green")
    assert settings.namespace == "green"
    assert (settings.config_revision, settings.hold_ms, settings.kg_llm_priority_reserve) == (7, 0, 3)
    assert (settings.lease_s, settings.heartbeat_s, settings.first_start_hold_ms) == (1.5, 0.5, 0)
    assert settings.models == (EndpointConfig(id="a"),)
    assert settings.unknown_servers == "refuse"
    assert settings.gpu_concurrency_budgets == {"gb10": 4}
    assert settings.gpu_reserved_roles == ("chat", "lite")
    assert (settings.model_circuit_breaker, settings.kg_adaptive_concurrency) == (False, True)
    assert (settings.kg_llm_priority_reserve_fraction, settings.model_breaker_backoff_factor) == (0, 1)
    assert (settings.model_max_concurrent_requests, settings.model_breaker_fail_threshold) == (8, 4)


def test_first_start_hold_is_one_heartbeat_unless_set() -> None:
    """Not set is one heartbeat; 0 is none at all."""
    assert GuardSettings(heartbeat_s=1.5).first_start_hold_ms == 1500
    assert GuardSettings(first_start_hold_s=0).first_start_hold_ms == 0
    assert GuardSettings(first_start_hold_s=0.25).first_start_hold_ms == 250


def test_settings_cannot_be_changed_afterwards() -> None:
    """What was checked at start-up stays what was checked."""
    with pytest.raises(AttributeError, match="frozen"):
        GuardSettings().lease_s = 1
    with pytest.raises(AttributeError, match="frozen"):
        EndpointConfig(id="a").reserve = 1  # type: ignore[misc]  # that it is frozen is what is tested


BAD_WHOLE = ["-1", "4.5", "4.0", "true", "1e3", "1e12", "NaN", "inf", "1_0", "0x10", "four", "9" * 30, "³", "null"]


@pytest.mark.parametrize("variable", sorted(WHOLE))
@pytest.mark.parametrize("value", BAD_WHOLE)
def test_whole_number_variable_refuses_everything_else(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative, fractional, boolean, huge and non-numbers are refused, naming the variable."""
    monkeypatch.setenv(variable, value)
    assert f"- {variable} must be a whole number from {WHOLE[variable]} to " in refusal()


@pytest.mark.parametrize("variable", sorted(WHOLE))
@pytest.mark.parametrize(
    "value", [-1, 4.5, 4.0, True, False, 1e12, math.nan, math.inf, 10**12 * 10**12, [], {}, b"4", "x"]
)
def test_whole_number_keyword_refuses_everything_else(variable: str, value: object) -> None:
    """The same holds for keywords, where a boolean would pass for 1."""
    assert f"- {variable} must be a whole number from " in refusal(**{DEFAULTS[variable][0]: value})


@pytest.mark.parametrize(("variable", "least"), WHOLE.items())
def test_zero_has_one_meaning(variable: str, least: int) -> None:
    """0 is taken as 0 where that is a number of things, and refused elsewhere; it is never the default."""
    field = DEFAULTS[variable][0]
    if least == 0:
        assert getattr(GuardSettings(**{field: 0}), field) == 0
    else:
        assert f"{variable} must be a whole number from 1 to" in refusal(**{field: 0})


@pytest.mark.parametrize("variable", sorted(WHOLE))
@pytest.mark.parametrize("value", [1, "1", " 1 ", "+1", "01"])
def test_one_is_one_also_in_quotes(variable: str, value: object) -> None:
    """The least number that every count accepts, as a number and as digits."""
    usual = 1 if variable == "MODEL_MAX_CONCURRENCY" else 2
    values = {"model_max_concurrent_requests": usual, DEFAULTS[variable][0]: value}
    assert getattr(GuardSettings(**values), DEFAULTS[variable][0]) == 1


def test_zero_ceiling_is_told_how_to_pause() -> None:
    """Whoever writes 0 to stop an endpoint learns the command for it."""
    assert "guard_middleware pause" in refusal(model_max_concurrent_requests=0)
    assert "guard_middleware pause" in refusal(models=[{"id": "a", "max_concurrent_requests": 0}])


@pytest.mark.parametrize("variable", sorted(SECONDS))
@pytest.mark.parametrize("value", ["-1", "-0.5", "true", "NaN", "inf", "1e12", "2s", "1_0", "null"])
def test_duration_refuses_what_is_none(variable: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative, endless and unreadable durations are refused, naming the variable."""
    monkeypatch.setenv(variable, value)
    assert f"- {variable} must be a number from " in refusal()


@pytest.mark.parametrize("variable", sorted(SECONDS))
@pytest.mark.parametrize("value", [True, math.nan, math.inf, -math.inf, -1, 10**400, [], "x"])
def test_duration_keyword_refuses_what_is_none(variable: str, value: object) -> None:
    """The same holds for keywords."""
    assert f"- {variable} must be a number from " in refusal(**{DEFAULTS[variable][0]: value})


@pytest.mark.parametrize("variable", sorted(SECONDS - {"GUARD_FIRST_START_HOLD_S"}))
def test_duration_of_zero_is_refused(variable: str) -> None:
    """No lease, cooldown, ageing or time-out of no length."""
    assert f"{variable} must be a number from 0.001" in refusal(**{DEFAULTS[variable][0]: 0})


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("kg_llm_priority_reserve_fraction", [0, 0.34, 0.999], [-0.01, 1, 1.5]),
        ("model_breaker_backoff_factor", [1, 2.5, 100], [0, 0.99, -2, 101]),
        ("model_latency_gradient_target", [0.001, 0.9, 1], [0, 1.01, -1]),
    ],
)
def test_ratio_stays_in_its_range(field: str, good: list[float], bad: list[float]) -> None:
    """Fraction in [0, 1), factor at least 1, gradient in (0, 1]."""
    for value in good:
        assert getattr(GuardSettings(**{field: value}), field) == value
    for value in bad:
        assert f"{field.upper()} must be a number from" in refusal(**{field: value})


@pytest.mark.parametrize("word", ["true", "TRUE", "yes", "on", "1", True])
def test_switch_reads_words_for_yes(word: object) -> None:
    """The usual words switch on."""
    assert GuardSettings(kg_adaptive_concurrency=word).kg_adaptive_concurrency is True


@pytest.mark.parametrize("word", ["false", "No", "off", "0", False])
def test_switch_reads_words_for_no(word: object) -> None:
    """The usual words switch off."""
    assert GuardSettings(model_circuit_breaker=word).model_circuit_breaker is False


@pytest.mark.parametrize("word", ["enabled", "2", 1, 0, None, "tru", []])
def test_switch_refuses_what_is_neither(word: object) -> None:
    """A misspelled switch is not silently off or on."""
    assert "MODEL_CIRCUIT_BREAKER must be true or false" in refusal(model_circuit_breaker=word)


@pytest.mark.parametrize("word", ["passed", "block", "true", True, None, 0, []])
def test_unknown_servers_pass_or_are_refused(word: object) -> None:
    """Whoever wants unknown servers refused does not get them passed for a slip of the pen."""
    assert "GUARD_UNKNOWN_SERVERS must be pass or refuse" in refusal(unknown_servers=word)
    assert GuardSettings(unknown_servers=" PASS ").unknown_servers == "pass"


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("GUARD_MODLES", "GUARD_MODELS:"),
        ("GUARD_LEASE", "GUARD_LEASE_S:"),
        ("guard_lease_s", "GUARD_LEASE_S:"),
        ("Guard_Lease_S", "GUARD_LEASE_S:"),
        ("GUARD_MODEL_CIRCUIT_BREAKER", "MODEL_CIRCUIT_BREAKER:"),
    ],
)
def test_unknown_guard_variable_is_refused_with_the_nearest(
    variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever begins with GUARD_ and is not ours would be ignored without a word, so it is refused."""
    monkeypatch.setenv(variable, "S3cr")
    message = refusal()
    assert f"- {variable} is a variable that the guard does not know; the nearest is {nearest}" in message
    assert "S3cr" not in message


@pytest.mark.parametrize("variable", ["GUARD_X", "GUARD_DOG", "guard_"])
def test_unknown_guard_variable_that_resembles_none_names_none(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nearest name that is not near at all would send people the wrong way."""
    monkeypatch.setenv(variable, "S3cr")
    message = refusal()
    assert f"- {variable} is a variable that the guard does not know: remove it, or name it in" in message
    assert "nearest" not in message


@pytest.mark.parametrize(
    ("variable", "nearest"),
    [
        ("MODEL_BREAKER_TRESHOLD", "MODEL_BREAKER_FAIL_THRESHOLD"),
        ("MODEL_MAX_CONCURRENT_REQUEST", "MODEL_MAX_CONCURRENT_REQUESTS"),
        ("MODEL_CIRCUITBREAKER", "MODEL_CIRCUIT_BREAKER"),
        ("GPU_CONCURENCY_BUDGETS", "GPU_CONCURRENCY_BUDGETS"),
        ("KG_LLM_PRIORITY_RESERV", "KG_LLM_PRIORITY_RESERVE"),
        ("model_max_concurrency", "MODEL_MAX_CONCURRENCY"),
    ],
)
def test_slip_in_a_shared_prefix_is_refused(variable: str, nearest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A near miss under MODEL_, GPU_ or KG_ is refused."""
    monkeypatch.setenv(variable, "3")
    assert f"- {variable} is a variable that the guard does not know; the nearest is {nearest}:" in refusal()


@pytest.mark.parametrize("variable", ["MODEL_NAME", "MODEL_PATH", "MODEL_MAX_LENGTH", "GPU_COUNT", "KG_URL", "LEASE_S"])
def test_variables_of_other_programs_are_left_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not resemble ours belongs to somebody else."""
    monkeypatch.setenv(variable, "x")
    GuardSettings()


@pytest.mark.parametrize(
    "variable",
    ["GUARD_PORT", "GUARD_SERVICE_HOST", "GUARD_REDIS_SERVICE_PORT_TCP", "GUARD_PORT_6379_TCP_ADDR", "GUARD_A_PORT"],
)
def test_service_links_of_kubernetes_are_left_alone(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service that is named guard puts its variables into every container."""
    monkeypatch.setenv(variable, "tcp://10.0.0.1:6379")
    GuardSettings()


def test_variable_of_an_api_key_may_begin_with_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable that a model names for its key is known, and its value is not read."""
    monkeypatch.setenv("GUARD_QWEN_KEY", "S3cr")
    assert "S3cr" not in repr(GuardSettings(models=[{"id": "a", "api_key_env": "GUARD_QWEN_KEY"}]))
    assert "GUARD_QWEN_KEY is a variable that the guard does not know" in refusal(models=[{"id": "a"}])


def test_ignored_variables_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who cannot rename another program's variable names it."""
    monkeypatch.setenv("MODEL_MIN_CONCURRENCY", "3")
    assert "MODEL_MIN_CONCURRENCY is a variable" in refusal()
    monkeypatch.setenv("GUARD_IGNORE_VARIABLES", "MODEL_MIN_CONCURRENCY, OTHER")
    assert GuardSettings().ignore_variables == ("MODEL_MIN_CONCURRENCY", "OTHER")


@pytest.mark.parametrize(
    ("keyword", "nearest"),
    [
        ("leese_s", "lease_s"),
        ("cieling", "model_max_concurrent_requests"),
        ("max_concurrent_requests", "model_max_concurrent_requests"),
        ("Namespace", "namespace"),
        ("_env_file", "models_file"),
        ("guard_lease_s", "lease_s"),
    ],
)
def test_unknown_keyword_is_refused_with_the_nearest(keyword: str, nearest: str) -> None:
    """A misspelled or misplaced keyword is refused, also one that pydantic-settings would swallow."""
    assert f"- GuardSettings.{keyword} is not a setting; the nearest is {nearest}" in refusal(**{keyword: 1})


@pytest.mark.parametrize("namespace", ["a{b", "a}", " a", "a ", "a\nb", "x" * 201, 5, ""])
def test_namespace_that_cannot_stand_in_a_key_is_refused(namespace: object) -> None:
    """Braces would break the tag that keeps all keys of a namespace together."""
    assert "- GUARD_NAMESPACE " in refusal(namespace=namespace)


@pytest.mark.parametrize("value", ["a,b", '["chat", "Super"]', ["chat", "super"], ("chat",), {"chat"}])
def test_reserved_roles_are_a_list_of_any_kind(value: object) -> None:
    """A comma list, JSON and Python's lists all work; case does not matter."""
    roles = GuardSettings(gpu_reserved_roles=value).gpu_reserved_roles
    assert roles in {("a", "b"), ("chat", "super"), ("chat",)}


@pytest.mark.parametrize("value", ["[]", "", []])
def test_reserved_roles_can_be_none(value: object) -> None:
    """An empty list reserves nothing; it is not the default."""
    assert GuardSettings(gpu_reserved_roles=value).gpu_reserved_roles == ()


@pytest.mark.parametrize("value", ['{"a": 1}', "'chat'", '["chat"', '"chat"', "[1]", "a\nb", 5, None])
def test_reserved_roles_refuse_what_is_no_list(value: object) -> None:
    """Something else is refused, naming the variable."""
    assert "- GPU_RESERVED_ROLES" in refusal(gpu_reserved_roles=value)


@pytest.mark.parametrize(
    "value", ["[]", "null", "gb10=40", "gb10:40,b:3", '"x"', "5", "{'gb10': 4}", '{"a":1,"a":2}', 5]
)
def test_budgets_refuse_what_is_no_object(value: object) -> None:
    """Anything but a JSON object is refused, naming the variable."""
    assert "- GPU_CONCURRENCY_BUDGETS " in refusal(gpu_concurrency_budgets=value)


@pytest.mark.parametrize("budget", [0, -1, True, 4.5, "x", None, 1e12, math.nan, [1]])
def test_budget_must_be_a_positive_whole_number(budget: object) -> None:
    """A budget that is none names its group in the path, and the others are checked all the same."""
    message = refusal(gpu_concurrency_budgets={"gb10": budget, "ok": 4, "10.0.0.5": 0})
    assert "- GPU_CONCURRENCY_BUDGETS.gb10 must be a whole number from 1 to" in message
    assert '- GPU_CONCURRENCY_BUDGETS["10.0.0.5"] must be' in message
    assert "2 problems" in message


@pytest.mark.parametrize("group", ["", " a", "a\nb", "x" * 201, "http://u:S3cr@h"])
def test_budget_of_an_impossible_group_is_refused(group: str) -> None:
    """A group's name obeys the rules of names, and is shown without credentials."""
    message = refusal(gpu_concurrency_budgets={group: 4})
    assert "- GPU_CONCURRENCY_BUDGETS" in message
    assert "S3cr" not in message


@pytest.mark.parametrize(
    "url",
    ["redis://h", "rediss://u:p%40@h:6379/3", "redis://h:6379/", "unix:///run/r.sock?db=1", "redis://[::1]:1/0?a=b"],
)
def test_redis_url_is_kept_whole(url: str) -> None:
    """What the client library can use is accepted, plain or as a secret, and given back as written."""
    assert GuardSettings(redis_url=url).redis_url.get_secret_value() == url
    assert GuardSettings(redis_url=SecretStr(url)).redis_url.get_secret_value() == url
    assert GuardSettings(redis_url=GuardSettings(redis_url=url).redis_url).redis_url.get_secret_value() == url


@pytest.mark.parametrize(
    "url",
    [
        "h:6379",
        "http://h:6379",
        "valkey://h",
        "redis://",
        "redis://u:S3cr@:6379",
        "redis://h:S3cr",
        "redis://h/S3cr",
        "redis://h/0/1",
        "redis://u:S3cr/x@h:6379",
        "redis://u:S3cr#x@h:6379",
        "redis://u:S3cr x@h",
        "redis://h/0#S3cr",
        "unix://",
        "",
        5,
        None,
    ],
)
def test_redis_url_that_cannot_work_is_refused_without_repeating_it(url: object) -> None:
    """A wrong scheme, no host, a database that is no number: refused, and nothing of the URL is printed."""
    message = refusal(redis_url=url)
    assert "- GUARD_REDIS_URL " in message
    assert "S3cr" not in message


@given(
    st.dictionaries(
        st.sampled_from([*DEFAULTS, "GUARD_REDIS_URL"]),
        st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=30),
    )
)
@with_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_any_environment_is_read_or_refused_in_our_words(values: dict[str, str]) -> None:
    """No text in any variable gets a foreign exception out of the settings."""
    with pytest.MonkeyPatch.context() as patch:
        for variable, value in values.items():
            patch.setenv(variable, value)
        try:
            settings = GuardSettings()
        except ConfigurationError as error:
            assert "the configuration of the guard is refused" in str(error)  # noqa: PT017  # both ends are right
        else:
            assert settings.published().revision == settings.config_revision


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from([*EndpointConfig.model_fields, "x"]), inner, max_size=4)
    ),
    max_leaves=8,
)


@given(JSON_VALUES)
@with_settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
def test_any_json_as_models_is_read_or_refused_in_our_words(value: object) -> None:
    """No JSON in GUARD_MODELS gets a foreign exception out of the settings."""
    try:
        settings = GuardSettings(models=json.dumps(value))
    except ConfigurationError as error:
        assert "GUARD_MODELS" in str(error)  # noqa: PT017  # both ends are right
    else:
        assert len(settings.published().endpoints) == len(settings.models)
        assert all(spec.ceiling >= 1 for spec in settings.published().endpoints)
