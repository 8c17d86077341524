"""The executable rule under arbitrary commands: after each one, the invariants of the design hold."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import fields, replace

import hypothesis
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from guard_middleware.core.breaker import Breaker
from guard_middleware.core.commands import Action, Operate, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.reference import Reference
from guard_middleware.core.state import Process
from guard_middleware.core.values import NOWHERE, Rules
from guard_middleware.core.verdict import Admit, Reason
from tests.unit.builders import NAMESPACE, World, spec

BACKGROUND = 3
RULES = Rules(lease_ms=6_000, heartbeat_ms=1_000, ageing_ms=8_000, probe_deadline_ms=4_000)

# -- the admission rule once more, from the design's text: the oracle of the checks -----------------------------------


def reserve(limit, fixed):
    """Units of a limit that background may not take."""
    return 0 if limit <= 1 else min(max(1, int(0.34 * limit + 0.5)) if fixed is None else fixed, limit - 1)


def live(state, now, endpoint):
    """The leases of an endpoint that count."""
    return [one for one in state.leases.values() if one.endpoint == endpoint and one.expires_at_ms > now]


def in_flight(state, now, endpoint):
    """Units leased at an endpoint."""
    return sum(one.cost for one in live(state, now, endpoint))


def half_open(state, now, endpoint):
    """Whether the breaker waits for its probe."""
    return state.specs[endpoint].breaker and 0 < state.breakers.get(endpoint, Breaker()).open_until_ms <= now


def closed(state, endpoint):
    """Whether the breaker lets everybody through."""
    return not state.specs[endpoint].breaker or state.breakers.get(endpoint, Breaker()).open_until_ms == 0


def role_taken(state, now, endpoint):
    """Whether a living call is the probe."""
    breaker = state.breakers.get(endpoint, Breaker())
    probe = state.leases.get(breaker.probe)
    return probe is not None and probe.expires_at_ms > now and now < breaker.probe_until_ms


def endpoint_admits(state, now, endpoint, rank, cost, *, aged=False):
    """Rules 2, 4 and the endpoint's half of 5."""
    one = state.specs.get(endpoint)
    if one is None or endpoint in state.paused:
        return False
    ceiling = state.overrides.get(endpoint, one.ceiling)
    used = in_flight(state, now, endpoint)
    breaker = state.breakers.get(endpoint, Breaker())
    if used + cost > ceiling:
        return False
    if not closed(state, endpoint):
        held = any(lease.hold for lease in live(state, now, endpoint))
        return half_open(state, now, endpoint) and not held and not role_taken(state, now, endpoint)
    background = rank >= BACKGROUND and not aged
    if background and used + cost > ceiling - reserve(ceiling, one.reserve):
        return False
    if one.breaker and breaker.ramp >= 0:
        limit = min(ceiling, 1 + breaker.ramp)
        present = sum(lease.cost for lease in live(state, now, endpoint) if lease.generation == breaker.generation)
        if present and present + cost > 1 + breaker.ramp:
            return False
        return not (background and present and present + cost > limit - reserve(limit, one.reserve))
    return True


def lent_units(state, now, leases):
    """Units among these that a call under another one of them uses while that one lives: they count once."""
    lent = 0
    for one in leases:
        parent = state.leases.get(one.parent)
        if parent is not None and parent in leases and parent.expires_at_ms > now:
            lent += min(one.cost, parent.cost)
    return lent


def budget_left(state, now, endpoint, *, rank=0, aged=False):
    """Rule 6 and the budget's half of 5: what the group would still give to this endpoint, `None` for no bound."""
    one = state.specs[endpoint]
    budget = state.budgets.get(one.group)
    if budget is None:
        return None
    members = [other for other in state.specs.values() if other.group == one.group]
    there = [lease for other in members for lease in live(state, now, other.id)]
    total = sum(lease.cost for lease in there) - lent_units(state, now, there)
    aside = sum(max(0, other.floor - in_flight(state, now, other.id)) for other in members if other.id != endpoint)
    left = budget - total - aside
    if rank >= BACKGROUND and not aged and closed(state, endpoint):
        left = min(left, budget - reserve(budget, None) - total)
    return left


