"""I13: no secret comes out of the settings, whatever is done with them and however wrong they are."""

from __future__ import annotations

import copy
import json
import logging
import os
import pickle
import traceback
from urllib.parse import quote, unquote

import pytest

from guard_middleware.config import EndpointConfig, GuardSettings
from guard_middleware.errors import ConfigurationError

PASSWORD = "S3cr%40t"  # what must not be printed
SECRETS = ("S3cr", PASSWORD, unquote(PASSWORD), quote(PASSWORD), "k3yabc")
REDIS_URL = f"rediss://user:{PASSWORD}@redis-host:6380/0"
BASE_URL = f"http://user:{PASSWORD}@model-host:8000/v1"
VARIABLES = [
    "GUARD_REDIS_URL",
    *(
        str(field.validation_alias)
        for name, field in GuardSettings.model_fields.items()
        if name not in {"redis_url", "namespace", "models_file", "ignore_variables", "gpu_reserved_roles"}
    ),
]


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.upper().startswith(("GUARD_", "MODEL_", "GPU_", "KG_")):
            monkeypatch.delenv(variable)


def assert_quiet(text: str) -> None:
    """None of the secrets stands in the text, raw, decoded or encoded."""
    assert [secret for secret in SECRETS if secret in text] == []


def assert_refused_quietly(caught: pytest.ExceptionInfo[ConfigurationError]) -> None:
    """Neither message, arguments, chain nor traceback hold a secret."""
    error = caught.value
    assert type(error) is ConfigurationError
    assert (error.__cause__, error.__context__) == (None, None)
    assert_quiet(str(error) + repr(error) + repr(error.args) + repr(vars(error)))
    assert_quiet("".join(traceback.format_exception(error)))


@pytest.fixture
def settings() -> GuardSettings:
    """Settings that hold two secrets."""
    return GuardSettings(redis_url=REDIS_URL, models=[{"id": "a", "base_url": BASE_URL, "api_key_env": "A_KEY"}])


def test_every_view_of_the_settings_is_quiet(settings: GuardSettings) -> None:
    """repr, str, format, dumps and logs show host and port, and no credentials."""
    for shown in (settings, settings.models, settings.models[0], settings.endpoint("a")):
        text = f"{shown!r} {shown} {[shown]}"
        assert_quiet(text)
        assert "model-host:8000/v1" in text
    assert "redis-host:6380/0" in repr(settings)
    dumps = [
        repr(settings.model_dump()),
        repr(settings.model_dump(mode="json")),
        settings.model_dump_json(),
        repr(settings.models[0].model_dump()),
        settings.models[0].model_dump_json(),
        repr(settings.redis_url) + str(settings.redis_url) + f"{settings.redis_url}",
        repr(settings.published()),
        repr(settings.warnings()),
        repr(list(settings.__repr_args__())),
    ]
    for dump in dumps:
        assert_quiet(dump)
    assert "redis-host:6380/0" in settings.model_dump_json()
    assert "model-host:8000/v1" in settings.model_dump_json()


def test_log_of_the_settings_is_quiet(settings: GuardSettings, caplog: pytest.LogCaptureFixture) -> None:
    """Logged at debug level, as an argument or in a dictionary."""
    with caplog.at_level(logging.DEBUG):
        logging.getLogger("test").debug("%s %r %s", settings, settings.models, {"url": settings.redis_url})
    assert_quiet(caplog.text)
    assert "redis-host" in caplog.text


def test_values_for_requests_are_whole(settings: GuardSettings) -> None:
    """Who connects gets the URL as it was written, also from a copy."""
    for holder in (settings, copy.deepcopy(settings), pickle.loads(pickle.dumps(settings))):  # our own
        assert holder.redis_url.get_secret_value() == REDIS_URL
        assert holder.endpoint("a").base_url == BASE_URL


@pytest.mark.parametrize("variable", VARIABLES)
@pytest.mark.parametrize(
    "value",
    [
        PASSWORD,
        "sk-k3yabc",
        f"redis://u:{PASSWORD}",
        f"redis://u:{PASSWORD}/x@h",
        f'[{{"id": "a", "api_key": "k3yabc"}}, {{"id": "b", "base_url": "{BASE_URL}?key=k3yabc"}}]',
        f'{{"{BASE_URL}": {{"sk-k3yabc": 1}}}}',
        f"[{{'id': '{BASE_URL}'}}]",
        f'["{PASSWORD}", {{"id": "{BASE_URL}", "model": "{BASE_URL}", "role": ["k3yabc"], "fallback": "{BASE_URL}"}}]',
        f'{{"a": {{"fallback": "{BASE_URL}?k3yabc", "api_key_env": "sk_k3yabc", "gpu_group": " {PASSWORD}"}}}}',
        f'{{"g": "{PASSWORD}"}}',
    ],
)
def test_refusal_is_quiet_whatever_stands_in_a_variable(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret in the wrong variable, or in a broken one, is refused without being printed."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigurationError) as caught:
        GuardSettings()
    assert variable in str(caught.value)
    assert_refused_quietly(caught)


@pytest.mark.parametrize("field", EndpointConfig.model_fields)
@pytest.mark.parametrize("value", [f" {PASSWORD}\n", {"k3yabc": PASSWORD}, [PASSWORD], f"x://k3yabc:{PASSWORD}@h"])
def test_refusal_is_quiet_whatever_stands_in_a_field(field: str, value: object) -> None:
    """The same for each field of a model, from a list, from JSON and made in Python."""
    fields = {"id": "a", field: value}
    for models in ([fields], json.dumps([fields])):
        with pytest.raises(ConfigurationError) as caught:
            GuardSettings(models=models)
        assert f"GUARD_MODELS[0].{field}" in str(caught.value)
        assert_refused_quietly(caught)
    with pytest.raises(ConfigurationError) as caught:
        EndpointConfig(**fields)  # type: ignore[arg-type]  # wrong on purpose
    assert_refused_quietly(caught)


def test_refusal_elsewhere_does_not_show_the_good_secrets(settings: GuardSettings) -> None:
    """A wrong number does not bring up the URLs that stand beside it."""
    with pytest.raises(ConfigurationError) as caught:
        GuardSettings(redis_url=REDIS_URL, lease_s=0, models=[{"id": "a", "base_url": BASE_URL, "reserve": 99}])
    assert_refused_quietly(caught)
    with pytest.raises(ConfigurationError) as caught:
        settings.endpoint(BASE_URL)
    assert_refused_quietly(caught)


def test_pydantics_own_errors_are_quiet(settings: GuardSettings) -> None:
    """Paths into pydantic that do not pass the constructor hide the input as well."""
    for attempt in (
        lambda: GuardSettings.model_validate({"lease_s": PASSWORD}),
        lambda: EndpointConfig.model_validate({"id": f" {PASSWORD}"}),
        lambda: EndpointConfig.model_validate_json(json.dumps({"id": f" {PASSWORD}"})),
    ):
        with pytest.raises(ValueError, match="the configuration of the guard is refused") as caught:
            attempt()
        assert_quiet(str(caught.value) + repr(caught.value))


def test_assignment_is_refused_quietly(settings: GuardSettings) -> None:
    """Frozen means frozen, and the value that somebody tried to assign is not repeated."""
    for owner, field, value in ((settings, "redis_url", REDIS_URL), (settings.models[0], "base_url", BASE_URL)):
        with pytest.raises(AttributeError, match=f"{field} is frozen") as caught:
            setattr(owner, field, value)
        assert_quiet("".join(traceback.format_exception(caught.value, limit=0)))
    assert settings.redis_url.get_secret_value() == REDIS_URL
