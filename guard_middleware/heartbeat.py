"""One process's life line to the store: it beats, renews, reports, takes, and never forgets a release.

A `Heartbeat` serves one host: a Dramatiq worker, or a plain process whose callers ask for permits. Its two threads
are started by `start` in the process that uses them (never at import, never before a fork).
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, assert_never

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
)
from guard_middleware.errors import StoreUnavailable
from guard_middleware.holdings import Holdings, new_id
from guard_middleware.host import NoWorker
from guard_middleware.observe import events
from guard_middleware.steps import Hear, Publish, perform
from guard_middleware.threads import Beats, Listening

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from guard_middleware.core.values import Published
    from guard_middleware.holdings import Holding
    from guard_middleware.host import Host
    from guard_middleware.steps import Step
    from guard_middleware.store.base import Store

_GOODBYE_S = 1.0
_GOODBYE_PAUSE_S = 0.05
_TELL_MS = 5


class Heartbeat:
    """The commands and the beats of one process, with what must accompany each: ids, holdings, resending.

    Attributes:
        process: id of this process.
        host: whom it serves.
        holdings: what this process holds.
        somebody_waits: anywhere, as the last reply said.
        waiting: one that this process could run would go if it had an idle thread, as the last reply that told said.
    """

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
        self.somebody_waits = False
        self.waiting = False
        self._told_idle = -1
        rules = published().rules
        self.lease_s = rules.lease_ms / 1000
        self.heartbeat_s = rules.heartbeat_ms / 1000
        self._published = published
        self._first_start_hold_ms = first_start_hold_ms
        self._epoch = ""
        self._beating = threading.RLock()
        self._numbers = itertools.count(1)
        self._given_up: SimpleQueue[Finish | Operate] = SimpleQueue()
        self._leaving = False
        self._stopped = False
        self._available = True
        self._beats = Beats(self._beat_and_resend, every_s=self.heartbeat_s, unavailable=self._unavailable)
        self._listening = Listening(
            lambda: self.store.wakeups(self.process), poke=self.poke, unavailable=self._unavailable
        )

    # -- life ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Publish, report once, and begin to beat. A store that is away is waited for by the threads."""
        try:
            self.configure()
            self.beat()
        except StoreUnavailable as exc:
            self._unavailable(exc)
        self._beats.start()
        self._listening.start()

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
        self._beats.stop()
        self._listening.stop()
        self._beats.join()
        self._listening.join()
        if self._beating.acquire(timeout=_GOODBYE_S):  # a beat that is still under way could publish after the goodbye
            self._stopped = True
            self._beating.release()
        self._say_goodbye()
        self.store.close()

    def _say_goodbye(self) -> None:
        """Send what was not answered, then the goodbye; again for a moment, since nobody does it later."""
        until_s = time.monotonic() + _GOODBYE_S
        self._take_over()
        while True:
            try:
                self._resend()
                self.store.operate(Operate(action=Action.FORGET, target=self.process))
            except StoreUnavailable as exc:
                if time.monotonic() > until_s:
                    events.warning("guard.goodbye_failed", error=type(exc).__name__)
                    return
                time.sleep(_GOODBYE_PAUSE_S)
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

    def carry_out(self, step: Step) -> Any:
        """Do what a step of `asking` or `finishing` wants, in this thread."""
        match step:
            case Ask():
                return self.store.admit(step)
            case Finish():
                return self.store.finish(step)
            case Operate():
                return self.store.operate(step)
            case Publish():
                self.configure()
                return self.beat()
            case Hear():  # it belongs to the faces
                raise NotImplementedError
            case other:
                assert_never(other)

    def asking(self, ask: Ask) -> Generator[Step, Any, tuple[Reply, Holding | None]]:
        """Ask once; publish first where the store does not know this process or endpoint.

        The id stays outstanding if no answer came: the caller repeats the ask with the same ids, or calls
        `abandon`.

        Raises:
            StoreUnavailable: there was no usable answer.
        """
        self.holdings.expect(ask.lease)
        sent_at_s = time.monotonic()
        reply = yield ask
        if reply.status is Status.UNCONFIGURED:
            if self._leaving:  # it would be taken for alive again, after its goodbye
                msg = "the process has said goodbye, and asks for nothing more"
                raise StoreUnavailable(msg)
            yield Publish()
            sent_at_s = time.monotonic()
            reply = yield ask
            if reply.status is Status.UNCONFIGURED:
                msg = f"the store still does not know {ask.endpoint!r} after this process has published it"
                raise StoreUnavailable(msg)
        holding = None
        if reply.status is Status.ADMITTED:
            holding = self.holdings.admitted(ask, reply, sent_at_s)
        elif ask.confirm:
            self.holdings.drop(ask.lease)
        is_free = ask.idle >= 0 and reply.status is Status.PARKED  # so is the thread that asked
        self._handle(reply, sent_at_s, ask.idle + ask.take if is_free else ask.idle)
        if reply.status is not Status.WAITING:
            self.holdings.settled(ask.lease)
        return reply, holding

    def admit(self, ask: Ask) -> tuple[Reply, Holding | None]:
        """Ask once, in this thread: see `asking`."""
        return perform(self.asking(ask), self.carry_out)

    def operating(self, operation: Operate) -> Generator[Step, Any, None]:
        """Operate now. If that cannot be done, or the process leaves and waits for nothing any more, a beat does it."""
        if self._leaving:
            return self.operate_later(operation)
        sent_at_s = time.monotonic()
        try:
            self._handle((yield operation), sent_at_s)
        except StoreUnavailable:
            self.operate_later(operation)

    def abandon(self, command_id: str) -> None:
        """Stop waiting for a command: whatever it was given goes back with the next beat."""
        self.holdings.settled(command_id)
        self.poke()

    def finishing(self, finish: Finish) -> Generator[Step, Any, Reply]:
        """Release once.

        Raises:
            StoreUnavailable: there was no usable answer; repeat it, or leave it to `finish_later`.
        """
        self.holdings.expect(finish.lease, finish.take)
        sent_at_s = time.monotonic()
        reply: Reply = yield finish
        holding = self.holdings.drop(finish.lease)
        self._handle(reply, sent_at_s, finish.idle)
        self.holdings.settled(finish.lease)
        if holding is not None and holding.stolen:
            return replace(reply, status=Status.STOLEN)
        return reply

    def finish(self, finish: Finish) -> Reply:
        """Release once, in this thread: see `finishing`."""
        return perform(self.finishing(finish), self.carry_out)

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
        self._beats.poke(extra)

    def give_up(self, command: Finish | Operate) -> None:
        """Leave to a beat what nobody does any more. Safe where an object is collected: it takes no lock."""
        self._given_up.put(command)

    def hear(self, lease: str, granted: Callable[[], object]) -> None:
        """Let a waiting caller hear that its lease was granted, or that the process stops; from another thread."""
        self._listening.hear(lease, granted)

    def deafen(self, lease: str) -> None:
        """The caller waits no more."""
        self._listening.deafen(lease)

    # -- beats -----------------------------------------------------------------------------------------------------

    def beat(self, extra: int = 0) -> None:
        """Beat once: renew, report, give back, take; assert again what was lost while its call runs.

        One beat at a time: the store gives back what a beat does not name only if it is older than the beat before.

        Raises:
            StoreUnavailable: there was no usable answer; the next beat names everything again.
        """
        with self._beating:
            if self._stopped:
                return
            given_back = self.holdings.give_back(older_than_s=0 if self._leaving else self.heartbeat_s)
            lost = self._send(self._compose(extra, give_back=given_back))
            if lost:
                for held in lost:
                    events.warning("guard.lease_lost", endpoint=held.endpoint, lease=held.lease)
                self._send(self._compose(0, asserts=lost))
        self.host.beaten()

    def _beat_and_resend(self, extra: int) -> None:
        self._take_over()
        self.beat(extra)
        self._resend()

    def _take_over(self) -> None:
        """Do for those who gave up what they cannot do."""
        while True:
            try:
                command = self._given_up.get_nowait()
            except Empty:
                return
            if isinstance(command, Operate):  # an ask that was thrown away
                self.holdings.settled(command.target)
                self.operate_later(command)
            else:
                events.warning("guard.permit_abandoned", endpoint=command.home)
                self.finish_later(command)

    def _compose(self, extra: int, *, give_back: tuple[str, ...] = (), asserts: tuple[Held, ...] = ()) -> Beat:
        """A beat that names everything as of now: what is not named goes back."""
        leaving = self._leaving
        idle = 0 if leaving else self.host.idle()
        leases, outstanding = self.holdings.named()
        in_hand = self.holdings.in_hand()
        return Beat(
            process=self.process,
            id=new_id(),
            number=next(self._numbers),
            take=0 if leaving else max(idle - self.holdings.coming(), min(extra, self.host.threads() - in_hand), 0),
            idle=idle,
            queues=() if leaving else self.host.queues(),
            worker=self.host.worker,
            leases=leases,
            outstanding=outstanding,
            give_back=give_back,
            asserts=asserts,
            leaving=leaving,
        )

    def _send(self, beat: Beat) -> tuple[Held, ...]:
        sent_at_s = time.monotonic()
        try:
            self.holdings.expect(beat.id, beat.take)
            reply = self.store.beat(beat)
            if reply.status is Status.UNCONFIGURED:
                self.configure()
                reply = self.store.beat(beat)
            asserts = self.holdings.renewed(beat.leases, reply.lost, sent_at_s)
            if reply.stolen:
                self.holdings.mark_stolen(reply.stolen)
                events.warning("guard.message_taken_over", leases=len(reply.stolen))
            self._handle(reply, sent_at_s, beat.idle)
        finally:
            self.holdings.settled(beat.id)
        self._look_again()
        return asserts

    def _look_again(self) -> None:
        """Beat once more if a thread has become idle since a command was made: nobody else says so."""
        if self.waiting and not self._leaving and self.host.idle() > self.holdings.coming():
            self.poke()

    def thread_is_idle(self) -> None:
        """A thread becomes idle without a command that tells of it: if the store knows of none, it is told soon.

        Otherwise a permit that somebody frees meanwhile would wait for the next beat. Only while somebody waits.
        """
        if self._told_idle == 0 and not self._leaving and self.host.idle() > 0:
            self._beats.beat_in(_TELL_MS)

    def _handle(self, reply: Reply, sent_at_s: float, idle: int = -1) -> None:
        """Do what every reply asks for: remember the epoch, set the timer, run what was handed over.

        Args:
            reply: what was answered.
            sent_at_s: when the command was sent, as monotonic time.
            idle: how many threads it said were idle, -1 for nothing.
        """
        self._note(reply)
        if idle >= 0:
            self._told_idle = max(0, idle - len(reply.takes))
        if reply.takes:
            new = [take for take in reply.takes if self.holdings.is_new(take.lease)]  # I11: a repeated answer
            self.host.deliver([(take, self.holdings.taken(take, sent_at_s)) for take in new])

    def _note(self, reply: Reply) -> None:
        if reply.epoch:
            self._epoch = reply.epoch
        if reply.waiting >= 0:
            self.waiting = reply.waiting == 1
        self.somebody_waits = reply.next_ms >= 0
        if reply.next_ms >= 0:
            self._beats.beat_in(reply.next_ms)
        if not self._available:
            self._available = True
            events.info("guard.store_back", process=self.process)

    def _resend(self) -> None:
        """Repeat the commands that were not answered; their ids make the repetition harmless (I11)."""
        while (command := self.holdings.next_unsent()) is not None:
            self.holdings.postpone(command)
            sent_at_s = time.monotonic()
            reply = self.store.finish(command) if isinstance(command, Finish) else self.store.operate(command)
            self._handle(reply, sent_at_s)
            self.holdings.sent(command)
            self._look_again()

    def _unavailable(self, exc: StoreUnavailable) -> None:
        if self._available:
            self._available = False
            events.warning("guard.store_unavailable", error=str(exc))
