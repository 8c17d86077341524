"""Random plays: what processes, brokers, operators and time do to one guard, drawn from bytes.

Each step is eight bytes: which move, and what it is about. So Hypothesis can shrink a play, and a loop over seeds can
make many.
"""

from __future__ import annotations

from guard_middleware.core.commands import (
    Action,
    Ask,
    Beat,
    Configure,
    Finish,
    Held,
    Message,
    Operate,
    ParkAs,
    Status,
)
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import NOWHERE, EndpointSpec, Published, Rules
from tests.property.twin import Twin

NAMESPACES = ("da", "db")
QUEUES = (("da", "q"), ("db", "r"), ("da", "s"))
ALPHA, BETA, GAMMA = "alpha:é {1}", "beta", "gamma"
ENDPOINTS = (ALPHA, BETA, GAMMA, ALPHA, GAMMA)
PROCESSES = ("p1", "p2", "P3")
STEPS_MS = (1, 0, 7, 49, 50, 51, 199, 500, 501, 999, 1_000, 2_001, 3_999, 4_001, 9_000, 15_000, 15_001, 31_000, 60_000)
RULES = Rules(lease_ms=6_000, heartbeat_ms=2_000, ageing_ms=10_000, max_overloads=2, probe_deadline_ms=5_000)
BUDGETS = {"gpu": 5, "side": 2}


def endpoints(variant):
    """What a process publishes; the variants differ a little, as during a deploy."""
    gamma = "gpu" if variant != 2 else "side"
    return (
        EndpointSpec(id=ALPHA, ceiling=4 - variant % 2, floor=1, group="gpu", fallback=BETA, max_cooldown_ms=4_000),
        EndpointSpec(id=BETA, ceiling=2, reserve=0 if variant == 2 else None, fail_threshold=2),
        *((EndpointSpec(id=GAMMA, ceiling=3, floor=1, group=gamma, breaker=variant != 1),) if variant < 3 else ()),
    )


