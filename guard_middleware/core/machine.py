"""Leases, lines, how messages move between them, and the sweep.

The counterpart of `include/leases.lua`, `lines.lua`, `moves.lua`, `configuration.lua` and `sweep.lua`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from guard_middleware.core import breaker as breakers
from guard_middleware.core.admission import GroupView, View
from guard_middleware.core.breaker import Breaker, Phase
from guard_middleware.core.configuration import effective
from guard_middleware.core.state import BrokerState, GuardState, Lease, Line, Parked
from guard_middleware.core.values import BACKGROUND_RANK, NOWHERE

if TYPE_CHECKING:
    from guard_middleware.core.commands import Ask, Message
    from guard_middleware.core.values import EndpointSpec

SWEEP_LEASES = 256
SWEEP_PROCESSES = 16
HOLD_PREFIX = "hold:"
DRAIN_BATCH = 500
STAMPS = 10
"""The time of the last command is noted so often in a heartbeat: each note costs the store a write."""


class Machine:
    """One command's view of the state: the clock stands still until the next command (I6)."""

    def __init__(self, state: GuardState, broker: BrokerState) -> None:
        self.state = state
        self.broker = broker
        self.now_ms = 0
        self.freed = False

    # -- the beginning of every command ------------------------------------------------------------------------

    def begin(self, now_ms: int, process: str, idle: int) -> None:
        """Move every expiry on if the store was away, sweep, and note that this process speaks."""
        self.now_ms = now_ms
        self.freed = False
        state = self.state
        gap = now_ms - state.last_run_ms
        if state.last_run_ms and gap > 2 * state.rules.heartbeat_ms:
            for lease_id, lease in state.leases.items():
                state.leases[lease_id] = replace(lease, expires_at_ms=lease.expires_at_ms + gap)
            for known in state.processes.values():
                known.alive_until_ms += gap
            for lease_id, tombstone in state.tombstones.items():
                state.tombstones[lease_id] = replace(tombstone, until_ms=tombstone.until_ms + gap)
        if gap * STAMPS >= state.rules.heartbeat_ms:
            state.last_run_ms = now_ms
        self.sweep()
        if state.leases.pop(HOLD_PREFIX + process, None) is not None:
            self.freed = True
        if idle >= 0 and process in state.processes:
            state.processes[process].idle = idle

    def sweep(self) -> None:
        """End what time has ended: leases, processes, and the pauses of single waiters."""
        state = self.state
        expired = sorted(
            (lease.expires_at_ms, lease_id)
            for lease_id, lease in state.leases.items()
            if lease.expires_at_ms <= self.now_ms
        )
        for _, lease_id in expired[:SWEEP_LEASES]:
            self.freed = True
            lease = state.leases.pop(lease_id)
            if lease.hold and lease.process in state.processes:
                state.processes[lease.process].idle = 0
            self.put_back(lease)
        dead = sorted(
            (known.alive_until_ms, process)
            for process, known in state.processes.items()
            if known.alive_until_ms <= self.now_ms
        )
        gone = [self.forget(process) for _, process in dead[:SWEEP_PROCESSES]]
        if any(gone):
            self.recompute()
        buried = sorted((one.until_ms, lease_id) for lease_id, one in state.tombstones.items())
        for until_ms, lease_id in buried[:SWEEP_LEASES]:
            if until_ms <= self.now_ms:
                del state.tombstones[lease_id]
        due = sorted((at_ms, key) for key, at_ms in state.held_back.items() if at_ms <= self.now_ms)
        for _, (line, message_id) in due[:SWEEP_LEASES]:
            self.freed = True
            del state.held_back[line, message_id]
            parked = state.parked.get((line, message_id))
            if parked is not None:
                state.lines.setdefault(line, {})[message_id] = parked.key

    def recovering(self) -> bool:
        """Whether a store that lost its data, or is new, still holds admissions."""
        return self.now_ms < self.state.epoch_until_ms

    def forget(self, process: str) -> bool:
        """Drop what a process published and reported. Its leases end by themselves.

        Returns:
            Whether the configuration in force has to be found anew.
        """
        state = self.state
        self.freed = True
        state.processes.pop(process, None)
        state.leases.pop(HOLD_PREFIX + process, None)
        return state.published.pop(process, None) is not None

    def recompute(self) -> None:
        """Let the published configurations of the live processes take effect.

        An endpoint that leaves its GPU group, because nobody names it any more or a deploy moves it, counts there until
        its last lease has ended: its calls still load the accelerator (I1).
        """
        state = self.state
        before = {(one.id, one.group) for one in state.specs.values() if one.group}
        state.specs, state.budgets, state.rules = effective(state.published)
        now = {(one.id, one.group) for one in state.specs.values()}
        state.left = {one for one in (state.left | before) - now if self.in_flight(one[0])}

    # -- one endpoint --------------------------------------------------------------------------------------------

    def live(self, endpoint: str) -> list[Lease]:
        """The leases that count: an expired one stops at its instant, swept or not."""
        return [
            lease
            for lease in self.state.leases.values()
            if lease.endpoint == endpoint and lease.expires_at_ms > self.now_ms
        ]

    def in_flight(self, endpoint: str) -> int:
        """Units leased at an endpoint."""
        return sum(lease.cost for lease in self.live(endpoint))

    def ceiling(self, spec: EndpointSpec) -> int:
        """The ceiling in force."""
        return self.state.overrides.get(spec.id, spec.ceiling)

    def breaker(self, endpoint: str) -> Breaker:
        """The endpoint's breaker; missing state means closed."""
        return self.state.breakers.get(endpoint, Breaker())

    def view(self, endpoint: str, parent: str = "") -> View | None:
        """The endpoint as the admission rule sees it, `None` if nobody names it.

        Args:
            endpoint: its id.
            parent: the lease under which the call at hand is made, "" for none.
        """
        state = self.state
        spec = state.specs.get(endpoint)
        if spec is None:
            return None
        breaker = self.breaker(endpoint)
        live = self.live(endpoint)
        probe = state.leases.get(breaker.probe)
        role = probe is not None and probe.expires_at_ms > self.now_ms and self.now_ms < breaker.probe_until_ms
        return View(
            spec=spec,
            ceiling=self.ceiling(spec),
            paused=endpoint in state.paused,
            breaker=breaker,
            probe_live=role or any(lease.hold for lease in live),
            in_flight=sum(lease.cost for lease in live),
            present=sum(lease.cost for lease in live if lease.generation == breaker.generation),
            fraction=state.rules.reserve_fraction,
            group=self._group(spec, parent),
        )

    def group_total(self, group: str) -> int:
        """Units leased at all endpoints of a GPU group, those that left it among them; what is lent counts once."""
        members = {one.id for one in self.state.specs.values() if one.group == group}
        members |= {endpoint for endpoint, former in self.state.left if former == group}
        lent = [
            min(child.cost, parent.cost)
            for child, parent in self._nested()
            if child.endpoint in members and parent.endpoint in members
        ]
        return sum(self.in_flight(member) for member in members) - sum(lent)

    def _nested(self) -> list[tuple[Lease, Lease]]:
        """The live leases that use the units of another live one, each with that one."""
        state = self.state
        pairs = [(one, state.leases.get(one.parent)) for one in state.leases.values() if one.parent]
        return [
            (child, parent)
            for child, parent in pairs
            if parent is not None and min(child.expires_at_ms, parent.expires_at_ms) > self.now_ms
        ]

    def lendable(self, spec: EndpointSpec, parent: str) -> int:
        """Units of the group's budget that a call under this lease may use at another endpoint of the group."""
        lender = self.state.leases.get(parent)
        if lender is None or lender.expires_at_ms <= self.now_ms or lender.endpoint == spec.id:
            return 0
        if spec.group not in self.state.budgets:
            return 0
        home = self.state.specs.get(lender.endpoint)
        busy = any(child.parent == parent for child, _ in self._nested())
        return 0 if busy or home is None or home.group != spec.group else lender.cost

    def _group(self, spec: EndpointSpec, parent: str) -> GroupView | None:
        budget = self.state.budgets.get(spec.group)
        if budget is None:
            return None
        others = [other for other in self.state.specs.values() if other.group == spec.group and other.id != spec.id]
        return GroupView(
            budget=budget,
            total=self.group_total(spec.group),
            set_aside=sum(max(0, other.floor - self.in_flight(other.id)) for other in others),
            floors=sum(other.floor for other in others),
            lent=self.lendable(spec, parent) if parent else 0,
        )

    # -- leases ----------------------------------------------------------------------------------------------------

    def grant(self, lease_id: str, lease: Lease) -> tuple[Lease, bool]:
        """Record a lease; in half-open it takes the probe's role. A role that had passed on ends its generation."""
        state = self.state
        breaker = self.breaker(lease.endpoint)
        spec = state.specs.get(lease.endpoint)
        probe = not lease.hold and spec is not None and spec.breaker and breaker.phase(self.now_ms) is Phase.HALF_OPEN
        if probe:
            breaker = replace(
                breaker,
                generation=breaker.generation + (1 if breaker.probe else 0),
                probe=lease_id,
                probe_until_ms=self.now_ms + breakers.role_ms(state.rules, state.means.get(lease.endpoint, 0)),
            )
            state.breakers[lease.endpoint] = breaker
        lease = replace(lease, generation=breaker.generation)
        state.leases[lease_id] = lease
        if lease.rank >= BACKGROUND_RANK and not lease.hold and lease.endpoint != NOWHERE:
            state.background_at[lease.endpoint] = self.now_ms
            state.background_at[lease.home] = self.now_ms
        return lease, probe

    def new_lease(
        self, endpoint: str, home: str, process: str, parked: Parked, message: Message | None, *, hold: bool = False
    ) -> Lease:
        """A lease that begins now; its generation is written by `grant`."""
        rules = self.state.rules
        return Lease(
            endpoint=endpoint,
            home=home,
            rank=parked.rank,
            cost=parked.cost,
            generation=0,
            process=process,
            message=message,
            place=parked.place,
            deadline_ms=parked.deadline_ms,
            expires_at_ms=self.now_ms + (rules.hold_ms if hold else rules.lease_ms),
            started_at_ms=self.now_ms,
            hold=hold,
        )

    # -- lines -----------------------------------------------------------------------------------------------------

    def next_place(self) -> int:
        """The next place in the order of first arrival."""
        self.state.places += 1
        return self.state.places

    def put_back(self, lease: Lease) -> None:
        """Return the message of an ended lease to its own place, if that worker still had it."""
        message = lease.message
        if message is None:
            return
        acks = self.broker.ack_set(message)
        if message.id not in acks:
            return
        acks.remove(message.id)
        line = (lease.home, message.namespace, message.queue)
        if self.broker.payload((message.namespace, message.queue), message.id) is None:
            self.state.parked.pop((line, message.id), None)
            return
        parked = self.state.parked.get((line, message.id))
        if parked is None:
            parked = Parked(rank=lease.rank, cost=lease.cost, place=lease.place, deadline_ms=lease.deadline_ms)
        self.enter(line, message.id, parked)

    def enter(self, line: Line, waiter: str, parked: Parked, *, not_before_ms: int = 0) -> None:
        """Stand in a line, or beside it until `not_before_ms`."""
        state = self.state
        if parked.rank >= BACKGROUND_RANK and not self.background_waits(line[0]):
            state.background_at[line[0]] = max(self.now_ms, state.background_at.get(line[0], 0))
        state.parked[line, waiter] = parked
        if not_before_ms > self.now_ms:
            state.held_back[line, waiter] = not_before_ms
        else:
            state.lines.setdefault(line, {})[waiter] = parked.key

    def background_waits(self, endpoint: str) -> bool:
        """Whether a background waiter stands in one of the endpoint's lines."""
        return any(
            rank >= BACKGROUND_RANK
            for line, waiters in self.state.lines.items()
            if line[0] == endpoint
            for rank, _ in waiters.values()
        )

    def leave(self, line: Line, waiter: str) -> bool:
        """Leave a line, or the place beside it; the record stays.

        Returns:
            Whether the waiter stood there.
        """
        state = self.state
        if state.held_back.pop((line, waiter), None) is not None:
            return True
        waiters = state.lines.get(line, {})
        if waiters.pop(waiter, None) is None:
            return False
        if not waiters:
            del state.lines[line]
        return True

    def stands(self, line: Line, waiter: str) -> bool:
        """Whether a waiter stands in its line, or beside it."""
        return waiter in self.state.lines.get(line, {}) or (line, waiter) in self.state.held_back

    def withdraw(self, line: Line, message: Message) -> bool:
        """Make sure that this worker has the message: it still does, or it stood in the line and comes back.

        Returns:
            False if somebody else has it.
        """
        if self.leave(line, message.id):
            self.broker.ack_set(message).add(message.id)
            return True
        again = any(lease.message == message for lease in self.state.leases.values())  # taken by the same worker
        return message.id in self.broker.ack_set(message) and not again

    def record_of(self, command: Ask, line: Line, waiter: str) -> Parked:
        """What is known of this asker: its first place if it has one, else the next one, counted when it takes it."""
        known = self.state.parked.get((line, waiter))
        deadline_ms = command.deadline_ms if command.deadline_ms > self.now_ms else 0  # else its broker knows already
        if known is not None:
            return known if command.message is None else replace(known, deadline_ms=deadline_ms)
        return Parked(
            rank=command.rank,
            cost=command.cost,
            place=self.state.places + 1,
            deadline_ms=deadline_ms,
            process="" if command.message is not None else command.process,
        )

    def drain(self, queue: tuple[str, str], most: int, *, only: Line | None = None) -> int:
        """Put parked messages back at the tail of their queue, in the order of their lines."""
        state = self.state
        lines = {line for line in state.lines if line[1:] == queue and only in (None, line)}
        beside = {key for key in state.held_back if key[0][1:] == queue and only in (None, key[0])}
        waiting = [(state.parked[line, waiter].key, line, waiter) for line in lines for waiter in state.lines[line]]
        waiting += [(state.parked[key].key, *key) for key in beside]
        moved = 0
        for _, line, waiter in sorted(waiting)[:most]:
            self.leave(line, waiter)
            del state.parked[line, waiter]
            moved += 1
            if self.broker.payload(queue, waiter) is not None:
                self.broker.queues.setdefault(queue, []).append(waiter)
        return moved
