"""One promise, two faces: each scenario is written once and played through `Guard` and through `AsyncGuard`."""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import time
from contextlib import nullcontext

import httpx
import pytest

from guard_middleware import (
    AdmissionDenied,
    AsyncGuard,
    AsyncPermit,
    ConfigurationError,
    Guard,
    Permit,
    Priority,
    StoreUnavailable,
    current_permit,
    priority_scope,
)
from guard_middleware.core.commands import Action, Operate
from guard_middleware.core.outcome import Outcome
from guard_middleware.priority import set_message_priority
from guard_middleware.store.aredis import AsyncRedisStore
from guard_middleware.store.redis import RedisStore
from tests.support.faces import AT_ONCE_S, FACES, HEARTBEAT_S, LEASE_S, settings_of, until

ONE = {"chat": {"max_concurrent_requests": 1}}
TWO = {"chat": {"max_concurrent_requests": 2}}
BOX = {name: {"max_concurrent_requests": 2, "gpu_group": "box"} for name in ("chat", "embed", "other")}
ONE_FOR_THE_BOX = {"gpu_concurrency_budgets": {"box": 1}, "gpu_reserved_roles": []}


@pytest.fixture(params=FACES)
def play(request, redis_url, namespace, monkeypatch):
    """Play a scenario through one face, and see that it leaves nothing behind before any lease could have ended."""
    monkeypatch.setattr("guard_middleware.threads._LISTEN_S", 0.02)  # a guard that closes waits for it

    def played(scenario, models, **fields):
        settings = settings_of(redis_url, namespace, models, **fields)

        async def whole():
            face = FACES[request.param](settings)
            other = Guard(settings)
            begun_s = time.monotonic()
            try:
                await scenario(face, other)
                await until(face.truth.nothing_left, AT_ONCE_S, face.truth.snapshot)
                assert time.monotonic() - begun_s < LEASE_S
            finally:
                await asyncio.gather(face.close(), asyncio.to_thread(other.close))
                face.truth.close()

        asyncio.run(whole())

    return played


async def hold(face, model="chat", **options):
    """Get a permit, give it back, and return it."""
    async with face.permit(model, **options) as permit:
        return permit


def apart(function, *args):
    """Call something in a thread that knows nothing of the permit in force here."""
    return asyncio.get_running_loop().run_in_executor(None, function, *args)


# ---------------------------------------------------------------------- to get one, or not


def test_a_permit_that_becomes_free_in_time_goes_to_the_one_who_waits(play):
    """On a full endpoint the caller stands in line, and has the permit as soon as the holder gives it back."""

    async def scenario(face, other):
        held = other.permit("chat")
        begun_s = time.monotonic()
        waiting = face.beside(hold(face, timeout=20))
        await until(lambda: face.truth.waiting() == 1)
        assert set(face.truth.leases()) == {held.lease}
        held.release()
        permit = await waiting
        assert time.monotonic() - begun_s < AT_ONCE_S
        assert (permit.model, permit.endpoint.id, permit.cost, permit.probe) == ("chat", "chat", 1, False)
        assert permit.released

    play(scenario, ONE)


def test_the_permit_of_a_block_is_current_inside_of_it_and_leased_until_its_end(play):
    """`current_permit` is the innermost one; the store has a lease for each, and none after the last block."""

    async def scenario(face, other):
        assert current_permit() is None
        async with face.permit("chat") as outer:
            assert current_permit() is outer
            async with face.permit("embed") as inner:
                assert current_permit() is inner
                assert face.truth.leases() == {outer.lease: "chat", inner.lease: "embed"}
            assert current_permit() is outer
            assert face.truth.leases() == {outer.lease: "chat"}
        assert current_permit() is None
        assert (await face.snapshot()).leases == {}

    play(scenario, {**ONE, "embed": {}})


def test_a_permit_got_by_hand_is_released_once_and_by_hand(play):
    """Without a block it is nobody's current one; a second release gives back nothing that others have got."""

    async def scenario(face, other):
        permit = await face.get("chat")
        assert current_permit() is None
        await face.release(permit)
        held = other.permit("chat", timeout=5)
        await face.release(permit)
        assert set(face.truth.leases()) == {held.lease}
        held.release()

    play(scenario, ONE)


