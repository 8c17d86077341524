"""The state of the executable rule, and the broker beneath it, as plain dictionaries.

`Reference` works on it; the property tests compare it with what the scripts keep in the store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from guard_middleware.core.values import Rules

if TYPE_CHECKING:
    from guard_middleware.core.breaker import Breaker
    from guard_middleware.core.commands import Message, Status
    from guard_middleware.core.values import EndpointSpec, Published

Line = tuple[str, str, str]
"""(endpoint, broker namespace, queue); callers stand in ``(endpoint, "", "")``."""

Queue = tuple[str, str]
"""(broker namespace, queue)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The right to one call (or `cost` of them), or a unit held for a notified process.

    Attributes:
        endpoint: whose capacity it uses.
        home: in whose line its message belongs.
        rank: the priority's rank.
        cost: units.
        generation: the breaker's generation when it was given.
        process: who holds it.
        message: whereabouts of its message, `None` for callers and holds.
        place: the message's place in the order of first arrival.
        deadline_ms: when the message is too old, 0 for never.
        expires_at_ms: it stops counting at this instant.
        started_at_ms: when it was given.
        hold: it only keeps a unit for `process`, which was notified.
        via: id of the command whose reply hands it over, "" for a lease that was asked for under its own id.
        parent: the lease whose units of the GPU group's budget it uses as long as that lives, "" for none.
    """

    endpoint: str
    home: str
    rank: int
    cost: int
    generation: int
    process: str
    message: Message | None
    place: int
    deadline_ms: int
    expires_at_ms: int
    started_at_ms: int
    hold: bool = False
    via: str = ""
    parent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked:
    """What is remembered of a message beside its line, from its first park until it is done.

    Attributes:
        rank: the priority's rank.
        cost: units wanted.
        place: order of first arrival, counted once for the whole namespace of the guard.
        overloads: overloads that count against it.
        denials: how often its actor was refused a further permit.
        overloaded: it saw the server shed load, and is not the next probe while another can be.
        deadline_ms: when it is too old, 0 for never.
        process: the waiting caller's process, "" for messages.
    """

    rank: int
    cost: int
    place: int
    overloads: int = 0
    denials: int = 0
    overloaded: bool = False
    deadline_ms: int = 0
    process: str = ""

    @property
    def key(self) -> tuple[int, int]:
        """The order of the line: better rank first, then first come first served."""
        return (self.rank, self.place)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstone:
    """What became of a lease id that is no lease any more, so that a repeated command gets the same answer."""

    status: Status
    until_ms: int
    reason: str = ""
    retry_after_ms: int = 0
    takes: tuple[str, ...] = ()


@dataclass(slots=True, kw_only=True)
class Process:
    """What a live process has reported of itself.

    Attributes:
        alive_until_ms: it counts as dead from here on.
        idle: its idle threads.
        worker: the broker's id of its worker.
        queues: the queues that it consumes.
        beat: id of its last beat.
        number: of that beat.
        beaten_at_ms: when that beat was carried out; 0 before the first.
        before_ms: when the beat before that one was carried out. Leases given since then may be younger than the list
            in the last beat, which was made before it was sent.
    """

    alive_until_ms: int
    idle: int = 0
    worker: str = ""
    queues: tuple[Queue, ...] = ()
    beat: str = ""
    number: int = 0
    beaten_at_ms: int = 0
    before_ms: int = 0


@dataclass(slots=True)
class BrokerState:
    """The part of Dramatiq's keys that parking touches."""

    queues: dict[Queue, list[str]] = field(default_factory=dict)
    payloads: dict[Queue, dict[str, bytes]] = field(default_factory=dict)
    acks: dict[tuple[str, str, str], set[str]] = field(default_factory=dict)

    def ack_set(self, message: Message) -> set[str]:
        """The ids that this worker has fetched from this queue and not acked."""
        return self.acks.setdefault((message.namespace, message.worker, message.queue), set())

    def payload(self, queue: Queue, message_id: str) -> bytes | None:
        """The message, byte for byte, or `None` if it was flushed."""
        return self.payloads.get(queue, {}).get(message_id)


@dataclass(slots=True)
class GuardState:
    """Everything that the guard keeps in the store."""

    rules: Rules = field(default_factory=Rules)
    epoch: str = ""
    epoch_until_ms: int = 0
    last_run_ms: int = 0
    places: int = 0
    takes: int = 0
    published: dict[str, Published] = field(default_factory=dict)
    specs: dict[str, EndpointSpec] = field(default_factory=dict)
    budgets: dict[str, int] = field(default_factory=dict)
    left: set[tuple[str, str]] = field(default_factory=set)
    """(endpoint, GPU group that it does not belong to any more while calls that began there may still run)."""
    overrides: dict[str, int] = field(default_factory=dict)
    paused: set[str] = field(default_factory=set)
    breakers: dict[str, Breaker] = field(default_factory=dict)
    means: dict[str, int] = field(default_factory=dict)
    background_at: dict[str, int] = field(default_factory=dict)
    slots: dict[tuple[str, int], int] = field(default_factory=dict)
    leases: dict[str, Lease] = field(default_factory=dict)
    lines: dict[Line, dict[str, tuple[int, int]]] = field(default_factory=dict)
    held_back: dict[tuple[Line, str], int] = field(default_factory=dict)
    parked: dict[tuple[Line, str], Parked] = field(default_factory=dict)
    processes: dict[str, Process] = field(default_factory=dict)
    tombstones: dict[str, Tombstone] = field(default_factory=dict)
