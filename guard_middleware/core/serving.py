"""Who goes next: gives free permits to the best waiters that somebody idle can run (DESIGN section 5 "Take", I8, I9).

The counterpart of `include/serve.lua`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from guard_middleware.core.admission import never_fits, takes_from_others
from guard_middleware.core.breaker import Phase
from guard_middleware.core.commands import Message, Take
from guard_middleware.core.machine import HOLD_PREFIX
from guard_middleware.core.values import NOWHERE
from guard_middleware.core.waiting import PROBE_SCAN, Room

if TYPE_CHECKING:
    from guard_middleware.core.state import Line, Parked

SCAN = 500
"""The most waiters that one command looks at."""
WAKES = 8
"""The most processes that one command notifies."""


@dataclass(slots=True)
class Serving:
    """What one command has handed out so far."""

    process: str
    want: int
    via: str
    takes: list[Take] = field(default_factory=list)
    woken: list[str] = field(default_factory=list)
    waiting: int = 0
    closed_endpoints: set[str] = field(default_factory=set)
    claimed_groups: set[str] = field(default_factory=set)
    passed: set[tuple[Line, str]] = field(default_factory=set)
    skipped: set[Line] = field(default_factory=set)


class Servant(Room):
    """The part of the machine that hands permits out."""

    def serve(self, process: str, want: int, via: str) -> Serving:
        """Give free permits to the best waiters that somebody idle can run (I8, I9).

        Args:
            process: who asks, with `want` idle threads.
            want: how many messages it can run.
            via: id of the command; the new leases remember it, so that a repeat finds them.
        """
        serving = Serving(process=process, want=want, via=via)
        if self.recovering():
            return serving
        self._hand_over_old(serving)
        for endpoint in sorted({line[0] for line in self.state.lines}):
            aged = self.aged_waiter(endpoint)
            if aged is not None:
                self._attempt(serving, *aged, aged=True)
        for _ in range(SCAN):
            candidate = self._next(serving)
            if candidate is None:
                break
            self._attempt(serving, *candidate, aged=False)
        return serving

    def _next(self, serving: Serving) -> tuple[Line, str] | None:
        """The best waiter among the lines that are still open in this command."""
        best: tuple[tuple[int, int], Line, str] | None = None
        for line, waiters in self.state.lines.items():
            if line in serving.skipped or line[0] in serving.closed_endpoints:
                continue
            left = [waiter for waiter in waiters if (line, waiter) not in serving.passed]
            if left:
                waiter = min(left, key=waiters.__getitem__)
                if best is None or waiters[waiter] < best[0]:
                    best = (waiters[waiter], line, waiter)
        return None if best is None else best[1:]

    def _attempt(self, serving: Serving, line: Line, waiter: str, *, aged: bool) -> None:
        """Let one waiter go, or close what stands against it for the rest of this command."""
        parked = self.state.parked[line, waiter]
        runner = self.runner(line, parked, serving.process if serving.want > 0 else "")
        if not runner:
            self._nobody(serving, line, waiter)
            return
        endpoint, reason, by_group = self.place_call(line[0], parked, aged=aged)
        view = self.view(endpoint)
        if reason is not None and not self.release_helps(line[0], endpoint, parked, aged=aged):
            serving.passed.add((line, waiter))
            home = self.view(line[0])
            mine = runner == serving.process and serving.want > 0 and line[1:] != ("", "")
            if mine and home is not None and never_fits(home, parked.cost):
                self._take(serving, line, waiter, parked, NOWHERE)
            return
        if by_group and view is not None:
            serving.claimed_groups.add(view.spec.group)
        if reason is not None or view is None:
            serving.closed_endpoints.add(line[0])
            return
        if view.spec.group in serving.claimed_groups and takes_from_others(view, parked.cost):
            serving.closed_endpoints.add(line[0])
            return
        if parked.overloaded and view.phase(self.now_ms) is Phase.HALF_OPEN:
            other = self._other_probe(serving, line[0], endpoint)
            if other is not None:
                line, waiter, runner = other
                parked = self.state.parked[line, waiter]
        self._let_go(serving, line, waiter, parked, endpoint, runner)

    def _nobody(self, serving: Serving, line: Line, waiter: str) -> None:
        """Nobody idle can run this line now; a caller whose process is gone leaves it."""
        if line[1:] == ("", ""):
            self.leave(line, waiter)
            self.state.parked.pop((line, waiter), None)
            return
        serving.skipped.add(line)
        known = self.state.processes.get(serving.process)
        if known is not None and line[1:] in known.queues:
            _, reason, _ = self.place_call(line[0], self.state.parked[line, waiter])
            serving.waiting = 1 if reason is None else serving.waiting

    def _other_probe(self, serving: Serving, home: str, endpoint: str) -> tuple[Line, str, str] | None:
        """The best takeable waiter of `home` that `endpoint` would admit and that has not seen a server shed load."""
        first = serving.process if serving.want > 0 else ""
        found = []
        for line, waiters in self.state.lines.items():
            if line[0] != home:
                continue
            for waiter in sorted(waiters, key=waiters.__getitem__)[:PROBE_SCAN]:
                parked = self.state.parked[line, waiter]
                runner = "" if parked.overloaded else self.runner(line, parked, first)
                if runner and self.place_call(home, parked)[:2] == (endpoint, None):
                    found.append((parked.key, line, waiter, runner))
                    break
        return min(found)[1:] if found else None

    def _let_go(self, serving: Serving, line: Line, waiter: str, parked: Parked, endpoint: str, runner: str) -> None:
        if line[1:] == ("", ""):
            self.leave(line, waiter)
            del self.state.parked[line, waiter]
            self.grant(waiter, self.new_lease(endpoint, line[0], runner, parked, None))
            self._wake(serving, runner)
        elif runner == serving.process and serving.want > 0:
            self._take(serving, line, waiter, parked, endpoint)
        else:
            if len(serving.woken) >= WAKES:
                serving.closed_endpoints.add(line[0])
                return
            self.grant(HOLD_PREFIX + runner, self.new_lease(endpoint, line[0], runner, parked, None, hold=True))
            self._wake(serving, runner)
            serving.passed.add((line, waiter))

    def _use_thread(self, serving: Serving) -> None:
        """One idle thread of the asking process has something to run now."""
        known = self.state.processes[serving.process]
        known.idle = max(0, known.idle - 1)
        serving.want -= 1

    def _wake(self, serving: Serving, process: str) -> None:
        if process not in serving.woken:
            serving.woken.append(process)

    def _take(self, serving: Serving, line: Line, waiter: str, parked: Parked, endpoint: str) -> None:
        """Hand a message over to the asking process: to run at an endpoint, or at `NOWHERE`, for its broker to end."""
        payload = self.broker.payload(line[1:], waiter)
        self.leave(line, waiter)
        if payload is None:  # flushed: a ghost never counts as a take
            del self.state.parked[line, waiter]
            return
        message = Message(
            namespace=line[1], queue=line[2], id=waiter, worker=self.state.processes[serving.process].worker
        )
        self.broker.ack_set(message).add(waiter)
        self.state.takes += 1
        lease_id = f"{self.state.epoch}:{self.state.takes}"  # not made of `via`: it would grow with each take
        fresh = self.new_lease(endpoint, line[0], serving.process, parked, message)
        lease, probe = self.grant(lease_id, replace(fresh, via=serving.via))
        self._use_thread(serving)
        serving.takes.append(
            Take(
                lease=lease_id,
                endpoint=endpoint,
                home=line[0],
                generation=lease.generation,
                probe=probe,
                expires_at_ms=lease.expires_at_ms,
                rank=parked.rank,
                cost=parked.cost,
                queue=line[1:],
                message_id=waiter,
                payload=payload,
            )
        )

    def _hand_over_old(self, serving: Serving) -> None:
        """Hand waiters that are too old to their broker's age limit, without a permit."""
        known = self.state.processes.get(serving.process)
        if known is None:
            return
        old = sorted(
            (parked.deadline_ms, line, waiter)
            for (line, waiter), parked in self.state.parked.items()
            if 0 < parked.deadline_ms <= self.now_ms and line[1:] in known.queues and self.stands(line, waiter)
        )
        for _, line, waiter in old[: serving.want]:
            self._take(serving, line, waiter, self.state.parked[line, waiter], NOWHERE)
