"""The server: what becomes of each request, and the two timers that wake it, the engine's and that of the ports."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from guard_middleware.testing.model_server import payloads
from guard_middleware.testing.model_server.call import CALL_PATHS, EMBEDDINGS_PATH, Call
from guard_middleware.testing.model_server.control import answer_control
from guard_middleware.testing.model_server.faults import break_stream, strike
from guard_middleware.testing.model_server.ledger import Ledger, Log
from guard_middleware.testing.model_server.memory import Host, HostState, Seating
from guard_middleware.testing.model_server.pace import Pacer
from guard_middleware.testing.model_server.port import Port
from guard_middleware.testing.model_server.protocol import TEXT_TYPE
from guard_middleware.testing.model_server.script import STREAM_FAULTS, Arrival, Fault, Script, ScriptRun
from guard_middleware.testing.model_server.stats import Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from guard_middleware.testing.model_server.config import FakeEndpoint, ServerConfig
    from guard_middleware.testing.model_server.protocol import Exchange
    from guard_middleware.testing.model_server.stats import ServerStats

_LOADING = payloads.error("loading model", 503)


class FakeServer:
    """Endpoints on ports of their own over one host. To be made and used inside one running event loop.

    Args:
        config: what to be.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock_offset = time.time() - self._loop.time()
        now = self._loop.time()
        self.names = [endpoint.name for endpoint in config.endpoints]
        self._memory = config.host
        self._host: Host[Call] = Host(config.host, {one.name: one.max_num_seqs for one in config.endpoints})
        self._pacer: Pacer[Call] = Pacer(config.host.knee, now)
        self._ledger = Ledger(self.names, now, self._clock_offset)
        self._log = Log()
        self._script = ScriptRun(config.script, now)
        self._calls: dict[Exchange, Call] = {}
        self._engine_timer: asyncio.TimerHandle | None = None
        self._port_timer: asyncio.TimerHandle | None = None
        self._control_port = Port(config.control_port, partial(answer_control, self), lambda _: None)
        self._ports = {one.name: Port(one.port, partial(self._begin, one), self._ended) for one in config.endpoints}

    @property
    def control_port(self) -> int:
        """The port that no fault touches."""
        return self._control_port.number

    @property
    def ports(self) -> dict[str, int]:
        """Each endpoint's port, by name."""
        return {name: port.number for name, port in self._ports.items()}

    def start(self) -> None:
        """Listen."""
        self._control_port.open()
        self._move_ports()

    # --- what the control port asks for

    def stats(self) -> ServerStats:
        """Return all counts as they stand."""
        now = self._loop.time()
        return self._ledger.snapshot(self._host.state(now).value, self._host.deaths, now)

    def log(self) -> tuple[list[Request], int]:
        """Return the requests that are remembered, the open ones last, and how many have been forgotten."""
        return self._log.rows(self._line(call, None) for call in self._calls.values()), self._log.forgotten

    def reset(self) -> None:
        """Be as after the start, with no script; calls that are open stay so, and stay counted."""
        self._ledger.restart(self._loop.time())
        self._log.clear()
        self._host.revive()
        self.follow(Script())

    def follow(self, script: Script) -> None:
        """Follow another script, from its beginning."""
        self._script = ScriptRun(script, self._loop.time())
        self._move_ports()

    def die(self) -> None:
        """Go dark, as if the memory had run out now."""
        self._host.die(self._loop.time())
        self._fall()

    # --- what becomes of a request

    def _begin(self, endpoint: FakeEndpoint, exchange: Exchange) -> None:
        if exchange.path in CALL_PATHS and exchange.method == "POST":
            self._arrive(Call(exchange, endpoint, self._loop.time()))
        elif exchange.path.startswith("/_"):
            answer_control(self, exchange)
        else:
            self._probe(endpoint, exchange)

    def _arrive(self, call: Call) -> None:
        """Count a call in, and find out what becomes of it: script first, then the state of the host."""
        name, exchange, now = call.endpoint.name, call.exchange, call.t_start
        call.number = self._ledger.open(name, call.cost, call.priority, now)
        self._calls[exchange] = call
        is_first = not self._script.has_begun
        call.step = self._script.decide(self._arrival(call), now)
        if is_first:
            self._move_ports()
        if exchange.ending:  # given up between its last byte and this turn of the loop
            self._ended(exchange)
        elif self._host.state(now) is HostState.DARK:
            exchange.close()
        elif self._host.state(now) is HostState.LOADING:
            exchange.respond(503, _LOADING)
        elif call.forced_status:
            exchange.respond(call.forced_status, payloads.error("as you asked", call.forced_status))
        elif call.step is None:
            self._enter(call)
        elif call.step.fault is Fault.SERVE or call.step.fault in STREAM_FAULTS:
            self._later(call.step.after_ms, call, partial(self._enter, call))
        else:
            self._later(call.step.after_ms, call, partial(strike, exchange, call.step, call.prompt))

    def _arrival(self, call: Call) -> Arrival:
        return Arrival(
            endpoint=call.endpoint.name,
            path=call.exchange.path,
            message_id=call.message_id,
            body=call.exchange.body,
            is_stream=call.is_stream,
            in_flight=self._ledger.endpoints[call.endpoint.name].calls.now,
            cost=self._ledger.host.cost.now,
        )

    def _probe(self, endpoint: FakeEndpoint, exchange: Exchange) -> None:
        """Answer for health, models and metrics, which cost nothing and tell nothing of the engine's health."""
        now = self._loop.time()
        step = self._script.decide_probe(endpoint.name, exchange.path, now)
        if step is not None:
            strike(exchange, step, "")
        elif self._host.state(now) is not HostState.UP:
            exchange.respond(503, _LOADING)
        else:
            self._tell(endpoint, exchange)
        line = Request(
            t_start=now + self._clock_offset,
            t_end=now + self._clock_offset,
            endpoint=endpoint.name,
            path=exchange.path,
            status=exchange.status,
            ending=exchange.ending,
            number=0,
            cost=0,
            message_id="",
            priority="",
            user="",
        )
        self._log.add(line)

    def _tell(self, endpoint: FakeEndpoint, exchange: Exchange) -> None:
        name, model = endpoint.name, endpoint.served_model
        match exchange.method, exchange.path:
            case "GET", "/health":
                exchange.respond(200, b"", TEXT_TYPE)
            case "GET", "/v1/models":
                exchange.respond(200, payloads.model_list(model))
            case "GET", "/metrics":
                running, waiting = self._host.running(name), self._host.waiting(name)
                memory = self._memory.edge or self._memory.knee or endpoint.max_num_seqs or 0
                usage = min(1.0, self._host.load / memory) if memory else 0.0
                text = payloads.metrics(model, running, waiting, usage, old_names=endpoint.old_metric_names)
                exchange.respond(200, text, b"text/plain; version=0.0.4; charset=utf-8")
            case _:
                exchange.respond(404, b'{"detail":"Not Found"}')

    # --- the engine

    def _enter(self, call: Call) -> None:
        """Let a call into the engine, unless it is refused at the door."""
        endpoint, exchange = call.endpoint, call.exchange
        name, now = endpoint.name, self._loop.time()
        open_here, open_cost = self._ledger.endpoints[name].calls.now, self._ledger.host.cost.now
        if call.problem:
            exchange.respond(400, payloads.error(call.problem, 400))
        elif call.body.get("model", endpoint.served_model) != endpoint.served_model:
            exchange.respond(404, payloads.error(f"The model `{call.body['model']}` does not exist.", 404))
        elif _is_above(open_here, endpoint.refuse_above):
            exchange.respond(endpoint.refuse_status, payloads.encode({"error": endpoint.refuse_text}))
        elif _is_above(open_here, endpoint.oom_above) or _is_above(open_cost, self._memory.oom_above):
            exchange.respond(500, payloads.out_of_memory(call.prompt))
        else:
            call.in_engine = True
            match self._host.enter(name, call, call.cost, now):
                case Seating.RUNS:
                    self._run([call], now)
                case Seating.WAITS:
                    pass
                case Seating.KILLS:
                    self._fall()
            self._note_seats(name, now)

    def _run(self, calls: Iterable[Call], now: float) -> None:
        for call in calls:
            self._pacer.add(call, self._stage_s(call), now)
        self._pacer.set_load(self._host.load, now)
        self._wind_engine()

    def _stage_s(self, call: Call) -> float:
        """Return the work until the call's next chunk, or until its whole answer."""
        return call.work_s / max(1, call.chunks) if call.is_stream else call.work_s

    def _turn_engine(self) -> None:
        """Go on with each call whose present piece of work is done."""
        self._engine_timer = None
        for call in self._pacer.pop_done(self._loop.time()):
            if call.exchange.ending:
                continue
            if call.is_stream:
                self._stream_on(call)
            else:
                call.exchange.respond(200, self._answer(call))
        self._wind_engine()

    def _answer(self, call: Call) -> bytes:
        model = call.endpoint.served_model
        if call.exchange.path == EMBEDDINGS_PATH:
            return payloads.embeddings(model, call.body, call.endpoint.dimensions)
        return payloads.completion(call.request_id, model, call.prompt, self._created(call))

    def _created(self, call: Call) -> int:
        return int(call.t_start + self._clock_offset)

    def _stream_on(self, call: Call) -> None:
        """Send the next piece of a stream, or break it where the script says so."""
        exchange, step = call.exchange, call.step
        if not exchange.status:
            exchange.start_stream()
        if step is not None and step.fault in STREAM_FAULTS and call.stage == step.chunks:
            break_stream(exchange, step, call.prompt)
            return
        stream = payloads.Stream(
            call.request_id, call.endpoint.served_model, call.prompt, self._created(call), call.chunks
        )
        exchange.send_chunk(stream.chunk(call.stage))
        call.stage += 1
        breaks_later = step is not None and step.fault in STREAM_FAULTS and call.stage <= step.chunks
        if call.stage < call.chunks or breaks_later:
            self._pacer.add(call, self._stage_s(call), self._loop.time())
        else:
            exchange.send_chunk(stream.end(with_usage=call.wants_usage))
            exchange.end_stream()

    def _wind_engine(self) -> None:
        """Set the engine's timer for the next piece of work, if it is not set for an earlier instant."""
        due_at = self._pacer.next_at()
        if due_at is None:
            return
        if self._engine_timer is not None:
            if self._engine_timer.when() <= due_at:
                return
            self._engine_timer.cancel()
        self._engine_timer = self._loop.call_at(due_at, self._turn_engine)

    # --- how calls end

    def _ended(self, exchange: Exchange) -> None:
        """Count a call out, and seat those that waited for its place."""
        call = self._calls.pop(exchange, None)
        if call is None:
            return
        name, now = call.endpoint.name, self._loop.time()
        self._ledger.close(name, call.cost, call.priority, str(exchange.status or exchange.ending), now)
        self._log.add(self._line(call, now))
        if call.timer is not None:
            call.timer.cancel()
        if call.in_engine:
            self._pacer.discard(call)
            seated, killed = self._host.leave(name, call, now)
            self._run(seated, now)
            if killed:
                self._fall()
            self._note_seats(name, now)

    def _line(self, call: Call, ended_at: float | None) -> Request:
        return Request(
            t_start=call.t_start + self._clock_offset,
            t_end=0.0 if ended_at is None else ended_at + self._clock_offset,
            endpoint=call.endpoint.name,
            path=call.exchange.path,
            status=call.exchange.status,
            ending=call.exchange.ending,
            number=call.number,
            cost=call.cost,
            message_id=call.message_id,
            priority=call.priority,
            user=str(call.body.get("user", "")),
        )

    # --- ports, and the death of the host

    def _fall(self) -> None:
        """Take everything down after the host has died."""
        for port in self._ports.values():
            port.shut(self._memory.death)
        for name in self.names:
            self._note_seats(name, self._loop.time())
        self._move_ports()

    def _move_ports(self) -> None:
        """Open and close ports as host and script want it now, and come back when that changes."""
        now = self._loop.time()
        is_dark = self._host.state(now) is HostState.DARK
        for name, port in self._ports.items():
            refusal = self._script.refusing(name, now)
            if refusal is not None and port.is_open:
                port.shut(refusal.open_calls)
            elif refusal is None and not is_dark:
                port.open()
        if self._port_timer is not None:
            self._port_timer.cancel()
        changes = (self._host.next_change_at(now), self._script.next_change_at(now))
        next_at = min((at for at in changes if at is not None), default=None)
        self._port_timer = None if next_at is None else self._loop.call_at(next_at, self._move_ports)

    def _note_seats(self, name: str, now: float) -> None:
        self._ledger.seats(name, self._host.running(name), self._host.waiting(name), now)

    def _later(self, delay_ms: float, call: Call, what: Callable[[], None]) -> None:
        """Do something to a call after a while, unless it has ended by then."""
        if delay_ms:
            call.timer = self._loop.call_later(delay_ms / 1000, what)
        else:
            what()


def _is_above(number: int, limit: int | None) -> bool:
    return limit is not None and number > limit
