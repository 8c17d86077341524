"""What every store does, verb by verb: in memory, and by the scripts on a real server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard_middleware.core.commands import Action, Held, Operate, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import EndpointSpec
from tests.contract.store_sides import ENDPOINT, PROCESS, MemorySide, RedisSide


@pytest.fixture(params=["memory", "redis"])
def side(request, namespace):
    """One store of each kind, configured with one endpoint of ceiling 1."""
    if request.param == "memory":
        side = MemorySide(namespace)
    else:
        side = RedisSide(namespace, request.getfixturevalue("redis_url"))
    yield side
    side.close()


def operate(side, action, target=ENDPOINT, **more):
    """An operator's command."""
    return side.store.operate(Operate(action=action, target=target, **more))


def test_store_that_knows_nothing_asks_to_be_told(side):
    """Nothing starts before somebody has published."""
    assert side.ask().status is Status.UNCONFIGURED
    assert side.beat().status is Status.UNCONFIGURED


def test_new_store_holds_admissions_for_one_heartbeat(side):
    """Whoever still runs gets the time to say so."""
    side.configure(first_start_hold_ms=-1)
    reply = side.ask()
    assert (reply.status, reply.reason, reply.retry_after_ms) == (Status.REFUSED, "recovering", 2_000)
    side.pass_time(2_000)
    assert side.ask().status is Status.ADMITTED


def test_permit_is_given_up_to_the_ceiling_and_again_after_a_release(side):
    """I1, I5."""
    side.boot()
    first = side.ask("l-first")
    assert (first.status, first.endpoint, first.expires_at_ms) == (Status.ADMITTED, ENDPOINT, side.now_ms + 15_000)
    refused = side.ask()
    assert (refused.status, refused.reason, refused.retry_after_ms) == (Status.REFUSED, "endpoint_full", 1_000)
    assert side.finish("l-first").status is Status.FINISHED
    assert side.ask().status is Status.ADMITTED


def test_message_that_may_not_start_is_parked_and_handed_over_with_the_permit(side):
    """I3, I9: the payload comes back byte for byte, and the message is in the worker's ack set again."""
    side.boot()
    first, second = side.deliver(), side.deliver(payload=b"\x80\x00second")
    assert side.ask("l-first", message=first, idle=0).status is Status.ADMITTED
    parked = side.ask("l-second", message=second, take=1, idle=0)
    assert (parked.status, parked.reason, parked.takes) == (Status.PARKED, "endpoint_full", ())
    assert not side.has(second)
    reply = side.finish("l-first", message=first, take=1, idle=1)
    (take,) = reply.takes
    assert (take.message_id, take.payload, take.queue) == (second.id, b"\x80\x00second", side.queue)
    assert side.has(second)
    assert side.finish(take.lease, message=second).status is Status.FINISHED


@pytest.mark.parametrize("what", ["admit", "park", "wait", "slot", "finish", "beat", "configure"])
def test_repeated_command_has_the_same_answer_and_changes_nothing(side, what):
    """I11: the reply may be lost, and the client library may resend."""
    side.boot()
    message, other = side.deliver(), side.deliver()
    side.ask("l-first", message=message, idle=0)
    if what in ("finish", "beat"):
        side.ask("l-other", message=other, take=1, idle=0)
    if what == "beat":
        side.finish("l-first", message=message)
    give = {
        "admit": lambda: side.ask("l-first", message=message, idle=0),
        "park": lambda: side.ask("l-other", message=other, take=1, idle=0),
        "wait": lambda: side.ask("l-caller", wait=True),
        "slot": lambda: side.ask("l-caller", slot=True),
        "finish": lambda: side.finish("l-first", message=message, take=1, idle=1),
        "beat": lambda: side.beat(beat_id="b-same", take=1, idle=1),
        "configure": side.configure,
    }[what]
    first, state = give(), side.store.snapshot()
    assert replace(give(), waiting=first.waiting) == first  # a hint of the moment, not part of the answer
    assert side.store.snapshot() == state
    if what in ("finish", "beat"):
        assert len(first.takes) == 1


