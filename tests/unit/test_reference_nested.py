"""Calls made under another call's permit: on another endpoint of its GPU group they use its units of the budget."""

from __future__ import annotations

from guard_middleware.core.commands import Action, Status
from guard_middleware.core.verdict import Reason
from tests.unit.builders import World, spec


def world_of(budget=2, **embed):
    """An endpoint `chat` and an endpoint `embed` share a budget, which calls to `chat` use up."""
    world = World(spec("chat", 4, group="g"), spec("embed", 4, group="g", **embed), budgets={"g": budget})
    outer = [world.call(endpoint="chat") for _ in range(budget)]
    assert world.call(endpoint="embed").reason is Reason.GROUP_FULL
    return world, outer


def total(world):
    return world.rule.snapshot(world.now).groups["g"][0]


def test_nested_call_uses_the_unit_of_the_call_around_it():
    """The budget is used up, and yet it starts: the call around it waits for it meanwhile."""
    world, (outer, _) = world_of()
    inner = world.call(endpoint="embed", parent=outer.lease)

    assert inner.status is Status.ADMITTED
    assert world.seen("embed").in_flight == 1
    assert total(world) == 2, "what is lent counts once"


def test_unit_is_lent_to_one_call_at_a_time():
    """A second one needs a unit of its own; when the first has ended, it can have the lent one."""
    world, (outer, _) = world_of()
    inner = world.call(endpoint="embed", parent=outer.lease)
    second = world.call(endpoint="embed", parent=outer.lease)
    world.finish(inner)
    third = world.call(endpoint="embed", parent=outer.lease)

    assert second.reason is Reason.GROUP_FULL
    assert third.status is Status.ADMITTED


def test_unit_passes_on_if_the_call_around_it_ends_first():
    """From then on the inner call counts for itself: the budget is never exceeded."""
    world, (outer, other) = world_of()
    inner = world.call(endpoint="embed", parent=outer.lease)
    world.finish(outer)
    assert total(world) == 2
    assert world.call(endpoint="chat").reason is Reason.GROUP_FULL
    world.finish(inner)

    assert world.call(endpoint="chat").status is Status.ADMITTED
    assert other.live


def test_units_of_a_call_that_is_over_are_not_lent():
    """Only a live lease lends."""
    world, (outer, _) = world_of()
    world.finish(outer)
    world.call(endpoint="chat")

    assert world.call(endpoint="embed", parent=outer.lease).reason is Reason.GROUP_FULL


def test_only_as_many_units_are_lent_as_the_outer_call_has():
    """A call of cost 2 under one of cost 1 needs one more."""
    world, (outer, other) = world_of()
    assert world.call(endpoint="embed", parent=outer.lease, cost=2).reason is Reason.GROUP_FULL
    world.finish(other)

    assert world.call(endpoint="embed", parent=outer.lease, cost=2).status is Status.ADMITTED
    assert total(world) == 2


def test_nothing_is_lent_on_the_same_endpoint_or_to_another_group():
    """There the call's own unit is what the actor itself works with, or is somebody else's accelerator."""
    world = World(
        spec("chat", 1, group="g"), spec("embed", 4, group="h"), spec("rank", 4, group="h"), budgets={"g": 1, "h": 1}
    )
    outer = world.call(endpoint="chat")
    world.call(endpoint="embed")

    assert world.call(endpoint="chat", parent=outer.lease).reason is Reason.ENDPOINT_FULL
    assert world.call(endpoint="rank", parent=outer.lease).reason is Reason.GROUP_FULL


def test_ceiling_and_breaker_of_the_other_endpoint_stand():
    """Only the budget is shared."""
    world, (outer, _) = world_of()
    world.operate(Action.OVERRIDE, "embed", value=1)
    inner = world.call(endpoint="embed", parent=outer.lease)
    world.finish(inner)
    world.operate(Action.PAUSE, "embed")
    assert world.call(endpoint="embed", parent=outer.lease).reason is Reason.PAUSED
    world.operate(Action.RESUME, "embed")
    world.operate(Action.OPEN, "embed", value=1_000)

    assert world.call(endpoint="embed", parent=outer.lease).reason is Reason.BREAKER_OPEN


def test_who_waits_for_the_budget_is_not_in_the_way_of_a_lent_unit():
    """The nested call takes nothing from the budget that the waiter could have."""
    world, (outer, _) = world_of()
    assert world.call(endpoint="embed", wait=True, rank=0).status is Status.WAITING

    assert world.call(endpoint="chat", rank=1).status is Status.REFUSED
    assert world.call(endpoint="embed", parent=outer.lease, rank=0).status is Status.ADMITTED


def test_nested_call_keeps_its_unit_through_renewals():
    """Both are renewed by the beats of their process, and go on counting once."""
    world, (outer, other) = world_of()
    inner = world.call(endpoint="embed", parent=outer.lease)
    for _ in range(8):
        world.pass_time(2_000)

    assert total(world) == 2
    assert all(call.lease in world.rule.state.leases for call in (outer, other, inner))
