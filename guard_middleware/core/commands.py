"""The verbs of the store as frozen values: what is asked, and what is answered.

Every command carries its own ids, made before the call, so that it can be repeated: a reply may be lost and the
client library may resend, with the same effect and the same answer (I11).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from guard_middleware.core.outcome import Outcome
    from guard_middleware.core.values import Published


class Status(IntEnum):
    """The first number of every reply. The scripts' headers list the same ones."""

    ADMITTED = 0
    PARKED = 1
    """The message stands in the waiting line."""
    WAITING = 2
    """The caller stands in the waiting line."""
    REFUSED = 3
    """Not admitted, and nothing was kept."""
    GONE = 4
    """The delivery is not this worker's any more (doubled, swept, flushed): skip it quietly."""
    FINISHED = 5
    STOLEN = 6
    """The lease ran out and somebody else has the message: this run must leave nothing behind."""
    IMPOSSIBLE = 7
    UNCONFIGURED = 8
    """The store does not know the endpoint or the process: publish, and ask again with the same ids."""
    DONE = 9
    REFUSED_ALIVE = 10
    """A drain was refused: a guarded worker consumes the queue and would park the messages again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Where a delivered message is: everything that names it in the broker.

    Attributes:
        namespace: the broker's key prefix.
        queue: the queue that it was delivered from.
        id: the broker's id of this delivery (`redis_message_id`).
        worker: the broker's id of the worker whose ack set holds it.
    """

    namespace: str
    queue: str
    id: str
    worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Ask for a permit: lease it, park, wait or refuse.

    Attributes:
        process: id of the asking process (one per process and broker).
        lease: id of the lease, unique per delivery.
        endpoint: id of the endpoint asked for.
        rank: the priority's rank.
        cost: units wanted.
        message: whereabouts of the message, which is parked if it may not start; `None` for callers.
        wait: a caller that may not start enters the waiting line.
        take: how many waiters to hand over if the message parks; the thread that becomes free can run one.
        idle: idle threads of the process as of now, this one not counted; -1 leaves what was reported.
        deadline_ms: when the message is too old for its broker, 0 for never.
        confirm: the lease came with a take, some time ago: check that it may still start.
        slot: reserve a slot to come back at, for brokers that cannot park.
        parent: the lease under which this call is made, "" for none: on another endpoint of its GPU group the call uses
            its units of the budget, one call at a time.
    """

    process: str
    lease: str
    endpoint: str
    rank: int
    cost: int = 1
    message: Message | None = None
    wait: bool = False
    take: int = 0
    idle: int = -1
    deadline_ms: int = 0
    confirm: bool = False
    slot: bool = False
    parent: str = ""


class ParkAs(StrEnum):
    """Why a finished message goes back into the line instead of to its broker."""

    NO = ""
    OVERLOADED = "overloaded"
    """The server shed load: a new place behind those of its rank, if the breaker is not closed."""
    DENIED = "denied"
    """The actor was refused a further permit: not to be taken for a while, at most three times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finish:
    """Release a lease, say how its call ended, and take for the thread that is about to be idle.

    Attributes:
        process: id of the process.
        lease: id of the lease.
        outcome: how the call ended.
        retry_after_ms: the server's hint, 0 for none.
        home: the endpoint in whose line the message belongs.
        message: whereabouts of the message, `None` for callers.
        park: ask for the message to go back into the line.
        take: how many waiters to hand over.
        idle: idle threads of the process once this one is; -1 leaves what was reported.
    """

    process: str
    lease: str
    outcome: Outcome
    retry_after_ms: int = 0
    home: str = ""
    message: Message | None = None
    park: ParkAs = ParkAs.NO
    take: int = 0
    idle: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A lease in full, to be asserted again after the store lost it: its call still loads the server."""

    lease: str
    endpoint: str
    home: str
    rank: int
    cost: int
    generation: int
    message: Message | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Renew this process's leases, report what it can run, give back, assert, and take.

    Attributes:
        process: id of the process.
        id: id of this beat; a repeat with the same id hands over the same messages again.
        number: one more than that of the beat before. One that arrives after a later one is out of date: it changes
            nothing, or it would give back what is younger than its lists.
        take: how many waiters to hand over.
        idle: idle threads of the process.
        queues: the queues that it consumes now, as (namespace, queue).
        worker: the broker's id of its worker, which names the ack sets.
        leases: ids of all its leases, asked for or held.
        outstanding: ids of the commands whose replies it still waits for.
        give_back: leases whose messages have not begun and go back to their places.
        asserts: leases that the store lost and whose calls still run.
        leaving: the process shuts down: hand over nothing more.
    """

    process: str
    id: str
    number: int = 0
    take: int = 0
    idle: int = 0
    queues: tuple[tuple[str, str], ...] = ()
    worker: str = ""
    leases: tuple[str, ...] = ()
    outstanding: tuple[str, ...] = ()
    give_back: tuple[str, ...] = ()
    asserts: tuple[Held, ...] = ()
    leaving: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Configure:
    """Publish what this process knows about the endpoints, replacing what it published before.

    Attributes:
        process: id of the process.
        published: its whole configuration.
        first_start_hold_ms: how long a store without an epoch holds admissions; -1 for the rule (one heartbeat at
            a first start, one lease time after a loss).
        epoch: the store's epoch that this process remembers.
    """

    process: str
    published: Published
    first_start_hold_ms: int = -1
    epoch: str = ""


