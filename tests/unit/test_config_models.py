"""The list of models: its JSON, its file, its ids and its fields."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard_middleware.config import EndpointConfig, GuardSettings
from guard_middleware.errors import ConfigurationError

if TYPE_CHECKING:
    from pathlib import Path

GOOD = '[{"id": "bge-m3", "max_concurrent_requests": 16}]'


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.upper().startswith(("GUARD_", "MODEL_", "GPU_", "KG_")):
            monkeypatch.delenv(variable)


def refusal(**values: object) -> str:
    """The message with which these keywords are refused."""
    with pytest.raises(ConfigurationError) as caught:
        GuardSettings(**values)
    return str(caught.value)


@pytest.mark.parametrize("text", ["", "  ", "[]", "{}", " [ ] "])
def test_models_may_be_none(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty, [] and {} all mean that no models are configured; then every id is an endpoint with the usual ceiling."""
    monkeypatch.setenv("GUARD_MODELS", text)
    settings = GuardSettings()
    assert settings.models == ()
    assert settings.endpoint("any/model") == EndpointConfig(id="any/model")


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\ufeff{GOOD}",
        f"\n {GOOD}\r\n",
        '[\n  {\n    "id": "bge-m3",\n    "max_concurrent_requests": 16\n  }\n]',
        '[{"id": "bge-m3", "max_concurrent_requests": "16"}]',
        '{"bge-m3": {"max_concurrent_requests": 16}}',
        '{"bge-m3": {"id": "bge-m3", "max_concurrent_requests": 16, "reserve": null, "role": ""}}',
        '[{"id": "\\u0062ge-m3", "max_concurrent_requests": 16}]',
    ],
)
def test_models_are_read_from_every_good_spelling(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """List or object, on one line or many, with a byte-order mark or without: the same model."""
    monkeypatch.setenv("GUARD_MODELS", text)
    assert GuardSettings().models == (EndpointConfig(id="bge-m3", max_concurrent_requests=16),)


BAD_JSON = [
    ('\'[{"id": "S3cr"}]\'', "line 1, column 1", "remove the quotes around it"),
    ('"[{"id": "S3cr"}]"', "line 1, column 5", "remove the quotes around it"),
    ("[{'id': 'S3cr'}]", "line 1, column 3", "double quotes"),
    ("{'S3cr': {}}", "line 1, column 2", "double quotes"),
    ("[{\"id\": 'S3cr'}]", "line 1, column 9", "double quotes"),
    ('[{"id": "S3cr"},]', "line 1, column 17", "remove the comma"),
    ('[{"id": "S3cr",}]', "line 1, column 16", "remove the comma"),
    ('[\n {"id": "S3cr"}\n {"id": "b"}]', "line 3, column 2", ""),
    ('[{"id": "S3cr"', "line 1, column 15", ""),
    ("/etc/S3cr/models.json", "line 1, column 1", "set GUARD_MODELS_FILE to the path"),
    ("S3cr.json", "line 1, column 1", "set GUARD_MODELS_FILE to the path"),
    ("./S3cr", "line 1, column 1", "set GUARD_MODELS_FILE to the path"),
    ("bge-m3,S3cr", "line 1, column 1", "comma list"),
    ("S3cr", "line 1, column 1", "begins with [ or {"),
    ("[" * 200_000, "line 1, column 1", "nested too deeply"),
    ('[{"id": "a\nS3cr"}]', "line 1, column 11", ""),
]


@pytest.mark.parametrize(("text", "position", "hint"), BAD_JSON)
def test_models_that_are_no_json_are_refused_with_position_and_hint(
    text: str, position: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One message names the variable and the position, says that JSON is expected, and repeats no value."""
    monkeypatch.setenv("GUARD_MODELS", text)
    message = refusal()
    assert f"- GUARD_MODELS cannot be read at {position}: JSON is expected" in message
    assert hint in message
    assert "1 problem:" in message
    assert "S3cr" not in message


@pytest.mark.parametrize("text", ["null", "5", "true", "NaN", '"a"', json.dumps(GOOD)])
def test_models_of_another_kind_are_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A null is no list of models, and neither is JSON inside a JSON text."""
    monkeypatch.setenv("GUARD_MODELS", text)
    assert "JSON" in refusal()
    assert "- GUARD_MODELS " in refusal()


def test_models_tell_one_model_from_a_list() -> None:
    """Who forgot the brackets is told so."""
    assert "GUARD_MODELS is one model: put it into brackets" in refusal(models='{"id": "a", "role": "chat"}')


@pytest.mark.parametrize("text", [json.dumps(GOOD), '"S3cr"'])
def test_models_tell_json_inside_a_json_text(text: str) -> None:
    """A text that was encoded twice is told from other kinds."""
    assert "GUARD_MODELS is JSON inside a JSON text: remove the quotes" in refusal(models=text)


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ('[{"id": "a", "id": "S3cr"}]', "line 1, column 14"),
        ('[{"id": "x"},\n {"fallback": {"id": 1}, "id": "S3cr",\n  "id": "}"}]', "line 3, column 3"),
        ('{"a": {}, "b}{\\"": {"id": "b"}, "\\u0061": {}}', "line 1, column 33"),
        ('{"a": {"role": "S3cr", "role" : "S3cr"}}', "line 1, column 24"),
    ],
)
def test_repeated_key_is_refused_where_it_stands(text: str, position: str) -> None:
    """The second one of two equal keys is pointed at; plain JSON would silently take it."""
    message = refusal(models=text)
    assert f"GUARD_MODELS cannot be read at {position}: JSON without repeated keys" in message
    assert "S3cr" not in message


