"""The waiting room: who waits, who could run it, and who is ahead of whom (DESIGN section 6, rule 3).

The counterpart of `include/waiting.lua`, and of the choice of an endpoint at the end of `include/rule.lua`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard_middleware.core.admission import endpoint_reason, fits_alone, group_reason, never_fits, takes_from_others
from guard_middleware.core.breaker import Phase
from guard_middleware.core.machine import HOLD_PREFIX, Machine
from guard_middleware.core.values import BACKGROUND_RANK
from guard_middleware.core.verdict import DELAYS, Admit, Delay, Impossible, Reason, Reroute, Verdict

if TYPE_CHECKING:
    from guard_middleware.core.admission import View
    from guard_middleware.core.state import Line, Parked

PROBE_SCAN = 32
"""How far into each line another probe, or the first whom a release could let go, is looked for."""

_AGED_RANK = -1


class Room(Machine):
    """The part of the machine that decides on a call, in view of those that wait."""

    # -- verdicts -----------------------------------------------------------------------------------------------------

    def place_call(
        self, home: str, parked: Parked, *, aged: bool = False, parent: str = ""
    ) -> tuple[str, Reason | None, bool]:
        """Choose the endpoint for a call: its own, or the fallback while its own breaker is not closed.

        Args:
            home: the endpoint asked for.
            parked: its rank, cost and place.
            aged: its turn has come by age.
            parent: the lease under which it is made, "" for none.

        Returns:
            The endpoint; why it would not admit the call, if so; and whether only the GPU group stands against it.
        """
        primary = self.view(home, parent)
        if primary is None:
            return home, Reason.PAUSED, False
        reason, by_group = self._own(primary, parked, aged=aged)
        if reason is None or primary.paused or primary.phase(self.now_ms) is Phase.CLOSED:
            return home, reason, by_group
        fallback = self.view(primary.spec.fallback, parent)
        if fallback is None:
            return home, reason, by_group
        return primary.spec.fallback, *self._own(fallback, parked, aged=aged)

    def _own(self, view: View, parked: Parked, *, aged: bool) -> tuple[Reason | None, bool]:
        call = {"rank": parked.rank, "cost": parked.cost}
        reason = endpoint_reason(view, **call, aged=aged, now_ms=self.now_ms)
        if reason is not None:
            return reason, False
        reason = group_reason(view, **call, aged=aged, now_ms=self.now_ms)
        return reason, reason is not None

    def decide(self, home: str, parked: Parked, process: str, *, asking: bool, parent: str = "") -> Verdict:
        """The whole rule for a call that has arrived now.

        Args:
            home: the endpoint asked for.
            parked: its rank, cost and place.
            process: who asks.
            asking: the asking thread could run a waiter of its own queues instead.
            parent: the lease under which the call is made, "" for none.
        """
        view = self.view(home)
        if view is not None and never_fits(view, parked.cost):
            return Impossible()
        if self.recovering():
            return Delay(reason=Reason.RECOVERING, retry_after_ms=self.state.epoch_until_ms - self.now_ms)
        endpoint, reason, by_group = self.place_call(home, parked, parent=parent)
        target = self.view(endpoint, parent)
        if (reason is None or by_group) and self.queue_ahead(home, target, parked, process if asking else ""):
            reason = Reason.QUEUE_AHEAD
        if reason is None:
            return Admit(endpoint=endpoint)
        if reason in DELAYS:
            return Delay(reason=reason, retry_after_ms=self.wait_ms(endpoint, reason))
        return Reroute(reason=reason, retry_after_ms=self.step_ms(endpoint))

    def wait_ms(self, endpoint: str, reason: Reason) -> int:
        """How long a `Delay` lasts at least, as far as is known, in milliseconds."""
        breaker = self.breaker(endpoint)
        if reason is Reason.BREAKER_OPEN:
            return breaker.open_until_ms - self.now_ms
        if reason is Reason.PROBING:
            mean = self.state.means.get(endpoint, 0) or 1_000
            return max(1, min(mean, breaker.probe_until_ms - self.now_ms))
        return self.state.rules.heartbeat_ms

    def step_ms(self, endpoint: str) -> int:
        """How often a permit of this endpoint becomes free, in milliseconds: mean call over limit."""
        view = self.view(endpoint)
        mean = self.state.means.get(endpoint, 0) or 1_000
        return max(1, mean // max(1, view.limit() if view else 1))

    # -- who is ahead -------------------------------------------------------------------------------------------------

    def queue_ahead(self, home: str, target: View | None, parked: Parked, asker: str) -> bool:
        """Rule 3: whether a takeable waiter goes before this call.

        Args:
            home: the endpoint asked for.
            target: the endpoint at which it would start.
            parked: its rank, cost and place.
            asker: the process whose asking thread could run a waiter of its own queues instead, "" for none.
        """
        state = self.state
        if target is None:
            return False
        lent = target.group is not None and parked.cost <= target.group.lent
        for line in state.lines:
            if line[0] in (home, target.spec.id) or self._falls_back(line[0], target.spec.id):
                if self._before(line, parked, asker) and self._would_go(line, needs_budget=not lent):
                    return True
            elif (
                target.group is not None
                and takes_from_others(target, parked.cost)
                and state.specs.get(line[0]) is not None
                and state.specs[line[0]].group == target.spec.group
                and self._before(line, parked, asker)
                and self._blocked_by_group(line)
            ):
                return True
        return False

    def _falls_back(self, home: str, endpoint: str) -> bool:
        """Whether the waiters of `home` count as standing at `endpoint` too, because its breaker is not closed."""
        view = self.view(home)
        return view is not None and view.spec.fallback == endpoint and view.phase(self.now_ms) is not Phase.CLOSED

    def _before(self, line: Line, parked: Parked, asker: str) -> bool:
        """Whether the first of a line goes before this call, and somebody idle could run it."""
        waiter, head = self._head(line)
        key = (_AGED_RANK, head.place) if self.aged_waiter(line[0]) == (line, waiter) else head.key
        return key < parked.key and self.runner(line, head, asker) != ""

    def _would_go(self, line: Line, *, needs_budget: bool) -> bool:
        """Whether the endpoint would admit the first of its line, or keeps for it what this call needs, too."""
        waiter, head = self._head(line)
        aged = self.aged_waiter(line[0]) == (line, waiter)
        endpoint, reason, by_group = self.place_call(line[0], head, aged=aged)
        if reason is None:
            return True
        if not self.release_helps(line[0], endpoint, head, aged=aged):
            return False
        if by_group:
            return needs_budget
        return reason in (Reason.ENDPOINT_FULL, Reason.RESERVED) and head.cost > 1

    def _blocked_by_group(self, line: Line) -> bool:
        """Whether only the GPU group's budget stands against the first of a line, and a release can help it."""
        waiter, head = self._head(line)
        aged = self.aged_waiter(line[0]) == (line, waiter)
        endpoint, _, by_group = self.place_call(line[0], head, aged=aged)
        return by_group and self.release_helps(line[0], endpoint, head, aged=aged)

    def _head(self, line: Line) -> tuple[str, Parked]:
        """The first of a line that somebody waits for and that a release could let go.

        If the turn of an aged background waiter has come, it is that one.
        """
        waiters = self.state.lines[line]
        aged = self.aged_waiter(line[0])
        if aged is not None and aged[0] == line:
            return aged[1], self.state.parked[aged]
        ordered = sorted(waiters, key=lambda one: waiters[one])[:PROBE_SCAN]
        for waiter in ordered:
            parked = self.state.parked[line, waiter]
            gone = line[1:] == ("", "") and parked.process not in self.state.processes
            endpoint, reason, _ = self.place_call(line[0], parked)
            if not gone and (reason is None or self.release_helps(line[0], endpoint, parked, aged=False)):
                return waiter, parked
        return ordered[0], self.state.parked[line, ordered[0]]

    def aged_waiter(self, endpoint: str) -> tuple[Line, str] | None:
        """The background waiter whose turn it is because none has started for the ageing time, if there is one."""
        state = self.state
        if self.now_ms - state.background_at.get(endpoint, self.now_ms) < state.rules.ageing_ms:
            return None
        waiting = [
            (place, line, waiter)
            for line, waiters in state.lines.items()
            if line[0] == endpoint
            for waiter, (rank, place) in waiters.items()
            if rank >= BACKGROUND_RANK
        ]
        view = self.view(endpoint)
        for _, line, waiter in sorted(waiting)[:PROBE_SCAN]:
            if view is None or self._fits_alone(view, state.parked[line, waiter], aged=True):
                return line, waiter
        return None

    def release_helps(self, home: str, endpoint: str, parked: Parked, *, aged: bool) -> bool:
        """Whether releases could let a waiter go, at its home and at the endpoint chosen instead."""
        views = (self.view(one) for one in (home, endpoint))
        return all(view is None or self._fits_alone(view, parked, aged=aged) for view in views)

    def _fits_alone(self, view: View, parked: Parked, *, aged: bool) -> bool:
        return fits_alone(view, rank=_AGED_RANK if aged else parked.rank, cost=parked.cost, now_ms=self.now_ms)

    # -- who could run it ---------------------------------------------------------------------------------------------

    def runner(self, line: Line, parked: Parked, first: str) -> str:
        """Who could run a waiter: a process with an idle thread and no unserved hold that consumes its queue.

        Args:
            line: the waiter's line.
            parked: its record; a waiting caller runs in its own process as long as that is alive.
            first: the process that asks with an idle thread of its own, "" for none.

        Returns:
            A process id, "" for nobody.
        """
        processes = self.state.processes
        if line[1:] == ("", ""):
            return parked.process if parked.process in processes else ""
        if first in processes and line[1:] in processes[first].queues:
            return first
        able = [
            (-known.idle, process)
            for process, known in processes.items()
            if known.idle > 0 and line[1:] in known.queues and HOLD_PREFIX + process not in self.state.leases
        ]
        return min(able)[1] if able else ""
