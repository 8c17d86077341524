"""One endpoint as it is configured, and the reading of the list of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_serializer, model_validator

from guard_middleware.config_parse import (
    Problem,
    Unchangeable,
    message,
    name,
    name_problem,
    nearest,
    problems_in,
    refuse,
    truth,
    unknown,
    whole,
)
from guard_middleware.config_url import base_url_problem, host_of, redact_url
from guard_middleware.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

PAUSE_HINT = "0 never means unlimited or paused: pausing is an operator's command (python -m guard_middleware pause)"
_KEY_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]{0,63}")
_LONGEST_PLAIN_VARIABLE = 16
_ALSO_CALLED = {
    "api_key": "api_key_env",
    "breaker": "MODEL_CIRCUIT_BREAKER, a variable for all endpoints",
    "budget": "GPU_CONCURRENCY_BUDGETS, a variable",
    "ceiling": "max_concurrent_requests",
    "cooldown": "MODEL_BREAKER_BASE_COOLDOWN_S, a variable for all endpoints",
    "concurrency": "max_concurrent_requests",
    "enabled": "MODEL_CIRCUIT_BREAKER, a variable for all endpoints",
    "endpoint": "base_url",
    "group": "gpu_group",
    "instances": "parallel_instances",
    "limit": "max_concurrent_requests",
    "max_concurrency": "max_concurrent_requests",
    "max_parallel": "max_parallel_calls",
    "name": "id",
    "threshold": "MODEL_BREAKER_FAIL_THRESHOLD, a variable for all endpoints",
    "statuses": "overload_statuses",
    "url": "base_url",
}
"""What people call these fields elsewhere, so that the nearest name is the one they are looking for."""


def _read_base_url(value: object) -> str:
    if not isinstance(value, str):
        refuse("must be a text in double quotes")
    wrong = base_url_problem(value) if value else None
    if wrong:
        refuse(wrong)
    return value


def _read_key_variable(value: object) -> str:
    variable = value if isinstance(value, str) else "?"
    # Some keys are spelled like names; those that are in capitals are long and have no underscore.
    resembles_key = "_" not in variable and len(variable) > _LONGEST_PLAIN_VARIABLE
    if variable and (resembles_key or not _KEY_VARIABLE.fullmatch(variable)):
        text = "must be the NAME of an environment variable in capitals, such as QWEN_API_KEY"
        refuse(f"{text}; the key itself does not belong here: put it into that variable")
    return variable


def _read_statuses(value: object) -> object:
    if not isinstance(value, list | tuple | set | frozenset):
        refuse("must be a list of HTTP statuses, such as [418, 599]")
    return tuple(value)


Name = Annotated[str, name()]
OptionalName = Annotated[str, name(optional=True)]
Role = Annotated[str, name(optional=True, folded=True)]
Capacity = Annotated[int, whole(1, zero=PAUSE_HINT)]
Truth = Annotated[bool, truth()]


class EndpointConfig(Unchangeable, BaseModel):
    """One served model: what is guarded.

    Everything but the id may be left out; ``null`` is the same as leaving it out, and so is an empty text. Whole
    numbers may also stand in quotes. Nothing else is converted: ``true`` is no number, 4.5 is no ceiling.

    Attributes:
        id: what actors and callers name, 1 to 200 characters. Case matters: ``X`` and ``x`` are two endpoints.
        model: name of the model that the server serves under; the id if left out.
        base_url: of the server, ``http`` or ``https``, with or without ``/v1``. The attribute is as written, for
            requests; `repr` and `model_dump` show it without credentials.
        role: what it is for; the roles in GPU_RESERVED_ROLES keep their floor in the group's budget. Lower case.
        max_concurrent_requests: the ceiling. Wins over everything else, also below the declared capacity.
        parallel_instances: how many copies of the model the server runs.
        max_parallel_calls: how many calls one copy can take at once.
        gpu_group: accelerator that it shares; the base_url's host if left out.
        reserve: calls that background work may not take; a fraction of the limit if left out, 0 for none.
        fallback: id of the endpoint that serves while this one's breaker is not closed.
        fallback_other_model: allows a fallback that serves another model. Never for embeddings: vectors of two models
            must not meet in one index.
        server_priority: whether the server itself orders requests by a priority that is sent along.
        overload_statuses: HTTP statuses that this server answers under overload, besides the usual ones.
        api_key_env: NAME of the environment variable that holds the API key. Never the key.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=())

    id: Name
    model: OptionalName = ""
    base_url: Annotated[str, BeforeValidator(_read_base_url)] = ""
    role: Role = ""
    max_concurrent_requests: Capacity | None = None
    parallel_instances: Capacity | None = None
    max_parallel_calls: Capacity | None = None
    gpu_group: OptionalName = ""
    reserve: Annotated[int, whole(0)] | None = None
    fallback: OptionalName = ""
    fallback_other_model: Truth = False
    server_priority: Truth = False
    overload_statuses: Annotated[tuple[Annotated[int, whole(400, 599)], ...], BeforeValidator(_read_statuses)] = ()
    api_key_env: Annotated[str, BeforeValidator(_read_key_variable)] = ""

    if not TYPE_CHECKING:  # so that type checkers keep the signature made of the fields

        def __init__(self, /, **fields: object) -> None:
            """Check the fields.

            Raises:
                ConfigurationError: with everything that is wrong with them, none of their values.
            """
            problems = _fill(self, fields, ())
            if problems:
                raise ConfigurationError(message(problems))

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, fields: object) -> object:
        if not isinstance(fields, dict):
            return fields
        given = {key: value for key, value in fields.items() if value is not None or key == "id"}
        if not given.get("model") and name_problem(given.get("id")) is None:
            given["model"] = given["id"]
        return given

    @field_serializer("base_url")
    def _without_credentials(self, base_url: str) -> str:
        return redact_url(base_url) if base_url else ""

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Hide the credentials of the base URL (I13)."""
        for key, value in super().__repr_args__():
            yield key, redact_url(value) if key == "base_url" and value else value

    @property
    def declared(self) -> int:
        """Calls that the server is declared to take at once; 0 if nothing was declared."""
        if self.parallel_instances is None and self.max_parallel_calls is None:
            return 0
        return (self.parallel_instances or 1) * (self.max_parallel_calls or 1)

    @property
    def group(self) -> str:
        """The GPU group: as configured, else the base URL's host, else ""."""
        if self.gpu_group or not self.base_url:
            return self.gpu_group
        return host_of(self.base_url)

    def ceiling(self, usual: int) -> int:
        """The most calls in flight that the server can take.

        Args:
            usual: ceiling of an endpoint about which nothing is said.
        """
        return max(self.declared, usual) if self.max_concurrent_requests is None else self.max_concurrent_requests


