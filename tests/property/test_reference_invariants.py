"""The executable rule under arbitrary commands: after each one, the invariants of the design hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace

import hypothesis
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test

from guard_middleware.core.breaker import Breaker
from guard_middleware.core.commands import Action, Operate, ParkAs, Status
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.reference import Reference
from guard_middleware.core.state import Process
from guard_middleware.core.values import Rules
from guard_middleware.core.verdict import Admit
from tests.unit.builders import NAMESPACE, World, spec

BACKGROUND = 3
RULES = Rules(lease_ms=6_000, heartbeat_ms=1_000, ageing_ms=8_000, probe_deadline_ms=4_000)

# -- the admission rule once more, from the design's text, as the oracle of the checks -------------------------------------


def reserve(limit, fixed):
    return 0 if limit <= 1 else min(max(1, int(0.34 * limit + 0.5)) if fixed is None else fixed, limit - 1)


def live(state, now, endpoint):
    return [one for one in state.leases.values() if one.endpoint == endpoint and one.expires_at_ms > now]


def in_flight(state, now, endpoint):
    return sum(one.cost for one in live(state, now, endpoint))


def half_open(state, now, endpoint):
    return state.specs[endpoint].breaker and 0 < state.breakers.get(endpoint, Breaker()).open_until_ms <= now


def closed(state, endpoint):
    return not state.specs[endpoint].breaker or state.breakers.get(endpoint, Breaker()).open_until_ms == 0


def role_taken(state, now, endpoint):
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
        return not (background and present + cost > limit - reserve(limit, one.reserve))
    return True


def budget_left(state, now, endpoint, *, rank=0, aged=False):
    """Rule 6 and the budget's half of 5: what the group would still give to this endpoint, `None` for no bound."""
    one = state.specs[endpoint]
    budget = state.budgets.get(one.group)
    if budget is None:
        return None
    members = [other for other in state.specs.values() if other.group == one.group]
    total = sum(in_flight(state, now, other.id) for other in members)
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
    floors = sum(o.floor for o in state.specs.values() if o.group == one.group and o.id != home)
    return left is not None and left < cost <= state.budgets[one.group] - floors


class Watched(Reference):
    """The rule, with the invariants checked at the very moment of each decision."""

    def all_waiters(self):
        for line, waiters in self.state.lines.items():
            for waiter in waiters:
                yield line, waiter, self.state.parked[line, waiter]

    def falls_back(self, home, endpoint):
        one = self.state.specs.get(home)
        return one is not None and one.fallback == endpoint and not closed(self.state, home)

    def decide(self, home, parked, process, *, asking):
        verdict = super().decide(home, parked, process, asking=asking)
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
        if not lease.hold and half_open(self.state, now, endpoint):
            assert not role_taken(self.state, now, endpoint), "I7: a second probe"
        granted = super().grant(lease_id, lease)
        state, one = self.state, self.state.specs[endpoint]
        assert endpoint not in state.paused
        assert in_flight(state, now, endpoint) <= state.overrides.get(endpoint, one.ceiling), "I1: over the ceiling"
        left = budget_left(state, now, endpoint)
        assert left is None or left >= 0, "I1: over the budget"
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
                assert chosen(state, now, line[0], other.rank, other.cost) is None, "I8: a better waiter stood there"
        super()._let_go(serving, line, waiter, parked, endpoint, runner)

    def serve(self, process, want, via):
        serving = super().serve(process, want, via)
        if not self.recovering() and len(serving.woken) < 8:
            self.check_no_idle_permit(serving)
        return serving

    def check_no_idle_permit(self, serving):
        """I9: nobody idle could run a waiter that would be admitted, unless a better one is being waited for."""
        state, now = self.state, self.now_ms
        waiters = sorted((parked.key, line, waiter) for line, waiter, parked in self.all_waiters())
        blocked, claimed = set(), set()
        for _, line, waiter in waiters:
            parked = state.parked[line, waiter]
            if line[0] not in state.specs or (line, waiter) in serving.passed:
                continue
            if not self.runner(line, parked, serving.process if serving.want > 0 else ""):
                continue
            endpoint = chosen(state, now, line[0], parked.rank, parked.cost)
            if endpoint is None:
                blocked.add(line[0])  # strict first come, first served by cost
                claimed |= {state.specs[line[0]].group, state.specs.get(state.specs[line[0]].fallback, spec("")).group}
                continue
            one = state.specs[endpoint]
            claims = one.group in claimed and one.group in state.budgets
            assert line[0] in blocked or claims, ("I9: an idle permit", line, waiter)