def chosen(state, now, home, rank, cost, *, aged=False):
    """The endpoint that would admit a call now, `None` for none."""
    for endpoint in (home, state.specs[home].fallback if home in state.specs else ""):
        if endpoint in state.specs and endpoint_admits(state, now, endpoint, rank, cost, aged=aged):
            left = budget_left(state, now, endpoint, rank=rank, aged=aged)
            if left is None or cost <= left:
                return endpoint
        if home not in state.specs or closed(state, home) or home in state.paused:
            return None
    return None


def waits_for_budget(state, now, home, rank, cost):
    """Whether only the group's budget stands against a call, and a release could help it."""
    one = state.specs.get(home)
    if one is None or not endpoint_admits(state, now, home, rank, cost):
        return False
    left = budget_left(state, now, home, rank=rank)
    if left is None or cost <= left:
        return False
    budget = state.budgets[one.group]
    floors = sum(other.floor for other in state.specs.values() if other.group == one.group and other.id != home)
    kept = reserve(budget, None) if rank >= BACKGROUND and closed(state, home) else 0
    return cost <= budget - max(floors, kept)


class Watched(Reference):
    """The rule, with the invariants checked at the very moment of each decision."""

    def __init__(self):
        super().__init__()
        self.begun_in = {}

    def all_waiters(self):
        for line, waiters in self.state.lines.items():
            for waiter in waiters:
                yield line, waiter, self.state.parked[line, waiter]

    def falls_back(self, home, endpoint):
        one = self.state.specs.get(home)
        return one is not None and one.fallback == endpoint and not closed(self.state, home)

    def decide(self, home, parked, process, *, asking, parent=""):
        verdict = super().decide(home, parked, process, asking=asking, parent=parent)
        if isinstance(verdict, Admit):
            self.check_nobody_overtaken(home, verdict.endpoint, parked, process if asking else "")
        return verdict

    def check_nobody_overtaken(self, home, endpoint, parked, asker):
        """I8: no takeable waiter of the same or a better rank stood there, nor one for whom the budget is kept."""
        state, now = self.state, self.now_ms
        mine = state.specs[endpoint]
        in_floor = in_flight(state, now, endpoint) + parked.cost <= mine.floor
        for line, waiter, other in self.all_waiters():
            if other.key >= parked.key or not self.runner(line, other, asker):
                continue
            if line[0] in (home, endpoint) or self.falls_back(line[0], endpoint):
                assert chosen(state, now, line[0], other.rank, other.cost) is None, (line, waiter)
            elif line[0] in state.specs and mine.group in state.budgets and state.specs[line[0]].group == mine.group:
                kept = waits_for_budget(state, now, line[0], other.rank, other.cost)
                first = min(one.key for where, _, one in self.all_waiters() if where == line) == other.key
                assert in_floor or not (kept and first), (line, waiter)

    def grant(self, lease_id, lease):
        endpoint, now = lease.endpoint, self.now_ms
        if endpoint == NOWHERE:  # it uses nothing
            return super().grant(lease_id, lease)
        if not lease.hold and half_open(self.state, now, endpoint):
            assert not role_taken(self.state, now, endpoint), "I7: a second probe"
        granted = super().grant(lease_id, lease)
        state, one = self.state, self.state.specs[endpoint]
        assert endpoint not in state.paused
        assert in_flight(state, now, endpoint) <= state.overrides.get(endpoint, one.ceiling), "I1: over the ceiling"
        left = budget_left(state, now, endpoint)
        assert left is None or left >= 0, "I1: over the budget"
        self.begun_in[lease_id] = one.group
        there = [x for name, x in state.leases.items() if self.begun_in.get(name) == one.group]
        units = sum(x.cost for x in there) - lent_units(state, now, there)
        assert units <= state.budgets.get(one.group, units), "I1: over the budget, with those that left it"
        if lease.parent:
            assert state.leases[lease.parent].endpoint != endpoint
            assert [x.parent for x in state.leases.values()].count(lease.parent) == 1, "one call at a time"
        breaker = state.breakers.get(endpoint, Breaker())
        if one.breaker and breaker.ramp >= 0:
            present = [x.cost for x in live(state, now, endpoint) if x.generation == breaker.generation]
            assert sum(present) <= 1 + breaker.ramp or len(present) == 1, "over the ramp"
        return granted

    def _let_go(self, serving, line, waiter, parked, endpoint, runner):
        state, now = self.state, self.now_ms
        aged = self.aged_waiter(line[0])
        for other_line, other_id, other in self.all_waiters():
            same = other_line[0] == line[0]
            if not same or other.key >= parked.key or aged == (line, waiter):
                continue
            if other.overloaded and half_open(state, now, endpoint):
                continue
            if (other_line, other_id) in serving.passed:
                continue
            if self.runner(other_line, other, serving.process if serving.want > 0 else ""):
                assert chosen(state, now, line[0], other.rank, other.cost) != endpoint, (
                    "I8: a better waiter stood there"
                )
        super()._let_go(serving, line, waiter, parked, endpoint, runner)

    def serve(self, process, want, via):
        serving = super().serve(process, want, via)
        if not self.recovering() and len(serving.woken) < 8:
            self.check_no_idle_permit(serving, {*serving.woken, *([process] if want > 0 else [])})
        return serving

    def check_no_idle_permit(self, serving, asked):
        """I9: nobody idle could run a waiter that would be admitted, unless a better one is being waited for."""
        state, now = self.state, self.now_ms
        waiters = sorted((parked.key, line, waiter) for line, waiter, parked in self.all_waiters())
        aged = {home: self.aged_waiter(home) for home in {line[0] for line in state.lines}}
        waiters = [((-1, 0), *one) for one in aged.values() if one is not None] + waiters
        blocked, claimed = set(), set()
        for key, line, waiter in waiters:
            parked = state.parked[line, waiter]
            if line[0] not in state.specs or (line, waiter) in serving.passed:
                continue
            idle = self.runner(line, parked, serving.process if serving.want > 0 else "") != ""
            was_idle = any(line[1:] in state.processes[name].queues for name in asked if name in state.processes)
            if not idle and not was_idle:
                continue
            endpoint = chosen(state, now, line[0], parked.rank, parked.cost, aged=key[0] < 0)
            if endpoint is None:
                blocked.add(line[0])  # strict first come, first served by cost
                claimed |= {state.specs[line[0]].group, state.specs.get(state.specs[line[0]].fallback, spec("")).group}
                continue
            one = state.specs[endpoint]
            claims = one.group in claimed and one.group in state.budgets
            assert not idle or key[0] < 0 or line[0] in blocked or claims, ("I9: an idle permit", line, waiter)


