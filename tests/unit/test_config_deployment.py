"""The values of this deployment: its files, and the environment over them."""

from __future__ import annotations

import json
import os
import re

import pytest

from guard_middleware.config import GuardSettings
from guard_middleware.core.values import EndpointSpec
from guard_middleware.errors import ConfigurationError
from settings import ENV_FILE, MODELS_FILE, deployment

LINE = re.compile(r"#?([A-Z_]+)=(.*)")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.upper().startswith(("GUARD_", "MODEL_", "GPU_", "KG_")):
            monkeypatch.delenv(variable)


def test_deployment_guards_two_models_on_one_accelerator() -> None:
    """The generator keeps 16 of 40 calls; embeddings share the rest; nothing looks like a mistake."""
    deployed = deployment()
    assert deployed.published().endpoints == (
        EndpointSpec(id="qwen/qwen3.6-27b", ceiling=32, floor=16, group="gb10"),
        EndpointSpec(id="bge-m3", ceiling=16, group="gb10"),
    )
    assert deployed.published().budgets == {"gb10": 40}
    assert deployed.endpoint("qwen/qwen3.6-27b").base_url == "http://127.0.0.1:8001/v1"
    assert (deployed.endpoint("bge-m3").role, deployed.endpoint("bge-m3").base_url) == (
        "embedding",
        "http://127.0.0.1:8002/v1",
    )
    assert deployed.warnings() == []


def test_environment_wins_over_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Budget, URL and models of the environment take the place of the files'."""
    monkeypatch.setenv("GPU_CONCURRENCY_BUDGETS", '{"gb10": 20}')
    monkeypatch.setenv("GUARD_REDIS_URL", "redis://elsewhere:1/2")
    assert deployment().published().budgets == {"gb10": 20}
    assert deployment().redis_url.get_secret_value() == "redis://elsewhere:1/2"
    monkeypatch.setenv("GUARD_MODELS", '[{"id": "only"}]')
    assert [endpoint.id for endpoint in deployment().models] == ["only"]
    monkeypatch.setenv("GUARD_MODELS", "[]")
    assert deployment().models == ()


def test_blank_variable_leaves_the_file_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blank counts as not set."""
    monkeypatch.setenv("GPU_CONCURRENCY_BUDGETS", " ")
    monkeypatch.setenv("GUARD_MODELS", "")
    assert deployment().published().budgets == {"gb10": 40}
    assert len(deployment().models) == 2


def test_models_file_of_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file named in the environment is read, and refused if it is not there."""
    monkeypatch.setenv("GUARD_MODELS_FILE", "/nowhere/models.json")
    with pytest.raises(ConfigurationError, match="GUARD_MODELS_FILE names a file that cannot be read"):
        deployment()


def test_env_file_documents_every_setting_with_its_default() -> None:
    """Each setting stands in the file once; what is commented out is the default."""
    lines = [found.groups() for line in ENV_FILE.read_text().splitlines() if (found := LINE.fullmatch(line))]
    assert sorted(variable for variable, _ in lines) == sorted(
        str(field.validation_alias) for field in GuardSettings.model_fields.values()
    )
    commented = [line for line in ENV_FILE.read_text().splitlines() if re.match(r"#[A-Z_]+=.", line)]
    with pytest.MonkeyPatch.context() as patch:
        for line in commented:
            patch.setenv(*line.removeprefix("#").split("=", 1))
        documented = GuardSettings()
    assert documented == GuardSettings()


def test_files_hold_no_secrets() -> None:
    """No credentials in a URL, no key where the name of a variable belongs."""
    assert "@" not in ENV_FILE.read_text() + MODELS_FILE.read_text()
    assert all("api_key" not in member for member in json.loads(MODELS_FILE.read_text()))