KEYS = st.text('ab"\\{}:é ', min_size=1, max_size=4)


@given(st.lists(KEYS, min_size=1, max_size=4, unique=True), st.data(), st.sampled_from(["", " ", "\n"]))
def test_repeated_key_is_found_whatever_stands_around_it(keys: list[str], data: st.DataObject, space: str) -> None:
    """The position is that of the second key, also among quotes, braces and objects that close earlier."""
    twice = data.draw(st.sampled_from(keys))
    before = [f'{json.dumps(key)}{space}:{space}{{"{{": {{}}}}' for key in keys]
    head = "{" + f",{space}".join(before) + f",{space}"
    line, column = head.count("\n") + 1, len(head) - head.rfind("\n")
    message = refusal(models=f"{head}{json.dumps(twice)}: 1}}")
    assert f"cannot be read at line {line}, column {column}: JSON without repeated keys" in message


def test_large_list_is_read() -> None:
    """A megabyte of models loads."""
    models = [{"id": f"model-{number}", "base_url": f"http://host-{number}:8000/v1"} for number in range(20_000)]
    text = json.dumps(models)
    assert len(text) > 1_000_000
    assert len(GuardSettings(models=text).models) == 20_000


def test_file_is_read_like_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file holds the same JSON, with or without a byte-order mark."""
    file = tmp_path / "models.json"
    for text in (GOOD, f"\ufeff{GOOD}"):
        file.write_text(text, encoding="utf-8")
        monkeypatch.setenv("GUARD_MODELS_FILE", str(file))
        assert GuardSettings().endpoint("bge-m3").max_concurrent_requests == 16
        assert GuardSettings(models_file=file).models_file == file


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty file"),
        (b"\xef\xbb\xbf \n", "empty file"),
        (b"\xff\xfe[\x00", "not UTF-8"),
        (b'[{"id": "S3cr"},]', "line 1, column 17: JSON is expected"),
        (b"null", "must be a JSON list"),
    ],
)
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, reason: str) -> None:
    """An empty, broken or binary file is not taken for "no models"."""
    file = tmp_path / "S3cr.json"
    file.write_bytes(content)
    message = refusal(models_file=str(file))
    assert "- GUARD_MODELS_FILE " in message
    assert reason in message
    assert "S3cr" not in message


@pytest.mark.parametrize("path", ["/nowhere/models.json", "models v2.json", "../no-such~file"])
def test_file_that_is_not_there_is_named(path: str) -> None:
    """Whoever set a path looks for the slip in it."""
    assert f'GUARD_MODELS_FILE names a file that cannot be read, "{path}": check' in refusal(models_file=path)


@pytest.mark.parametrize(
    "path", ["/", "S3cr\0", '[{"id": "S3cr"}]', ' {"id": "S3cr"}', "http://u:S3cr@h/v1", "id=S3cr", "x" * 5000]
)
def test_what_is_not_plainly_a_path_is_refused_without_repeating_it(path: str) -> None:
    """The models themselves, or a URL, may stand there by mistake."""
    message = refusal(models_file=path)
    assert "- GUARD_MODELS_FILE " in message
    assert "S3cr" not in message


def test_file_names_itself_in_the_path_of_a_field(tmp_path: Path) -> None:
    """A wrong field is looked for where it stands."""
    file = tmp_path / "models.json"
    file.write_text('[{"id": "a"}, {"id": "b", "reserve": -1}]', encoding="utf-8")
    assert "- GUARD_MODELS_FILE[1].reserve must be" in refusal(models_file=file)


def test_models_and_file_exclude_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both in one place are refused; a keyword takes the place of both variables."""
    file = tmp_path / "models.json"
    file.write_text(GOOD, encoding="utf-8")
    monkeypatch.setenv("GUARD_MODELS_FILE", str(file))
    assert GuardSettings(models=[]).models == ()
    monkeypatch.setenv("GUARD_MODELS", "[]")
    assert "GUARD_MODELS_FILE and GUARD_MODELS are both set" in refusal()
    assert GuardSettings(models_file=file).endpoint("bge-m3").id == "bge-m3"