@pytest.mark.parametrize(
    ("action", "reason"),
    [(None, "endpoint_full"), (Action.PAUSE, "paused"), (Action.OPEN, "breaker_open")],
    ids=str,
)
def test_a_wait_that_is_over_says_why_and_leaves_nothing(play, action, reason):
    """`AdmissionDenied` after the time-out, not before and not much later; the line and the leases are as before."""

    async def scenario(face, other):
        held = other.permit("chat")
        if action is not None:
            face.truth.store.operate(Operate(action=action, target="chat", value=60_000))
        begun_s = time.monotonic()
        with pytest.raises(AdmissionDenied) as caught:
            await hold(face, timeout=0.3, priority="interactive")
        assert 0.3 <= time.monotonic() - begun_s < 1.5
        denied = caught.value
        assert (denied.model, denied.priority, denied.reason) == ("chat", "interactive", reason)
        assert denied.retry_after_ms > 0
        assert face.truth.waiting() == 0
        assert set(face.truth.leases()) == {held.lease}
        held.release()

    play(scenario, ONE)


def test_try_permit_is_none_at_once_on_a_full_endpoint_and_a_permit_on_a_free_one(play):
    """It never stands in line."""

    async def scenario(face, other):
        held = other.permit("chat")
        begun_s = time.monotonic()
        assert await face.try_permit("chat", priority="interactive") is None
        assert time.monotonic() - begun_s < 1
        assert face.truth.waiting() == 0
        held.release()
        permit = await face.try_permit("chat")
        assert set(face.truth.leases()) == {permit.lease}
        await face.release(permit)

    play(scenario, ONE)


def test_a_cost_that_can_never_be_is_a_configuration_error_at_once(play):
    """Above the ceiling, above what the group's floors leave, no number: refused, and nobody stands in line."""

    async def scenario(face, other):
        for model, cost in [("chat", 2), ("boxed", 4), ("chat", 0), ("chat", True), ("chat", 1.5)]:
            for way in (hold(face, model, cost=cost, timeout=20), face.try_permit(model, cost=cost)):
                begun_s = time.monotonic()
                with pytest.raises(ConfigurationError, match="cost"):
                    await way
                assert time.monotonic() - begun_s < 1
        assert face.truth.nothing_left()

    models = {**ONE, "boxed": {"max_concurrent_requests": 8, "gpu_group": "box"}}
    play(scenario, models, gpu_concurrency_budgets={"box": 3}, gpu_reserved_roles=[])


def test_what_is_no_model_no_priority_or_no_time_is_refused_before_anything_is_asked(play):
    """A model that is not configured names the nearest; a priority names all; a time-out must be a number."""

    async def scenario(face, other):
        with pytest.raises(ConfigurationError, match='"chat"'):
            await hold(face, "chatt")
        with pytest.raises(ConfigurationError, match='"chat"'):
            await face.try_permit("chatt")
        with pytest.raises(ConfigurationError, match="background_ingestion"):
            await hold(face, priority="urgent")
        for timeout in (-1, float("nan"), None, "5", True):
            with pytest.raises(ConfigurationError, match="timeout"):
                await hold(face, timeout=timeout)

    play(scenario, ONE)


def test_a_store_that_does_not_answer_is_said_within_the_time(play):
    """Nobody listens at the store's address: `StoreUnavailable`, in time; nothing starts unguarded (I12)."""

    async def scenario(face, other):
        for way in (hold(face, timeout=0.5), face.try_permit("chat"), face.snapshot()):
            begun_s = time.monotonic()
            with pytest.raises(StoreUnavailable):
                await way
            assert time.monotonic() - begun_s < 1.5
        face.truth.nothing_left = lambda: True

    play(scenario, ONE, redis_url="redis://127.0.0.1:1/0", store_timeout_s=0.2)


def test_the_fallback_is_what_the_permit_names_while_the_breaker_is_open(play):
    """The endpoint asked for stays in `model`; the one to call stands in `endpoint`."""

    async def scenario(face, other):
        await hold(face)
        face.truth.store.operate(Operate(action=Action.OPEN, target="chat", value=60_000))
        async with face.permit("chat", timeout=0.5) as permit:
            assert (permit.model, permit.endpoint.id) == ("chat", "spare")
            assert face.truth.leases() == {permit.lease: "spare"}

    play(scenario, {"chat": {"fallback": "spare", "fallback_other_model": True}, "spare": {}})


# ---------------------------------------------------------------------- how it ends


class Interrupted(BaseException):
    """A BaseException that nobody knows."""