class Play:
    """One guard, three processes, and what they know."""

    def __init__(self, client, namespace):
        self.twin = Twin(client, namespace, namespaces=NAMESPACES)
        self.number = 0
        self.enqueued, self.done = {}, set()
        self.fetched, self.leases, self.callers, self.commands = [], {}, [], []
        self.beats = dict.fromkeys(PROCESSES, 0)
        self.lost = dict.fromkeys(PROCESSES, ())
        self.asserted, self.known, self.served, self.log = set(), set(), False, []
        moves = (
            (self.admit_fetched, 20), (self.finish, 18), (self.enqueue, 11), (self.beat, 10), (self.advance, 10),
            (self.caller, 8), (self.again, 8), (self.confirm, 4), (self.operate, 4), (self.configure, 2),
            (self.flush, 1), (self.requeue, 1), (self.foreign_finish, 1),
        )  # fmt: skip
        self.table = [move for move, weight in moves for _ in range(weight)]
        for index, process in enumerate(PROCESSES):
            self.ask(Configure(process=process, published=self.published(0), first_start_hold_ms=0))
            self.send_beat(process, queues=QUEUES[: index + 1] if index < 2 else ())

    def published(self, variant):
        return Published(endpoints=endpoints(variant), budgets=BUDGETS, rules=RULES, revision=variant // 4)

    def step(self, eight):
        """Make one move, and check everything."""
        self.served = False
        self.table[eight[0] % len(self.table)](*eight[1:])
        self.check()

    # -- moves -------------------------------------------------------------------------------------------------------

    def ask(self, command):
        self.log.append((self.twin.now_ms, command))
        reply = self.twin.ask(command)
        self.served = reply.waiting >= 0
        self.log.append(reply)
        self.commands.append(command)
        for take in reply.takes:
            process = getattr(command, "process", "")
            message = Message(
                namespace=take.queue[0], queue=take.queue[1], id=take.message_id, worker=self.worker(process)
            )
            self.leases[take.lease] = (process, take.home, take.rank, message, take)
        return reply

    def worker(self, process):
        return f"w{process}"

    def new_id(self, prefix):
        self.number += 1
        return f"{prefix}{self.number}"

    def advance(self, a, *_):
        self.twin.now_ms += STEPS_MS[a % len(STEPS_MS)]
        self.log.append(self.twin.now_ms)

    def enqueue(self, a, b, *_):
        for _ in range(1 + b % 3):
            queue = QUEUES[a % len(QUEUES)]
            message_id = self.new_id("m")
            self.enqueued[message_id] = queue
            self.twin.enqueue(queue, message_id, f"payload of {message_id}\0".encode())

    def admit_fetched(self, a, b, c, d, e, f, _):
        """A worker thread gets a message, and asks for it."""
        queue = QUEUES[a % len(QUEUES)]
        process = PROCESSES[b % len(PROCESSES)]
        worker = self.worker(process)
        message_id = self.twin.fetch(queue, worker)
        if message_id is None:
            if not self.fetched:
                return
            process, endpoint, rank, cost, message = self.fetched[c % len(self.fetched)]
        else:
            endpoint, rank, cost = ENDPOINTS[c % len(ENDPOINTS)], (1, 0, 3, 3)[d % 4], (1, 1, 1, 1, 2, 3, 1, 9)[e % 8]
            message = Message(namespace=queue[0], queue=queue[1], id=message_id, worker=worker)
            if f % 8 == 7:  # only prefetched
                self.fetched.append((process, endpoint, rank, cost, message))
                return
        lease = self.new_id("L")
        deadline = self.twin.now_ms + 1_000 * (f % 16) if f % 5 == 0 else 0
        reply = self.ask(
            Ask(
                process=process, lease=lease, endpoint=endpoint, rank=rank, cost=cost, message=message,
                take=f % 2, idle=f % 4 - 1, deadline_ms=deadline,
            )
        )  # fmt: skip
        if reply.status is Status.ADMITTED:
            self.leases[lease] = (process, endpoint, rank, message, reply)
        elif reply.status in (Status.IMPOSSIBLE, Status.GONE):
            self.finish_message(message)

    def caller(self, a, b, c, d, e, f, g):
        process, endpoint = PROCESSES[a % len(PROCESSES)], ENDPOINTS[b % len(ENDPOINTS)]
        lease = self.new_id("C")
        if e % 4 == 3 and self.callers:
            process, endpoint, lease = self.callers[d % len(self.callers)]
        parent = list(self.leases)[g % len(self.leases)] if self.leases and f % 3 == 0 else ""
        reply = self.ask(
            Ask(
                process=process, lease=lease, endpoint=endpoint, rank=(1, 0, 3)[c % 3], cost=(1, 1, 2, 3)[d % 4],
                wait=e % 4 > 0, slot=e % 4 == 0, idle=-1, parent=parent,
            )
        )  # fmt: skip
        self.callers.append((process, endpoint, lease))
        if reply.status is Status.ADMITTED:
            self.leases[lease] = (process, endpoint, 1, None, reply)

    def finish(self, a, b, c, d, e, f, _):
        if not self.leases:
            return
        lease = list(self.leases)[a % len(self.leases)]
        process, home, _, message, _ = self.leases[lease]
        outcome = (
            Outcome.SUCCESS,
            Outcome.OVERLOAD,
            Outcome.BENIGN,
            Outcome.SUCCESS,
            Outcome.NEUTRAL,
            Outcome.IGNORED,
        )[b % 6]
        park = (ParkAs.NO, ParkAs.OVERLOADED, ParkAs.NO, ParkAs.OVERLOADED, ParkAs.DENIED)[c % 5]
        if message is None or (park is ParkAs.OVERLOADED and outcome is not Outcome.OVERLOAD):
            park = ParkAs.NO
        reply = self.ask(
            Finish(
                process=process, lease=lease, outcome=outcome, retry_after_ms=(0, 0, 3_000)[d % 3], home=home,
                message=message, park=park, take=e % 3 if message else 0, idle=f % 4 - 1,
            )
        )  # fmt: skip
        if f % 16 < 15:  # else it does not know that it has ended
            self.leases.pop(lease, None)
        if reply.status is Status.FINISHED and message is not None:
            self.finish_message(message)

    def foreign_finish(self, a, b, *_):
        """Nonsense that may happen: a lease nobody gave, a message of somebody else."""
        message = None
        if self.enqueued:
            message_id = list(self.enqueued)[a % len(self.enqueued)]
            queue = self.enqueued[message_id]
            message = Message(namespace=queue[0], queue=queue[1], id=message_id, worker=self.worker(PROCESSES[b % 3]))
        reply = self.ask(
            Finish(
                process=PROCESSES[b % 3], lease=self.new_id("F"), outcome=Outcome.SUCCESS, home=ENDPOINTS[a % 5],
                message=message, take=1, idle=1,
            )
        )  # fmt: skip
        if reply.status is Status.FINISHED and message is not None:
            self.finish_message(message)

    def finish_message(self, message):
        if self.twin.ack(message):
            self.done.add(message.id)

    def confirm(self, a, b, *_):
        """A taken message waited in the process, and asks again with its lease."""
        taken = [lease for lease, one in self.leases.items() if one[3] is not None]
        if not taken:
            return
        lease = taken[a % len(taken)]
        process, home, rank, message, _ = self.leases[lease]
        reply = self.ask(
            Ask(
                process=process, lease=lease, endpoint=home, rank=rank, message=message, take=1, idle=b % 3 - 1,
                confirm=True,
            )
        )  # fmt: skip
        if reply.status is not Status.ADMITTED:
            self.leases.pop(lease, None)

    def beat(self, a, b, c, d, e, f, g):
        process = PROCESSES[a % len(PROCESSES)]
        mine = [lease for lease, one in self.leases.items() if one[0] == process]
        named = tuple(lease for index, lease in enumerate(mine) if b >> index % 8 & 1 or b < 128)
        give_back = tuple(lease for index, lease in enumerate(mine) if c == 128 + index % 16)
        missing = [lease for lease in self.lost[process] if lease in self.leases]
        asserts = tuple(self.held(lease) for lease in (mine if d % 8 == 7 else missing if d % 8 < 6 else ()))
        self.asserted.update(one.lease for one in asserts)
        for lease in give_back:
            self.leases.pop(lease, None)
        queues = (QUEUES[: 1 + PROCESSES.index(process)], QUEUES, QUEUES[1:], ())[(0, 0, 0, 1, 1, 2, 3, 0)[e % 8]]
        self.send_beat(
            process, queues=queues if process != "P3" or e % 8 == 4 else (), take=f % 3, idle=g % 4, leases=named,
            give_back=give_back, asserts=asserts, leaving=f % 32 == 31, outstanding=tuple(f"L{self.number}"[: f % 4]),
        )  # fmt: skip

    def send_beat(self, process, **more):
        self.beats[process] += 1
        worker = "" if process == "P3" else self.worker(process)
        number = self.beats[process]
        reply = self.ask(Beat(process=process, id=f"b{process}{number}", number=number, worker=worker, **more))
        self.lost[process] = reply.lost

    def held(self, lease):
        process, home, rank, message, given = self.leases[lease]
        assert process
        return Held(
            lease=lease, endpoint=given.endpoint or home, home=home, rank=rank, cost=getattr(given, "cost", 1) or 1,
            generation=given.generation, message=message,
        )  # fmt: skip

    def again(self, a, *_):
        """A reply was lost, and the command comes again."""
        if self.commands:
            command = self.commands[-1 - a % min(12, len(self.commands))]
            if isinstance(command, Beat):
                self.asserted.update(held.lease for held in command.asserts)
            reply = self.ask(command)
            message = getattr(command, "message", None)
            if isinstance(command, Finish) and reply.status is Status.FINISHED and message is not None:
                self.finish_message(message)

    def flush(self, a, *_):
        if self.enqueued:
            message_id = list(self.enqueued)[a % len(self.enqueued)]
            self.twin.flush(self.enqueued[message_id], message_id)
            self.done.add(message_id)

    def requeue(self, a, *_):
        """Dramatiq takes a worker for dead."""
        process = PROCESSES[a % 2]
        for (namespace, worker, queue), ids in list(self.twin.reference.broker.acks.items()):
            if worker == self.worker(process):
                for message_id in sorted(ids):
                    self.twin.requeue(Message(namespace=namespace, queue=queue, id=message_id, worker=worker))

    def operate(self, a, b, c, d, *_):
        endpoint = ENDPOINTS[b % 5]
        action = (
            Action.OPEN, Action.CLOSE, Action.RESET, Action.OVERRIDE, Action.CLEAR_OVERRIDE, Action.CLEAR_OVERRIDE,
            Action.PAUSE, Action.RESUME, Action.RESUME, Action.RESUME, Action.DRAIN, Action.WITHDRAW, Action.WITHDRAW,
            Action.FORGET,
        )[a % 14]  # fmt: skip
        target, value = endpoint, c % 3 * 400
        if action is Action.OVERRIDE:
            value = c % 6
        elif action is Action.DRAIN:
            value = c % 3
        elif action is Action.WITHDRAW:
            target = self.callers[c % len(self.callers)][2] if self.callers else "nobody"
        elif action is Action.FORGET:
            target = PROCESSES[c % 3]
        self.ask(Operate(action=action, target=target, value=value, queue=QUEUES[d % 3], force=d % 2 == 0))

    def configure(self, a, b, c, *_):
        self.ask(
            Configure(
                process=PROCESSES[a % 3], published=self.published(b % 6), epoch="other" if c % 4 == 0 else "",
                first_start_hold_ms=-1,
            )
        )  # fmt: skip

    # -- what must hold ----------------------------------------------------------------------------------------------

    def check(self):
        stored = self.twin.compare()
        self.check_nothing_lost(stored)
        self.check_never_over(stored)
        self.check_no_idle_permit()

    def check_never_over(self, stored):
        """I1: where a lease has come to be that nobody asserted, the ceiling and the budget are kept."""
        now = self.twin.now_ms
        live = {lease: one for lease, one in stored["leases"].items() if one["expires_at_ms"] > now}
        for lease in set(live) - self.known - self.asserted:
            endpoint = live[lease]["endpoint"]
            if endpoint == NOWHERE:  # it uses nothing
                continue
            spec = stored["specs"][endpoint]
            ceiling = stored["overrides"].get(endpoint, spec["ceiling"])
            assert sum(one["cost"] for one in live.values() if one["endpoint"] == endpoint) <= ceiling
            if spec["group"] in stored["budgets"]:
                members = {name for name, other in stored["specs"].items() if other["group"] == spec["group"]}
                there = {name: one for name, one in live.items() if one["endpoint"] in members}
                lent = [
                    min(one["cost"], there[one["parent"]]["cost"]) for one in there.values() if one["parent"] in there
                ]
                assert sum(one["cost"] for one in there.values()) - sum(lent) <= stored["budgets"][spec["group"]]
        self.known |= set(live)

    def check_no_idle_permit(self):
        """I9: after a command that served, the first at an endpoint whom somebody idle can run cannot go."""
        rule = self.twin.reference
        if not self.served or rule.recovering() or any(lease.hold for lease in rule.state.leases.values()):
            return  # a unit that is held for the first of a line leaves it standing there
        for home in {line[0] for line in rule.state.lines if line[0] in rule.state.specs}:
            heads = [(line, *rule._head(line)) for line in rule.state.lines if line[0] == home]
            able = [(parked.key, line, waiter) for line, waiter, parked in heads if rule.runner(line, parked, "")]
            if able and rule.aged_waiter(home) is None:  # else units are kept for the aged one
                _, line, waiter = min(able)
                endpoint, reason, _ = rule.place_call(home, rule.state.parked[line, waiter])
                group = rule.view(endpoint).group  # a budget may be kept for somebody at another endpoint
                assert reason is not None or group is not None, f"{waiter} of {line} could go"

    def check_nothing_lost(self, stored):
        """I3: every message is in one place: its queue, an ack set, a line, beside a line, or done."""
        places = dict.fromkeys(self.enqueued, 0)
        found = [message for ids in stored["queues"].values() for message in ids]
        found += [message for ids in stored["acks"].values() for message in ids]
        found += [waiter for line, waiters in stored["lines"].items() if line[2] for waiter, _ in waiters]
        found += [waiter for line, waiter in stored["held_back"] if line[2]]
        for message in found:
            places[message] += 1
        lost = [one for one, count in places.items() if count == 0 and one not in self.done]
        twice = [one for one, count in places.items() if count > 1]
        assert not lost, f"lost: {lost}"
        assert not twice, f"in two places: {twice}"
