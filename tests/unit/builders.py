"""A small world around the executable rule: a broker, processes, and a clock that moves only when told."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace

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
    Reply,
    Status,
)
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.reference import Reference
from guard_middleware.core.values import EndpointSpec, Published, Rules

NAMESPACE = "dramatiq"
START_MS = 1_000_000


def spec(endpoint="e", ceiling=4, **more):
    """An endpoint as one process publishes it; no reserve unless asked for."""
    return EndpointSpec(id=endpoint, ceiling=ceiling, **{"reserve": 0, **more})


@dataclass
class Call:
    """One ask, as its process knows it; a lease is held as long as `live`."""

    process: str
    lease: str
    endpoint: str
    home: str
    rank: int
    cost: int
    message: Message | None
    generation: int = 0
    probe: bool = False
    live: bool = False
    reply: Reply | None = None

    @property
    def status(self):
        return self.reply.status

    @property
    def reason(self):
        return self.reply.reason

    @property
    def id(self):
        return self.message.id

    def held(self):
        """The lease in full, as a process asserts it again."""
        return Held(
            lease=self.lease,
            endpoint=self.endpoint,
            home=self.home,
            rank=self.rank,
            cost=self.cost,
            generation=self.generation,
            message=self.message,
        )


@dataclass
class Worker:
    """One process with its broker's worker, as the store would see it."""

    name: str
    idle: int = 0
    queues: tuple[str, ...] = ("q",)
    alive: bool = True
    calls: dict[str, Call] = field(default_factory=dict)

    @property
    def consumes(self):
        return tuple((NAMESPACE, queue) for queue in self.queues)


