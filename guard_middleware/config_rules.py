"""What must hold between fields that are each right by themselves, and what merely looks like a mistake."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from guard_middleware.config_parse import Problem, nearest, shown, shown_path
from guard_middleware.config_url import normalise_base_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from guard_middleware.config import GuardSettings
    from guard_middleware.config_endpoint import EndpointConfig, Entry

_SUSPICIOUS_FACTOR = 3
_RESEMBLES = 0.75


@dataclass(frozen=True, slots=True)
class Draft:
    """A configuration of which some parts may have been refused already.

    Attributes:
        settings: what could be read; defaults stand where something was refused.
        entries: the list of models.
        unsure: variables that were refused, on which no rule may rely.
    """

    settings: GuardSettings
    entries: list[Entry]
    unsure: frozenset[str]

    @property
    def placed(self) -> list[tuple[tuple[str | int, ...], EndpointConfig]]:
        """The endpoints that could be read, and where they stand."""
        return [(entry.path, entry.endpoint) for entry in self.entries if entry.endpoint is not None]

    def sure(self, *variables: str) -> bool:
        """Whether none of these was refused."""
        return not self.unsure.intersection(variables)


def problems_across(draft: Draft) -> Iterator[Problem]:
    """Everything that cannot work although each field by itself is right."""
    yield from _durations(draft)
    yield from _bounds(draft)
    yield from _reserves(draft)
    yield from _twice(draft)
    yield from _fallbacks(draft)
    yield from _budgets(draft)


def _durations(draft: Draft) -> Iterator[Problem]:
    settings = draft.settings
    if draft.sure("GUARD_LEASE_S", "GUARD_HEARTBEAT_S"):
        rules = settings.rules()
        if 3 * rules.heartbeat_ms > rules.lease_ms:
            text = "must be at most a third of GUARD_LEASE_S, or one late heartbeat ends leases of running calls"
            yield Problem(("GUARD_HEARTBEAT_S",), text)
    if (
        draft.sure("MODEL_BREAKER_BASE_COOLDOWN_S", "MODEL_BREAKER_MAX_COOLDOWN_S")
        and settings.model_breaker_base_cooldown_s > settings.model_breaker_max_cooldown_s
    ):
        text = "must be at most MODEL_BREAKER_MAX_COOLDOWN_S: lower it, or raise that"
        yield Problem(("MODEL_BREAKER_BASE_COOLDOWN_S",), text)


def _bounds(draft: Draft) -> Iterator[Problem]:
    if not draft.sure("MODEL_MAX_CONCURRENCY"):
        return
    most = draft.settings.model_max_concurrency
    above = f"above MODEL_MAX_CONCURRENCY ({most}), the most that any ceiling may be: lower it, or raise that"
    if draft.sure("MODEL_MAX_CONCURRENT_REQUESTS") and draft.settings.model_max_concurrent_requests > most:
        yield Problem(("MODEL_MAX_CONCURRENT_REQUESTS",), f"is {above}")
    for path, endpoint in draft.placed:
        if endpoint.max_concurrent_requests is None and endpoint.declared > most:
            field = "parallel_instances" if endpoint.max_parallel_calls is None else "max_parallel_calls"
            yield Problem((*path, field), f"makes a declared capacity of {endpoint.declared}, {above}")
        elif (endpoint.max_concurrent_requests or 0) > most:
            yield Problem((*path, "max_concurrent_requests"), f"is {above}")


def _reserves(draft: Draft) -> Iterator[Problem]:
    settings = draft.settings
    usual = settings.model_max_concurrent_requests
    shared = settings.kg_llm_priority_reserve if draft.sure("KG_LLM_PRIORITY_RESERVE") else None
    never = "or its background work could never run"
    for path, endpoint in draft.placed:
        if endpoint.max_concurrent_requests is None and not draft.sure("MODEL_MAX_CONCURRENT_REQUESTS"):
            continue
        ceiling = endpoint.ceiling(usual)
        if endpoint.reserve is not None:
            if endpoint.reserve >= ceiling:
                yield Problem((*path, "reserve"), f"must be below the endpoint's ceiling of {ceiling}, {never}")
        elif shared is not None and shared >= ceiling:
            text = f"must be below the ceiling of {shown_path(path)}, which is {ceiling}, {never}"
            yield Problem(("KG_LLM_PRIORITY_RESERVE",), f"{text}: lower it, or give that endpoint a reserve of its own")
    no_models = not draft.entries and draft.sure("GUARD_MODELS", "GUARD_MODELS_FILE", "MODEL_MAX_CONCURRENT_REQUESTS")
    if no_models and shared is not None and shared >= usual:
        yield Problem(("KG_LLM_PRIORITY_RESERVE",), f"must be below MODEL_MAX_CONCURRENT_REQUESTS ({usual}), {never}")


def _twice(draft: Draft) -> Iterator[Problem]:
    ids: dict[str, Entry] = {}
    for entry in draft.entries:
        first = ids.setdefault(entry.id, entry)
        if entry.id and first is not entry:
            text = f"is the same as that of {shown_path(first.path)}: give each endpoint an id of its own"
            yield Problem((*entry.path, "id"), text)
    servers: dict[tuple[str, str], tuple[tuple[str | int, ...], EndpointConfig]] = {}
    for path, endpoint in draft.placed:
        if endpoint.base_url:
            key = (normalise_base_url(endpoint.base_url), endpoint.model)
            first_path, first_endpoint = servers.setdefault(key, (path, endpoint))
            if first_path != path and first_endpoint.id != endpoint.id:
                text = f"is the same server, with the same model, as that of {shown_path(first_path)}"
                yield Problem((*path, "base_url"), f"{text}: keep one, or the server would get two ceilings")


def _fallbacks(draft: Draft) -> Iterator[Problem]:
    endpoints = {endpoint.id: endpoint for _, endpoint in reversed(draft.placed)}
    ids = [entry.id for entry in draft.entries if entry.id]
    in_rings: set[str] = set()
    for path, endpoint in draft.placed:
        place = (*path, "fallback")
        target = endpoints.get(endpoint.fallback)
        if not endpoint.fallback:
            continue
        if endpoint.fallback not in ids:
            others = [known for known in ids if known != endpoint.id]
            close = nearest(endpoint.fallback, others)
            advice = f"the nearest id is {shown(close)}" if close else "there is no other endpoint: leave it out"
            yield Problem(place, f"names {shown(endpoint.fallback)}, which is not configured; {advice}")
            continue
        ring = _ring(endpoint, endpoints)
        if ring:
            if endpoint.id not in in_rings:
                yield Problem(place, f"makes a ring, {' -> '.join(shown(member) for member in ring)}: break it")
            in_rings.update(ring)
        elif target is not None and target.fallback:
            text = f"names {shown(target.id)}, which has a fallback itself, and there is one level only"
            yield Problem(place, f"{text}: leave one of the two out")
        if target is not None and target.model != endpoint.model and not endpoint.fallback_other_model:
            text = f"names {shown(target.id)}, which serves another model: name one that serves the same, or"
            yield Problem(place, f"{text} allow it with fallback_other_model (never for embeddings)")


def _ring(endpoint: EndpointConfig, endpoints: dict[str, EndpointConfig]) -> list[str]:
    """The ids from an endpoint along its fallbacks back to itself, or nothing if that way does not come back."""
    walked = [endpoint.id]
    current: EndpointConfig | None = endpoint
    while current is not None and current.fallback:
        following = current.fallback
        if following == endpoint.id:
            return [*walked, following]
        if following in walked:  # a ring further on, which is that one's problem
            return []
        walked.append(following)
        current = endpoints.get(following)
    return []


def _budgets(draft: Draft) -> Iterator[Problem]:
    settings = draft.settings
    if not draft.sure("GPU_RESERVED_ROLES", "MODEL_MAX_CONCURRENT_REQUESTS"):
        return
    members = _members(settings, [endpoint for _, endpoint in draft.placed])
    for group, budget in settings.gpu_concurrency_budgets.items():
        floors = {endpoint.id: settings.floor(endpoint) for endpoint in members[group]}
        taken = sum(floors.values())
        without = [shown(endpoint) for endpoint, floor in floors.items() if not floor]
        place = ("GPU_CONCURRENCY_BUDGETS", group)
        advice = "raise it, or lower parallel_instances or max_parallel_calls of"
        reserved = ", ".join(shown(endpoint) for endpoint, floor in floors.items() if floor)
        if taken > budget:
            yield Problem(place, f"is {budget}, less than the {taken} calls that are set aside: {advice} {reserved}")
        elif taken == budget and taken and without:
            text = f"is {budget}, and {taken} calls are set aside, which leaves no room for {', '.join(without)}"
            yield Problem(place, f"{text}: {advice} {reserved}")


def _members(settings: GuardSettings, endpoints: list[EndpointConfig]) -> defaultdict[str, list[EndpointConfig]]:
    members: defaultdict[str, list[EndpointConfig]] = defaultdict(list)
    for endpoint in endpoints:
        if endpoint.group in settings.gpu_concurrency_budgets:
            members[endpoint.group].append(endpoint)
    return members


def suspicions(settings: GuardSettings) -> Iterator[str]:
    """What works and is probably not meant, one sentence each, for the log at start-up."""
    endpoints = list(settings.models)
    budgets = settings.gpu_concurrency_budgets
    members = _members(settings, endpoints)
    for group, budget in budgets.items():
        ceilings = sum(endpoint.ceiling(settings.model_max_concurrent_requests) for endpoint in members[group])
        place = shown_path(("GPU_CONCURRENCY_BUDGETS", group))
        if ceilings > _SUSPICIOUS_FACTOR * budget:
            yield f"{place} is {budget}, but the ceilings of its endpoints sum to {ceilings}: is one of them a mistake?"
        if endpoints and not members[group]:
            close = nearest(group, {endpoint.group for endpoint in endpoints if endpoint.group})
            nearby = f"; the nearest group in use is {shown(close)}" if close else ""
            yield f"{place} caps no endpoint, as no configured model is in that GPU group{nearby}"
    for endpoint in endpoints:
        if endpoint.gpu_group and endpoint.gpu_group not in budgets:
            group = shown(endpoint.gpu_group)
            yield f"gpu_group {group} of {shown(endpoint.id)} has no entry in GPU_CONCURRENCY_BUDGETS: it has no budget"
        close = nearest(endpoint.role, settings.gpu_reserved_roles, _RESEMBLES) if endpoint.role else None
        if close and close != endpoint.role:
            yield f"role {shown(endpoint.role)} of {shown(endpoint.id)} is not reserved; did you mean {shown(close)}?"
    yield from _divided_servers(endpoints)
    if settings.store_timeout_s >= settings.lease_s:
        yield "GUARD_STORE_TIMEOUT_S is not below GUARD_LEASE_S: one slow answer can outlast a lease"
    if settings.kg_adaptive_concurrency:
        yield "KG_ADAPTIVE_CONCURRENCY is accepted, but limits stay at their ceilings: there is no controller yet"


def _divided_servers(endpoints: list[EndpointConfig]) -> Iterator[str]:
    first: dict[str, EndpointConfig] = {}
    for endpoint in endpoints:
        if endpoint.base_url:
            other = first.setdefault(normalise_base_url(endpoint.base_url), endpoint)
            if other.group != endpoint.group:
                yield f"{shown(other.id)} and {shown(endpoint.id)} are on one server but in different GPU groups"
