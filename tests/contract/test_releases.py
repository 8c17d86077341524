"""A permit comes back once, from whoever holds it, however its call ends; and nobody else's does (I5, I7, I11).

The rule itself is in ``tests/unit/test_reference_leases.py`` and ``test_reference_faults.py``. Here are both stores,
and the threads of callers.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import threading
import time
from contextlib import closing, contextmanager

import httpx
import pytest

from guard_middleware import AdmissionDenied, Guard, GuardSettings
from guard_middleware.core.commands import Action, Operate, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import EndpointSpec
from guard_middleware.core.verdict import Reason
from tests.contract.store_sides import ENDPOINT, PROCESS, MemorySide, RedisSide
from tests.support.deployment import wait_until

OTHER = "other"
LEASE_MS = 15_000


@pytest.fixture(params=["memory", "redis"])
def side(request, namespace):
    """One store of each kind."""
    if request.param == "memory":
        side = MemorySide(namespace)
    else:
        side = RedisSide(namespace, request.getfixturevalue("redis_url"))
    with closing(side):
        yield side


def boot(side, ceiling=1, *processes, **more):
    """Configure one endpoint for these processes, which listen to no queue."""
    for process in processes or (PROCESS, OTHER):
        side.configure(EndpointSpec(id=ENDPOINT, ceiling=ceiling, reserve=0, **more), process=process)
        side.beat(process=process, queues=())


def operate(side, action, target=ENDPOINT, **more):
    """An operator's command, or a process's own."""
    return side.store.operate(Operate(action=action, target=target, **more))


def admitted(side, count, **more):
    """Ask so many times, and return the leases of those that were admitted."""
    asked = [(lease := side.new("a"), side.ask(lease, **more)) for _ in range(count)]
    return [lease for lease, reply in asked if reply.status is Status.ADMITTED]


def seen(side):
    """The endpoint's state."""
    return side.store.snapshot().endpoints[ENDPOINT]


# ---------------------------------------------------------------------- twice, late, foreign


def test_second_release_changes_nothing(side):
    """At a ceiling of one: released twice by a worker that was thought dead, the unit is one unit still."""
    # Given a lease that has been released, whose unit somebody else has
    boot(side)
    side.ask("l-first")
    side.finish("l-first")
    side.ask("l-second", process=OTHER)
    # When it is released again, as success, as failure and in another process's name
    before = side.store.snapshot()
    side.finish("l-first")
    side.finish("l-first", Outcome.OVERLOAD)
    side.finish("l-first", process=OTHER)
    # Then nothing has changed, and there is no unit for a third
    assert side.store.snapshot() == before
    assert admitted(side, 3) == []
    side.finish("l-second", process=OTHER)
    assert len(admitted(side, 3)) == 1