@pytest.mark.parametrize(
    "ending", [None, ValueError, Interrupted, KeyboardInterrupt, SystemExit, asyncio.CancelledError]
)
def test_however_a_block_ends_its_permit_is_back_before_the_next_line(play, ending):
    """Return, an exception, one of a client, one that ends processes: no unit is in use once the block is left (I5)."""

    async def block(face):
        async with face.permit("chat"):
            if ending is not None:
                raise ending

    async def scenario(face, other):
        for _ in range(3):
            with nullcontext() if ending is None else pytest.raises(ending):
                await block(face)
            assert face.truth.leases() == {}
            assert current_permit() is None

    play(scenario, ONE, model_circuit_breaker=False)


def test_a_block_that_is_left_by_its_caller_gives_its_permit_back(play):
    """A generator that is closed in its middle, as a streaming view would be."""

    async def stream(face):
        async with face.permit("chat"):
            yield 1
            yield 2

    async def scenario(face, other):
        some = stream(face)
        assert await anext(some) == 1
        assert len(face.truth.leases()) == 1
        await some.aclose()
        assert face.truth.leases() == {}

    play(scenario, ONE)


@pytest.mark.parametrize(
    ("ending", "breaker"),
    [
        (None, "closed"),
        (ValueError(), "closed"),
        (AdmissionDenied("other", "orchestration", "endpoint_full"), "closed"),
        (httpx.ReadTimeout(""), "open"),
        (httpx.ConnectError(""), "open"),
        (httpx.PoolTimeout(""), "closed"),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Exception) else str(one),
)
@pytest.mark.parametrize("how", ["block", "release"])
def test_the_exception_with_which_a_call_ends_is_classified(play, how, ending, breaker):
    """What leaves the block, or is given to `release`, feeds the breaker if it says something about capacity."""

    async def scenario(face, other):
        if how == "release":
            await face.release(await face.get("chat"), ending)
        elif ending is None:
            await hold(face)
        else:
            with pytest.raises(type(ending)):
                async with face.permit("chat"):
                    raise ending
        assert face.truth.of().breaker == breaker

    play(scenario, ONE, model_breaker_base_cooldown_s=20)


def test_the_worst_of_what_was_recorded_is_told(play):
    """`record` returns each outcome; an overload among them trips the breaker at the end, though the block returns."""

    async def scenario(face, other):
        async with face.permit("chat") as permit:
            assert permit.record() is Outcome.SUCCESS
            assert permit.record(status=503, headers={"Retry-After": "30"}) is Outcome.OVERLOAD
            assert permit.record(status=404) is Outcome.BENIGN
            assert permit.record(exception=ValueError()) is Outcome.IGNORED
            assert face.truth.of().breaker == "closed"
        now = face.truth.of()
        assert now.breaker == "open"
        assert now.open_for_ms > 20_000

    play(scenario, ONE)


def test_a_permit_that_is_dropped_without_a_release_is_back_within_a_heartbeat(play, caplog):
    """Nobody can give it back any more: a beat does, and says so."""

    async def scenario(face, other):
        permit = await face.get("chat")
        assert len(face.truth.leases()) == 1
        del permit
        gc.collect()
        await until(face.truth.nothing_left, 2 * HEARTBEAT_S + 0.5)
        await until(lambda: "guard.permit_abandoned" in caplog.text)
        assert "endpoint='chat'" in caplog.text

    caplog.set_level(logging.WARNING)
    play(scenario, ONE)


def test_close_gives_back_what_is_held_lets_those_who_wait_go_and_leaves_no_process(play):
    """At once: the holder's lease, a waiter with 20 s to go, and the process itself; then the guard works again."""

    async def scenario(face, other):
        held = await face.get("chat")
        waiting = [face.beside(hold(face, timeout=20)) for _ in range(3)]
        await until(lambda: face.truth.waiting() == 3)
        begun_s = time.monotonic()
        await face.close()
        for one in waiting:
            with pytest.raises(AdmissionDenied):
                await one
        assert time.monotonic() - begun_s < AT_ONCE_S
        assert face.truth.nothing_left()
        assert face.truth.snapshot().processes == {}
        await face.release(held)
        assert face.truth.snapshot().processes == {}
        async with face.permit("chat", timeout=5) as permit:
            assert set(face.truth.leases()) == {permit.lease}

    play(scenario, ONE)


def test_looking_on_takes_no_part(play):
    """A snapshot publishes nothing, so that a process with a smaller ceiling lowers nobody's by reading."""

    async def scenario(face, other):
        async with face.permit("chat", timeout=5):
            assert len(other.snapshot().processes) == 1
            assert set(other.snapshot().endpoints) == {"chat"}

    play(scenario, ONE)