GOOD_IDS = ["BAAI/bge-m3", "qwen3:0.6b", "a:b", "x.y", "X", "x", "a b", "模型-β", "*", "{x}", "x" * 200, "a@b", "[key]"]


def test_ids_of_every_ordinary_kind_are_distinct() -> None:
    """Slash, colon, dot, star, braces, Unicode, inner space and case all make ids of their own."""
    settings = GuardSettings(models=[{"id": name, "max_concurrent_requests": n} for n, name in enumerate(GOOD_IDS, 1)])
    assert {spec.id: spec.ceiling for spec in settings.published().endpoints} == {
        name: number for number, name in enumerate(GOOD_IDS, 1)
    }
    assert [settings.endpoint(name).max_concurrent_requests for name in GOOD_IDS] == list(range(1, len(GOOD_IDS) + 1))


@given(st.text(min_size=1, max_size=200))
def test_id_is_kept_exactly_or_refused(name: str) -> None:
    """An id is never cut, folded or cleaned: it stays as it is, or is refused."""
    try:
        endpoint = EndpointConfig(id=name)
    except ConfigurationError:
        assert name != name.strip() or not name.isprintable()  # both ends are right
    else:
        assert (endpoint.id, endpoint.model) == (name, name)


BAD_IDS = [
    ("", "is empty"),
    ("  ", "is empty"),
    (" a", "begins or ends with a space"),
    ("a ", "begins or ends with a space"),
    ("a\u00a0", "begins or ends with a space"),
    ("a\nb", "line break"),
    ("a\x00", "line break"),
    ("a\u2028b", "line break"),
    ("\ud800", "line break"),
    ("x" * 201, "longer than 200"),
    ("x" * 300, "longer than 200"),
    ("http://u:S3cr@h/v1", "credentials"),
    (5, "must be a text"),
    (None, "must be a text"),
    (True, "must be a text"),
    (["a"], "must be a text"),
]


@pytest.mark.parametrize(("name", "reason"), BAD_IDS)
def test_impossible_id_is_refused(name: object, reason: str) -> None:
    """Empty, with line breaks or control characters, padded, too long, or no text: refused at start-up."""
    message = refusal(models=[{"id": "ok"}, {"id": name}])
    assert "- GUARD_MODELS[1].id " in message
    assert reason in message
    assert "S3cr" not in message


@pytest.mark.parametrize("name", ["a\nb", " a", "x" * 201, "", "http://u:S3cr@h"])
def test_impossible_key_is_refused_and_shown_safely(name: str) -> None:
    """As a key of the object form too; the path shows it escaped, shortened and without credentials."""
    message = refusal(models={name: {}})
    assert "- GUARD_MODELS[" in message
    assert "S3cr" not in message
    assert len(message.splitlines()) == 2
    assert len(message) < 300


@pytest.mark.parametrize("name", ["a\nb", " a", "x" * 201, "", "http://u:S3cr@h", None, 5, ["S3cr"]])
def test_impossible_id_is_no_endpoint_without_models_either(name: object) -> None:
    """With no models configured every id is an endpoint, if it can be an id."""
    for settings in (GuardSettings(), GuardSettings(models=[{"id": "a"}])):
        with pytest.raises(ConfigurationError) as caught:
            settings.endpoint(name)
        assert "S3cr" not in str(caught.value)


def test_id_is_required() -> None:
    """A model without an id has nothing to be named by."""
    assert "- GUARD_MODELS[0].id is missing" in refusal(models=[{"model": "a"}])


