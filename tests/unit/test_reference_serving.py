"""Handing out: takes, holds, wakes, ageing, and who is awake (I9, I10)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from guard_middleware.core.commands import Action, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import Rules
from guard_middleware.core.verdict import Reason
from tests.unit.builders import World, fill, spec, trip

BACKGROUND = 3
HOLD_MS = Rules().hold_ms


def two(ceiling=1, **more):
    """One process that asks, one that could be woken; the endpoint is full."""
    world = World(spec(ceiling=ceiling), workers=(), **more)
    world.start("p")
    world.start("r")
    return world, fill(world, ceiling)


# -- takes -------------------------------------------------------------------------------------------------------------


def test_finish_hands_the_freed_permit_to_its_own_thread():
    """One release, one take, one command; nobody else is woken."""
    world, running = two()
    world.beat("r", idle=4)
    waiting = [world.arrive() for _ in range(3)]
    reply = world.finish(running[0], take=1, idle=1)

    assert [(take.message_id, take.payload) for take in reply.takes] == [(waiting[0].id, waiting[0].id.encode())]
    assert reply.woken == ()
    assert world.in_flight() == 1
    assert world.acks() == {waiting[0].id}


def test_take_carries_everything_that_its_run_needs():
    """Lease, endpoint, home, generation, end, rank, cost, queue and payload, as the snapshot has them."""
    world, running = two(ceiling=2)
    waiting = world.arrive(rank=0, cost=2)
    world.finish(running[0])
    take = world.finish(running[1], take=1, idle=1).takes[0]
    lease = world.rule.state.leases[take.lease]

    assert (take.endpoint, take.home, take.rank, take.cost, take.queue[1]) == ("e", "e", 0, 2, "q")
    assert (take.generation, take.expires_at_ms, take.probe) == (lease.generation, lease.expires_at_ms, False)
    assert lease.message == waiting.message


def test_process_takes_as_many_as_it_has_idle_threads():
    """Beat with three idle threads, five waiters, four permits: three start."""
    world, running = two(ceiling=4)
    waiting = [world.arrive().id for _ in range(5)]
    for call in running:
        world.finish(call, idle=0)
    reply = world.beat(take=3, idle=3)

    assert [take.message_id for take in reply.takes] == waiting[:3]


def test_nobody_is_given_a_message_of_a_queue_that_it_does_not_consume():
    """Only queues whose consumer lives are named, and only they are served."""
    world = World(spec(ceiling=1), workers=())
    world.start("p", queues=("q",))
    world.start("r", queues=("x",))
    running = fill(world, 1)[0]
    waiting = world.arrive("r", queue="x", idle=0, take=0)

    assert world.finish(running, take=1, idle=1).takes == ()
    assert [take.message_id for take in world.beat("r", take=1, idle=1).takes] == [waiting.id]


def test_paused_queue_is_left_alone():
    """A beat that no longer names the queue takes nothing from it."""
    world = World(spec(ceiling=1))
    running = fill(world, 1)[0]
    world.arrive()
    world.finish(running, idle=0)

    assert world.beat(take=1, idle=1, queues=()).takes == ()


def test_parking_thread_takes_the_best_that_may_run():
    """The thread that asks for a full endpoint exchanges its message for one of an endpoint with room."""
    world = World(spec("a", 1), spec("c", 1))
    fill(world, 1, endpoint="a")
    running = fill(world, 1, endpoint="c")[0]
    waiting = world.arrive(endpoint="c", idle=0, take=0)
    world.finish(running, idle=0)
    parked = world.arrive(endpoint="a", take=1, idle=0)

    assert parked.status is Status.PARKED
    assert [take.message_id for take in parked.reply.takes] == [waiting.id]


def test_message_of_one_full_endpoint_does_not_block_those_of_another():
    """500 for a full endpoint in the same queue: those of an idle one start at once."""
    world = World(spec("a", 1), spec("c", 4))
    fill(world, 1, endpoint="a")
    for _ in range(500):
        world.arrive(endpoint="a", idle=7)

    assert [world.arrive(endpoint="c").status for _ in range(4)] == [Status.ADMITTED] * 4


# -- idle threads ------------------------------------------------------------------------------------------------------


def test_thread_that_parked_counts_as_idle():
    """A process with one thread: its message was parked, and the next release by another process wakes it."""
    world, running = two()
    waiting = world.arrive("r", take=1, idle=0)
    assert waiting.status is Status.PARKED
    reply = world.finish(running[0], take=0, idle=0)

    assert reply.woken == ("r",)
    assert [take.message_id for take in world.beat("r", take=1, idle=1).takes] == [waiting.id]


def test_thread_that_took_is_not_idle_any_more():
    """The next free permit is not held for a process that has just used its last thread."""
    world, running = two(ceiling=2)
    waiting = [world.arrive("p", idle=0) for _ in range(2)]
    world.beat("p", idle=0)
    world.finish(running[0], take=1, idle=1)
    reply = world.finish(running[1], take=0, idle=0)

    assert reply.woken == ()
    assert world.line() == [waiting[1].id]
    assert world.call().status is Status.ADMITTED


def test_repeated_take_counts_its_thread_once():
    """I11: the repeat reports the same idle threads, and the take it repeats uses one of them."""
    world, running = two(ceiling=2)
    world.arrive("p", idle=0)
    ending = world.ending(running[0], take=1, idle=2)
    idle = []
    for _ in range(3):
        world.rule.finish(ending, world.now)
        idle.append(world.rule.state.processes["p"].idle)

    assert idle == [1, 1, 1]


# -- holds -------------------------------------------------------------------------------------------------------------


def held(world):
    """The processes for which a unit is held."""
    return {one.process for one in world.rule.state.leases.values() if one.hold}


def test_unit_is_held_for_the_process_that_can_run_the_better_waiter():
    """The asking process does not consume its queue: the other one is notified, and the unit is kept."""
    world = World(spec(ceiling=1), workers=())
    world.start("p", queues=("q",))
    world.start("r", queues=("x",))
    running = fill(world, 1)[0]
    mine, better = world.arrive("p"), world.arrive("r", queue="x", rank=0, idle=0)
    reply = world.finish(running, take=1, idle=1)

    assert (reply.takes, reply.woken) == ((), ("r",))
    assert held(world) == {"r"}
    assert world.call("p", rank=0).reason is Reason.ENDPOINT_FULL
    assert [take.message_id for take in world.beat("r", take=1, idle=1).takes] == [better.id]
    assert world.line() == [mine.id]
    assert world.in_flight() == 1


def test_one_release_wakes_one():
    """Ten idle processes, ten waiters, one permit: one notification."""
    world = World(spec(ceiling=1), workers=())
    world.start("p")
    running = fill(world, 1)[0]
    for number in range(10):
        world.start(f"r{number}", queues=("x",))
        world.arrive(f"r{number}", queue="x", idle=0)

    assert len(world.finish(running, idle=0).woken) == 1


def test_k_releases_wake_k():
    """As many permits freed at once as there are idle processes: all are notified, and k start."""
    world = World(spec(ceiling=5), workers=())
    world.start("p")
    names = [f"r{number}" for number in range(5)]
    running = fill(world, 5)
    for name in names:
        world.start(name, queues=("x",))
        world.arrive(name, queue="x", idle=0)
    woken = [name for call in running for name in world.finish(call, idle=0).woken]

    assert sorted(woken) == names
    for name in names:
        world.beat(name, take=1, idle=1)
    assert [len(world.workers[name].calls) for name in names] == [1] * 5


def test_woken_process_takes_as_many_as_are_free():
    """Three permits, one process with eight idle threads: one hold, and its beat takes three."""
    world = World(spec(ceiling=3), workers=())
    world.start("p")
    world.start("r", queues=("x",))
    running = fill(world, 3)
    waiting = [world.arrive("r", queue="x", idle=7).id for _ in range(4)]
    woken = [world.finish(call, idle=0).woken for call in running]
    reply = world.beat("r", take=8, idle=8)

    assert woken == [("r",), (), ()]
    assert [take.message_id for take in reply.takes] == waiting[:3]


def test_unserved_hold_ends_by_itself_and_its_process_is_passed_over_until_it_speaks():
    """After 50 ms the unit is free again; who did not come has no idle thread, as far as is known."""
    world = World(spec(ceiling=1), workers=())
    world.start("p", queues=("q",))
    world.start("r", queues=("x",))
    running = fill(world, 1)[0]
    mine = world.arrive("p")
    better = world.arrive("r", queue="x", rank=0, idle=0)
    reply = world.finish(running, take=1, idle=1)
    assert reply.next_ms == HOLD_MS
    world.jump(HOLD_MS)
    second = world.beat("p", take=1, idle=1)

    assert [take.message_id for take in second.takes] == [mine.id]
    assert second.woken == ()
    assert world.rule.state.processes["r"].idle == 0
    world.beat("r", idle=2)
    assert world.rule.state.processes["r"].idle == 2
    assert world.line(queue="x") == [better.id]


def test_process_has_one_unserved_hold_at_most():
    """It is notified once; further units go to others."""
    world = World(spec(ceiling=3), workers=())
    world.start("p", queues=("q",))
    world.start("r", queues=("x",))
    running = fill(world, 3)
    for _ in range(3):
        world.arrive("r", queue="x", idle=5)
    for call in running:
        world.finish(call, idle=0)

    assert world.in_flight() == 1
    assert held(world) == {"r"}


@pytest.mark.parametrize("speaks", ["beat", "admit", "finish", "configure"])
def test_hold_ends_when_its_process_speaks(speaks):
    """Whatever it says, its unit is there for it, or for whoever is next."""
    world = World(spec(ceiling=2), workers=())
    world.start("p")
    world.start("r", queues=("x",))
    mine = fill(world, 1, process="r")[0]
    running = fill(world, 1)[0]
    waiting = world.arrive("r", queue="x", idle=0)
    world.finish(running, idle=0)
    assert held(world) == {"r"}
    match speaks:
        case "beat":
            world.beat("r", take=1, idle=1)
        case "admit":
            world.arrive("r", queue="x", take=1, idle=0)
        case "finish":
            world.finish(mine, take=1, idle=2)
        case "configure":
            world.configure("r")
            assert held(world) == {"r"}  # it is idle still, and so it is woken once more
            world.beat("r", take=1, idle=1)

    assert held(world) == set()
    assert waiting.id in world.calls("r")


def test_lost_notification_costs_at_most_a_heartbeat():
    """Every wake-up is dropped: each waiter still goes, by the beats alone."""
    world = World(spec(ceiling=2), workers=("p", "r"))
    running = fill(world, 2)
    for _ in range(6):
        world.arrive("r", idle=1)
    for call in running:
        world.finish(call, idle=0)
    done = []
    for _ in range(6):
        world.jump(world.rules.heartbeat_ms)
        world.beat("p", idle=0)
        for take in world.beat("r", take=2, idle=2).takes:
            done.append(take.message_id)
            world.finish(world.workers["r"].calls[take.lease], idle=0)

    assert len(done) == 6


def test_hold_of_a_process_that_dies_is_given_on():
    """It never comes: the unit is free after the hold, and its report with its process."""
    world = World(spec(ceiling=1), workers=())
    world.start("p")
    world.start("r")
    running = fill(world, 1)[0]
    world.beat("r", idle=1)
    waiting = world.arrive("p", take=0, idle=0)
    assert world.finish(running, idle=0).woken == ("r",)
    world.kill("r")
    world.jump(HOLD_MS)

    assert [take.message_id for take in world.beat("p", take=1, idle=1).takes] == [waiting.id]


def test_hold_of_a_process_that_says_goodbye_is_given_on_at_once():
    """Its unit does not wait for the end of the hold."""
    world = World(spec(ceiling=1), workers=())
    world.start("p")
    world.start("r")
    running = fill(world, 1)[0]
    world.beat("r", idle=2)
    world.arrive("p", take=0, idle=0)
    world.finish(running, idle=0)
    assert held(world) == {"r"}
    world.beat("p", idle=1)
    reply = world.forget("r")

    assert reply.woken == ("p",)
    assert held(world) == {"p"}


def test_unit_that_is_held_in_half_open_is_the_probes():
    """I7: until its process has come, or the hold has ended, nobody else becomes the probe."""
    world = World(spec(ceiling=4), workers=())
    world.start("p")
    world.start("r", queues=("x",))
    trip(world)
    waiting = world.arrive("r", queue="x", idle=0)
    world.jump(500)
    assert world.beat("p").woken == ("r",)

    assert world.call("p", rank=0).reason is Reason.PROBING
    assert [(take.message_id, take.probe) for take in world.beat("r", take=1, idle=1).takes] == [(waiting.id, True)]


def test_held_unit_is_no_start_of_background():
    """Ageing goes on while a process is notified and does not come."""
    world = World(spec(ceiling=1), workers=())
    world.start("p")
    world.start("r", queues=("x",))
    running = fill(world, 1)[0]
    world.arrive("r", queue="x", rank=BACKGROUND, idle=0)
    since = world.rule.state.background_at["e"]
    world.jump(3_000)
    world.finish(running, idle=0)

    assert held(world) == {"r"}
    assert world.rule.state.background_at["e"] == since


def test_repeated_command_keeps_its_processs_hold_alive():
    """It ends the hold by speaking, so it must give the unit on in the same call: here to itself again."""
    world = World(spec(ceiling=2), workers=())
    world.start("p")
    world.start("r", queues=("x",))
    first, second = fill(world, 1, process="r")[0], fill(world, 1)[0]
    ending = world.ending(first, idle=0)
    world.rule.finish(ending, world.now)
    fill(world, 1)
    world.arrive("r", queue="x", idle=0)
    world.finish(second, idle=0)
    assert held(world) == {"r"}
    world.rule.finish(replace(ending, idle=1), world.now)

    assert held(world) == {"r"}


def test_one_command_notifies_at_most_eight():
    """A bound for the script; the rest follows with the next command."""
    world = World(spec(ceiling=20), workers=())
    world.start("p")
    for number in range(20):
        world.start(f"r{number}", queues=("x",))
    world.operate(Action.PAUSE)
    for number in range(20):
        world.arrive(f"r{number}", queue="x", idle=0)
    first = world.operate(Action.RESUME)
    second = world.beat("p")

    assert (len(first.woken), len(second.woken)) == (8, 8)


# -- who is awake ------------------------------------------------------------------------------------------------------


def test_nobody_waits_nobody_is_to_be_awake():
    """next_ms is -1."""
    world = World()

    assert world.beat().next_ms == -1
    assert world.call().reply.next_ms == -1


def test_next_instant_is_the_earliest_of_those_that_may_free_something():
    """Cooldown, expiry, rest after a denial, hold, ageing: the first of them; else a heartbeat."""
    world = World(spec(ceiling=1, base_cooldown_ms=20_000))
    assert trip(world).open_for_ms == 20_000
    assert world.arrive().reply.next_ms == 20_000

    full = World(spec(ceiling=1))
    fill(full, 1)
    assert full.arrive().reply.next_ms == full.rules.lease_ms
    full.jump(1_000)
    assert full.call(wait=True).reply.next_ms == full.rules.lease_ms - 1_000

    paused = World()
    paused.operate(Action.PAUSE)
    assert paused.arrive().reply.next_ms == paused.rules.heartbeat_ms


def test_cooldown_of_the_fallback_is_waited_for_too():
    """Waiters of a broken primary stand at its fallback: its end may let them go first."""
    world = World(spec("a", 1, fallback="b", base_cooldown_ms=20_000), spec("b", 1, base_cooldown_ms=3_000))
    trip(world, "b")
    trip(world, "a")

    assert world.arrive(endpoint="a").reply.next_ms == 3_000


def test_reply_says_whether_this_process_could_run_a_waiter_now():
    """For the beat after an unguarded message: 1 if a thread is all that is missing."""
    world = World(spec(ceiling=2))
    running = fill(world, 2)
    world.arrive("p", take=0, idle=0)

    assert world.beat(idle=0).waiting == 0
    assert world.finish(running[0], idle=0).waiting == 1
    assert world.call().reply.waiting == -1


# -- ageing ------------------------------------------------------------------------------------------------------------


def busy_world(**more):
    """Interactive work fills the endpoint all the time; one background message waits."""
    world = World(spec(ceiling=2, reserve=1, **more))
    running = fill(world, 2, rank=0)
    return world, running


def interactive_for(world, running, ms):
    """Let interactive work go on for so long: each call of 1 s is followed by the next. Returns what was taken."""
    taken = []
    for _ in range(ms // 1_000):
        world.pass_time(1_000)
        world.arrive(rank=0, idle=0, take=0)
        reply = world.finish(running.pop(0), take=1, idle=1)
        for take in reply.takes:
            taken.append((take.rank, take.message_id))
            running.append(world.calls()[take.message_id])
    return taken


def test_background_that_waits_goes_once_in_sixty_seconds():
    """A saturating better class cannot starve it: its head goes next, once per ageing time, and in its order."""
    world, running = busy_world()
    waiting = [world.arrive(rank=BACKGROUND, take=0, idle=0).id for _ in range(3)]
    taken = interactive_for(world, running, 185_000)
    background = [(number, message) for number, (rank, message) in enumerate(taken) if rank == BACKGROUND]

    assert [message for _, message in background] == waiting
    assert [number for number, _ in background] == [59, 119, 179]


def test_ageing_begins_with_the_wait_not_with_the_last_start():
    """The first background message after an idle hour is not aged at once."""
    world, running = busy_world()
    world.pass_time(3_600_000)
    world.arrive(rank=BACKGROUND, take=0, idle=0)

    assert all(rank == 0 for rank, _ in interactive_for(world, running, 59_000))


def test_aged_background_uses_the_reserve():
    """One unit is free but reserved: after 60 s it may have it, inside the ceiling."""
    world = World(spec(ceiling=2, reserve=1))
    fill(world, 1, rank=BACKGROUND)
    waiting = world.arrive(rank=BACKGROUND)
    assert waiting.reason is Reason.RESERVED
    world.pass_time(59_999)
    assert world.beat(take=1, idle=1).takes == ()
    world.jump(1)
    reply = world.beat(take=1, idle=1)

    assert [take.message_id for take in reply.takes] == [waiting.id]
    world.arrive(rank=BACKGROUND)
    assert world.beat(take=1, idle=1).takes == ()


def test_ageing_time_is_among_the_instants_that_are_waited_for():
    """I9: somebody is awake at that moment."""
    world = World(spec(ceiling=2, reserve=1), rules=Rules(ageing_ms=7_000))
    fill(world, 1, rank=BACKGROUND)

    assert world.arrive(rank=BACKGROUND).reply.next_ms == 7_000


def test_aged_background_goes_before_interactive_but_not_above_the_ceiling():
    """Its turn is the next permit that comes back, whoever else waits or arrives."""
    world, running = busy_world()
    waiting = world.arrive(rank=BACKGROUND, take=0, idle=0)
    world.pass_time(60_000)
    world.beat(idle=1)
    better = world.arrive(rank=0, take=0, idle=1)
    assert world.in_flight() == 2
    reply = world.finish(running[0], take=1, idle=1)

    assert [take.message_id for take in reply.takes] == [waiting.id]
    assert world.line() == [better.id]


def test_background_that_starts_at_the_fallback_has_started():
    """A long failover with a background backlog: its starts there count, so no reserve is eaten after 60 s."""
    broken = spec("a", 2, fallback="b", base_cooldown_ms=600_000, max_cooldown_ms=600_000)
    world = World(broken, spec("b", 2, reserve=1))
    trip(world, "a")
    running = world.arrive(endpoint="a", rank=BACKGROUND)
    assert (running.status, running.endpoint) == (Status.ADMITTED, "b")
    most = 0
    for _ in range(100):
        world.pass_time(1_000)
        world.arrive(endpoint="a", rank=BACKGROUND, take=0, idle=0)
        world.arrive(endpoint="a", rank=BACKGROUND, take=0, idle=0)
        world.beat(take=2, idle=2)
        most = max(most, world.in_flight("b"))
        running = next(iter(world.workers["p"].calls.values()))
        world.finish(running, take=1, idle=1)

    assert most == 1


# -- means and steps ---------------------------------------------------------------------------------------------------


def test_mean_call_is_that_of_successes():
    """Only a call that ended well tells how long calls take."""
    world = World()
    for outcome in (Outcome.NEUTRAL, Outcome.IGNORED, Outcome.BENIGN):
        call = fill(world, 1)[0]
        world.pass_time(7_000)
        world.finish(call, outcome)
    assert world.seen().mean_ms == 0
    call = fill(world, 1)[0]
    world.pass_time(800)
    world.finish(call)

    assert world.seen().mean_ms == 800


def test_retry_after_of_a_reroute_is_the_step_of_the_endpoint():
    """How often a permit comes back: mean call over limit."""
    world = World(spec(ceiling=4))
    call = fill(world, 1)[0]
    world.pass_time(800)
    world.finish(call)
    fill(world, 4)

    assert world.call().reply.retry_after_ms == 200