def test_nested_permit_that_was_given_back_leaves_the_outer_one_current(play):
    """Who still holds a permit is known to hold it, and does not wait for another."""

    async def scenario(face, other):
        async with face.permit("chat", timeout=5) as outer:
            async with face.permit("chat", timeout=5) as inner:
                await face.release(inner)
                assert current_permit() is outer
            assert current_permit() is outer
        assert current_permit() is None

    play(scenario, ONE)


def test_close_while_the_store_is_away_ends_the_waits_too(play):
    """A caller that repeats its ask because nobody answers is told to go, long before its own time is over."""

    async def scenario(face, other):
        waiting = face.beside(hold(face, timeout=20))
        await asyncio.sleep(0.5)
        begun_s = time.monotonic()
        await face.close()
        with pytest.raises((AdmissionDenied, StoreUnavailable)):
            await waiting
        assert time.monotonic() - begun_s < AT_ONCE_S + 2
        face.truth.nothing_left = lambda: True

    play(scenario, ONE, redis_url="redis://127.0.0.1:1/0", store_timeout_s=0.2)


# ---------------------------------------------------------------------- calls inside of calls


def test_a_nested_call_on_the_same_endpoint_borrows_the_permit_one_at_a_time(play):
    """On a ceiling of 1: the first nested call runs under the outer lease, a second is denied at once, a later one goes."""

    async def scenario(face, other):
        async with face.permit("chat", priority="interactive") as outer:
            for _ in range(2):
                async with face.permit("chat") as inner:
                    assert (inner.lease, inner.priority) == (outer.lease, Priority.INTERACTIVE)
                    deeper = await face.try_permit("chat")  # of the inner one, which is its own to lend
                    assert deeper.lease == outer.lease
                    begun_s = time.monotonic()
                    with pytest.raises(AdmissionDenied) as caught:
                        await hold(face, timeout=20)
                    assert time.monotonic() - begun_s < 1
                    assert caught.value.reason == "endpoint_full"
                    await face.release(deeper)
                assert face.truth.of().in_flight == 1
                assert face.truth.waiting() == 0
        assert face.truth.leases() == {}

    play(scenario, ONE)


def test_a_second_nested_call_at_once_gets_a_permit_of_its_own_if_one_is_free(play):
    """On a ceiling of 2: own permit for the first, an extra one for the second, none for the third, all back."""

    async def scenario(face, other):
        async with face.permit("chat") as outer:
            first, second = await face.get("chat"), await face.get("chat")
            assert first.lease == outer.lease != second.lease
            assert set(face.truth.leases()) == {outer.lease, second.lease}
            assert await face.try_permit("chat") is None
            await face.release(first)
            assert set(face.truth.leases()) == {outer.lease, second.lease}
            again = await face.try_permit("chat")
            assert again.lease == outer.lease
            await face.release(again)
            await face.release(second)
            assert set(face.truth.leases()) == {outer.lease}

    play(scenario, TWO)


def test_a_cost_above_the_outer_ones_is_not_lent(play):
    """A nested call of cost 2 under a permit of cost 1 gets its own units, at once or not at all."""

    async def scenario(face, other):
        async with face.permit("chat") as outer:
            with pytest.raises(AdmissionDenied):
                await face.get("chat", cost=2, timeout=20)
            assert face.truth.of().in_flight == 1
        async with face.permit("chat", cost=2) as outer, face.permit("chat", cost=1) as inner:
            assert inner.lease == outer.lease
            assert face.truth.of().in_flight == 2

    play(scenario, TWO)


def test_what_a_nested_call_records_counts_for_the_permit_that_it_borrowed(play):
    """Its overload is told once, when the lease ends."""

    async def scenario(face, other):
        async with face.permit("chat"):
            async with face.permit("chat") as inner:
                inner.record(status=503)
            assert face.truth.of().breaker == "closed"
        assert (face.truth.of().breaker, face.truth.of().trips) == ("open", 1)

    play(scenario, ONE, model_breaker_base_cooldown_s=20)


def test_a_borrowed_permit_that_is_dropped_can_be_borrowed_again(play):
    """It is taken back when it is collected."""

    async def scenario(face, other):
        async with face.permit("chat") as outer:
            borrowed = await face.try_permit("chat")
            assert borrowed.lease == outer.lease
            assert await face.try_permit("chat") is None
            del borrowed
            gc.collect()
            async with face.permit("chat") as inner:
                assert inner.lease == outer.lease

    play(scenario, ONE)