# -- the machine -------------------------------------------------------------------------------------------------------

PROCESSES = ["p1", "p2", "p3"]
QUEUES = {"p1": ("q1", "q2"), "p2": ("q1",), "p3": ("q2",)}
ENDPOINTS = ["a", "b", "c"]
ENDINGS = [Outcome.SUCCESS] * 5 + [Outcome.OVERLOAD] * 3 + [Outcome.BENIGN, Outcome.NEUTRAL, Outcome.IGNORED]
OFTEN = ["arrive"] * 5 + ["finish"] * 6 + ["beat"] * 4 + ["call", "ask_again", "confirm"] + ["wait"] * 3 + ["live_on"]
SELDOM = ["silence", "one_is_slow", "end_process", "publish", "drain", "flush", "redeliver"] + ["operate"] * 3


def configuration(pick):
    """Three endpoints: `a` falls back to `b`; `a` and `c` share a budget."""
    budget = pick([3, 4, 6])
    last = pick([1, 2, 4])
    shared = {"reserve": pick([None, 0, 1]), "fail_threshold": pick([1, 1, 2])}
    return (
        (
            spec("a", pick([1, 2, 3, 5]), fallback=pick(["b", "b", ""]), group="gpu", **shared),
            spec("b", pick([1, 2, 3]), breaker=pick([True, True, False]), **shared),
            spec("c", last, floor=min(pick([0, 1, 2]), last, budget - 2), group="gpu", **shared),
        ),
        {"gpu": budget},
    )


