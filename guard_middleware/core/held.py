"""The leases of one process: how its beats keep them, and how they go back.

The counterpart of `beat.lua` and `include/held.lua`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from guard_middleware.core.commands import Reply, Status
from guard_middleware.core.machine import DRAIN_BATCH
from guard_middleware.core.reply import Replier
from guard_middleware.core.state import Lease

if TYPE_CHECKING:
    from guard_middleware.core.commands import Beat, Held
    from guard_middleware.core.state import Process


class Keeper(Replier):
    """The part of the machine that keeps count of what processes hold."""

    def beat(self, command: Beat, now_ms: int) -> Reply:
        """Renew, report, give back, assert, and take (DESIGN section 5 "Beat and sweep")."""
        state = self.state
        known = state.processes.get(command.process)
        outdated = known is not None and command.number < known.number
        self.begin(now_ms, command.process, -1 if outdated else 0 if command.leaving else command.idle)
        known = state.processes.get(command.process)
        if not state.epoch or known is None:
            return self.answer(Status.UNCONFIGURED, command.process)
        if outdated:
            return self.answer(Status.DONE, command.process)
        known.alive_until_ms = now_ms + state.rules.lease_ms
        if command.id != known.beat:
            known.beat, known.before_ms, known.beaten_at_ms = command.id, known.beaten_at_ms, now_ms
        known.number = command.number
        known.queues = command.queues
        known.worker = command.worker
        stolen = tuple(held.lease for held in command.asserts if not self._assert_again(command.process, held))
        lost = tuple(lease_id for lease_id in command.leases if not self._renew(lease_id))
        for lease_id in command.give_back:
            self.give_back(lease_id)
        named = {*command.leases, *(held.lease for held in command.asserts)}
        explained = {*command.outstanding, command.id}
        mine = self.leases_of(command.process)
        for lease_id in mine:
            lease = state.leases[lease_id]
            known_then = lease.started_at_ms < known.before_ms  # else it may be younger than this beat's list
            if known_then and lease_id not in named and lease_id not in explained and lease.via not in explained:
                self.give_back(lease_id)
        again = tuple(one for one in mine if one in state.leases and state.leases[one].via == command.id)
        repeated = self.takes_again(again)
        known.idle = max(0, known.idle - len(repeated))
        want = 0 if command.leaving else max(0, command.take - len(repeated))
        if want and not repeated:
            self._drain_unnamed(known)
        serving = self.serve(command.process, 0 if repeated else want, command.id)
        serving.takes = [*repeated, *serving.takes]
        return replace(self.answer(Status.DONE, command.process, serving=serving), lost=lost, stolen=stolen)

    def _renew(self, lease_id: str) -> bool:
        """Give a lease its full time again. One that was asked for and not given yet is not lost, just unknown."""
        lease = self.state.leases.get(lease_id)
        if lease is None or lease.expires_at_ms <= self.now_ms:  # ended, only not swept yet
            return False
        self.state.leases[lease_id] = replace(lease, expires_at_ms=self.now_ms + self.state.rules.lease_ms)
        return True

    def _assert_again(self, process: str, held: Held) -> bool:
        """Count a call that still runs. Returns False if somebody else has its message."""
        state = self.state
        lease = state.leases.get(held.lease)
        if lease is not None:
            if lease.expires_at_ms <= self.now_ms:  # the sweep has not come so far
                state.leases[held.lease] = replace(lease, expires_at_ms=self.now_ms + state.rules.lease_ms)
            return lease.message is not None or held.message is None
        if self.tombstone(held.lease) is not None:
            return True
        message = held.message
        mine = True
        place = 0
        if message is not None:
            line = (held.home, message.namespace, message.queue)
            mine = self.withdraw(line, message)
            known = state.parked.get((line, message.id))
            place = known.place if known is not None else self.next_place()
        state.leases[held.lease] = Lease(
            endpoint=held.endpoint,
            home=held.home,
            rank=held.rank,
            cost=held.cost,
            generation=held.generation,
            process=process,
            message=message if mine else None,
            place=place,
            deadline_ms=0,
            expires_at_ms=self.now_ms + state.rules.lease_ms,
            started_at_ms=self.now_ms,
        )
        return mine

    def _drain_unnamed(self, known: Process) -> None:
        """Put messages of endpoints that no live process names back at the tails of their queues."""
        for line in sorted(self.state.lines):
            if line[0] not in self.state.specs and line[1:] in known.queues:
                self.drain(line[1:], DRAIN_BATCH, only=line)

    def leases_of(self, process: str) -> list[str]:
        """Ids of the leases that a process has, oldest name first; units held for it are not among them."""
        mine = (one for one, lease in self.state.leases.items() if lease.process == process and not lease.hold)
        return sorted(mine, key=lambda one: (len(one), one))

    def give_back(self, lease_id: str) -> None:
        """End a lease whose call has not begun: its message returns to its place, and its outcome says nothing."""
        lease = self.state.leases.pop(lease_id, None)
        if lease is not None:
            self.put_back(lease)
            self.bury(lease_id, Status.GONE, "", 0, ())