def test_key_and_id_must_agree() -> None:
    """In the object form the key is the id."""
    assert "- GUARD_MODELS.a.id differs from the key" in refusal(models={"a": {"id": "b"}})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("cieling", "max_concurrent_requests"),
        ("Ceiling", "max_concurrent_requests"),
        ("max_concurent_requests", "max_concurrent_requests"),
        ("Max_Concurrent_Requests", "max_concurrent_requests"),
        ("group", "gpu_group"),
        ("url", "base_url"),
        ("falback", "fallback"),
        ("enabld", "MODEL_CIRCUIT_BREAKER"),
        ("name", "id"),
        ("breaker", "MODEL_CIRCUIT_BREAKER"),
        ("treshold", "MODEL_BREAKER_FAIL_THRESHOLD"),
        ("api_key", "api_key_env (the NAME of a variable, never the key itself)"),
    ],
)
def test_unknown_field_is_refused_with_its_path_and_the_nearest(key: str, nearest: str) -> None:
    """A misspelled or misplaced field is refused at its place, naming the one that was meant."""
    expected = f".{key} is not a field of a model; the nearest is {nearest}"
    assert f"- GUARD_MODELS[1]{expected}" in refusal(models=[{"id": "ok"}, {"id": "a", key: "S3cr"}])
    message = refusal(models={"x.y": {key: "S3cr"}})
    assert f'- GUARD_MODELS["x.y"]{expected}' in message
    assert "S3cr" not in message


def test_unknown_field_that_may_be_a_key_is_not_repeated() -> None:
    """A field whose name is no name might be a secret at the wrong place."""
    message = refusal(models=[{"id": "a", "sk-S3cr": 1, "http://u:S3cr@h": 2}])
    assert "- GUARD_MODELS[0] has a field whose name is not shown here" in message
    assert "S3cr" not in message


COUNTS = ["max_concurrent_requests", "parallel_instances", "max_parallel_calls", "reserve"]


@pytest.mark.parametrize("field", COUNTS)
@pytest.mark.parametrize("value", [-1, 4.5, 4.0, True, False, 1e12, math.nan, 10**6, "", "x", "4.5", "true", [], {}])
def test_count_of_a_model_refuses_everything_else(field: str, value: object) -> None:
    """Negative, fractional, boolean, huge and non-numbers are refused by their path."""
    expected = f"- GUARD_MODELS[0].{field} must be a whole number from "
    assert expected in refusal(models=[{"id": "a", field: value}])
    assert expected in refusal(models=json.dumps([{"id": "a", field: value}]))


@pytest.mark.parametrize("digits", [19, 400, 5000])
def test_number_of_any_length_is_refused_by_its_path(digits: int) -> None:
    """More digits than Python converts are one more number out of range, not a foreign exception."""
    message = refusal(models=f'[{{"id": "a", "reserve": {"9" * digits}}}]')
    assert "- GUARD_MODELS[0].reserve must be a whole number from 0 to" in message


@pytest.mark.parametrize("field", COUNTS)
def test_count_of_a_model_takes_digits_and_null(field: str) -> None:
    """Digits in quotes are the number; null is the same as leaving it out."""
    assert getattr(EndpointConfig(**{"id": "a", field: "4"}), field) == 4
    assert getattr(EndpointConfig(**{"id": "a", field: None}), field) is None


def test_null_is_the_same_as_leaving_out() -> None:
    """Every field but the id may be null, from JSON and from Python."""
    fields = {"id": "a"} | dict.fromkeys(set(EndpointConfig.model_fields) - {"id"})
    assert EndpointConfig(**fields) == EndpointConfig(id="a")
    assert GuardSettings(models=json.dumps([fields])).models == (EndpointConfig(id="a"),)


def test_zero_of_a_model_has_one_meaning() -> None:
    """No reserve is a reserve of 0; no capacity is refused."""
    assert EndpointConfig(id="a", reserve=0).reserve == 0
    for field in COUNTS[:3]:
        message = refusal(models=[{"id": "a", field: 0}])
        assert f"- GUARD_MODELS[0].{field} must be a whole number from 1" in message
        assert "guard_middleware pause" in message


@pytest.mark.parametrize("field", ["fallback_other_model", "server_priority"])
def test_switch_of_a_model_is_true_or_false(field: str) -> None:
    """A misspelled switch is refused by its path."""
    assert getattr(EndpointConfig(**{"id": "a", field: "yes"}), field) is True
    for value in (1, "enabled", [], 0.0):
        assert f"- GUARD_MODELS[0].{field} must be true or false" in refusal(models=[{"id": "a", field: value}])


@pytest.mark.parametrize("field", ["model", "role", "gpu_group", "fallback"])
@pytest.mark.parametrize("value", [5, " a", "a\n", "x" * 201, "http://u:S3cr@h", ["S3cr"], True])
def test_name_in_a_model_obeys_the_rules_of_names(field: str, value: object) -> None:
    """Model, role, group and fallback end up in keys, labels and logs like ids do."""
    message = refusal(models=[{"id": "a", field: value}])
    assert f"- GUARD_MODELS[0].{field} " in message
    assert "S3cr" not in message