class Action(StrEnum):
    """What an operator, or the process itself, can do."""

    OPEN = "open"
    CLOSE = "close"
    RESET = "reset"
    OVERRIDE = "override"
    CLEAR_OVERRIDE = "clear_override"
    PAUSE = "pause"
    RESUME = "resume"
    DRAIN = "drain"
    WITHDRAW = "withdraw"
    FORGET = "forget"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operate:
    """One operation.

    Attributes:
        action: what to do.
        target: an endpoint (breaker, override, pause), a lease (withdraw), or a process (forget).
        value: milliseconds for `OPEN`, the ceiling for `OVERRIDE`, the most messages of one call for `DRAIN`.
        queue: (namespace, queue) to drain.
        force: drain although a guarded worker would park the messages again.
    """

    action: Action
    target: str = ""
    value: int = 0
    queue: tuple[str, str] = ("", "")
    force: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A message handed over, with a permit if it may run.

    Attributes:
        lease: id of its new lease.
        endpoint: the endpoint chosen; `NOWHERE` for one that has no permit: it is too old, or too costly for ever, and
            its broker ends it.
        home: the endpoint in whose line it stood.
        generation: the breaker's generation of the lease.
        probe: it is the breaker's probe.
        expires_at_ms: end of the lease.
        rank: its rank.
        cost: its units.
        queue: (namespace, queue).
        message_id: the broker's id of the delivery.
        payload: the message, byte for byte as it was enqueued.
    """

    lease: str
    endpoint: str
    home: str
    generation: int
    probe: bool
    expires_at_ms: int
    rank: int
    cost: int
    queue: tuple[str, str]
    message_id: str
    payload: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What the store answered.

    Attributes:
        status: the answer.
        reason: why not, one of `Reason`, or "".
        retry_after_ms: how long the reason lasts, as far as is known.
        endpoint: the endpoint chosen for an admission.
        generation: the breaker's generation of the lease, or the present one.
        probe: the lease is the breaker's probe.
        expires_at_ms: end of the lease.
        takes: messages handed over.
        next_ms: in how many milliseconds time alone may free something for a waiter; -1 if nobody waits.
        waiting: 1 if a waiter that this process could run would be admitted if it had an idle thread, 0 if not, -1 if
            this command did not look.
        epoch: the store's present epoch.
        lost: leases named in a beat that the store does not have.
        stolen: asserted leases whose messages somebody else has.
        count: how many messages an operation moved.
        woken: processes that were notified.
    """

    status: Status
    reason: str = ""
    retry_after_ms: int = 0
    endpoint: str = ""
    generation: int = 0
    probe: bool = False
    expires_at_ms: int = 0
    takes: tuple[Take, ...] = ()
    next_ms: int = -1
    waiting: int = -1
    epoch: str = ""
    lost: tuple[str, ...] = ()
    stolen: tuple[str, ...] = ()
    count: int = 0
    woken: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointSnapshot:
    """One endpoint as the store sees it, read without changing anything.

    Attributes:
        id: the endpoint.
        ceiling: the ceiling in force, override included.
        limit: what applies now.
        in_flight: units leased.
        waiting: waiters by rank.
        breaker: closed, open or half_open.
        open_for_ms: rest of the cooldown.
        generation: the breaker's generation.
        trips: trips since the escalation was last forgotten.
        ramp: costs that came back well since the close, -1 outside of the ramp.
        probe: lease id of the probe, "" for none.
        paused: an operator has paused it.
        group: GPU group with a budget, "" for none.
        mean_ms: smoothed length of a call, 0 before the first.
    """

    id: str
    ceiling: int
    limit: int
    in_flight: int
    waiting: dict[int, int] = field(default_factory=dict)
    breaker: str = "closed"
    open_for_ms: int = 0
    generation: int = 0
    trips: int = 0
    ramp: int = -1
    probe: str = ""
    paused: bool = False
    group: str = ""
    mean_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The whole store at one instant.

    Attributes:
        at_ms: the store's clock.
        endpoints: every configured endpoint.
        groups: GPU group -> (units leased, budget).
        leases: live leases -> (endpoint, cost, process).
        processes: live processes -> idle threads.
        lines: (endpoint, namespace, queue) -> the first 200 message ids in order.
    """

    at_ms: int
    endpoints: dict[str, EndpointSnapshot] = field(default_factory=dict)
    groups: dict[str, tuple[int, int]] = field(default_factory=dict)
    leases: dict[str, tuple[str, int, str]] = field(default_factory=dict)
    processes: dict[str, int] = field(default_factory=dict)
    lines: dict[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)