def test_a_nested_call_on_another_endpoint_of_the_group_borrows_the_unit_of_the_budget(play):
    """Budget 1, used up by the outer call: the nested one goes under its unit, one at a time, and nobody else does."""

    async def scenario(face, other):
        async with face.permit("chat") as outer:
            assert await apart(other.try_permit, "embed") is None
            async with face.permit("embed") as inner:
                assert face.truth.leases() == {outer.lease: "chat", inner.lease: "embed"}
                assert face.truth.snapshot().groups["box"] == (1, 1)
            async with face.permit("embed", timeout=20):
                second = await face.try_permit("other")  # under the nested one, which lends in its turn
                if second is not None:
                    await face.release(second)
                assert face.truth.snapshot().groups["box"] == (1, 1)
                assert await apart(other.try_permit, "other") is None
            loose = await face.get("embed")
            begun_s = time.monotonic()
            with pytest.raises(AdmissionDenied) as caught:
                await hold(face, "other", timeout=20)
            assert time.monotonic() - begun_s < 1
            assert caught.value.reason == "group_full"
            await face.release(loose)
        assert face.truth.snapshot().groups["box"] == (0, 1)

    play(scenario, BOX, **ONE_FOR_THE_BOX)


def test_the_unit_passes_to_the_nested_call_if_the_outer_one_ends_first(play):
    """It is free for others only when both have ended."""

    async def scenario(face, other):
        async with face.permit("chat"):
            inner = await face.get("embed")
        assert face.truth.leases() == {inner.lease: "embed"}
        assert face.truth.snapshot().groups["box"] == (1, 1)
        assert await apart(other.try_permit, "chat") is None
        await face.release(inner)
        permit = await apart(other.try_permit, "chat")
        permit.release()

    play(scenario, BOX, **ONE_FOR_THE_BOX)


# ---------------------------------------------------------------------- priorities


def test_the_priority_is_the_explicit_one_else_the_scopes_else_the_outer_calls_else_the_usual_one(play):
    """And it is the rank with which the caller stands in line."""

    async def scenario(face, other):
        assert (await hold(face)).priority is Priority.ORCHESTRATION
        with priority_scope("interactive"):
            assert (await hold(face)).priority is Priority.INTERACTIVE
            assert (await hold(face, priority="hydration")).priority is Priority.HYDRATION
        async with face.permit("chat", priority="background_ingestion"):
            assert (await hold(face, "embed")).priority is Priority.BACKGROUND_INGESTION
            with priority_scope("interactive"):
                assert (await hold(face, "embed")).priority is Priority.INTERACTIVE
        set_message_priority(Priority.HYDRATION)
        assert (await hold(face)).priority is Priority.HYDRATION
        set_message_priority(None)
        held = other.permit("chat")
        with priority_scope("interactive"):
            first = face.beside(hold(face, timeout=20))
        second = face.beside(hold(face, timeout=20, priority=Priority.BACKGROUND_INGESTION))
        await until(lambda: face.truth.of().waiting == {0: 1, 3: 1}, 3, lambda: face.truth.of().waiting)
        held.release()
        await asyncio.gather(first, second)

    play(scenario, {**ONE, "embed": {}})


# ---------------------------------------------------------------------- the faces themselves


def shape(function):
    """Parameters and what is promised of them; the return type may differ by what waits."""
    return [
        (one.name, one.kind, one.default, one.annotation) for one in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(
    ("sync", "other", "verbs"),
    [
        (Guard, AsyncGuard, ["permit", "try_permit", "snapshot", "close", "from_settings", "get"]),
        (Permit, AsyncPermit, ["release", "record", "lend", "abandon"]),
        (RedisStore, AsyncRedisStore, ["admit", "finish", "snapshot", "close", "from_url"]),
    ],
    ids=["guard", "permit", "store"],
)
def test_both_faces_have_the_same_signatures(sync, other, verbs):
    """They differ by `await` only."""
    for verb in verbs:
        assert shape(getattr(sync, verb)) == shape(getattr(other, verb)), verb


def test_neither_face_shows_more_than_names(redis_url, namespace):
    """No URL in what either prints of itself (I13)."""
    settings = settings_of(redis_url, namespace, ONE)
    for guard in (Guard(settings), AsyncGuard(settings)):
        assert repr(guard) == f"<{type(guard).__name__} namespace={namespace!r} models=['chat']>"