# -- the machine -----------------------------------------------------------------------------------------------------------

PROCESSES = ["p1", "p2", "p3"]
QUEUES = {"p1": ("q1", "q2"), "p2": ("q1",), "p3": ("q2",)}
ENDPOINTS = ["a", "b", "c"]
ENDINGS = st.sampled_from([Outcome.SUCCESS] * 4 + [Outcome.OVERLOAD] * 2 + [Outcome.BENIGN, Outcome.NEUTRAL, Outcome.IGNORED])


def configurations():
    """Three endpoints: `a` falls back to `b`; `a` and `c` may share a budget."""

    def build(ceilings, reserve, floor, budget, threshold, breaker):
        one, two, three = ceilings
        shared = {"reserve": reserve, "fail_threshold": threshold}
        grouped = {**shared, "group": "gpu"}
        floor = min(floor, three, budget - 1)
        return (
            (
                spec("a", one, fallback="b", **grouped),
                spec("b", two, breaker=breaker, **shared),
                spec("c", three, floor=floor, **grouped),
            ),
            {"gpu": budget},
        )

    return st.builds(
        build,
        st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4)),
        st.sampled_from([None, 0, 1]),
        st.integers(0, 2),
        st.integers(2, 6),
        st.integers(1, 2),
        st.booleans(),
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
                one = {key: copied(each) if isinstance(each, (Process, dict, set, list)) else each for key, each in value.items()}
                kept[field.name] = {key: each for key, each in one.items() if each is not None}
            elif field.name != "places":
                kept[field.name] = copied(value) if isinstance(value, set) else value
    return kept


def without_advice(reply):
    """What a reply says of this command, without whom it woke and whether this process could run a waiter."""
    return replace(reply, woken=(), waiting=0)


