"""The whole rule as one in-memory machine: the oracle of the scripts, and the memory store behind the Protocol.

Each verb is one command of the store. Hypothesis drives this machine and the real scripts with the same commands
and compares replies and state; where they differ, one of them is wrong.

The machine is read from the ground up, each module beside its counterpart in `store/lua`:

    state       what is kept
    admission   one endpoint and its GPU group, as pure decisions       include/rule
    breaker     what moves a breaker                                    include/breaker
    machine     leases, lines, moves between them, the sweep            include/leases, lines, moves, sweep
    waiting     who waits, who could run it, who is ahead               include/waiting
    serving     who goes next                                           include/serve
    reply       what is answered, and answered again                    include/reply
    held        beats, and what they give back                          beat, include/held
    operating   operators, goodbyes, the snapshot                       operate, snapshot
    reference   the way of a call, and what a process publishes         admit, finish, configure
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from guard_middleware.core import breaker as breakers
from guard_middleware.core.breaker import Phase
from guard_middleware.core.commands import Ask, Configure, Finish, ParkAs, Reply, Status
from guard_middleware.core.operating import Operator
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.state import BrokerState, GuardState, Lease, Line, Parked, Process
from guard_middleware.core.verdict import Admit, Delay, Impossible, Reason, Reroute

MAX_DENIALS = 3
FIRST_DENIAL_MS = 1_000


class Reference(Operator):
    """The six verbs over `GuardState`: `beat`, `operate` and `snapshot` come with the parts below, the rest is here."""

    def __init__(self, state: GuardState | None = None, broker: BrokerState | None = None) -> None:
        super().__init__(state or GuardState(), broker or BrokerState())

    # -- admit --------------------------------------------------------------------------------------------------------

    def admit(self, command: Ask, now_ms: int) -> Reply:
        """Lease, park, wait or refuse (DESIGN section 5 "Park", steps 1 to 4)."""
        self.begin(now_ms, command.process, command.idle)
        state = self.state
        if not state.epoch or command.endpoint not in state.specs or command.process not in state.processes:
            return self.answer(Status.UNCONFIGURED, command.process)
        repeated = self._repeated(command)
        if repeated is not None:
            return repeated
        message = command.message
        line: Line = (command.endpoint, "", "")
        waiter = command.lease
        if message is not None:
            line = (command.endpoint, message.namespace, message.queue)
            waiter = message.id
            present = self.broker.payload((message.namespace, message.queue), message.id) is not None
            if not present or message.id not in self.broker.ack_set(message):
                return self.answer(Status.GONE, command.process)
        parked = self.record_of(command, line, waiter)
        is_new = (line, waiter) not in state.parked
        asking = message is not None and command.take > 0
        match self.decide(command.endpoint, parked, command.process, asking=asking, parent=command.parent):
            case Admit(endpoint=endpoint):
                if message is None:
                    self.leave(line, waiter)
                    state.parked.pop((line, waiter), None)
                elif is_new:
                    state.places = parked.place
                else:
                    state.parked[line, waiter] = parked
                fresh = self.new_lease(endpoint, command.endpoint, command.process, parked, message)
                if self.lendable(state.specs[endpoint], command.parent):
                    fresh = replace(fresh, parent=command.parent)
                granted, _ = self.grant(command.lease, fresh)
                return self.admitted(command.lease, granted, command.process)
            case Impossible(reason=reason):
                self.leave(line, waiter)
                state.parked.pop((line, waiter), None)
                return self.answer(Status.IMPOSSIBLE, command.process, reason=reason)
            case (
                Delay(reason=reason, retry_after_ms=retry_after_ms)
                | Reroute(reason=reason, retry_after_ms=retry_after_ms)
            ):
                return self._not_now(command, line, waiter, parked, reason, retry_after_ms)
            case other:
                assert_never(other)

    def _repeated(self, command: Ask) -> Reply | None:
        """Step 1: the answer to an ask that was answered before; `None` for a new one."""
        lease = self.state.leases.get(command.lease)
        if lease is not None:
            is_over = lease.expires_at_ms <= self.now_ms  # the sweep has not come so far
            if not is_over and not (command.confirm and self._outdated(lease)):
                return self.admitted(command.lease, lease, command.process)
            del self.state.leases[command.lease]
            self.freed = True
            if is_over:
                self.put_back(lease)
        tombstone = self.tombstone(command.lease)
        if tombstone is None:
            return None
        return self.answer_again(tombstone, command.process, self._idle_parked(command) if command.idle >= 0 else -1)

    def _not_now(
        self, command: Ask, line: Line, waiter: str, parked: Parked, reason: str, retry_after_ms: int
    ) -> Reply:
        if (command.message is not None or command.wait) and (line, waiter) not in self.state.parked:
            self.state.places = parked.place
        if command.message is not None:
            self.broker.ack_set(command.message).discard(waiter)
            self.enter(line, waiter, parked)
            self.state.processes[command.process].idle = self._idle_parked(command)
            serving = self.serve(command.process, command.take, command.lease)
            takes = tuple(take.lease for take in serving.takes)
            self.bury(command.lease, Status.PARKED, reason, retry_after_ms, takes)
            return self.answer(
                Status.PARKED, command.process, reason=reason, retry_after_ms=retry_after_ms, serving=serving
            )
        if reason == Reason.QUEUE_AHEAD:
            self.freed = True  # I9: somebody could go, and now has to hear of it
        if command.wait:
            if not self.stands(line, waiter):
                self.enter(line, waiter, parked)
            reply = self.answer(Status.WAITING, command.process, reason=reason, retry_after_ms=retry_after_ms)
            granted = self.state.leases.get(command.lease)  # what was free went to this very caller
            return reply if granted is None else self.with_lease(reply, command.lease, granted)
        if command.slot:
            retry_after_ms = max(retry_after_ms, self._slot(command.endpoint, command.rank))
            self.bury(command.lease, Status.REFUSED, reason, retry_after_ms, ())  # I11: one slot per message
        return self.answer(Status.REFUSED, command.process, reason=reason, retry_after_ms=retry_after_ms)

    def _idle_parked(self, command: Ask) -> int:
        """The process's idle threads once the one that asked is free again, too."""
        known = self.state.processes[command.process]
        return known.idle if command.idle < 0 else command.idle + command.take

    def _outdated(self, lease: Lease) -> bool:
        """Whether a lease that came with a take may not start any more: the breaker has moved since."""
        breaker = self.breaker(lease.endpoint)
        return lease.generation != breaker.generation and breaker.phase(self.now_ms) is not Phase.CLOSED

    def _slot(self, endpoint: str, rank: int) -> int:
        """Reserve the next slot of a rank: when to come back, at most 30 s ahead, in milliseconds."""
        step = self.step_ms(endpoint)
        before = max(self.now_ms, self.state.slots.get((endpoint, rank), 0))
        slot = min(before + step, self.now_ms + 30_000)
        self.state.slots[endpoint, rank] = slot
        return slot - self.now_ms

    # -- finish -------------------------------------------------------------------------------------------------------

    def finish(self, command: Finish, now_ms: int) -> Reply:
        """Release once, count the outcome once, perhaps park, and take for the thread that becomes idle (I5, I9)."""
        self.begin(now_ms, command.process, command.idle)
        tombstone = self.tombstone(command.lease)
        if tombstone is not None:
            return self.answer_again(tombstone, command.process, command.idle)
        lease = self.state.leases.pop(command.lease, None)
        status = Status.FINISHED
        reason = ""
        if lease is None:
            status = self._late(command)
        else:
            counted = self._settle(command, lease)
            if self._elsewhere(command, lease):
                status = self._late(command)
            elif self._park_again(command, lease, counted=counted):
                status, reason = Status.PARKED, command.park.value
        message = command.message
        if status is Status.FINISHED and message is not None:
            self.state.parked.pop(((command.home, message.namespace, message.queue), message.id), None)
        serving = self.serve(command.process, command.take, command.lease)
        takes = tuple(take.lease for take in serving.takes)
        self.bury(command.lease, status, reason, 0, takes)
        return self.answer(status, command.process, reason=reason, serving=serving)

    def _elsewhere(self, command: Finish, lease: Lease) -> bool:
        """Whether the message of a live lease is not with its worker any more: stolen, or requeued by its broker."""
        message = command.message
        return message is not None and (lease.message is None or message.id not in self.broker.ack_set(message))

    def _late(self, command: Finish) -> Status:
        """A finish whose lease or message was lost: withdraw it from the line, or learn that somebody else has it."""
        message = command.message
        if message is None:
            return Status.FINISHED
        line = (command.home, message.namespace, message.queue)
        return Status.FINISHED if self.withdraw(line, message) else Status.STOLEN

    def _settle(self, command: Finish, lease: Lease) -> bool:
        """Count the outcome. Returns whether it counts against the message."""
        state = self.state
        spec = state.specs.get(lease.endpoint)
        if spec is None:
            return False
        if command.outcome is Outcome.SUCCESS:
            length = self.now_ms - lease.started_at_ms
            state.means[lease.endpoint] = breakers.smoothed(state.means.get(lease.endpoint, 0), length)
        after, counted = breakers.settle(
            self.breaker(lease.endpoint),
            spec,
            state.rules,
            command.outcome,
            lease=command.lease,
            generation=lease.generation,
            cost=lease.cost,
            retry_after_ms=command.retry_after_ms,
            full_limit=self.ceiling(spec),
            now_ms=self.now_ms,
        )
        state.breakers[lease.endpoint] = after
        return counted

    def _park_again(self, command: Finish, lease: Lease, *, counted: bool) -> bool:
        """Put the message back into its line, if its outcome and its record allow it."""
        message = command.message
        if message is None or command.park is ParkAs.NO:
            return False
        line = (lease.home, message.namespace, message.queue)
        parked = self.state.parked.get((line, message.id)) or Parked(
            rank=lease.rank, cost=lease.cost, place=lease.place, deadline_ms=lease.deadline_ms
        )
        not_before_ms = 0
        if command.park is ParkAs.OVERLOADED:
            view = self.view(lease.endpoint)
            if view is None or view.phase(self.now_ms) is Phase.CLOSED:
                return False
            overloads = parked.overloads + counted
            if overloads >= self.state.rules.max_overloads:
                return False
            parked = replace(parked, overloads=overloads, overloaded=True)
        else:
            if parked.denials >= MAX_DENIALS:
                return False
            not_before_ms = self.now_ms + FIRST_DENIAL_MS * 2**parked.denials
            parked = replace(parked, denials=parked.denials + 1)
        acks = self.broker.ack_set(message)
        if message.id not in acks or self.broker.payload((message.namespace, message.queue), message.id) is None:
            return False
        if command.park is ParkAs.OVERLOADED:
            parked = replace(parked, place=self.next_place())
        acks.remove(message.id)
        self.enter(line, message.id, parked, not_before_ms=not_before_ms)
        return True

    # -- configure ----------------------------------------------------------------------------------------------------

    def configure(self, command: Configure, now_ms: int) -> Reply:
        """Publish a process's configuration; the first one makes the epoch."""
        self.begin(now_ms, command.process, -1)
        state = self.state
        state.published[command.process] = command.published
        self.recompute()
        if command.process not in state.processes:
            state.processes[command.process] = Process(alive_until_ms=0)
        state.processes[command.process].alive_until_ms = now_ms + state.rules.lease_ms
        made_ms = int(state.epoch.rpartition("@")[2] or 0)
        if command.epoch not in {"", state.epoch} and now_ms < made_ms + state.rules.lease_ms:  # data was lost
            state.epoch_until_ms = max(state.epoch_until_ms, made_ms + state.rules.lease_ms)
        if not state.epoch:
            state.epoch = f"{command.process}@{now_ms}"
            hold = state.rules.heartbeat_ms if command.first_start_hold_ms < 0 else command.first_start_hold_ms
            state.epoch_until_ms = now_ms + (state.rules.lease_ms if command.epoch else hold)
        self.freed = True  # a ceiling may have risen
        return self.answer(Status.DONE, command.process)
