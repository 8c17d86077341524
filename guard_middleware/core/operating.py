"""What operators do and see, and the goodbyes of callers and processes.

The counterpart of `operate.lua` and `snapshot.lua`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, assert_never

from guard_middleware.core.breaker import Breaker
from guard_middleware.core.commands import Action, EndpointSnapshot, Reply, Snapshot, Status
from guard_middleware.core.held import Keeper
from guard_middleware.core.machine import DRAIN_BATCH
from guard_middleware.core.values import NOWHERE

if TYPE_CHECKING:
    from guard_middleware.core.commands import Operate


SNAPSHOT_FIRST = 200
"""How many waiters of a line a snapshot names; how many there are it counts."""


class Operator(Keeper):
    """The part of the machine that does what it is told from outside."""

    def operate(self, command: Operate, now_ms: int) -> Reply:
        """Carry out one operation."""
        self.begin(now_ms, "", -1)
        state = self.state
        target = command.target
        count = 0
        match command.action:
            case Action.OPEN | Action.CLOSE | Action.RESET:
                state.breakers[target] = self._forced(command)
            case Action.OVERRIDE:
                state.overrides[target] = command.value
            case Action.CLEAR_OVERRIDE:
                state.overrides.pop(target, None)
            case Action.PAUSE:
                state.paused.add(target)
            case Action.RESUME:
                state.paused.discard(target)
            case Action.DRAIN:
                alive = any(command.queue in known.queues for known in state.processes.values())
                if alive and not command.force:
                    return self.answer(Status.REFUSED_ALIVE, "")
                count = self.drain(command.queue, command.value or DRAIN_BATCH)
            case Action.WITHDRAW:
                self._withdraw_caller(target)
            case Action.FORGET:
                self._bye(target)
            case other:
                assert_never(other)
        serving = self.serve("", 0, "")
        return replace(self.answer(Status.DONE, "", serving=serving), count=count)

    def _forced(self, command: Operate) -> Breaker:
        """A new generation, in the state that the operator wishes."""
        before = self.breaker(command.target)
        generation = before.generation + 1
        if command.action is Action.OPEN:
            return Breaker(generation=generation, open_until_ms=self.now_ms + command.value, trips=before.trips)
        return Breaker(generation=generation)

    def _withdraw_caller(self, lease_id: str) -> None:
        """A waiting caller gives up: it leaves the line, and gives back what it was given meanwhile."""
        for line, waiter in sorted(self.state.parked):
            if waiter == lease_id and line[1:] == ("", ""):
                self.leave(line, waiter)
                del self.state.parked[line, waiter]
        self.give_back(lease_id)
        if self.tombstone(lease_id) is None:  # its ask may still be on the way
            self.bury(lease_id, Status.GONE, "", 0, ())

    def _bye(self, process: str) -> None:
        """A process ends: what it still holds goes back at once."""
        for lease_id in self.leases_of(process):
            self.give_back(lease_id)
        if self.forget(process):
            self.recompute()

    def snapshot(self, now_ms: int) -> Snapshot:
        """Read everything, change nothing."""
        self.now_ms = now_ms
        state = self.state
        endpoints = {}
        for endpoint in sorted(state.specs):
            view = self.view(endpoint)
            if view is None:
                continue
            waiting: dict[int, int] = {}
            for (line, waiter), parked in state.parked.items():
                if line[0] == endpoint and self.stands(line, waiter):
                    waiting[parked.rank] = waiting.get(parked.rank, 0) + 1
            endpoints[endpoint] = EndpointSnapshot(
                id=endpoint,
                ceiling=view.ceiling,
                limit=view.limit(),
                in_flight=view.in_flight,
                waiting=waiting,
                breaker=view.phase(now_ms).value,
                open_for_ms=max(0, view.breaker.open_until_ms - now_ms),
                generation=view.breaker.generation,
                trips=view.breaker.trips,
                ramp=view.breaker.ramp,
                probe=view.breaker.probe,
                paused=view.paused,
                group=view.spec.group if view.group is not None else "",
                mean_ms=state.means.get(endpoint, 0),
            )
        return Snapshot(
            at_ms=now_ms,
            endpoints=endpoints,
            groups={group: (self.group_total(group), budget) for group, budget in sorted(state.budgets.items())},
            leases={
                lease_id: (lease.endpoint, lease.cost, lease.process)
                for lease_id, lease in state.leases.items()
                if lease.expires_at_ms > now_ms and lease.endpoint != NOWHERE
            },
            processes={process: known.idle for process, known in state.processes.items()},
            lines={
                line: tuple(sorted(waiters, key=waiters.__getitem__)[:SNAPSHOT_FIRST])
                for line, waiters in state.lines.items()
            },
        )