class World:
    """The rule with processes that keep their own side of the contract: they name what they hold in every beat."""

    def __init__(self, *endpoints, budgets=None, rules=None, workers=("p",), rule=None, first_start_hold_ms=0):
        self.rule = rule or Reference()
        self.now = START_MS
        self.rules = rules or Rules()
        self.published = Published(endpoints=endpoints or (spec(),), budgets=budgets or {}, rules=self.rules)
        self.hold = first_start_hold_ms
        self.workers = {}
        self._ids = itertools.count(1)
        self._numbers = itertools.count(1)
        for name in workers:
            self.start(name)

    # -- processes ---------------------------------------------------------------------------------------------------

    def start(self, name, *, idle=0, queues=("q",), published=None, epoch=""):
        """A process boots: it publishes, and reports once."""
        worker = self.workers[name] = Worker(name=name, idle=idle, queues=queues)
        self.configure(name, published, epoch=epoch)
        self.beat(name)
        return worker

    def configure(self, name, published=None, *, epoch=""):
        command = Configure(
            process=name, published=published or self.published, first_start_hold_ms=self.hold, epoch=epoch
        )
        return self.rule.configure(command, self.now)

    def publish(self, *endpoints, budgets=None, revision=0, rules=None):
        """What a process may publish instead."""
        return Published(endpoints=endpoints, budgets=budgets or {}, rules=rules or self.rules, revision=revision)

    def kill(self, name):
        """The process is gone, without a word."""
        self.workers[name].alive = False

    # -- commands ----------------------------------------------------------------------------------------------------

    def enqueue(self, queue="q", message_id=None):
        """A message stands in the broker's queue."""
        message_id = message_id or f"m{next(self._ids)}"
        self.rule.broker.payloads.setdefault((NAMESPACE, queue), {})[message_id] = message_id.encode()
        self.rule.broker.queues.setdefault((NAMESPACE, queue), []).append(message_id)
        return message_id

    def fetch(self, process="p", queue="q"):
        """The broker delivers the head of a queue to a worker: it stands in that worker's ack set."""
        message_id = self.rule.broker.queues[NAMESPACE, queue].pop(0)
        message = Message(namespace=NAMESPACE, queue=queue, id=message_id, worker=f"w-{process}")
        self.rule.broker.ack_set(message).add(message_id)
        return message

    def command(self, process="p", endpoint="e", *, rank=1, cost=1, message=None, lease=None, **more):
        return Ask(
            process=process,
            lease=lease or f"l{next(self._ids)}",
            endpoint=endpoint,
            rank=rank,
            cost=cost,
            message=message,
            **more,
        )

    def admit(self, ask):
        """Carry out one ask, and let its process remember what it was given."""
        reply = self.rule.admit(ask, self.now)
        call = Call(
            process=ask.process,
            lease=ask.lease,
            endpoint=reply.endpoint or ask.endpoint,
            home=ask.endpoint,
            rank=ask.rank,
            cost=ask.cost,
            message=ask.message,
            generation=reply.generation,
            probe=reply.probe,
            live=reply.status is Status.ADMITTED,
            reply=reply,
        )
        if call.live:
            self.workers[ask.process].calls[call.lease] = call
        self.taken(ask.process, reply)
        return call

    def arrive(self, process="p", endpoint="e", *, queue="q", take=1, **more):
        """A fresh message reaches a worker thread, which asks for it."""
        self.enqueue(queue)
        # the new one stands last: what waits in the queue before it was drained there on purpose
        waiting = self.rule.broker.queues[NAMESPACE, queue]
        waiting.insert(0, waiting.pop())
        return self.admit(self.command(process, endpoint, message=self.fetch(process, queue), take=take, **more))

    def call(self, process="p", endpoint="e", *, wait=False, **more):
        """A caller asks, and waits in the line if told to."""
        return self.admit(self.command(process, endpoint, wait=wait, **more))

    def ending(self, call, outcome=Outcome.SUCCESS, *, take=0, idle=-1, park=ParkAs.NO, retry_after_ms=0):
        """The command that ends a call."""
        return Finish(
            process=call.process,
            lease=call.lease,
            outcome=outcome,
            retry_after_ms=retry_after_ms,
            home=call.home,
            message=call.message,
            park=park,
            take=take,
            idle=idle,
        )

    def finish(self, call, outcome=Outcome.SUCCESS, **more):
        """End a call, and ack its message unless it went elsewhere."""
        reply = self.rule.finish(self.ending(call, outcome, **more), self.now)
        self.workers[call.process].calls.pop(call.lease, None)
        call.live = False
        if reply.status is Status.FINISHED and call.message is not None:
            self.ack(call.message)
        self.taken(call.process, reply)
        return reply

    def ack(self, message):
        """What the broker does with a message that is done."""
        self.rule.broker.ack_set(message).discard(message.id)
        self.rule.broker.payloads[message.namespace, message.queue].pop(message.id, None)

    def beating(self, name="p", *, take=0, idle=None, beat_id=None, **more):
        """The beat of a process that names all it holds."""
        worker = self.workers[name]
        values = {
            "process": name,
            "id": beat_id or f"b{next(self._ids)}",
            "number": next(self._numbers),
            "take": take,
            "idle": worker.idle if idle is None else idle,
            "queues": worker.consumes,
            "worker": f"w-{name}",
            "leases": tuple(worker.calls),
        }
        return Beat(**{**values, **more})

    def beat(self, name="p", **more):
        reply = self.rule.beat(self.beating(name, **more), self.now)
        self.taken(name, reply)
        return reply

    def operate(self, action, target="e", **more):
        return self.rule.operate(Operate(action=action, target=target, **more), self.now)

    def forget(self, name):
        """The process says goodbye."""
        self.workers[name].alive = False
        return self.operate(Action.FORGET, name)

    def taken(self, process, reply):
        """The process remembers what a reply handed to it."""
        for take in reply.takes:
            message = Message(namespace=take.queue[0], queue=take.queue[1], id=take.message_id, worker=f"w-{process}")
            self.workers[process].calls[take.lease] = Call(
                process=process,
                lease=take.lease,
                endpoint=take.endpoint,
                home=take.home,
                rank=take.rank,
                cost=take.cost,
                message=message,
                generation=take.generation,
                probe=take.probe,
                live=True,
            )

    # -- time --------------------------------------------------------------------------------------------------------

    def pass_time(self, ms):
        """Let time pass while every living process beats on time and takes nothing."""
        end = self.now + ms
        while self.now < end:
            self.now = min(end, self.now + self.rules.heartbeat_ms)
            for name, worker in self.workers.items():
                if worker.alive:
                    self.beat(name, idle=0)

    def jump(self, ms):
        """Let time pass in silence."""
        self.now += ms

    # -- what is seen ------------------------------------------------------------------------------------------------

    def seen(self, endpoint="e"):
        """The endpoint's snapshot."""
        return self.rule.snapshot(self.now).endpoints[endpoint]

    def in_flight(self, endpoint="e"):
        return self.seen(endpoint).in_flight

    def line(self, endpoint="e", queue="q"):
        """Message ids in the order of one line."""
        waiters = self.rule.state.lines.get((endpoint, NAMESPACE, queue), {})
        return sorted(waiters, key=waiters.__getitem__)

    def acks(self, process="p", queue="q"):
        return set(self.rule.broker.acks.get((NAMESPACE, f"w-{process}", queue), set()))

    def queue(self, queue="q"):
        return list(self.rule.broker.queues.get((NAMESPACE, queue), []))

    def calls(self, process="p"):
        """What the process holds, by message id or lease."""
        return {call.message.id if call.message else one: call for one, call in self.workers[process].calls.items()}


def fill(world, count, process="p", endpoint="e", **more):
    """Admit so many calls; fail if one is not."""
    calls = [world.call(process, endpoint, **more) for _ in range(count)]
    assert [call.status for call in calls] == [Status.ADMITTED] * count
    return calls


def trip(world, endpoint="e", process="p", retry_after_ms=0):
    """One overload, with a threshold of one: the breaker is open."""
    call = world.call(process, endpoint, rank=0)
    assert call.status is Status.ADMITTED
    world.finish(call, Outcome.OVERLOAD, retry_after_ms=retry_after_ms)
    return world.seen(endpoint)


def without_clock(reply):
    """A reply without the fields that tell time."""
    return replace(reply, next_ms=0, retry_after_ms=0)


def full(ceiling=1, **more):
    """A world whose only endpoint is full, and the calls that fill it."""
    world = World(spec(ceiling=ceiling), **more)
    return world, fill(world, ceiling)


def serve_all(world, running, process="p"):
    """End one call after the other, each by the thread that then takes; the order in which messages came."""
    order = []
    while running:
        reply = world.finish(running.pop(0), take=1, idle=1)
        for take in reply.takes:
            order.append(take.message_id)
            running.append(world.calls(process)[take.message_id])
    return order
