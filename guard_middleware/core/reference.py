"""The whole rule as one in-memory machine: the oracle of the scripts, and the memory store behind the Protocol.

Each verb is one command of the store. Hypothesis drives this machine and the real scripts with the same commands
and compares replies and state; where they differ, one of them is wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import assert_never

from guard_middleware.core import breaker as breakers
from guard_middleware.core.breaker import Breaker, Phase
from guard_middleware.core.commands import (
    Action,
    Ask,
    Beat,
    Configure,
    EndpointSnapshot,
    Finish,
    Held,
    Operate,
    ParkAs,
    Reply,
    Snapshot,
    Status,
    Take,
)
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.serving import Servant, Serving
from guard_middleware.core.state import BrokerState, GuardState, Lease, Line, Parked, Process, Tombstone
from guard_middleware.core.verdict import Admit, Delay, Impossible, Reason, Reroute

MAX_DENIALS = 3
FIRST_DENIAL_MS = 1_000
DRAIN_BATCH = 500


class Reference(Servant):
    """The six verbs over `GuardState`."""

    def __init__(self, state: GuardState | None = None, broker: BrokerState | None = None) -> None:
        super().__init__(state or GuardState(), broker or BrokerState())

    # -- admit -----------------------------------------------------------------------------------------------------

    def admit(self, command: Ask, now_ms: int) -> Reply:
        """Lease, park, wait or refuse (DESIGN section 5 "Park", steps 1 to 4)."""
        self.begin(now_ms, command.process, command.idle)
        state = self.state
        if not state.epoch or command.endpoint not in state.specs or command.process not in state.processes:
            return self._reply(Status.UNCONFIGURED, command.process)
        lease = state.leases.get(command.lease)
        if lease is not None and not (command.confirm and self._outdated(lease)):
            return self._admitted(command.lease, lease, command.process)
        if lease is not None:
            del state.leases[command.lease]
        tombstone = self._tombstone(command.lease)
        if tombstone is not None:
            return self._repeat(tombstone, command.process, self._idle_parked(command) if command.idle >= 0 else -1)
        message = command.message
        line: Line = (command.endpoint, "", "")
        waiter = command.lease
        if message is not None:
            line = (command.endpoint, message.namespace, message.queue)
            waiter = message.id
            present = self.broker.payload((message.namespace, message.queue), message.id) is not None
            if not present or message.id not in self.broker.ack_set(message):
                return self._reply(Status.GONE, command.process)
        parked = self.record_of(command, line, waiter)
        asking = message is not None and command.take > 0
        match self.decide(command.endpoint, parked, command.process, asking=asking):
            case Admit(endpoint=endpoint):
                if message is None:
                    self.leave(line, waiter)
                    state.parked.pop((line, waiter), None)
                fresh = self.new_lease(endpoint, command.endpoint, command.process, parked, message)
                granted, _ = self.grant(command.lease, fresh)
                return self._admitted(command.lease, granted, command.process)
            case Impossible(reason=reason):
                self.leave(line, waiter)
                state.parked.pop((line, waiter), None)
                return self._reply(Status.IMPOSSIBLE, command.process, reason=reason)
            case (
                Delay(reason=reason, retry_after_ms=retry_after_ms)
                | Reroute(reason=reason, retry_after_ms=retry_after_ms)
            ):
                return self._not_now(command, line, waiter, parked, reason, retry_after_ms)
            case other:
                assert_never(other)

    def _not_now(
        self, command: Ask, line: Line, waiter: str, parked: Parked, reason: str, retry_after_ms: int
    ) -> Reply:
        if command.message is not None:
            self.broker.ack_set(command.message).discard(waiter)
            self.enter(line, waiter, parked)
            self.state.processes[command.process].idle = self._idle_parked(command)
            serving = self.serve(command.process, command.take, command.lease)
            takes = tuple(take.lease for take in serving.takes if take.lease)
            self._bury(command.lease, Status.PARKED, reason, retry_after_ms, takes)
            return self._reply(
                Status.PARKED, command.process, reason=reason, retry_after_ms=retry_after_ms, serving=serving
            )
        if reason == Reason.QUEUE_AHEAD:
            self.freed = True  # I9: somebody could go, and now has to hear of it
        if command.wait:
            if not self._stands(line, waiter):
                self.enter(line, waiter, parked)
            reply = self._reply(Status.WAITING, command.process, reason=reason, retry_after_ms=retry_after_ms)
            granted = self.state.leases.get(command.lease)  # what was free went to this very caller
            return reply if granted is None else self._with_lease(reply, command.lease, granted)
        if command.slot:
            retry_after_ms = max(retry_after_ms, self._slot(command.endpoint, command.rank))
            self._bury(command.lease, Status.REFUSED, reason, retry_after_ms, ())  # I11: one slot per message
        return self._reply(Status.REFUSED, command.process, reason=reason, retry_after_ms=retry_after_ms)

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

    def _admitted(self, lease_id: str, lease: Lease, process: str) -> Reply:
        return self._with_lease(self._reply(Status.ADMITTED, process), lease_id, lease)

    def _with_lease(self, reply: Reply, lease_id: str, lease: Lease) -> Reply:
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

    # -- finish ----------------------------------------------------------------------------------------------------

    def finish(self, command: Finish, now_ms: int) -> Reply:
        """Release once, count the outcome once, perhaps park, and take for the thread that becomes idle (I5, I9)."""
        self.begin(now_ms, command.process, command.idle)
        tombstone = self._tombstone(command.lease)
        if tombstone is not None:
            return self._repeat(tombstone, command.process, command.idle)
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
        takes = tuple(take.lease for take in serving.takes if take.lease)
        self._bury(command.lease, status, reason, 0, takes)
        return self._reply(status, command.process, reason=reason, serving=serving)

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

    # -- beat ------------------------------------------------------------------------------------------------------

    def beat(self, command: Beat, now_ms: int) -> Reply:
        """Renew, report, give back, assert, and take (DESIGN section 5 "Beat and sweep")."""
        self.begin(now_ms, command.process, 0 if command.leaving else command.idle)
        state = self.state
        known = state.processes.get(command.process)
        if not state.epoch or known is None:
            return self._reply(Status.UNCONFIGURED, command.process)
        known.alive_until_ms = now_ms + state.rules.lease_ms
        if command.id != known.beat:
            known.beat, known.before_ms, known.beaten_at_ms = command.id, known.beaten_at_ms, now_ms
        known.queues = command.queues
        known.worker = command.worker
        stolen = tuple(held.lease for held in command.asserts if not self._assert(command.process, held))
        lost = tuple(lease_id for lease_id in command.leases if not self._renew(lease_id))
        for lease_id in command.give_back:
            self._give_back(lease_id)
        named = {*command.leases, *(held.lease for held in command.asserts)}
        explained = {*command.outstanding, command.id}
        mine = sorted(
            (one for one, lease in state.leases.items() if lease.process == command.process and not lease.hold),
            key=lambda one: (len(one), one),
        )
        for lease_id in mine:
            lease = state.leases[lease_id]
            known_then = lease.started_at_ms < known.before_ms  # else it may be younger than this beat's list
            if known_then and lease_id not in named and lease_id not in explained and lease.via not in explained:
                self._give_back(lease_id)
        again = tuple(one for one in mine if one in state.leases and state.leases[one].via == command.id)
        repeated = self._takes(again)
        known.idle = max(0, known.idle - len(repeated))
        want = 0 if command.leaving else max(0, command.take - len(repeated))
        if want and not repeated:
            self._drain_unnamed(known)
        serving = self.serve(command.process, 0 if repeated else want, command.id)
        serving.takes = [*repeated, *serving.takes]
        return replace(self._reply(Status.DONE, command.process, serving=serving), lost=lost, stolen=stolen)

    def _renew(self, lease_id: str) -> bool:
        """Give a lease its full time again. One that was asked for and not given yet is not lost, just unknown."""
        lease = self.state.leases.get(lease_id)
        if lease is None or lease.expires_at_ms <= self.now_ms:  # ended, only not swept yet
            return False
        self.state.leases[lease_id] = replace(lease, expires_at_ms=self.now_ms + self.state.rules.lease_ms)
        return True

    def _give_back(self, lease_id: str) -> None:
        """End a lease whose call has not begun: its message returns to its place, and its outcome says nothing."""
        lease = self.state.leases.pop(lease_id, None)
        if lease is not None:
            self.put_back(lease)
            self._bury(lease_id, Status.GONE, "", 0, ())

    def _assert(self, process: str, held: Held) -> bool:
        """Count a call that still runs. Returns False if somebody else has its message."""
        state = self.state
        lease = state.leases.get(held.lease)
        if lease is not None:
            return lease.message is not None or held.message is None
        if self._tombstone(held.lease) is not None:
            return True
        message = held.message
        mine = True
        place = 0
        if message is not None:
            line = (held.home, message.namespace, message.queue)
            mine = self.withdraw(line, message)
            known = state.parked.get((line, message.id))
            place = known.place if known is not None else 0
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
                self._drain(line[1:], DRAIN_BATCH, only=line)

    # -- configure, operate, snapshot ------------------------------------------------------------------------------

    def configure(self, command: Configure, now_ms: int) -> Reply:
        """Publish a process's configuration; the first one makes the epoch."""
        self.begin(now_ms, command.process, -1)
        state = self.state
        state.published[command.process] = command.published
        self.recompute()
        if command.process not in state.processes:
            state.processes[command.process] = Process(alive_until_ms=0)
        state.processes[command.process].alive_until_ms = now_ms + state.rules.lease_ms
        if not state.epoch:
            state.epoch = f"{command.process}@{now_ms}"
            hold = state.rules.heartbeat_ms if command.first_start_hold_ms < 0 else command.first_start_hold_ms
            state.epoch_until_ms = now_ms + (state.rules.lease_ms if command.epoch else hold)
        self.freed = True  # a ceiling may have risen
        return self._reply(Status.DONE, command.process)

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
                    return self._reply(Status.REFUSED_ALIVE, "")
                count = self._drain(command.queue, command.value or DRAIN_BATCH)
            case Action.WITHDRAW:
                self._withdraw_caller(target)
            case Action.FORGET:
                self._bye(target)
            case other:
                assert_never(other)
        serving = self.serve("", 0, "")
        return replace(self._reply(Status.DONE, "", serving=serving), count=count)

    def _forced(self, command: Operate) -> Breaker:
        before = self.breaker(command.target)
        generation = before.generation + 1
        if command.action is Action.OPEN:
            return Breaker(generation=generation, open_until_ms=self.now_ms + command.value, trips=before.trips)
        return Breaker(generation=generation)

    def _drain(self, queue: tuple[str, str], most: int, *, only: Line | None = None) -> int:
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

    def _withdraw_caller(self, lease_id: str) -> None:
        """A waiting caller gives up: it leaves the line, and gives back what it was given meanwhile."""
        for line, waiter in sorted(self.state.parked):
            if waiter == lease_id and line[1:] == ("", ""):
                self.leave(line, waiter)
                del self.state.parked[line, waiter]
        self._give_back(lease_id)

    def _bye(self, process: str) -> None:
        """A process ends: what it still holds goes back at once."""
        mine = sorted(one for one, lease in self.state.leases.items() if lease.process == process and not lease.hold)
        for lease_id in mine:
            self._give_back(lease_id)
        self.forget(process)

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
            for (line, _), parked in state.parked.items():
                if line[0] == endpoint and self._stands(line, _):
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
                if lease.expires_at_ms > now_ms
            },
            processes={process: known.idle for process, known in state.processes.items()},
            lines={line: tuple(sorted(waiters, key=waiters.__getitem__)) for line, waiters in state.lines.items()},
        )

    # -- tombstones and replies ------------------------------------------------------------------------------------

    def _tombstone(self, lease_id: str) -> Tombstone | None:
        tombstone = self.state.tombstones.get(lease_id)
        if tombstone is None or tombstone.until_ms <= self.now_ms:
            return None
        return tombstone

    def _bury(self, lease_id: str, status: Status, reason: str, retry_after_ms: int, takes: tuple[str, ...]) -> None:
        self.state.tombstones[lease_id] = Tombstone(
            status=status,
            until_ms=self.now_ms + self.state.rules.lease_ms,
            reason=reason,
            retry_after_ms=retry_after_ms,
            takes=takes,
        )

    def _repeat(self, tombstone: Tombstone, process: str, idle: int) -> Reply:
        """The same answer again, with the same messages as far as they are still leased."""
        takes = self._takes(tombstone.takes)
        known = self.state.processes.get(process)
        if known is not None and idle >= 0:
            known.idle = max(0, idle - len(takes))
        serving = self.serve(process, 0, "")  # its hold ended when it spoke
        serving.takes = takes
        return self._reply(
            tombstone.status,
            process,
            reason=tombstone.reason,
            retry_after_ms=tombstone.retry_after_ms,
            serving=serving,
        )

    def _takes(self, lease_ids: tuple[str, ...]) -> list[Take]:
        takes = []
        for lease_id in lease_ids:
            lease = self.state.leases.get(lease_id)
            if lease is None or lease.message is None:
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

    def _reply(
        self,
        status: Status,
        process: str,
        *,
        reason: str = "",
        retry_after_ms: int = 0,
        serving: Serving | None = None,
    ) -> Reply:
        if serving is None and self.freed:  # I9: what the sweep freed is given in the same command
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
