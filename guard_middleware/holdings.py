"""What this process holds: its leases, and the commands whose replies it still waits for."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from guard_middleware.core.commands import Finish, Held, Message, Take
from guard_middleware.core.values import NOWHERE

if TYPE_CHECKING:
    from guard_middleware.core.commands import Ask, Operate, Reply


def new_id() -> str:
    """An id that no other process makes: leases, beats and processes are named with it."""
    return os.urandom(16).hex()


@dataclass(slots=True, kw_only=True, eq=False)
class Holding:
    """One lease as this process knows it.

    Attributes:
        lease: its id.
        endpoint: whose capacity it uses.
        home: in whose line its message belongs.
        rank: the priority's rank.
        cost: units.
        generation: the breaker's generation of the lease.
        message: whereabouts of its message, `None` for callers.
        probe: its call is the breaker's probe.
        taken_at_s: monotonic time at which the command that brought it was sent.
        confirmed_at_s: monotonic time at which the last command that confirmed it was sent.
        running: its call has begun.
        lost: the store does not have it any more and its call has not begun.
        stolen: the store gave its message to somebody else while the call ran.
    """

    lease: str
    endpoint: str
    home: str
    rank: int
    cost: int
    generation: int
    message: Message | None
    probe: bool
    taken_at_s: float
    confirmed_at_s: float
    running: bool = False
    lost: bool = False
    stolen: bool = False

    def held(self) -> Held:
        """The lease in full, to be asserted again."""
        return Held(
            lease=self.lease,
            endpoint=self.endpoint,
            home=self.home,
            rank=self.rank,
            cost=self.cost,
            generation=self.generation,
            message=self.message,
        )


@dataclass(slots=True)
class Holdings:
    """Every lease of one process, under one lock.

    "Begun or given back" is decided here, and only here: `begin` and `give_back` exclude each other.
    """

    process: str
    worker: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _held: dict[str, Holding] = field(default_factory=dict)
    _outstanding: dict[str, int] = field(default_factory=dict)
    _generations: dict[str, int] = field(default_factory=dict)
    _unsent: deque[Finish | Operate] = field(default_factory=deque)
    _ended: deque[str] = field(default_factory=lambda: deque(maxlen=1_000))

    def expect(self, command_id: str, takes: int = 0) -> None:
        """Note that a command was sent: leases named after it are explained until its reply is here.

        Args:
            command_id: its id.
            takes: how many messages may come with its reply, for threads that have nothing else to run.
        """
        with self._lock:
            self._outstanding[command_id] = takes

    def settled(self, command_id: str) -> None:
        """Note that a command's reply is here, or that nobody waits for it any more."""
        with self._lock:
            self._outstanding.pop(command_id, None)

    def admitted(self, ask: Ask, reply: Reply, sent_at_s: float) -> Holding:
        """Keep the lease that an ask was given. Its call begins at once."""
        holding = Holding(
            lease=ask.lease,
            endpoint=reply.endpoint,
            home=ask.endpoint,
            rank=ask.rank,
            cost=ask.cost,
            generation=reply.generation,
            message=ask.message,
            probe=reply.probe,
            taken_at_s=sent_at_s,
            confirmed_at_s=sent_at_s,
            running=True,
        )
        with self._lock:
            self._held[ask.lease] = holding
            self._seen(reply.endpoint, reply.generation)
        return holding

    def taken(self, take: Take, sent_at_s: float) -> Holding:
        """Keep the lease that came with a message. Its call has not begun."""
        holding = Holding(
            lease=take.lease,
            endpoint=take.endpoint,
            home=take.home,
            rank=take.rank,
            cost=take.cost,
            generation=take.generation,
            message=Message(namespace=take.queue[0], queue=take.queue[1], id=take.message_id, worker=self.worker),
            probe=take.probe,
            taken_at_s=sent_at_s,
            confirmed_at_s=sent_at_s,
        )
        with self._lock:
            self._held[take.lease] = holding
            self._seen(take.endpoint, take.generation)
        return holding

    def _seen(self, endpoint: str, generation: int) -> None:
        self._generations[endpoint] = max(generation, self._generations.get(endpoint, 0))

    def begin(self, holding: Holding, *, fresh_s: float) -> bool | None:
        """Decide that a taken message begins, unless it was given back meanwhile.

        Args:
            holding: its lease.
            fresh_s: how old its last confirmation may be, in seconds.

        Returns:
            True: begin. False: ask first, the lease may be out of date, or is no permit; until that is answered it is
            not given back. None: it was given back.
        """
        with self._lock:
            if holding.lease not in self._held:
                return None
            present = self._generations.get(holding.endpoint, 0)
            fresh = time.monotonic() - holding.confirmed_at_s < fresh_s
            if holding.endpoint == NOWHERE or holding.lost or not fresh or holding.generation != present:
                self._outstanding[holding.lease] = 0
                return False
            holding.running = True
            return True

    def is_new(self, lease: str) -> bool:
        """Whether a lease was never handed over here: an answer that is given again may name one that has ended."""
        with self._lock:
            return lease not in self._held and lease not in self._ended

    def find(self, lease: str) -> Holding | None:
        """The lease, if this process holds it."""
        with self._lock:
            return self._held.get(lease)

    def coming(self) -> int:
        """How many messages may still come with replies that are waited for."""
        with self._lock:
            return sum(self._outstanding.values())

    def in_hand(self) -> int:
        """How many messages need a thread soon: those that may come, and those that were taken and have not begun."""
        with self._lock:
            unbegun = (
                not holding.running and holding.message is not None and holding.lease not in self._outstanding
                for holding in self._held.values()
            )
            return sum(unbegun) + sum(self._outstanding.values())

    def has_message(self, queue: str, message_id: str) -> bool:
        """Whether a lease of this process belongs to that delivery."""
        with self._lock:
            return any(
                holding.message is not None and (holding.message.queue, holding.message.id) == (queue, message_id)
                for holding in self._held.values()
            )

    def drop(self, lease: str) -> Holding | None:
        """Forget a lease: it is finished, or was never given."""
        with self._lock:
            holding = self._held.pop(lease, None)
            if holding is not None:
                self._ended.append(lease)
            return holding

    def give_back(self, *, older_than_s: float) -> tuple[str, ...]:
        """Forget the leases whose calls have not begun, and name them.

        Args:
            older_than_s: only those taken at least so long ago, in seconds. Renewals do not count.
        """
        now = time.monotonic()
        with self._lock:
            idle = [
                holding.lease
                for holding in self._held.values()
                if not holding.running
                and holding.lease not in self._outstanding  # its thread asks whether it may begin
                and now - holding.taken_at_s >= older_than_s
            ]
            for lease in idle:
                del self._held[lease]
            return tuple(idle)

    def named(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The ids of all leases, held or to be finished, and of all commands outstanding."""
        with self._lock:
            ending = (command.lease for command in self._unsent if isinstance(command, Finish))
            return (*self._held, *ending), tuple(self._outstanding)

    def renewed(self, leases: tuple[str, ...], lost: tuple[str, ...], sent_at_s: float) -> tuple[Held, ...]:
        """Apply a beat's answer.

        Args:
            leases: what the beat named.
            lost: what the store did not have.
            sent_at_s: monotonic time at which the beat was sent.

        Returns:
            The lost leases whose calls still run here: they load the server and are asserted again.
        """
        gone = set(lost)
        asserts = []
        with self._lock:
            for lease in leases:
                holding = self._held.get(lease)
                if holding is None:
                    continue
                if lease not in gone:
                    holding.confirmed_at_s = sent_at_s
                elif lease in self._outstanding:
                    continue  # its own finish is on the way, and the store has carried it out
                elif holding.running:
                    asserts.append(holding.held())
                else:
                    holding.lost = True
        return tuple(asserts)

    def mark_stolen(self, leases: tuple[str, ...]) -> None:
        """Note that somebody else has the messages of these leases."""
        with self._lock:
            for lease in leases:
                if lease in self._held:
                    self._held[lease].stolen = True

    def send_later(self, command: Finish | Operate) -> None:
        """Keep a command that the store did not answer. It is repeated until it is answered."""
        with self._lock:
            self._unsent.append(command)

    def next_unsent(self) -> Finish | Operate | None:
        """The oldest command that is still to be sent; it stays until `sent`."""
        with self._lock:
            return self._unsent[0] if self._unsent else None

    def sent(self, command: Finish | Operate) -> None:
        """Forget a command that was answered."""
        with self._lock:
            if command in self._unsent:
                self._unsent.remove(command)

    def postpone(self, command: Finish | Operate) -> None:
        """Let the other commands go first: this one went wrong."""
        with self._lock:
            if command in self._unsent:
                self._unsent.remove(command)
                self._unsent.append(command)

    def in_use(self) -> int:
        """Units leased by this process, as it knows."""
        with self._lock:
            return sum(holding.cost for holding in self._held.values())