@dataclass(frozen=True, slots=True)
class Entry:
    """One member of the list of models, readable or not.

    Attributes:
        path: where it stands, such as ``("GUARD_MODELS", 1)``.
        id: its id as far as that could be read, so that others may refer to it; else "".
        endpoint: what it says, ``None`` if something in it is wrong.
        key_variable: the variable that it names for its API key, "" if none.
    """

    path: tuple[str | int, ...]
    id: str
    endpoint: EndpointConfig | None
    key_variable: str


def read_entries(root: str, models: object) -> tuple[list[Entry], list[Problem]]:
    """Read the list of models: a list of objects with an ``id`` each, or an object from id to fields.

    Args:
        root: variable that the list came from.
        models: the list after JSON was parsed; members may also be `EndpointConfig`.

    Returns:
        All members, and all that is wrong with them.
    """
    if isinstance(models, Mapping):
        if isinstance(models.get("id"), str):
            return [], [Problem((root,), "is one model: put it into brackets, a list of models is expected")]
        named: list[tuple[str | int, object]] = [(str(key), _with_id(str(key), value)) for key, value in models.items()]
    elif isinstance(models, list | tuple):
        named = list(enumerate(models))
    else:
        text = "must be a JSON list of models, or an object from id to fields; for no models leave it out or write []"
        return [], [Problem((root,), text)]
    entries, problems = [], []
    for key, value in named:
        entry, wrong = _read_entry((root, key), value)
        if isinstance(key, str) and entry.id not in {"", key}:
            wrong.append(Problem((*entry.path, "id"), "differs from the key that it stands under: leave it out"))
        entries.append(entry)
        problems.extend(wrong)
    return entries, problems


def _with_id(key: str, value: object) -> object:
    return {"id": key, **value} if isinstance(value, Mapping) else value


def _read_entry(path: tuple[str | int, ...], value: object) -> tuple[Entry, list[Problem]]:
    if isinstance(value, EndpointConfig):
        return Entry(path, value.id, value, value.api_key_env), []
    if not isinstance(value, Mapping):
        problem = Problem(path, 'must be an object with the fields of one model, such as {"id": "bge-m3"}')
        return Entry(path, "", None, ""), [problem]
    fields = {str(key): field for key, field in value.items()}
    endpoint = EndpointConfig.__new__(EndpointConfig)
    problems = _fill(endpoint, fields, path)
    own_id, variable = fields.get("id"), fields.get("api_key_env")
    entry = Entry(
        path,
        own_id if isinstance(own_id, str) else "",
        None if problems else endpoint,
        variable if isinstance(variable, str) else "",
    )
    return entry, problems


def _fill(endpoint: EndpointConfig, fields: dict[str, object], path: tuple[str | int, ...]) -> list[Problem]:
    """Validate into a bare instance, and return what is wrong instead of raising it: one message tells about all."""
    known = {key: value for key, value in fields.items() if key in EndpointConfig.model_fields}
    problems = [_unknown_field(path, key) for key in fields if key not in known]
    try:
        BaseModel.__init__(endpoint, **known)
    except ValidationError as error:
        problems.extend(problems_in(error, path))
    return problems


def _unknown_field(path: tuple[str | int, ...], key: str) -> Problem:
    close = nearest(key, (*EndpointConfig.model_fields, *_ALSO_CALLED)) or "id"
    close = _ALSO_CALLED.get(close, close)
    text = f"is not a field of a model; the nearest is {close}"
    if close == "api_key_env":
        text += " (the NAME of a variable, never the key itself)"
    return unknown(path, key, text)
