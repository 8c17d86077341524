"""What is answered, and what is remembered so that a repeated command gets the same answer (I11).

The counterpart of `include/reply.lua`; tombstones stand in `include/leases.lua` there.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from guard_middleware.core.commands import Reply, Status, Take
from guard_middleware.core.serving import Servant
from guard_middleware.core.state import Tombstone

if TYPE_CHECKING:
    from guard_middleware.core.serving import Serving
    from guard_middleware.core.state import Lease


class Replier(Servant):
    """The part of the machine that answers."""

    def answer(
        self,
        status: Status,
        process: str,
        *,
        reason: str = "",
        retry_after_ms: int = 0,
        serving: Serving | None = None,
    ) -> Reply:
        """Answer a process, and give away in the same command what the sweep, or the command, has freed (I9)."""
        if serving is None and self.freed:
            serving = self.serve(process, 0, "")
        return Reply(
            status=status,
            reason=reason,
            retry_after_ms=retry_after_ms,
            takes=tuple(serving.takes) if serving else (),
            woken=tuple(serving.woken) if serving else (),
            next_ms=self.next_ms(),
            waiting=serving.waiting if serving else -1,
            epoch=self.state.epoch,
        )

    def admitted(self, lease_id: str, lease: Lease, process: str) -> Reply:
        """Answer that a lease was given."""
        return self.with_lease(self.answer(Status.ADMITTED, process), lease_id, lease)

    def with_lease(self, reply: Reply, lease_id: str, lease: Lease) -> Reply:
        """The same reply as an admission."""
        return replace(
            reply,
            status=Status.ADMITTED,
            reason="",
            retry_after_ms=0,
            endpoint=lease.endpoint,
            generation=lease.generation,
            probe=self.breaker(lease.endpoint).probe == lease_id,
            expires_at_ms=lease.expires_at_ms,
        )

    def next_ms(self) -> int:
        """In how many milliseconds time alone may free something for a waiter; -1 if nobody waits."""
        state = self.state
        instants = list(state.held_back.values())
        if state.lines:
            instants += [lease.expires_at_ms for lease in state.leases.values()]
            instants.append(state.epoch_until_ms)
            for endpoint in {line[0] for line in state.lines}:
                spec = state.specs.get(endpoint)
                for one in (endpoint, spec.fallback if spec is not None else ""):
                    instants += [self.breaker(one).open_until_ms, self.breaker(one).probe_until_ms]
                if self.background_waits(endpoint):
                    instants.append(state.background_at.get(endpoint, self.now_ms) + state.rules.ageing_ms)
        later = [at_ms - self.now_ms for at_ms in instants if at_ms > self.now_ms]
        if later:
            return min(later)
        return state.rules.heartbeat_ms if state.lines or state.held_back else -1

    # -- the same answer again ----------------------------------------------------------------------------------------

    def tombstone(self, lease_id: str) -> Tombstone | None:
        """What became of a lease id, as long as it is remembered."""
        tombstone = self.state.tombstones.get(lease_id)
        if tombstone is None or tombstone.until_ms <= self.now_ms:
            return None
        return tombstone

    def bury(self, lease_id: str, status: Status, reason: str, retry_after_ms: int, takes: tuple[str, ...]) -> None:
        """Remember what became of a lease id for one lease time."""
        self.state.tombstones[lease_id] = Tombstone(
            status=status,
            until_ms=self.now_ms + self.state.rules.lease_ms,
            reason=reason,
            retry_after_ms=retry_after_ms,
            takes=takes,
        )

    def answer_again(self, tombstone: Tombstone, process: str, idle: int) -> Reply:
        """The same answer again, with the same messages as far as they are still leased."""
        takes = self.takes_again(tombstone.takes)
        known = self.state.processes.get(process)
        if known is not None and idle >= 0:
            known.idle = max(0, idle - len(takes))
        serving = self.serve(process, 0, "")  # its hold ended when it spoke
        serving.takes = takes
        return self.answer(
            tombstone.status,
            process,
            reason=tombstone.reason,
            retry_after_ms=tombstone.retry_after_ms,
            serving=serving,
        )

    def takes_again(self, lease_ids: tuple[str, ...]) -> list[Take]:
        """Messages of leases that were handed over before, as far as they are still there."""
        takes = []
        for lease_id in lease_ids:
            lease = self.state.leases.get(lease_id)
            if lease is None or lease.message is None or lease.expires_at_ms <= self.now_ms:
                continue
            message = lease.message
            payload = self.broker.payload((message.namespace, message.queue), message.id)
            if payload is None:
                continue
            takes.append(
                Take(
                    lease=lease_id,
                    endpoint=lease.endpoint,
                    home=lease.home,
                    generation=lease.generation,
                    probe=self.breaker(lease.endpoint).probe == lease_id,
                    expires_at_ms=lease.expires_at_ms,
                    rank=lease.rank,
                    cost=lease.cost,
                    queue=(message.namespace, message.queue),
                    message_id=message.id,
                    payload=payload,
                )
            )
        return takes