def tidy(reference):
    """A copy of all state: without empty containers, which reading may leave, and gaps in the order of places."""

    def copied(value):
        return replace(value) if isinstance(value, Process) else type(value)(value) if value else None

    kept = {}
    for part in (reference.state, reference.broker):
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, dict):
                one = {
                    key: copied(each) if isinstance(each, (Process, dict, set, list)) else each
                    for key, each in value.items()
                }
                kept[field.name] = {key: each for key, each in one.items() if each is not None}
            elif field.name != "places":
                kept[field.name] = copied(value) if isinstance(value, set) else value
    return kept


def without_advice(reply):
    """What a reply decides, without what it says of the moment: whom it woke, who could go, why not yet."""
    kept = replace(reply, woken=(), waiting=0, next_ms=0)
    return replace(kept, reason="", retry_after_ms=0) if reply.status in (Status.WAITING, Status.REFUSED) else kept


def without_holds(state):
    """The state without the units that are held for a moment: a process ends its own by speaking."""
    return {**state, "leases": {lease_id: one for lease_id, one in state["leases"].items() if not one.hold}}


class Chaos:
    """Any commands in any order, by processes that keep the contract, are slow, or die.

    `pick` chooses one of a sequence: Hypothesis or a seeded generator does it.
    """

    def __init__(self, pick):
        self.pick = pick
        endpoints, budgets = configuration(pick)
        self.world = World(*endpoints, budgets=budgets, rules=RULES, workers=(), rule=Watched())
        self.waiting = {}
        self.lost = set()
        self.redelivered = set()
        self.names = 0
        for name in PROCESSES:
            self.world.start(name, queues=QUEUES[name])

    # -- helpers -----------------------------------------------------------------------------------------------------

    @property
    def alive(self):
        return [name for name, worker in self.world.workers.items() if worker.alive]

    @property
    def running(self):
        return [call for name in self.alive for call in self.world.workers[name].calls.values()]

    def twice(self, verb, command):
        """I11: now and then carry a command out ahead of the world, which then repeats it as if its reply was lost."""
        if self.pick([False, True]):
            first = getattr(self.world.rule, verb)(command, self.world.now)
            if first.status is Status.REFUSED and first.reason == Reason.QUEUE_AHEAD:
                return  # who was ahead has been served or was nobody: a refusal keeps nothing, so this is a new question
            before = without_holds(tidy(self.world.rule))
            held = f"hold:{getattr(command, 'process', '')}" in self.world.rule.state.leases
            repeated = getattr(self.world.rule, verb)(command, self.world.now)
            assert without_advice(repeated) == without_advice(first), "I11: another answer"
            # a hold ends when its process speaks, and while it stands its process cannot take: others may be served
            assert held or first.woken or without_holds(tidy(self.world.rule)) == before, "I11: another state"

    def ask(self, ask):
        self.twice("admit", ask)
        call = self.world.admit(ask)
        if call.status is Status.UNCONFIGURED:  # taken for dead, or another configuration applied: publish, repeat
            assert ask.process not in self.world.rule.state.processes
            self.world.configure(ask.process)
            self.world.beat(ask.process)
            call = self.world.admit(ask)
        self.waiting.pop(ask.lease, None)
        if call.status is Status.WAITING:
            self.waiting[ask.lease] = ask
        if call.status is Status.IMPOSSIBLE and ask.message is not None:
            self.world.ack(ask.message)  # dead-lettered

    # -- what happens often ------------------------------------------------------------------------------------------

    def arrive(self):
        process = self.pick(self.alive)
        queue = self.pick(QUEUES[process[:2]])
        endpoint = self.pick(ENDPOINTS)
        for _ in range(self.pick([1, 1, 2, 4])):
            self.world.enqueue(queue)
            waiting = self.world.rule.broker.queues[NAMESPACE, queue]
            waiting.insert(0, waiting.pop())
            self.ask(
                self.world.command(
                    process,
                    endpoint,
                    message=self.world.fetch(process, queue),
                    rank=self.pick([0, 1, 1, 3, 3]),
                    cost=self.pick([1, 1, 1, 2, 3]),
                    take=self.pick([0, 1, 1]),
                    idle=self.pick([0, 0, 1, 2]),
                    deadline_ms=self.pick([0, 0, 0, self.world.now + 5_000]),
                )
            )

    def call(self):
        wait = self.pick([True, True, False])
        more = {"rank": self.pick([0, 1, 3]), "cost": self.pick([1, 1, 2]), "wait": wait}
        slot = not wait and self.pick([False, True])
        if not wait and self.running and self.pick([False, True]):
            more["parent"] = self.pick(self.running).lease
        self.ask(self.world.command(self.pick(self.alive), self.pick(ENDPOINTS), slot=slot, **more))

    def ask_again(self):
        """A waiting caller learns that it was given its permit, or asks once more, or gives up."""
        if not self.waiting:
            return
        ask = self.waiting[self.pick(sorted(self.waiting))]
        if not self.world.workers[ask.process].alive:
            del self.waiting[ask.lease]
        elif self.pick([True, False, False]):
            del self.waiting[ask.lease]
            self.twice("operate", Operate(action=Action.WITHDRAW, target=ask.lease))
            self.world.operate(Action.WITHDRAW, ask.lease)
        else:
            self.ask(ask)

    def finish(self):
        for _ in range(self.pick([1, 1, 2, 4])):
            if not self.running:
                return
            call = self.pick(self.running)
            outcome = self.pick(ENDINGS)
            park = ParkAs.OVERLOADED if outcome is Outcome.OVERLOAD else self.pick([ParkAs.NO] * 4 + [ParkAs.DENIED])
            outcome = Outcome.IGNORED if park is ParkAs.DENIED else outcome
            take = self.pick([0, 1, 1])
            more = {
                "park": self.pick([park, park, ParkAs.NO]) if call.message is not None else ParkAs.NO,
                "take": take,
                "idle": take + self.pick([0, 0, 1]),
                "retry_after_ms": self.pick([0, 0, 2_000]),
            }
            self.twice("finish", self.world.ending(call, outcome, **more))
            reply = self.world.finish(call, outcome, **more)
            self.lost.discard(call.lease)
            if call.message is not None and reply.status is Status.FINISHED and call.id not in self.redelivered:
                assert call.id not in self.places(), "done, and yet it stands somewhere"

    def beat(self):
        process = self.pick(self.alive)
        calls = self.world.workers[process].calls
        unbegun = sorted(one for one, call in calls.items() if call.reply is None and one not in self.lost)
        back = (self.pick(unbegun),) if unbegun and self.pick([False, False, True]) else ()
        for lease in back:
            del calls[lease]
        asserts = tuple(call.held() for one, call in calls.items() if one in self.lost)
        idle = self.pick([0, 1, 2, 3])
        beat = self.world.beating(
            process,
            take=min(self.pick([0, 1, 3, 3]), idle),
            idle=idle,
            give_back=back,
            asserts=asserts,
            leaving=self.pick([False] * 9 + [True]),
        )
        self.twice("beat", beat)
        reply = self.world.rule.beat(beat, self.world.now)
        if reply.status is Status.UNCONFIGURED:
            self.world.configure(process)
            reply = self.world.rule.beat(beat, self.world.now)
        self.lost -= {held.lease for held in asserts}
        self.lost |= {lease for lease in reply.lost if lease in calls}
        self.world.taken(process, reply)

    def confirm(self):
        """A thread reaches a message that was taken a while ago, and makes sure that it may still start."""
        taken = [call for call in self.running if call.reply is None and call.message is not None]
        if taken:
            call = self.pick(taken)
            more = {"rank": call.rank, "cost": call.cost, "lease": call.lease, "take": 1, "idle": self.pick([0, 1])}
            del self.world.workers[call.process].calls[call.lease]
            self.lost.discard(call.lease)
            self.ask(self.world.command(call.process, call.home, message=call.message, confirm=True, **more))

    def wait(self):
        self.world.jump(self.pick([1, 20, 60, 400, 600, 1_000]))

    def live_on(self):
        self.world.pass_time(self.pick([1_900, 4_000, 5_000]))

    # -- what happens seldom -----------------------------------------------------------------------------------------

    def silence(self):
        """Nobody speaks: the store was away, or everybody was stopped."""
        self.world.jump(self.pick([2_100, 7_000, 100_000]))

    def one_is_slow(self):
        """One process is stopped while the others go on."""
        slow = self.pick(self.alive)
        self.world.workers[slow].alive = False
        self.world.pass_time(self.pick([3_000, 7_000, 13_000]))
        self.world.workers[slow].alive = True

    def redeliver(self):
        """A message that stands in its queue again (drained, or requeued by maintenance) reaches a worker."""
        process = self.pick(self.alive)
        queue = self.pick(QUEUES[process[:2]])
        if self.world.queue(queue):
            message = self.world.fetch(process, queue)
            self.ask(self.world.command(process, self.pick(ENDPOINTS), message=message, rank=self.pick([0, 3]), take=1))

    def end_process(self):
        """A process ends and another takes its place; maintenance may put back what the broker knows it held."""
        process = self.pick(self.alive)
        if self.pick([False, True]):
            self.world.forget(process)
        else:
            self.world.kill(process)
        if self.pick([False, True]):
            for (namespace, worker, queue), ids in self.world.rule.broker.acks.items():
                if worker == f"w-{process}":
                    self.redelivered |= ids
                    self.world.rule.broker.queues.setdefault((namespace, queue), []).extend(sorted(ids))
                    ids.clear()
        self.names += 1
        self.world.start(f"{process[:2]}-{self.names}", queues=QUEUES[process[:2]])

    def publish(self):
        endpoints, budgets = configuration(self.pick)
        more = {"budgets": budgets, "revision": self.pick([0, 1])}
        self.world.configure(self.pick(self.alive), self.world.publish(*endpoints, **more))

    def operate(self):
        action = self.pick(
            [Action.OPEN, Action.CLOSE, Action.RESET, Action.OVERRIDE, Action.PAUSE]
            + [Action.CLEAR_OVERRIDE] * 2
            + [Action.RESUME] * 3
        )
        self.world.operate(action, self.pick(ENDPOINTS), value=self.pick([0, 1, 2, 4, 6]))

    def drain(self):
        queue = (NAMESPACE, self.pick(["q1", "q2"]))
        self.world.operate(Action.DRAIN, "", queue=queue, force=self.pick([False, True]), value=self.pick([0, 1]))

    def flush(self):
        """Somebody deletes the payload of a waiting message."""
        parked = sorted((line, waiter) for line, waiter in self.world.rule.state.parked if line[1])
        if parked:
            line, waiter = self.pick(parked)
            self.world.rule.broker.payloads[NAMESPACE, line[2]].pop(waiter, None)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def places(self):
        """In how many places each message id stands: queues, ack sets, lines and beside them."""
        state, broker = self.world.rule.state, self.world.rule.broker
        found = Counter()
        for ids in [*broker.queues.values(), *broker.acks.values()]:
            found.update(ids)
        for line, waiters in state.lines.items():
            if line[1]:
                found.update(list(waiters))
        found.update(waiter for line, waiter in state.held_back if line[1])
        return found

    def check(self):
        self.every_message_stands_in_one_place()
        self.leases_are_what_is_in_flight()
        self.no_message_has_two_leases()
        self.records_fit_the_lines()
        self.somebody_is_awake_while_somebody_waits()

    def every_message_stands_in_one_place(self):
        """I3: a message with a payload is in exactly one place."""
        found = self.places()
        for queue, payloads in self.world.rule.broker.payloads.items():
            for message_id in payloads:
                assert found[message_id] == 1, (queue, message_id, found[message_id])

    def leases_are_what_is_in_flight(self):
        """The lease set is the only truth: the snapshot's sums are those of its leases. Reading changes nothing."""
        state, now = self.world.rule.state, self.world.now
        before = tidy(self.world.rule)
        snapshot = self.world.rule.snapshot(now)
        assert tidy(self.world.rule) == before, "reading changed something"
        for endpoint, seen in snapshot.endpoints.items():
            assert seen.in_flight == sum(cost for where, cost, _ in snapshot.leases.values() if where == endpoint)
            assert seen.in_flight == in_flight(state, now, endpoint)

    def no_message_has_two_leases(self):
        """I5: one delivery, one lease."""
        held = Counter(one.message for one in self.world.rule.state.leases.values() if one.message is not None)
        assert all(count == 1 for count in held.values()), held

    def records_fit_the_lines(self):
        """Whoever stands in a line has a record with the same rank and place; no caller's record outlives it."""
        state = self.world.rule.state
        for line, waiters in state.lines.items():
            assert waiters, "an empty line"
            for waiter, key in waiters.items():
                assert state.parked[line, waiter].key == key
                assert (line, waiter) not in state.held_back
        assert all(key in state.parked for key in state.held_back)
        for line, waiter in state.parked:
            assert line[1] or waiter in state.lines.get(line, {}), "a caller's record without the caller"

    def somebody_is_awake_while_somebody_waits(self):
        """next_ms is -1 only if nobody waits, and never another negative number or zero."""
        state = self.world.rule.state
        self.world.rule.now_ms = self.world.now
        next_ms = self.world.rule.next_ms()
        assert next_ms > 0 if state.lines or state.held_back else next_ms == -1, next_ms