def test_waiting_caller_hears_of_its_permit(side):
    """A waiter in the same line as messages; its process is told the lease's id."""
    side.boot()
    side.ask("l-first")
    with_wait = side.ask("l-caller", wait=True)
    assert (with_wait.status, with_wait.reason) == (Status.WAITING, "endpoint_full")
    wakeups = side.store.wakeups(PROCESS)
    try:
        assert wakeups.get(0) is None
        assert side.finish("l-first").woken == (PROCESS,)
        assert wakeups.get(5) == "l-caller"
    finally:
        wakeups.close()
    assert side.ask("l-caller", wait=True).status is Status.ADMITTED


def test_process_with_an_idle_thread_is_notified_and_a_unit_is_held_for_it(side):
    """I9: only another process can run the waiter; one release, one wake."""
    side.boot()
    side.configure(process="q")
    side.beat(process="q", queues=())
    parked = side.deliver()
    side.ask("l-first", process="q")
    assert side.ask("l-parked", message=parked, take=0, idle=1).status is Status.PARKED
    wakeups = side.store.wakeups(PROCESS)
    try:
        assert side.finish("l-first", process="q").woken == (PROCESS,)
        assert wakeups.get(5) == ""
    finally:
        wakeups.close()
    assert side.ask(process="q").reason == "endpoint_full"
    (take,) = side.beat(take=1, idle=1).takes
    assert take.message_id == parked.id


def test_lease_that_nobody_renews_ends_and_its_message_keeps_its_place(side):
    """I5, I8: what a killed worker held stands in the line again, before what came later."""
    side.boot()
    held, later = side.deliver(), side.deliver()
    side.ask("l-held", message=held, idle=0)
    side.ask("l-later", message=later, idle=0)
    for _ in range(4):  # of a process that has leases nowhere
        side.pass_time(3_999)
        side.configure(process="q")
        side.beat(process="q", queues=())
    assert side.store.snapshot().lines == {(ENDPOINT, *side.queue): (held.id, later.id)}


@pytest.mark.parametrize("what", ["caller", "message", "beat"])
def test_repeat_finds_that_a_lease_is_over_although_no_sweep_has_come_to_it(side, what):
    """One sweep ends 256 of them; the others are not given to anybody either, in an answer or in a take."""
    # Given more leases than that, the last one by the command at hand, and a process that stays although they are over
    spec = EndpointSpec(id=ENDPOINT, ceiling=300, reserve=0)
    side.boot(spec)
    message = side.deliver()
    for number in range(299):
        side.ask(f"l-{number:03}")
    if what == "beat":
        operate(side, Action.PAUSE)
        side.ask("m", message=message, idle=0)
        operate(side, Action.RESUME)
    say = {
        "caller": lambda: side.ask("m"),
        "message": lambda: side.ask("m", message=message, idle=0),
        "beat": lambda: side.beat(beat_id="b-same", take=1, idle=1),
    }[what]
    first = say()
    assert first.status is Status.ADMITTED or len(first.takes) == 1
    for _ in range(3):
        side.pass_time(3_750)
        side.configure(spec)
    side.pass_time(3_750)
    # When it is repeated, Then a caller has a fresh lease, and a message is for whoever takes it next
    again = say()
    if what == "caller":
        assert (again.status, again.expires_at_ms) == (Status.ADMITTED, side.now_ms + 15_000)
        assert side.store.snapshot().endpoints[ENDPOINT].in_flight == 1
    else:
        assert (again.status, again.takes) == (Status.GONE if what == "message" else Status.DONE, ())
        assert [take.message_id for take in side.beat(take=1, idle=1).takes] == [message.id]


def test_deadline_that_is_over_when_a_message_asks_is_none(side):
    """Its broker has let it run: given back before it began, it comes again with a permit."""
    side.boot()
    message = side.deliver()
    assert side.ask("l-first", message=message, idle=0, deadline_ms=side.now_ms).status is Status.ADMITTED
    (take,) = side.beat(give_back=("l-first",), take=1, idle=1).takes
    assert (take.message_id, take.endpoint) == (message.id, ENDPOINT)


def test_beat_renews_what_it_names_and_reports_what_is_lost(side):
    """A renewal never brings a lost lease back to life."""
    side.boot()
    side.ask("l-held")
    reply = side.beat(leases=("l-held", "l-never"), outstanding=("l-never",))
    assert (reply.status, reply.lost) == (Status.DONE, ("l-never",))


