"""One process's life line to the store: it beats, renews, reports, takes, and never forgets a release.

A `Heartbeat` serves one host: a Dramatiq worker, or a plain process whose callers ask for permits. It runs two
threads, started by `start` in the process that uses them (never at import, never before a fork): one beats, the
other listens to the process's own channel.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from guard_middleware.core.commands import (
    Action,
    Ask,
    Beat,
    Configure,
    Finish,
    Held,
    Operate,
    ParkAs,
    Reply,
    Status,
    Take,
)
from guard_middleware.errors import GuardError, StoreUnavailable
from guard_middleware.holdings import Holdings, new_id
from guard_middleware.observe import events

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from guard_middleware.core.values import Published
    from guard_middleware.holdings import Holding
    from guard_middleware.store.base import Store

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0
_TIMER_SLACK_S = 0.001
_LISTEN_S = 0.2
_GOODBYE_S = 1.0


class Host(Protocol):
    """Whom a heartbeat serves."""

    worker: str
    """The broker's id of the worker, which names the ack sets; "" for plain processes."""

    def idle(self) -> int:
        """How many threads could run a message now, those already asked for not counted."""
        ...

    def queues(self) -> tuple[tuple[str, str], ...]:
        """The queues consumed now, as (namespace, queue)."""
        ...

    def deliver(self, takes: Iterable[tuple[Take, Holding | None]]) -> None:
        """Run what was handed over; a take without a holding is too old and has no permit."""
        ...

    def beaten(self) -> None:
        """Do what belongs to every beat: called after each one that was answered."""
        ...


class NoWorker:
    """The host of a plain process: callers only."""

    worker = ""

    def idle(self) -> int:
        """No message can be handed over."""
        return 0

    def queues(self) -> tuple[tuple[str, str], ...]:
        """No queue is consumed."""
        return ()

    def deliver(self, takes: Iterable[tuple[Take, Holding | None]]) -> None:
        """Nothing was asked for, so nothing comes."""

    def beaten(self) -> None:
        """Nothing belongs to a beat here."""