def test_model_is_the_id_unless_named() -> None:
    """Most servers serve under the id; empty and null count as not named."""
    assert EndpointConfig(id="a").model == "a"
    assert EndpointConfig(id="a", model="").model == "a"
    assert EndpointConfig(id="a", model="b").model == "b"
    assert GuardSettings(models='[{"id": "a", "model": null}]').models[0].model == "a"


def test_ids_and_models_are_not_joined() -> None:
    """Endpoint a:b of model c is not endpoint a of model b:c."""
    settings = GuardSettings(models=[{"id": "a:b", "model": "c"}, {"id": "a", "model": "b:c"}])
    assert [(settings.endpoint(name).id, settings.endpoint(name).model) for name in ("a:b", "a")] == [
        ("a:b", "c"),
        ("a", "b:c"),
    ]


def test_overload_statuses_are_a_tuple_of_statuses() -> None:
    """Any list of client and server errors, kept as a tuple."""
    assert EndpointConfig(id="a", overload_statuses=(418, 599)).overload_statuses == (418, 599)
    assert GuardSettings(models='[{"id": "a", "overload_statuses": [418]}]').models[0].overload_statuses == (418,)
    assert "overload_statuses must be a list" in refusal(models=[{"id": "a", "overload_statuses": "418"}])
    for wrong in (200, 600, True, 418.5, None):
        message = refusal(models=[{"id": "a", "overload_statuses": [418, wrong]}])
        assert "- GUARD_MODELS[0].overload_statuses[1] must be a whole number from 400 to 599" in message


@pytest.mark.parametrize("variable", ["QWEN_API_KEY", "KEY", "OPENAIAPIKEY", "_K2", ""])
def test_api_key_env_takes_names_of_variables(variable: str) -> None:
    """A name in capitals is what a variable is called."""
    assert EndpointConfig(id="a", api_key_env=variable).api_key_env == variable


@pytest.mark.parametrize(
    "key",
    ["sk-S3cr", "hf_S3cr", "sk_live_S3cr", "AKIAIOSFODNN7S3CR", "A" * 17, "Bearer S3cr", "S3cr", "A_" * 40, 5, "1KEY"],
)
def test_api_key_env_refuses_keys_without_repeating_them(key: object) -> None:
    """What may be the key itself is refused, and not printed."""
    message = refusal(models=[{"id": "a", "api_key_env": key}])
    assert "- GUARD_MODELS[0].api_key_env must be the NAME of an environment variable" in message
    assert str(key) not in message.replace("1 problem", "").replace("[0]", "")


@pytest.mark.parametrize("member", [5, "bge-m3", None, [], True])
def test_member_that_is_no_object_is_refused(member: object) -> None:
    """A list of names is no list of models."""
    assert "- GUARD_MODELS[1] must be an object" in refusal(models=[{"id": "a"}, member])


def test_endpoint_refuses_by_itself_in_one_message() -> None:
    """Made in Python, an endpoint tells everything that is wrong with it at once, in the same words."""
    with pytest.raises(ConfigurationError) as caught:
        EndpointConfig(id="", ceiling=3, reserve=-1)  # type: ignore[call-arg]  # the unknown field is the point
    assert "3 problems" in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_endpoints_made_in_python_are_models() -> None:
    """Members may be EndpointConfig, in a list or under their id."""
    endpoint = EndpointConfig(id="a", reserve=2)
    assert GuardSettings(models=[endpoint]).endpoint("a") is endpoint
    assert GuardSettings(models={"a": endpoint}).models == (endpoint,)
    assert len({endpoint, EndpointConfig(id="a", reserve=2)}) == 1


@pytest.mark.parametrize(
    ("asked", "nearest"), [("bge-m", "bge-m3"), ("BGE-M3", "bge-m3"), ("qwen", "qwen/qwen3.6-27b")]
)
def test_unknown_endpoint_is_refused_with_the_nearest(asked: str, nearest: str) -> None:
    """With models configured, an id that is not among them is refused; case matters."""
    settings = GuardSettings(models=[{"id": "bge-m3"}, {"id": "qwen/qwen3.6-27b"}])
    with pytest.raises(ConfigurationError, match=f'"{asked}" is no configured model; the nearest is "{nearest}"'):
        settings.endpoint(asked)
    with pytest.raises(ConfigurationError, match="nearest"):
        settings.published([asked])
