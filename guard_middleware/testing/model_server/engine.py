"""The engine behind all endpoints of a host: it lets calls run or wait, works on them at its pace, and may die."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard_middleware.testing.model_server import payloads
from guard_middleware.testing.model_server.call import EMBEDDINGS_PATH, Call
from guard_middleware.testing.model_server.faults import break_stream
from guard_middleware.testing.model_server.memory import Host, Seating
from guard_middleware.testing.model_server.pace import Pacer
from guard_middleware.testing.model_server.script import STREAM_FAULTS

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

    from guard_middleware.testing.model_server.config import ServerConfig
    from guard_middleware.testing.model_server.ledger import Ledger


class Engine:
    """Works on calls until they are answered.

    Args:
        loop: for the time, and for one timer.
        config: of the server.
        ledger: told how many calls run and wait.
        on_death: called when a call has taken the host down; it ends all open calls.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, config: ServerConfig, ledger: Ledger, on_death: Callable[[], None]
    ) -> None:
        self._loop = loop
        self._ledger = ledger
        self._on_death = on_death
        self._pacer: Pacer[Call] = Pacer(config.host.knee, loop.time())
        self._timer: asyncio.TimerHandle | None = None
        self.host: Host[Call] = Host(config.host, {one.name: one.max_num_seqs for one in config.endpoints})

    def enter(self, call: Call) -> None:
        """Let a call run, or wait if its server is full, or take the host down."""
        name, now = call.endpoint.name, self._loop.time()
        call.in_engine = True
        seating = self.host.enter(name, call, call.cost, now)
        if seating is Seating.KILLS:
            self._on_death()
        elif seating is Seating.RUNS:
            self._run([call], now)
        self._note_seats(name, now)

    def leave(self, call: Call) -> None:
        """Forget a call, however it ended, and let the next one run."""
        if not call.in_engine:
            return
        name, now = call.endpoint.name, self._loop.time()
        call.in_engine = False
        self._pacer.discard(call)
        seated, killed = self.host.leave(name, call, now)
        self._run(seated, now)
        if killed:
            self._on_death()
        self._note_seats(name, now)

    def die(self) -> None:
        """Go dark, as if the memory had run out now."""
        self.host.die(self._loop.time())
        self._on_death()

    def _run(self, calls: Iterable[Call], now: float) -> None:
        for call in calls:
            self._pacer.add(call, call.stage_s, now)
        self._pacer.set_load(self.host.load, now)
        self._wind()

    def _turn(self) -> None:
        """Go on with each call whose present piece of work is done."""
        self._timer = None
        for call in self._pacer.pop_done(self._loop.time()):
            if call.exchange.ending:  # an earlier one of this turn took the host down
                continue
            if call.is_stream:
                self._stream_on(call)
            else:
                call.exchange.respond(200, _answer(call))
        self._wind()

    def _stream_on(self, call: Call) -> None:
        """Send the next piece of a stream, or break it where the script says so."""
        exchange, step = call.exchange, call.step
        breaks_after = step.chunks if step is not None and step.fault in STREAM_FAULTS else None
        if not exchange.status:
            exchange.start_stream()
        if step is not None and call.stage == breaks_after:
            break_stream(exchange, step, call.prompt)
            return
        stream = payloads.Stream(call.request_id, call.endpoint.served_model, call.prompt, call.created, call.chunks)
        if call.stage < call.chunks or breaks_after is not None:
            exchange.send_chunk(stream.chunk(call.stage))
            call.stage += 1
        if call.stage < call.chunks or breaks_after is not None:
            self._pacer.add(call, call.stage_s, self._loop.time())
        else:
            exchange.send_chunk(stream.end(with_usage=call.wants_usage))
            exchange.end_stream()

    def _wind(self) -> None:
        """Set the timer for the next piece of work, if it is not set for an earlier instant."""
        due_at = self._pacer.next_at()
        if due_at is None:
            return
        if self._timer is not None:
            if self._timer.when() <= due_at:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(due_at, self._turn)

    def _note_seats(self, name: str, now: float) -> None:
        self._ledger.seats(name, self.host.running(name), self.host.waiting(name), now)


def _answer(call: Call) -> bytes:
    model = call.endpoint.served_model
    if call.exchange.path == EMBEDDINGS_PATH:
        return payloads.embeddings(model, call.body, call.endpoint.dimensions)
    return payloads.completion(call.request_id, model, call.prompt, call.created)