class Heartbeat:
    """The commands of one process, with what must accompany each: ids, holdings, timers, resending."""

    def __init__(
        self,
        store: Store,
        published: Callable[[], Published],
        host: Host | None = None,
        *,
        first_start_hold_ms: int = -1,
    ) -> None:
        self.process = new_id()
        self.store = store
        self.host: Host = host or NoWorker()
        self.holdings = Holdings(self.process, self.host.worker)
        self.waiting = False
        rules = published().rules
        self.lease_s = rules.lease_ms / 1000
        self.heartbeat_s = rules.heartbeat_ms / 1000
        self._published = published
        self._first_start_hold_ms = first_start_hold_ms
        self._epoch = ""
        self._woken = threading.Event()
        self._stop = threading.Event()
        self._granted = threading.Condition()
        self._grants: set[str] = set()
        self._beating = threading.RLock()
        self._timer_lock = threading.Lock()
        self._timer_at_s = float("inf")
        self._extra = 0
        self._poked = False
        self._leaving = False
        self._available = True
        self._threads: list[threading.Thread] = []

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Publish, report once, and begin to beat. A store that is away is waited for by the threads."""
        try:
            self.configure()
            self.beat()
        except StoreUnavailable as exc:
            self._unavailable(exc)
        for name, target in (("beat", self._beat_forever), ("wake", self._listen_forever)):
            thread = threading.Thread(target=target, name=f"guard-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def leave(self) -> None:
        """Ask for nothing more and give back what has not begun; renewals go on until `stop`."""
        self._leaving = True
        try:
            self.beat()
        except StoreUnavailable as exc:
            self._unavailable(exc)
            self.poke()

    @property
    def leaving(self) -> bool:
        """Whether the process shuts down."""
        return self._leaving

    def stop(self) -> None:
        """Say goodbye: what is still held goes back at once, and the threads end."""
        self._leaving = True
        self._stop.set()
        self._woken.set()
        with self._granted:
            self._granted.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(timeout=5)
        self._say_goodbye()
        self.store.close()

    def _say_goodbye(self) -> None:
        """Send what was not answered, then the goodbye; again for a moment, since nobody does it later."""
        until_s = time.monotonic() + _GOODBYE_S
        while True:
            try:
                self._resend()
                self.store.operate(Operate(action=Action.FORGET, target=self.process))
            except StoreUnavailable as exc:
                if time.monotonic() > until_s:
                    events.warning("guard.goodbye_failed", error=type(exc).__name__)
                    return
                time.sleep(_FIRST_PAUSE_S)
            else:
                return

    # -- commands --------------------------------------------------------------------------------------------------

    def configure(self) -> None:
        """Publish this process's configuration."""
        reply = self.store.configure(
            Configure(
                process=self.process,
                published=self._published(),
                first_start_hold_ms=self._first_start_hold_ms,
                epoch=self._epoch,
            )
        )
        self._note(reply)

    def admit(self, ask: Ask) -> tuple[Reply, Holding | None]:
        """Ask once; publish first where the store does not know this process or endpoint.

        The id stays outstanding if no answer came: the caller repeats the ask with the same ids, or calls
        `abandon`.

        Raises:
            StoreUnavailable: there was no usable answer.
        """
        self.holdings.expect(ask.lease)
        sent_at_s = time.monotonic()
        reply = self.store.admit(ask)
        if reply.status is Status.UNCONFIGURED:
            self._reconfigure()
            sent_at_s = time.monotonic()
            reply = self.store.admit(ask)
            if reply.status is Status.UNCONFIGURED:
                msg = f"the store still does not know {ask.endpoint!r} after this process has published it"
                raise StoreUnavailable(msg)
        holding = None
        if reply.status is Status.ADMITTED:
            holding = self.holdings.admitted(ask, reply, sent_at_s)
        elif ask.confirm:
            self.holdings.drop(ask.lease)
        self._handle(reply, sent_at_s)
        if reply.status is not Status.WAITING:
            self.holdings.settled(ask.lease)
            with self._granted:
                self._grants.discard(ask.lease)
        return reply, holding

    def _reconfigure(self) -> None:
        self.configure()
        self.beat()

    def abandon(self, command_id: str) -> None:
        """Stop waiting for a command: whatever it was given goes back with the next beat."""
        self.holdings.settled(command_id)
        with self._granted:
            self._grants.discard(command_id)
        self.poke()

    def finish(self, finish: Finish) -> Reply:
        """Release once.

        Raises:
            StoreUnavailable: there was no usable answer; repeat it, or leave it to `finish_later`.
        """
        self.holdings.expect(finish.lease)
        sent_at_s = time.monotonic()
        reply = self.store.finish(finish)
        holding = self.holdings.drop(finish.lease)
        self._handle(reply, sent_at_s)
        self.holdings.settled(finish.lease)
        if holding is not None and holding.stolen:
            return replace(reply, status=Status.STOLEN)
        return reply

    def finish_later(self, finish: Finish) -> None:
        """Leave a finish to the beats, which repeat it until it is answered.

        It parks nothing any more: by then the message has gone another way.
        """
        # Kept first: a lease that nobody names goes back.
        self.holdings.send_later(replace(finish, take=0, idle=-1, park=ParkAs.NO))
        self.holdings.drop(finish.lease)
        self.holdings.settled(finish.lease)
        self.poke()

    def operate_later(self, operation: Operate) -> None:
        """Leave an operation to the next beat, which repeats it until it is answered."""
        self.holdings.send_later(operation)
        self.poke()

    def poke(self, extra: int = 0) -> None:
        """Beat now, and ask for `extra` messages beyond the idle threads."""
        with self._timer_lock:
            self._extra += extra
            self._poked = True
        self._woken.set()

    def wait_granted(self, lease: str, timeout_s: float) -> None:
        """Sleep until a waiting caller's lease is granted, at most `timeout_s` seconds."""
        with self._granted:
            self._granted.wait_for(lambda: lease in self._grants or self._stop.is_set(), timeout_s)
            self._grants.discard(lease)

    # -- beats -----------------------------------------------------------------------------------------------------

    def beat(self, extra: int = 0) -> None:
        """Beat once: renew, report, give back, take; assert again what was lost while its call runs.

        One beat at a time: the store gives back what a beat does not name only if it is older than the beat before.

        Raises:
            StoreUnavailable: there was no usable answer; the next beat names everything again.
        """
        with self._beating:
            given_back = self.holdings.give_back(older_than_s=0 if self._leaving else self.heartbeat_s)
            lost = self._send(self._compose(extra, give_back=given_back))
            if lost:
                for held in lost:
                    events.warning("guard.lease_lost", endpoint=held.endpoint, lease=held.lease)
                self._send(self._compose(0, asserts=lost))
        self.host.beaten()

    def _compose(self, extra: int, *, give_back: tuple[str, ...] = (), asserts: tuple[Held, ...] = ()) -> Beat:
        """A beat that names everything as of now: what is not named goes back."""
        leaving = self._leaving
        idle = 0 if leaving else self.host.idle()
        leases, outstanding = self.holdings.named()
        return Beat(
            process=self.process,
            id=new_id(),
            take=0 if leaving else max(idle, extra),
            idle=idle,
            queues=() if leaving else self.host.queues(),
            worker=self.host.worker,
            leases=leases,
            outstanding=outstanding,
            give_back=give_back,
            asserts=asserts,
            leaving=leaving,
            epoch=self._epoch,
        )

    def _send(self, beat: Beat) -> tuple[Held, ...]:
        sent_at_s = time.monotonic()
        self.holdings.expect(beat.id)
        try:
            reply = self.store.beat(beat)
            if reply.status is Status.UNCONFIGURED:
                self.configure()
                reply = self.store.beat(beat)
            asserts = self.holdings.renewed(beat.leases, reply.lost, sent_at_s)
            if reply.stolen:
                self.holdings.mark_stolen(reply.stolen)
                events.warning("guard.message_taken_over", leases=len(reply.stolen))
            self._handle(reply, sent_at_s)
        finally:
            self.holdings.settled(beat.id)
        return asserts

    def _handle(self, reply: Reply, sent_at_s: float) -> None:
        """Do what every reply asks for: remember the epoch, arm the timer, run what was handed over."""
        self._note(reply)
        if reply.takes:
            new = [take for take in reply.takes if self.holdings.find(take.lease) is None]  # I11: a repeated answer
            self.host.deliver([(take, self.holdings.taken(take, sent_at_s) if take.lease else None) for take in new])

    def _note(self, reply: Reply) -> None:
        if reply.epoch:
            self._epoch = reply.epoch
        if reply.waiting >= 0:
            self.waiting = reply.waiting == 1
        if reply.next_ms >= 0:
            self._arm(time.monotonic() + reply.next_ms / 1000 + _TIMER_SLACK_S)
        if not self._available:
            self._available = True
            events.info("guard.store_back", process=self.process)

    def _arm(self, at_s: float) -> None:
        """Let the beating thread wake at an instant, unless it is awake by then anyway."""
        with self._timer_lock:
            if at_s >= self._timer_at_s:
                return
            self._timer_at_s = at_s
        self._woken.set()

    def _beat_forever(self) -> None:
        next_beat_s = time.monotonic() + self.heartbeat_s
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            with self._timer_lock:
                due_s = min(next_beat_s, self._timer_at_s)
            self._woken.wait(max(0.0, due_s - time.monotonic()))
            self._woken.clear()
            now_s = time.monotonic()
            with self._timer_lock:
                due = self._poked or now_s >= min(next_beat_s, self._timer_at_s)
                extra, self._extra, self._poked = self._extra, 0, False
                if now_s >= self._timer_at_s:
                    self._timer_at_s = float("inf")
            if not due or self._stop.is_set():
                continue
            next_beat_s = now_s + self.heartbeat_s
            try:
                self.beat(extra)
                self._resend()
                pause_s = _FIRST_PAUSE_S
            except StoreUnavailable as exc:
                self._unavailable(exc)
                next_beat_s = now_s + min(pause_s, self.heartbeat_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            except Exception as exc:  # noqa: BLE001  # a life line must not end because one beat went wrong
                events.error("guard.beat_failed", error=type(exc).__name__, detail=_detail(exc))

    def _resend(self) -> None:
        """Repeat the commands that were not answered; their ids make the repetition harmless (I11)."""
        while (command := self.holdings.next_unsent()) is not None:
            self.holdings.postpone(command)
            sent_at_s = time.monotonic()
            reply = self.store.finish(command) if isinstance(command, Finish) else self.store.operate(command)
            self._handle(reply, sent_at_s)
            self.holdings.sent(command)

    def _listen_forever(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._stop.is_set():
            try:
                wakeups = self.store.wakeups(self.process)
                try:
                    self.poke()  # what was missed while nobody listened
                    while not self._stop.is_set():
                        lease = wakeups.get(_LISTEN_S)
                        pause_s = _FIRST_PAUSE_S
                        if lease:
                            with self._granted:
                                self._grants.add(lease)
                                self._granted.notify_all()
                        elif lease is not None:
                            self.poke()
                finally:
                    wakeups.close()
            except Exception as exc:  # noqa: BLE001  # without this thread nobody hears of a notification again
                if isinstance(exc, StoreUnavailable):
                    self._unavailable(exc)
                else:
                    events.error("guard.listening_failed", error=type(exc).__name__)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _unavailable(self, exc: StoreUnavailable) -> None:
        if self._available:
            self._available = False
            events.warning("guard.store_unavailable", error=_detail(exc))


def _detail(exc: BaseException) -> str:
    """An error's own words if they are this package's, which hold no secrets; else only its type."""
    return str(exc) if isinstance(exc, GuardError) else type(exc).__name__