class Commands(RuleBasedStateMachine):
    """Any commands in any order, by processes that keep the contract, are slow, or die."""

    @initialize(configuration=configurations())
    def begin(self, configuration):
        endpoints, budgets = configuration
        self.world = World(*endpoints, budgets=budgets, rules=RULES, workers=(), rule=Watched())
        self.waiting = {}
        self.lost = {}
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

    def twice(self, verb, command, again):
        """Carry a command out ahead of the world, which then repeats it as a client whose reply was lost."""
        if again:
            first = getattr(self.world.rule, verb)(command, self.world.now)
            if not all(take.lease for take in first.takes):
                return  # what is handed over without a permit is handed over once
            before = tidy(self.world.rule)
            repeated = getattr(self.world.rule, verb)(command, self.world.now)
            assert without_advice(repeated) == without_advice(first), ("I11: another answer", repeated, first)
            assert tidy(self.world.rule) == before, "I11: another state"

    def ask(self, ask, again):
        self.twice("admit", ask, again)
        call = self.world.admit(ask)
        if call.status is Status.WAITING:
            self.waiting[ask.lease] = ask
        else:
            self.waiting.pop(ask.lease, None)
        assert call.status is not Status.UNCONFIGURED or ask.process not in self.world.rule.state.processes
        if call.status is Status.UNCONFIGURED:  # the process was taken for dead: as its client does, publish and repeat
            self.world.configure(ask.process)
            self.world.beat(ask.process)
            call = self.world.admit(ask)
            if call.status is Status.WAITING:
                self.waiting[ask.lease] = ask
        if call.status is Status.IMPOSSIBLE and ask.message is not None:
            self.world.ack(ask.message)  # dead-lettered
        return call

    # -- rules -------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        endpoint=st.sampled_from(ENDPOINTS),
        rank=st.sampled_from([0, 1, 1, 3, 3]),
        cost=st.sampled_from([1, 1, 1, 2, 3]),
        take=st.integers(0, 1),
        idle=st.integers(-1, 2),
        age=st.sampled_from([0, 0, 0, 5_000]),
        again=st.booleans(),
    )
    def arrive(self, data, endpoint, rank, cost, take, idle, age, again):
        process = data.draw(st.sampled_from(self.alive))
        queue = data.draw(st.sampled_from(QUEUES[process[:2]]))
        self.world.enqueue(queue)
        waiting = self.world.rule.broker.queues[NAMESPACE, queue]
        waiting.insert(0, waiting.pop())
        deadline_ms = self.world.now + age if age else 0
        more = {"rank": rank, "cost": cost, "take": take, "idle": idle, "deadline_ms": deadline_ms}
        self.ask(self.world.command(process, endpoint, message=self.world.fetch(process, queue), **more), again)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), endpoint=st.sampled_from(ENDPOINTS), rank=st.sampled_from([0, 1, 3]), again=st.booleans())
    def redeliver(self, data, endpoint, rank, again):
        """A message that stands in its queue again (drained, or requeued by maintenance) reaches a worker."""
        process = data.draw(st.sampled_from(self.alive))
        queue = data.draw(st.sampled_from(QUEUES[process[:2]]))
        if self.world.queue(queue):
            message = self.world.fetch(process, queue)
            self.ask(self.world.command(process, endpoint, message=message, rank=rank, take=1), again)

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(),
        endpoint=st.sampled_from(ENDPOINTS),
        rank=st.sampled_from([0, 1, 3]),
        cost=st.sampled_from([1, 1, 2]),
        wait=st.booleans(),
        slot=st.booleans(),
        again=st.booleans(),
    )
    def call(self, data, endpoint, rank, cost, wait, slot, again):
        process = data.draw(st.sampled_from(self.alive))
        more = {"rank": rank, "cost": cost, "wait": wait, "slot": slot and not wait}
        self.ask(self.world.command(process, endpoint, **more), again)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), give_up=st.booleans(), again=st.booleans())
    def ask_again(self, data, give_up, again):
        """A waiting caller learns that it was given its permit, or asks once more, or gives up."""
        ask = self.waiting[data.draw(st.sampled_from(sorted(self.waiting)))]
        if not self.world.workers[ask.process].alive:
            del self.waiting[ask.lease]
        elif give_up:
            del self.waiting[ask.lease]
            withdraw = Operate(action=Action.WITHDRAW, target=ask.lease)
            self.twice("operate", withdraw, again)
            self.world.operate(Action.WITHDRAW, ask.lease)
        else:
            self.ask(ask, again)

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(),
        outcome=ENDINGS,
        parks=st.booleans(),
        denied=st.booleans(),
        take=st.integers(0, 1),
        idle=st.integers(-1, 2),
        retry_after_ms=st.sampled_from([0, 0, 2_000]),
        again=st.booleans(),
    )
    def finish(self, data, outcome, parks, denied, take, idle, retry_after_ms, again):
        call = data.draw(st.sampled_from(self.running))
        park = ParkAs.NO
        if call.message is not None and parks:
            park = ParkAs.DENIED if denied else ParkAs.OVERLOADED if outcome is Outcome.OVERLOAD else ParkAs.NO
        more = {"park": park, "take": take, "idle": idle, "retry_after_ms": retry_after_ms}
        outcome = Outcome.IGNORED if park is ParkAs.DENIED else outcome
        self.twice("finish", self.world.ending(call, outcome, **more), again)
        reply = self.world.finish(call, outcome, **more)
        self.lost.pop(call.lease, None)
        if call.message is not None and reply.status is Status.FINISHED and call.id not in self.redelivered:
            assert call.id not in self.places(), "done, and yet it stands somewhere"

    @precondition(lambda self: self.alive)
    @rule(
        data=st.data(), take=st.integers(0, 3), idle=st.integers(0, 3), leaving=st.booleans(), again=st.booleans()
    )
    def beat(self, data, take, idle, leaving, again):
        process = data.draw(st.sampled_from(self.alive))
        calls = self.world.workers[process].calls
        unbegun = sorted(one for one, call in calls.items() if call.reply is None and one not in self.lost)
        back = tuple(data.draw(st.lists(st.sampled_from(unbegun), unique=True, max_size=2))) if unbegun else ()
        for lease in back:
            del calls[lease]
        asserts = tuple(call.held() for one, call in calls.items() if self.lost.get(one) and call.message is not None)
        leaving = leaving and take == 0
        beat = self.world.beating(
            process, take=min(take, idle), idle=idle, give_back=back, asserts=asserts, leaving=leaving
        )
        self.twice("beat", beat, again)
        reply = self.world.rule.beat(beat, self.world.now)
        if reply.status is Status.UNCONFIGURED:
            self.world.configure(process)
            reply = self.world.rule.beat(beat, self.world.now)
        self.world.taken(process, reply)
        for lease in [held.lease for held in asserts]:
            self.lost.pop(lease, None)
        for lease in reply.lost:
            if lease in calls:
                self.lost[lease] = True

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), idle=st.integers(0, 1), again=st.booleans())
    def confirm(self, data, idle, again):
        """A thread reaches a message that was taken a while ago, and makes sure that it may still start."""
        taken = [call for call in self.running if call.reply is None and call.message is not None]
        if taken:
            call = data.draw(st.sampled_from(taken))
            more = {"rank": call.rank, "cost": call.cost, "lease": call.lease, "take": 1, "idle": idle}
            ask = self.world.command(call.process, call.home, message=call.message, confirm=True, **more)
            del self.world.workers[call.process].calls[call.lease]
            self.lost.pop(call.lease, None)
            self.ask(ask, again)

    @rule(ms=st.sampled_from([1, 20, 60, 400, 1_000]))
    def wait(self, ms):
        self.world.jump(ms)

    @rule(ms=st.sampled_from([1_900, 4_000, 5_000]))
    def live_on(self, ms):
        self.world.pass_time(ms)

    @rule(ms=st.sampled_from([2_100, 7_000, 100_000]))
    def silence(self, ms):
        """Nobody speaks: the store was away, or everybody was stopped."""
        self.world.jump(ms)

    @rule(data=st.data(), ms=st.sampled_from([3_000, 7_000, 13_000]))
    def one_is_slow(self, data, ms):
        """One process is stopped while the others go on."""
        if self.alive:
            slow = data.draw(st.sampled_from(self.alive))
            self.world.workers[slow].alive = False
            self.world.pass_time(ms)
            self.world.workers[slow].alive = True

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), polite=st.booleans(), maintained=st.booleans())
    def end_process(self, data, polite, maintained):
        """A process ends and another takes its place; maintenance may put back what the broker knows it held."""
        process = data.draw(st.sampled_from(self.alive))
        if polite:
            self.world.forget(process)
        else:
            self.world.kill(process)
        if maintained:
            for (namespace, worker, queue), ids in self.world.rule.broker.acks.items():
                if worker == f"w-{process}":
                    self.redelivered |= ids
                    self.world.rule.broker.queues.setdefault((namespace, queue), []).extend(sorted(ids))
                    ids.clear()
        self.names += 1
        name = f"{process[:2]}-{self.names}"
        self.world.start(name, queues=QUEUES[process[:2]])

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), configuration=configurations(), revision=st.integers(0, 1))
    def publish(self, data, configuration, revision):
        endpoints, budgets = configuration
        process = data.draw(st.sampled_from(self.alive))
        self.world.configure(process, self.world.publish(*endpoints, budgets=budgets, revision=revision))

    @rule(
        action=st.sampled_from(
            [Action.OPEN, Action.CLOSE, Action.RESET, Action.OVERRIDE, Action.CLEAR_OVERRIDE, Action.PAUSE]
            + [Action.RESUME] * 3
        ),
        endpoint=st.sampled_from(ENDPOINTS),
        value=st.sampled_from([0, 1, 2, 600]),
    )
    def operate(self, action, endpoint, value):
        value = min(value, 6) if action is Action.OVERRIDE else value
        self.world.operate(action, endpoint, value=value)

    @rule(queue=st.sampled_from(["q1", "q2"]), force=st.booleans(), most=st.sampled_from([0, 1]))
    def drain(self, queue, force, most):
        self.world.operate(Action.DRAIN, "", queue=(NAMESPACE, queue), force=force, value=most)

    @rule(data=st.data())
    def flush(self, data):
        """Somebody deletes the payload of a waiting message."""
        parked = [(line, waiter) for line, waiter in self.world.rule.state.parked if line[1]]
        if parked:
            line, waiter = data.draw(st.sampled_from(sorted(parked)))
            self.world.rule.broker.payloads[NAMESPACE, line[2]].pop(waiter, None)

    # -- invariants --------------------------------------------------------------------------------------------------

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

    @invariant()
    def every_message_stands_in_one_place(self):
        """I3: a message with a payload is in exactly one place."""
        if hasattr(self, "world"):
            found = self.places()
            for queue, payloads in self.world.rule.broker.payloads.items():
                for message_id in payloads:
                    assert found[message_id] == 1, (queue, message_id, found[message_id])

    @invariant()
    def leases_are_what_is_in_flight(self):
        """The lease set is the only truth: the snapshot's sums are those of its leases."""
        if hasattr(self, "world"):
            state, now = self.world.rule.state, self.world.now
            before = tidy(self.world.rule)
            snapshot = self.world.rule.snapshot(now)
            assert tidy(self.world.rule) == before, "reading changed something"
            for endpoint, seen in snapshot.endpoints.items():
                assert seen.in_flight == sum(cost for where, cost, _ in snapshot.leases.values() if where == endpoint)
                assert seen.in_flight == in_flight(state, now, endpoint)

    @invariant()
    def no_message_has_two_leases(self):
        """I5: one delivery, one lease."""
        if hasattr(self, "world"):
            held = Counter(one.message for one in self.world.rule.state.leases.values() if one.message is not None)
            assert all(count == 1 for count in held.values()), held

    @invariant()
    def records_fit_the_lines(self):
        """Whoever stands in a line has a record with the same rank and place; no record outlives its message."""
        if hasattr(self, "world"):
            state, broker = self.world.rule.state, self.world.rule.broker
            for line, waiters in state.lines.items():
                assert waiters, "an empty line"
                for waiter, key in waiters.items():
                    assert state.parked[line, waiter].key == key
                    assert (line, waiter) not in state.held_back
            assert all(key in state.parked for key in state.held_back)
            for line, waiter in state.parked:
                standing = waiter in state.lines.get(line, {}) or (line, waiter) in state.held_back
                assert standing or line[1], "a caller's record without the caller"
            del broker

    @invariant()
    def somebody_is_awake_while_somebody_waits(self):
        """next_ms is -1 only if nobody waits, and never another negative number or zero."""
        if hasattr(self, "world"):
            state = self.world.rule.state
            self.world.rule.now_ms = self.world.now
            next_ms = self.world.rule.next_ms()
            waits = bool(state.lines or state.held_back)
            assert next_ms > 0 if waits else next_ms == -1, next_ms


def test_any_commands_keep_the_invariants():
    """I1, I3, I5, I7, I8, I9 and I11 hold after every command, whatever came before."""
    run_state_machine_as_test(
        Commands,
        settings=hypothesis.settings(
            max_examples=120,
            stateful_step_count=40,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(hypothesis.HealthCheck),
        ),
    )
