"""Which of the published configurations applies: pure, and the same for every process."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from guard_middleware.core.values import EndpointSpec, Rules

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from guard_middleware.core.values import Published


def effective(published: Mapping[str, Published]) -> tuple[dict[str, EndpointSpec], dict[str, int], Rules]:
    """Merge what the live processes published.

    For each endpoint and each budget, only the processes at the highest revision that name it count. Of their
    values the smallest ceiling, floor, reserve and budget apply, so that a deploy is never looser than either side;
    everything else comes from the first of them in the order of their ids.

    Args:
        published: process id -> what it published.

    Returns:
        Specs by endpoint id, budgets by group, and the rules.
    """
    order = [published[process] for process in sorted(published)]
    specs: dict[str, list[tuple[int, EndpointSpec]]] = {}
    budgets: dict[str, list[tuple[int, int]]] = {}
    for one in order:
        for spec in one.endpoints:
            specs.setdefault(spec.id, []).append((one.revision, spec))
        for group, budget in one.budgets.items():
            budgets.setdefault(group, []).append((one.revision, budget))
    rules = max(order, key=lambda one: one.revision).rules if order else Rules()
    return (
        {endpoint: _smallest(_newest(found)) for endpoint, found in specs.items()},
        {group: min(_newest(found)) for group, found in budgets.items()},
        rules,
    )


_T = TypeVar("_T")


def _newest(found: Iterable[tuple[int, _T]]) -> list[_T]:
    pairs = list(found)
    highest = max(revision for revision, _ in pairs)
    return [value for revision, value in pairs if revision == highest]


def _smallest(specs: list[EndpointSpec]) -> EndpointSpec:
    reserves = [spec.reserve for spec in specs if spec.reserve is not None]
    ceiling = min(spec.ceiling for spec in specs)
    return replace(
        specs[0],
        ceiling=ceiling,
        floor=min(ceiling, *(spec.floor for spec in specs)),
        reserve=min(reserves) if reserves else None,
    )
