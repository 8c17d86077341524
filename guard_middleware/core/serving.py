"""Who goes next: the waiting lines of the executable rule (DESIGN section 5 "Take" and section 6, rule 3)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from guard_middleware.core.admission import (
    View,
    endpoint_reason,
    group_reason,
    hopeless,
    impossible,
    inside_floor,
)
from guard_middleware.core.breaker import Phase
from guard_middleware.core.commands import Message, Take
from guard_middleware.core.machine import HOLD_PREFIX, Machine
from guard_middleware.core.values import BACKGROUND_RANK
from guard_middleware.core.verdict import DELAYS, Admit, Delay, Impossible, Reason, Reroute, Verdict

if TYPE_CHECKING:
    from guard_middleware.core.state import Line, Parked

SCAN = 500
"""The most waiters that one command looks at."""
WAKES = 8
"""The most processes that one command notifies."""
PROBE_SCAN = 32
"""How far into each line another probe, or the first whom a release could let go, is looked for."""

_AGED_RANK = -1


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


class Servant(Machine):
    """The part of the machine that decides who goes next."""

    # -- verdicts --------------------------------------------------------------------------------------------------

    def place_call(self, home: str, parked: Parked, *, aged: bool = False) -> tuple[str, Reason | None, bool]:
        """Choose the endpoint for a call: its own, or the fallback while its own breaker is not closed.

        Returns:
            The endpoint; why it would not admit the call, if so; and whether only the GPU group stands against it.
        """
        primary = self.view(home)
        if primary is None:
            return home, Reason.PAUSED, False
        reason, by_group = self._own(primary, parked, aged=aged)
        if reason is None or primary.paused or primary.phase(self.now_ms) is Phase.CLOSED:
            return home, reason, by_group
        fallback = self.view(primary.spec.fallback)
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

    def decide(self, home: str, parked: Parked, process: str, *, asking: bool) -> Verdict:
        """The whole rule for a call that has arrived now.

        Args:
            home: the endpoint asked for.
            parked: its rank, cost and place.
            process: who asks.
            asking: the asking thread could run a waiter of its own queues instead.
        """
        view = self.view(home)
        if view is not None and impossible(view, parked.cost):
            return Impossible()
        if self.recovering():
            return Delay(reason=Reason.RECOVERING, retry_after_ms=self.state.epoch_until_ms - self.now_ms)
        endpoint, reason, by_group = self.place_call(home, parked)
        if (reason is None or by_group) and self.queue_ahead(home, endpoint, parked, process, asking=asking):
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

    # -- who is ahead ------------------------------------------------------------------------------------------------

    def queue_ahead(self, home: str, endpoint: str, parked: Parked, process: str, *, asking: bool) -> bool:
        """Rule 3: whether a takeable waiter goes before this call."""
        state = self.state
        asker = process if asking else ""
        target = self.view(endpoint)
        if target is None:
            return False
        for line in state.lines:
            if line[0] in (home, endpoint) or self._falls_back(line[0], endpoint):
                if self._before(line, parked, asker) and self._would_go(line):
                    return True
            elif (
                target.group is not None
                and not inside_floor(target, parked.cost)
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
            if not gone and (reason is None or not self._stuck(line[0], endpoint, parked, aged=False)):
                return waiter, parked
        return ordered[0], self.state.parked[line, ordered[0]]

    def _before(self, line: Line, parked: Parked, asker: str) -> bool:
        """Whether the first of a line goes before this call, and somebody idle could run it."""
        waiter, head = self._head(line)
        key = (_AGED_RANK, head.place) if self.aged_waiter(line[0]) == (line, waiter) else head.key
        return key < parked.key and self.runner(line, head, asker) != ""

    def _would_go(self, line: Line) -> bool:
        """Whether the endpoint would admit the first of its line, or keeps its free units for that one's cost."""
        waiter, head = self._head(line)
        aged = self.aged_waiter(line[0]) == (line, waiter)
        endpoint, reason, by_group = self.place_call(line[0], head, aged=aged)
        if reason is None:
            return True
        if self._stuck(line[0], endpoint, head, aged=aged):
            return False
        return by_group or (reason in (Reason.ENDPOINT_FULL, Reason.RESERVED) and head.cost > 1)

    def _blocked_by_group(self, line: Line) -> bool:
        """Whether only the GPU group's budget stands against the first of a line, and a release can help it."""
        waiter, head = self._head(line)
        aged = self.aged_waiter(line[0]) == (line, waiter)
        endpoint, _, by_group = self.place_call(line[0], head, aged=aged)
        return by_group and not self._stuck(line[0], endpoint, head, aged=aged)

    def _stuck(self, home: str, endpoint: str, parked: Parked, *, aged: bool) -> bool:
        """Whether no release could let a waiter go, at its home or at the endpoint chosen instead."""
        views = (self.view(one) for one in (home, endpoint))
        return any(view is not None and self._hopeless(view, parked, aged=aged) for view in views)

    def _hopeless(self, view: View, parked: Parked, *, aged: bool) -> bool:
        return hopeless(view, rank=_AGED_RANK if aged else parked.rank, cost=parked.cost, now_ms=self.now_ms)

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
            if view is None or not self._hopeless(view, state.parked[line, waiter], aged=True):
                return line, waiter
        return None

    # -- handing out -------------------------------------------------------------------------------------------------

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
        if reason is not None and self._stuck(line[0], endpoint, parked, aged=aged):
            serving.passed.add((line, waiter))
            home = self.view(line[0])
            mine = runner == serving.process and serving.want > 0 and line[1:] != ("", "")
            if mine and home is not None and impossible(home, parked.cost):
                self._hand_over(serving, line, waiter)
            return
        if by_group and view is not None:
            serving.claimed_groups.add(view.spec.group)
        if reason is not None or view is None:
            serving.closed_endpoints.add(line[0])
            return
        if view.group is not None and view.spec.group in serving.claimed_groups and not inside_floor(view, parked.cost):
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
            if 0 < parked.deadline_ms <= self.now_ms and line[1:] in known.queues and self._stands(line, waiter)
        )
        for _, line, waiter in old[: serving.want]:
            self._hand_over(serving, line, waiter)

    def _hand_over(self, serving: Serving, line: Line, waiter: str) -> None:
        """Give a message that can never run to the asking process, without a permit: its broker ends it."""
        self.leave(line, waiter)
        parked = self.state.parked.pop((line, waiter))
        payload = self.broker.payload(line[1:], waiter)
        if payload is None:
            return
        worker = self.state.processes[serving.process].worker
        self.broker.ack_set(Message(namespace=line[1], queue=line[2], id=waiter, worker=worker)).add(waiter)
        self._use_thread(serving)
        serving.takes.append(
            Take(
                lease="",
                endpoint=line[0],
                home=line[0],
                generation=0,
                probe=False,
                expires_at_ms=0,
                rank=parked.rank,
                cost=parked.cost,
                queue=line[1:],
                message_id=waiter,
                payload=payload,
            )
        )

    def _stands(self, line: Line, waiter: str) -> bool:
        return waiter in self.state.lines.get(line, {}) or (line, waiter) in self.state.held_back

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
