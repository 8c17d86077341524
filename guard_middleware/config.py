"""The settings: read once at start-up, from the environment and from keywords, and refused as a whole if wrong."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import (
    Field,
    PrivateAttr,
    ValidationError,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from guard_middleware.config_endpoint import PAUSE_HINT, EndpointConfig
from guard_middleware.config_parse import (
    SecretUrl,
    Unchangeable,
    message,
    name,
    name_problem,
    nearest,
    number,
    one_of,
    problems_in,
    shown,
    truth,
    url_of_redis,
    whole,
)
from guard_middleware.config_rules import Draft, problems_across, suspicions
from guard_middleware.config_source import environment, read_values, stray_variables, unknown_keyword, without
from guard_middleware.config_url import api_url, normalise_base_url, redact_url, server_url
from guard_middleware.core.values import EndpointSpec, Published, Rules
from guard_middleware.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "EndpointConfig",
    "GuardSettings",
    "SecretUrl",
    "api_url",
    "normalise_base_url",
    "redact_url",
    "server_ceiling",
    "server_url",
]

DEFAULT_CEILING = 32
_DAY_S = 86_400
TEST_SERVER = "GUARD_TEST_SERVER"
"""Not a setting: it names the server that `guard_middleware.testing.valkey` starts."""
_LARGEST_REVISION = 2**53
"""The largest whole number that Redis scripts hold exactly."""


Count = Annotated[int, whole(1, zero=PAUSE_HINT)]
Seconds = Annotated[float, number(0.001, _DAY_S)]


class GuardSettings(Unchangeable, BaseSettings):
    """Everything that the guard is told from outside.

    Read from the environment; keywords win over it. A keyword is the variable's name in lower case without ``GUARD_``
    (``redis_url``, ``model_max_concurrent_requests``). A variable that is empty or blank counts as **not set**, and
    spaces around a value do not count. Numbers are written in digits: ``4`` and ``"4"`` are four, while ``4.5``,
    ``true`` and ``NaN`` are refused where a whole number is expected. 0 never means "unlimited" or "the default".

    The whole configuration is checked at once. Variables that begin with ``GUARD_`` and are not among these are
    refused, apart from those that an ``api_key_env`` names or that Kubernetes derives from a service's name; others
    are refused if they look like a slip of the pen for one of these.

    Attributes:
        redis_url: GUARD_REDIS_URL, ``redis``, ``rediss`` or ``unix``. Shown without its credentials.
        namespace: GUARD_NAMESPACE, parts deployments that share nothing on one Redis.
        config_revision: GUARD_CONFIG_REVISION, the highest one among the live processes applies.
        models: GUARD_MODELS, a JSON list of models or an object from id to fields. Empty, ``[]`` and ``{}`` mean that
            no models are configured: then every id is an endpoint with the usual ceiling.
        models_file: GUARD_MODELS_FILE, path of a file with the same instead.
        model_max_concurrent_requests: MODEL_MAX_CONCURRENT_REQUESTS, ceiling of an endpoint that says nothing.
        model_max_concurrency: MODEL_MAX_CONCURRENCY, the most that any ceiling or cost may be.
        model_circuit_breaker: MODEL_CIRCUIT_BREAKER, whether overloads trip a breaker.
        model_breaker_fail_threshold: MODEL_BREAKER_FAIL_THRESHOLD, consecutive overloads that trip it.
        model_breaker_base_cooldown_s: MODEL_BREAKER_BASE_COOLDOWN_S, the first cooldown.
        model_breaker_max_cooldown_s: MODEL_BREAKER_MAX_COOLDOWN_S, the longest.
        model_breaker_backoff_factor: MODEL_BREAKER_BACKOFF_FACTOR, by which each trip lengthens it; at least 1.
        gpu_concurrency_budgets: GPU_CONCURRENCY_BUDGETS, a JSON object from GPU group to calls in flight.
        gpu_reserved_roles: GPU_RESERVED_ROLES, a comma list or JSON list of roles whose floor is kept; ``[]`` for none.
        kg_llm_priority_reserve: KG_LLM_PRIORITY_RESERVE, calls that background work may not take, as a number; 0 for
            none. If not set, the fraction applies.
        kg_llm_priority_reserve_fraction: KG_LLM_PRIORITY_RESERVE_FRACTION, the same as a share of the present limit,
            of which at least one call is kept.
        kg_adaptive_concurrency: KG_ADAPTIVE_CONCURRENCY, accepted; limits stay at their ceilings.
        model_latency_gradient_target: MODEL_LATENCY_GRADIENT_TARGET, accepted for the adaptive controller.
        lease_s: GUARD_LEASE_S, how long a permit lives without a heartbeat; at least three heartbeats.
        heartbeat_s: GUARD_HEARTBEAT_S, how often each process renews and takes.
        hold_ms: GUARD_HOLD_MS, how long a freed permit is kept for a process that was notified; 0 for not at all.
        background_ageing_s: GUARD_BACKGROUND_AGEING_S, after this long a waiting background call goes next, once.
        max_overloads: GUARD_MAX_OVERLOADS, overloads that count against one message before Dramatiq deals with it.
        first_start_hold_s: GUARD_FIRST_START_HOLD_S, how long a new store admits nothing; one heartbeat if not set, 0
            for not at all.
        store_timeout_s: GUARD_STORE_TIMEOUT_S, how long one answer of the store is waited for.
        unknown_servers: GUARD_UNKNOWN_SERVERS, what `GuardTransport` does with a request to a server that no model
            names: ``pass`` lets it through unguarded, with one warning; ``refuse`` raises.
        ignore_variables: GUARD_IGNORE_VARIABLES, a comma list of variables that belong to other programs although
            they look like a misspelling of these.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        hide_input_in_errors=True,
        populate_by_name=True,
        case_sensitive=True,
        protected_namespaces=(),
    )

    redis_url: Annotated[SecretUrl, url_of_redis()] = Field(
        default=SecretUrl("redis://127.0.0.1:6379/0"), validation_alias="GUARD_REDIS_URL"
    )
    namespace: Annotated[str, name(forbidden="{}")] = Field(default="default", validation_alias="GUARD_NAMESPACE")
    config_revision: Annotated[int, whole(0, _LARGEST_REVISION)] = Field(
        default=0, validation_alias="GUARD_CONFIG_REVISION"
    )
    models: tuple[EndpointConfig, ...] = Field(default=(), validation_alias="GUARD_MODELS")
    models_file: Path | None = Field(default=None, validation_alias="GUARD_MODELS_FILE")

    model_max_concurrent_requests: Count = Field(
        default=DEFAULT_CEILING, validation_alias="MODEL_MAX_CONCURRENT_REQUESTS"
    )
    model_max_concurrency: Count = Field(default=512, validation_alias="MODEL_MAX_CONCURRENCY")

    model_circuit_breaker: Annotated[bool, truth()] = Field(default=True, validation_alias="MODEL_CIRCUIT_BREAKER")
    model_breaker_fail_threshold: Annotated[int, whole(1)] = Field(
        default=1, validation_alias="MODEL_BREAKER_FAIL_THRESHOLD"
    )
    model_breaker_base_cooldown_s: Seconds = Field(default=0.5, validation_alias="MODEL_BREAKER_BASE_COOLDOWN_S")
    model_breaker_max_cooldown_s: Seconds = Field(default=30.0, validation_alias="MODEL_BREAKER_MAX_COOLDOWN_S")
    model_breaker_backoff_factor: Annotated[float, number(1, 100)] = Field(
        default=2.0, validation_alias="MODEL_BREAKER_BACKOFF_FACTOR"
    )

    gpu_concurrency_budgets: dict[Annotated[str, name()], Count] = Field(
        default={}, validation_alias="GPU_CONCURRENCY_BUDGETS"
    )
    gpu_reserved_roles: tuple[Annotated[str, name(folded=True)], ...] = Field(
        default=("chat", "generator", "default", "lite", "super"), validation_alias="GPU_RESERVED_ROLES"
    )
    kg_llm_priority_reserve: Annotated[int, whole(0)] | None = Field(
        default=None, validation_alias="KG_LLM_PRIORITY_RESERVE"
    )
    kg_llm_priority_reserve_fraction: Annotated[float, number(0, 1, open_end=True)] = Field(
        default=0.34, validation_alias="KG_LLM_PRIORITY_RESERVE_FRACTION"
    )
    kg_adaptive_concurrency: Annotated[bool, truth()] = Field(default=False, validation_alias="KG_ADAPTIVE_CONCURRENCY")
    model_latency_gradient_target: Annotated[float, number(0.001, 1)] = Field(
        default=0.9, validation_alias="MODEL_LATENCY_GRADIENT_TARGET"
    )

    lease_s: Seconds = Field(default=15.0, validation_alias="GUARD_LEASE_S")
    heartbeat_s: Seconds = Field(default=2.0, validation_alias="GUARD_HEARTBEAT_S")
    hold_ms: Annotated[int, whole(0, 10_000)] = Field(default=50, validation_alias="GUARD_HOLD_MS")
    background_ageing_s: Seconds = Field(default=60.0, validation_alias="GUARD_BACKGROUND_AGEING_S")
    max_overloads: Annotated[int, whole(1)] = Field(default=3, validation_alias="GUARD_MAX_OVERLOADS")
    first_start_hold_s: Annotated[float, number(0, _DAY_S)] | None = Field(
        default=None, validation_alias="GUARD_FIRST_START_HOLD_S"
    )
    store_timeout_s: Annotated[float, number(0.001, 600)] = Field(default=2.0, validation_alias="GUARD_STORE_TIMEOUT_S")
    unknown_servers: Annotated[Literal["pass", "refuse"], one_of("pass", "refuse")] = Field(
        default="pass", validation_alias="GUARD_UNKNOWN_SERVERS"
    )
    ignore_variables: tuple[Annotated[str, name()], ...] = Field(default=(), validation_alias="GUARD_IGNORE_VARIABLES")

    _by_id: dict[str, EndpointConfig] = PrivateAttr(default_factory=dict)

    def __init__(self, /, **values: object) -> None:
        """Read the environment and the keywords, and check them together.

        Args:
            **values: settings by their names in Python, or by the names of their variables.

        Raises:
            ConfigurationError: with everything that is wrong, none of the values.
        """
        named = {_VARIABLES.get(key, key): value for key, value in values.items()}
        problems = [unknown_keyword(key, _VARIABLES) for key in named if key not in _VARIABLES.values()]
        said = environment(_VARIABLES.values(), named) | named
        fields, entries, unreadable = read_values({key: said[key] for key in _VARIABLES.values() if key in said})
        problems += unreadable
        try:
            super().__init__(**fields)
        except ValidationError as error:
            found = list(problems_in(error))
            problems += found
            # The rules between fields are applied to what is left, so that one message tells about everything.
            super().__init__(**without(fields, found))
        problems += problems_across(Draft(self, entries, frozenset(str(problem.path[0]) for problem in problems)))
        ignored = {TEST_SERVER, *self.ignore_variables, *(entry.key_variable for entry in entries)}
        problems += stray_variables(os.environ, _VARIABLES.values(), ignored)
        # Outside of the except block: what is chained to an exception is carried along to whoever reports it.
        if problems:
            raise ConfigurationError(message(problems))

    def model_post_init(self, context: object, /) -> None:
        """Index the endpoints, since each call looks one up."""
        super().model_post_init(context)
        self._by_id = {endpoint.id: endpoint for endpoint in self.models}

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Nothing but keywords: the constructor reads the environment, to tell everything that is wrong at once."""
        del settings_cls, env_settings, dotenv_settings, file_secret_settings
        return (init_settings,)

    def endpoint(self, endpoint_id: str) -> EndpointConfig:
        """The endpoint with this id. With no models configured, every id is one, with the usual ceiling.

        Raises:
            ConfigurationError: if there are models and it is not among them (the message names the nearest), or if it
                cannot be an id.
        """
        asked: object = endpoint_id  # it may come from a message's options, where anything may stand
        known = self._by_id.get(asked) if isinstance(asked, str) else None
        if known is not None:
            return known
        if not self._by_id:
            return EndpointConfig(id=endpoint_id)
        wrong = name_problem(endpoint_id)
        if wrong:
            msg = f"the id of an endpoint {wrong}"
            raise ConfigurationError(msg)
        close = shown(nearest(endpoint_id, self._by_id) or "")
        source = "GUARD_MODELS_FILE" if self.models_file else "GUARD_MODELS"
        msg = f"{shown(endpoint_id)} is no configured model; the nearest is {close}: correct it, or add it to {source}"
        raise ConfigurationError(msg)

    def floor(self, endpoint: EndpointConfig) -> int:
        """Calls of the group's budget that are set aside for an endpoint; 0 unless its role is a reserved one."""
        if endpoint.role not in self.gpu_reserved_roles:
            return 0
        return min(endpoint.declared, endpoint.ceiling(self.model_max_concurrent_requests))

    def check_cost(self, cost: object) -> int:
        """Check how many permits a call asks for.

        Returns:
            The cost, 1 to MODEL_MAX_CONCURRENCY. Whether it fits its endpoint is for the admission to say.

        Raises:
            ConfigurationError: if it is anything else, booleans and fractions included.
        """
        if isinstance(cost, bool) or not isinstance(cost, int) or not 1 <= cost <= self.model_max_concurrency:
            most = self.model_max_concurrency
            msg = f"guard_cost must be a whole number from 1 to {most} (MODEL_MAX_CONCURRENCY)"
            raise ConfigurationError(msg)
        return cost

    def rules(self) -> Rules:
        """What this process publishes about the deployment as a whole."""
        return Rules(
            lease_ms=_ms(self.lease_s),
            heartbeat_ms=_ms(self.heartbeat_s),
            hold_ms=self.hold_ms,
            ageing_ms=_ms(self.background_ageing_s),
            max_overloads=self.max_overloads,
            reserve_fraction=self.kg_llm_priority_reserve_fraction,
        )

    @property
    def first_start_hold_ms(self) -> int:
        """How long a store that never saw a guard admits nothing: as set, else one heartbeat."""
        return _ms(self.heartbeat_s) if self.first_start_hold_s is None else round(self.first_start_hold_s * 1000)

    def published(self, extra_ids: Iterable[str] = ()) -> Published:
        """What this process tells the store.

        Args:
            extra_ids: ids that this process uses, beside the configured ones (with no models configured).

        Raises:
            ConfigurationError: if models are configured and one of `extra_ids` is not among them.
        """
        extra = {endpoint_id: self.endpoint(endpoint_id) for endpoint_id in extra_ids}
        return Published(
            endpoints=tuple(self._spec(endpoint) for endpoint in {**self._by_id, **extra}.values()),
            budgets=dict(self.gpu_concurrency_budgets),
            rules=self.rules(),
            revision=self.config_revision,
        )

    def _spec(self, endpoint: EndpointConfig) -> EndpointSpec:
        return EndpointSpec(
            id=endpoint.id,
            ceiling=endpoint.ceiling(self.model_max_concurrent_requests),
            floor=self.floor(endpoint),
            reserve=self.kg_llm_priority_reserve if endpoint.reserve is None else endpoint.reserve,
            group=endpoint.group if endpoint.group in self.gpu_concurrency_budgets else "",
            fallback=endpoint.fallback,
            breaker=self.model_circuit_breaker,
            fail_threshold=self.model_breaker_fail_threshold,
            base_cooldown_ms=_ms(self.model_breaker_base_cooldown_s),
            max_cooldown_ms=_ms(self.model_breaker_max_cooldown_s),
            backoff_factor=self.model_breaker_backoff_factor,
        )

    def warnings(self) -> list[str]:
        """What works and is probably not meant, one sentence each, for the log at start-up."""
        return list(suspicions(self))


_VARIABLES = {field_name: str(field.validation_alias) for field_name, field in GuardSettings.model_fields.items()}


def server_ceiling(model: str, settings: GuardSettings | None = None) -> int:
    """The most calls in flight that a model's server can take, from the configuration alone.

    An explicit ``max_concurrent_requests`` wins absolutely, also below the declared capacity; else it is the larger of
    the declared capacity and MODEL_MAX_CONCURRENT_REQUESTS; for an unknown model the latter. A live override by an
    operator is not in it. Never raises: a configuration that is refused at start-up counts as none, which gives 32.

    Args:
        model: id of the endpoint.
        settings: where to look. Without it the environment is read anew: pass it wherever this is called often.

    Returns:
        At least 1.
    """
    try:
        where = GuardSettings() if settings is None else settings
    except ConfigurationError:
        return DEFAULT_CEILING
    found = next((endpoint for endpoint in where.models if endpoint.id == model), None)
    usual = where.model_max_concurrent_requests
    return usual if found is None else found.ceiling(usual)


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