class Commands(RuleBasedStateMachine):
    """Hypothesis chooses, and shrinks what it finds."""

    def __init__(self):
        super().__init__()
        self.chaos = None

    @initialize(data=st.data())
    def begin(self, data):
        self.chaos = Chaos(lambda choices: data.draw(st.sampled_from(choices)))

    @rule(data=st.data(), what=st.sampled_from(OFTEN))
    def often(self, data, what):
        self.do(data, what)

    @rule(data=st.data(), what=st.sampled_from(OFTEN))
    def often_again(self, data, what):
        self.do(data, what)

    @rule(data=st.data(), what=st.sampled_from(OFTEN))
    def and_again(self, data, what):
        self.do(data, what)

    @rule(data=st.data(), what=st.sampled_from(SELDOM))
    def seldom(self, data, what):
        self.do(data, what)

    def do(self, data, what):
        self.chaos.pick = lambda choices: data.draw(st.sampled_from(choices))
        getattr(self.chaos, what)()

    @invariant()
    def everything_holds(self):
        if self.chaos is not None:
            self.chaos.check()


def test_any_commands_keep_the_invariants():
    """I1, I3, I5, I7, I8, I9 and I11 hold after every command, whatever came before."""
    run_state_machine_as_test(
        Commands,
        settings=hypothesis.settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", range(4))
def test_long_run_keeps_the_invariants(seed):
    """The same over hundreds of commands in a row, with a store that fills up, empties and is disturbed."""
    chance = random.Random(seed)
    chaos = Chaos(chance.choice)
    for _ in range(400):
        getattr(chaos, chance.choice(SELDOM if chance.random() < 0.1 else OFTEN))()
        chaos.check()