def test_release_of_an_expired_lease_frees_nobody_elses_unit(side):
    """A process stood still for a lease time; its unit was given on; what it releases now is nobody's."""
    boot(side)
    side.ask("l-slow", process=OTHER)
    for _ in range(5):
        side.pass_time(LEASE_MS // 5)
        side.beat(queues=())
    side.ask("l-mine")
    before = side.store.snapshot().leases
    side.finish("l-slow", Outcome.OVERLOAD, process=OTHER)
    assert before == side.store.snapshot().leases == {"l-mine": (ENDPOINT, 1, PROCESS)}
    assert seen(side).breaker == "closed"
    assert admitted(side, 2) == []


def test_release_under_an_unknown_id_frees_nothing(side):
    """Neither an id that never was, nor one that differs by a letter, nor one that still stands in line."""
    boot(side, 2)
    held = admitted(side, 2)
    assert side.ask("l-waiting", wait=True).status is Status.WAITING
    before = side.store.snapshot().leases
    for lease in ("l-never", held[0][:-1], f"{held[0]}0", held[0].upper(), "*"):
        side.finish(lease)
        side.finish(lease, Outcome.OVERLOAD)
        side.finish(lease, process=OTHER)
    assert side.store.snapshot().leases == before
    assert seen(side).breaker == "closed"
    side.finish(held[0])
    assert side.ask("l-waiting", wait=True).status is Status.ADMITTED


@pytest.fixture
def make_guard(redis_url, namespace):
    """Guards of one deployment; to the store each is a process of its own."""
    guards = []

    def make(ceiling=1, **settings):
        guard = Guard(
            GuardSettings(
                **{
                    "redis_url": redis_url,
                    "namespace": namespace,
                    "models": [{"id": "chat", "max_concurrent_requests": ceiling, "reserve": 0}],
                    "first_start_hold_s": 0,
                    "heartbeat_s": 0.5,
                    "lease_s": 30,
                    **settings,
                }
            )
        )
        guards.append(guard)
        return guard

    yield make
    for guard in guards:
        guard.close()


def test_permit_that_eight_threads_release_at_once_comes_back_once(make_guard):
    """The block's end, a release by hand and a finalizer may meet: one unit comes back, and no more."""
    guard, other = make_guard(2), make_guard(2)
    for _ in range(10):
        permit, kept = guard.permit("chat"), other.permit("chat")
        start = threading.Barrier(8)
        threads = [threading.Thread(target=lambda p=permit, b=start: (b.wait(), p.release())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        permit.release()
        again = other.permit("chat")
        permit.release(RuntimeError())
        permit.abandon()
        assert guard.try_permit("chat") is None
        kept.release()
        again.release()
    assert guard.snapshot().leases == {}


# ---------------------------------------------------------------------- cancelled


@pytest.mark.parametrize("seed", range(2))
def test_cancelling_in_any_phase_leaves_nothing_in_flight(side, seed):
    """Before the ask, between ask and grant, with the permit, while it is released, after it: 0 in use, none in line."""
    chance = random.Random(seed)
    boot(side, 2)
    for _ in range(150):
        lease, process = side.new("c"), chance.choice([PROCESS, OTHER])
        asking = {"process": process, "wait": chance.random() < 0.7}
        match chance.choice(["before", "in line", "held", "releasing", "crossed", "repeated"]):
            case "before":  # the withdrawal overtakes the ask
                operate(side, Action.WITHDRAW, lease)
                side.ask(lease, **asking)
            case "in line":
                blocking = admitted(side, 2)
                side.ask(lease, **asking)
                operate(side, Action.WITHDRAW, lease)
                for one in blocking:
                    side.finish(one)
            case "held":
                side.ask(lease, **asking)
                operate(side, Action.WITHDRAW, lease)
            case "releasing":
                side.ask(lease, **asking)
                side.finish(lease, Outcome.IGNORED, process=process)
                operate(side, Action.WITHDRAW, lease)
            case "crossed":  # the grant is on its way while its caller gives up
                blocking = admitted(side, 2)
                side.ask(lease, **asking)
                for one in blocking:
                    side.finish(one)
                operate(side, Action.WITHDRAW, lease)
            case "repeated":
                side.ask(lease, **asking)
                operate(side, Action.WITHDRAW, lease)
                side.ask(lease, **asking)
                operate(side, Action.WITHDRAW, lease)
        assert side.store.snapshot().leases == {}
    assert (seen(side).in_flight, seen(side).waiting) == (0, {})
    assert len(admitted(side, 3)) == 2


def test_callers_that_give_up_as_they_are_granted_leave_nothing_in_flight(make_guard):
    """400 waits of 0 to 6 ms in four threads of two processes, at an endpoint that others free all the time."""
    guards = [make_guard(), make_guard()]

    def call(chance):
        time.sleep(chance.random() * 0.003)
        if chance.random() < 0.3:
            raise asyncio.CancelledError

    ends = {"got": 0, "denied": 0, "cancelled": 0}
    lock = threading.Lock()

    def work(guard, seed):
        chance = random.Random(seed)
        for _ in range(100):
            end = "got"
            try:
                with guard.permit("chat", timeout=chance.random() * 0.006):
                    call(chance)
            except AdmissionDenied:
                end = "denied"
            except asyncio.CancelledError:
                end = "cancelled"
            with lock:
                ends[end] += 1

    threads = [threading.Thread(target=work, args=(guards[n % 2], n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert min(ends.values()) > 0, ends
    # The withdrawals of those that gave up are sent by the beats.
    wait_until(lambda: not guards[0].snapshot().leases and not guards[0].snapshot().endpoints["chat"].waiting, 5)
    chat = guards[0].snapshot().endpoints["chat"]
    assert (chat.in_flight, chat.breaker) == (0, "closed")


# ---------------------------------------------------------------------- a limit that shrinks


@pytest.mark.parametrize("by", ["operator", "deploy"])
def test_limit_that_shrinks_below_what_is_held_grants_nothing_until_enough_came_back(side, by):
    """64 held, then a ceiling of 16: no grant until fewer than 16 are held; what is held goes on; a rise counts at once."""
    # Given 64 calls at a ceiling of 64
    boot(side, 64)
    held = admitted(side, 65)
    assert len(held) == 64

    def shrink_to(ceiling):
        if by == "operator":
            operate(side, Action.OVERRIDE, value=ceiling)
        else:
            side.configure(EndpointSpec(id=ENDPOINT, ceiling=ceiling, reserve=0), process=OTHER)

    # When the ceiling falls to 16
    shrink_to(16)
    side.beat(leases=tuple(held), queues=())
    assert (seen(side).ceiling, seen(side).in_flight) == (16, 64)
    # Then nobody gets a permit while 64 to 16 are held
    for _ in range(48):
        assert admitted(side, 1) == []
        side.finish(held.pop())
    assert seen(side).in_flight == 16
    assert admitted(side, 1) == []
    # ...a rise in between is obeyed at once, and the next fall as well
    shrink_to(20)
    risen = admitted(side, 6)
    assert len(risen) == 4
    shrink_to(16)
    assert admitted(side, 1) == []
    # ...and below 16 it is 16
    for lease in [*risen, *held[:3]]:
        side.finish(lease)
    assert len(admitted(side, 5)) == 3
    assert seen(side).in_flight == 16


# ---------------------------------------------------------------------- the probe


def to_half_open(side):
    """Trip the breaker by one call's overload, and wait for the end of its cooldown."""
    side.ask("l-trips")
    side.finish("l-trips", Outcome.OVERLOAD)
    side.pass_time(500)


def test_cancelled_call_that_is_not_the_probe_never_moves_the_probe(side):
    """A call from before the trip, a waiter, one that is refused: each is cancelled in turn, the probe stays."""
    # Given a probe, and beside it a call that was in flight before the trip
    boot(side, 8)
    side.ask("l-old", process=OTHER)
    to_half_open(side)
    assert side.ask("l-probe").probe
    for number in range(3):
        # When others are cancelled in any way
        side.ask(f"l-waits{number}", process=OTHER, wait=True)
        operate(side, Action.WITHDRAW, f"l-waits{number}")
        side.finish(f"l-waits{number}", Outcome.IGNORED, process=OTHER)
        refused = side.ask(f"l-refused{number}", process=OTHER)
        side.finish(f"l-refused{number}", Outcome.IGNORED, process=OTHER)
        if number == 2:
            side.finish("l-old", Outcome.IGNORED, process=OTHER)
        # Then the probe is the probe, nobody else becomes one, and the pauses are what they were
        assert refused.reason == Reason.PROBING
        now = seen(side)
        assert (now.breaker, now.probe, now.trips, now.generation) == ("half_open", "l-probe", 1, 1)
    side.finish("l-probe")
    assert seen(side).breaker == "closed"


def test_cancelled_call_while_the_breaker_is_open_neither_shortens_nor_lengthens_the_pause(side):
    """Unsubscribing is no evidence: the end of the cooldown stays where it was."""
    boot(side, 8)
    side.ask("l-old", process=OTHER)
    side.ask("l-trips")
    side.finish("l-trips", Outcome.OVERLOAD)
    side.pass_time(200)
    before = seen(side)
    side.ask("l-waits", process=OTHER, wait=True)
    operate(side, Action.WITHDRAW, "l-waits")
    side.finish("l-old", Outcome.IGNORED, process=OTHER)
    assert (seen(side).breaker, seen(side).open_for_ms, seen(side).trips) == ("open", 300, before.trips)
    side.pass_time(300)
    assert side.ask().probe


@contextmanager
def left_by(exception):
    """What the caller of a failing block does with its exception."""
    try:
        yield
    except BaseException as exc:
        if exc is not exception:
            raise


def answer(status):
    """What httpx raises for a status."""
    request = httpx.Request("POST", "http://server/v1/chat/completions")
    return httpx.HTTPStatusError("refused", request=request, response=httpx.Response(status, request=request))


@pytest.mark.parametrize(
    ("exception", "breaker"),
    [
        (asyncio.CancelledError(), "half_open"),
        (KeyboardInterrupt(), "half_open"),
        (GeneratorExit(), "half_open"),
        (TypeError("a fault of our own"), "half_open"),
        (answer(500), "half_open"),
        (answer(400), "closed"),
        (answer(422), "closed"),
    ],
    ids=["cancelled", "interrupted", "closed early", "own fault", "500", "400", "422"],
)
def test_probe_that_proves_nothing_or_is_refused_frees_its_role_at_once(make_guard, exception, breaker):
    """Cancelled, or answered 400: the next call goes, at once; a 400 is an answer, and closes the breaker."""
    # Given a breaker whose cooldown is over
    guard, other = (make_guard(4, model_breaker_base_cooldown_s=0.1) for _ in range(2))
    with left_by(overload := answer(503)), guard.permit("chat"):
        raise overload
    wait_until(lambda: guard.snapshot().endpoints["chat"].breaker == "half_open", 5)
    # When its probe ends like that, while nobody else may call
    with left_by(exception), guard.permit("chat") as probe:
        assert probe.probe
        assert contextvars.Context().run(other.try_permit, "chat") is None  # elsewhere, or it would borrow the probe's
        raise exception
    # Then nobody has the role any more, the pauses have not grown, and the next call goes without waiting
    chat = guard.snapshot().endpoints["chat"]
    assert (chat.breaker, chat.probe, chat.trips, chat.in_flight) == (breaker, "", 1, 0)
    with other.permit("chat", timeout=0) as permit:
        assert permit.probe == (breaker == "half_open")
    assert guard.snapshot().endpoints["chat"].breaker == "closed"
