"""Which of the published configurations applies."""

from __future__ import annotations

import itertools

from guard_middleware.core.configuration import effective
from guard_middleware.core.values import EndpointSpec, Published, Rules


def published(*specs, revision=0, budgets=None, rules=None):
    """What one process publishes."""
    return Published(endpoints=specs, revision=revision, budgets=budgets or {}, rules=rules or Rules())


def test_nobody_publishes_nothing_applies():
    """Without a live process there is no endpoint, no budget, and the default rules."""
    assert effective({}) == ({}, {}, Rules())


def test_one_process_applies_as_it_is():
    """What the only process published is what applies."""
    spec = EndpointSpec(id="e", ceiling=4, floor=2, reserve=1, group="gpu", fallback="f", fail_threshold=3)
    rules = Rules(lease_ms=5_000)

    assert effective({"p": published(spec, budgets={"gpu": 6}, rules=rules)}) == ({"e": spec}, {"gpu": 6}, rules)


def test_smallest_value_at_the_same_revision_applies():
    """Two that differ: the smallest ceiling, floor, reserve and budget, from whichever side."""
    one = published(EndpointSpec(id="e", ceiling=4, floor=3, reserve=2), budgets={"gpu": 8})
    two = published(EndpointSpec(id="e", ceiling=6, floor=1, reserve=1), budgets={"gpu": 5})

    specs, budgets, _ = effective({"a": one, "b": two})

    assert (specs["e"].ceiling, specs["e"].floor, specs["e"].reserve) == (4, 1, 1)
    assert budgets == {"gpu": 5}


def test_highest_revision_wins_also_upwards():
    """A deploy with a higher revision applies at once, whatever the old processes still say."""
    old = published(EndpointSpec(id="e", ceiling=4), budgets={"gpu": 4}, rules=Rules(ageing_ms=1))
    new = published(EndpointSpec(id="e", ceiling=16), budgets={"gpu": 9}, rules=Rules(ageing_ms=2), revision=1)

    for names in (("a", "b"), ("b", "a")):
        specs, budgets, rules = effective(dict(zip(names, (old, new), strict=True)))
        assert (specs["e"].ceiling, budgets["gpu"], rules.ageing_ms) == (16, 9, 2)


def test_smallest_among_the_highest_revision_only():
    """Of three, the two of the newest revision count."""
    each = {
        "a": published(EndpointSpec(id="e", ceiling=1)),
        "b": published(EndpointSpec(id="e", ceiling=9), revision=2),
        "c": published(EndpointSpec(id="e", ceiling=7), revision=2),
    }

    assert effective(each)[0]["e"].ceiling == 7


def test_endpoint_that_the_newest_do_not_name_stays():
    """Revisions are compared per endpoint and per budget: an old worker's own endpoint is not taken from it."""
    old = published(EndpointSpec(id="old", ceiling=3), budgets={"gpu": 3})
    new = published(EndpointSpec(id="new", ceiling=5), revision=7)

    specs, budgets, _ = effective({"a": old, "b": new})

    assert {one: spec.ceiling for one, spec in specs.items()} == {"old": 3, "new": 5}
    assert budgets == {"gpu": 3}


def test_floor_never_exceeds_the_merged_ceiling():
    """The smaller ceiling of one side bounds the floor of the other, and a floor above its own ceiling as well."""
    one = published(EndpointSpec(id="e", ceiling=8, floor=8))
    two = published(EndpointSpec(id="e", ceiling=2, floor=6))

    assert effective({"a": one, "b": two})[0]["e"].floor == 2


def test_own_reserve_beats_the_fraction_in_a_merge():
    """`None` means "the fraction"; a number of any side applies, 0 included."""
    free = published(EndpointSpec(id="e", ceiling=8))
    fixed = published(EndpointSpec(id="e", ceiling=8, reserve=0))

    assert effective({"a": free, "b": fixed})[0]["e"].reserve == 0
    assert effective({"a": free})[0]["e"].reserve is None


def test_everything_else_comes_from_the_first_process_by_id():
    """Cooldowns, group and fallback are not mixed: one process's whole set applies, the same for everybody."""
    one = published(EndpointSpec(id="e", ceiling=8, base_cooldown_ms=1, fallback="f"), rules=Rules(hold_ms=1))
    two = published(EndpointSpec(id="e", ceiling=4, base_cooldown_ms=2, group="gpu"), rules=Rules(hold_ms=2))

    specs, _, rules = effective({"b": two, "a": one})

    assert (specs["e"].base_cooldown_ms, specs["e"].fallback, specs["e"].group) == (1, "f", "")
    assert rules.hold_ms == 1


def test_order_of_publishing_does_not_matter():
    """All processes compute the same from the same set."""
    each = {
        name: published(
            EndpointSpec(id="e", ceiling=ceiling, reserve=reserve), revision=revision, budgets={"g": ceiling}
        )
        for name, ceiling, reserve, revision in [("a", 4, None, 1), ("b", 3, 2, 1), ("c", 9, 1, 0)]
    }

    assert len({repr(effective(dict(order))) for order in itertools.permutations(each.items())}) == 1