def test_running_call_that_the_store_lost_is_asserted_and_counts(side):
    """It loads the server, whatever the store remembers; a released one stays released."""
    side.boot()
    side.ask("l-done")
    side.finish("l-done")
    asserted = [
        Held(lease=lease, endpoint=ENDPOINT, home=ENDPOINT, rank=1, cost=1, generation=0)
        for lease in ("l-lost", "l-done")
    ]
    side.beat(asserts=tuple(asserted))
    assert side.store.snapshot().leases == {"l-lost": (ENDPOINT, 1, PROCESS)}


def test_overload_trips_the_breaker_and_parks_the_message(side):
    """The server's state is not the message's fault."""
    side.boot()
    message = side.deliver()
    side.ask("l-first", message=message, idle=0)
    reply = side.finish("l-first", Outcome.OVERLOAD, message=message, park=ParkAs.OVERLOADED, take=1, idle=1)
    assert (reply.status, reply.takes, reply.next_ms) == (Status.PARKED, (), 500)
    assert side.ask().reason == "breaker_open"
    side.pass_time(500)
    (take,) = side.beat(take=1, idle=1).takes
    assert (take.probe, take.message_id) == (True, message.id)


def test_operations_are_seen_by_the_next_call(side):
    """Override, pause, and the breaker by hand."""
    side.boot()
    operate(side, Action.OVERRIDE, value=0)
    assert side.ask().reason == "endpoint_full"
    operate(side, Action.CLEAR_OVERRIDE)
    operate(side, Action.PAUSE)
    assert side.ask().reason == "paused"
    operate(side, Action.RESUME)
    operate(side, Action.OPEN, value=700)
    assert (side.ask().reason, side.ask().retry_after_ms) == ("breaker_open", 700)
    operate(side, Action.CLOSE)
    assert side.ask().status is Status.ADMITTED


def test_drain_is_refused_while_a_worker_would_park_again_and_forced_otherwise(side):
    """Every parked message stands at the tail of its queue, in order."""
    side.boot()
    side.ask()
    messages = [side.deliver() for _ in range(3)]
    for message in messages:
        side.ask(message=message, idle=0)
    assert operate(side, Action.DRAIN, queue=side.queue).status is Status.REFUSED_ALIVE
    assert operate(side, Action.DRAIN, queue=side.queue, force=True, value=2).count == 2
    assert operate(side, Action.DRAIN, queue=side.queue, force=True).count == 1
    assert side.queued() == [message.id for message in messages]
    assert side.store.snapshot().lines == {}


def test_forgotten_process_holds_nothing_and_says_nothing(side):
    """What it had goes back at once."""
    side.boot()
    side.ask("l-held")
    operate(side, Action.FORGET, PROCESS)
    snapshot = side.store.snapshot()
    assert (snapshot.leases, snapshot.processes, snapshot.endpoints) == ({}, {}, {})


def test_snapshot_shows_everything_and_survives_any_name(side):
    """Ids may contain anything but control characters."""
    odd = EndpointSpec(id='é: "{[ \\ 模型', ceiling=3, group="", reserve=0)
    side.boot(EndpointSpec(id=ENDPOINT, ceiling=1), odd)
    side.ask("l-held")
    parked = side.deliver()
    side.ask("l-parked", message=parked, rank=3, idle=0)
    side.ask("l-odd", endpoint=odd.id, cost=2)
    snapshot = side.store.snapshot()
    assert snapshot.at_ms == side.now_ms
    assert snapshot.leases == {"l-held": (ENDPOINT, 1, PROCESS), "l-odd": (odd.id, 2, PROCESS)}
    assert snapshot.lines == {(ENDPOINT, *side.queue): (parked.id,)}
    assert snapshot.processes == {PROCESS: 0}
    assert snapshot.endpoints[ENDPOINT].waiting == {3: 1}
    assert (snapshot.endpoints[odd.id].in_flight, snapshot.endpoints[odd.id].limit) == (2, 3)
    assert side.store.snapshot() == snapshot
