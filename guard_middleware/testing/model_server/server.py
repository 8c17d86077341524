"""The server: what becomes of each request, and when its ports are open."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

from guard_middleware.testing.model_server import payloads
from guard_middleware.testing.model_server.call import CALL_PATHS, Call
from guard_middleware.testing.model_server.control import answer_control
from guard_middleware.testing.model_server.engine import Engine
from guard_middleware.testing.model_server.faults import strike
from guard_middleware.testing.model_server.ledger import Ledger, Log
from guard_middleware.testing.model_server.memory import HostState
from guard_middleware.testing.model_server.port import Port
from guard_middleware.testing.model_server.probe import Probe, tell
from guard_middleware.testing.model_server.script import STREAM_FAULTS, Arrival, Fault, Script, ScriptRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from guard_middleware.testing.model_server.config import FakeEndpoint, ServerConfig
    from guard_middleware.testing.model_server.protocol import Exchange
    from guard_middleware.testing.model_server.stats import Request, ServerStats

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
        self._ledger = Ledger(self.names, now, self._clock_offset)
        self._log = Log()
        self._engine = Engine(self._loop, config, self._ledger, self._fall)
        self._script = ScriptRun(config.script, now)
        self._open: dict[Exchange, Call | Probe] = {}
        self._was_dark = False
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

    def stop(self) -> None:
        """Reset all connections and give the ports up."""
        for port in (self._control_port, *self._ports.values()):
            port.give_up()

    # --- what the control port asks for

    def stats(self) -> ServerStats:
        """Return all counts as they stand."""
        now = self._loop.time()
        return self._ledger.snapshot(self._state(now).value, self._engine.host.deaths, now)

    def log(self) -> tuple[list[Request], int]:
        """Return the requests that are remembered, the open ones last, and how many have been forgotten."""
        still_open = [one.line(None, self._clock_offset) for one in self._open.values()]
        return self._log.rows(still_open), self._log.forgotten

    def reset(self) -> None:
        """Be as after the start, with no script; calls that are open stay so, and stay counted."""
        self._ledger.restart(self._loop.time())
        self._log.clear()
        self._engine.host.revive()
        self.follow(Script())

    def follow(self, script: Script) -> None:
        """Follow another script, from its beginning."""
        self._script = ScriptRun(script, self._loop.time())
        self._move_ports()

    def die(self) -> None:
        """Go dark, as if the memory had run out now."""
        self._engine.die()

    # --- what becomes of a request

    def _begin(self, endpoint: FakeEndpoint, exchange: Exchange) -> None:
        now = self._loop.time()
        if exchange.path in CALL_PATHS and exchange.method == "POST":
            self._arrive(Call(exchange, endpoint, now, self._clock_offset))
        elif exchange.path.startswith("/_"):
            answer_control(self, exchange)
        else:
            self._probe(Probe(exchange, endpoint, now))
        if exchange.ending:  # also: given up between its last byte and this turn of the loop
            self._ended(exchange)

    def _arrive(self, call: Call) -> None:
        """Count a call in, and find out what becomes of it: script first, then the state of the host."""
        name, exchange, now = call.endpoint.name, call.exchange, call.t_start
        call.number = self._ledger.open(name, call.cost, call.priority, now)
        self._open[exchange] = call
        is_first = not self._script.has_begun
        step = call.step = self._script.decide(self._arrival(call), now)
        if is_first:
            self._move_ports()
        state = self._state(now)
        if exchange.ending:
            return
        if state is HostState.DARK:
            self._meet_the_dark(exchange)
        elif state is HostState.LOADING:
            exchange.respond(503, _LOADING)
        elif call.forced_status:
            exchange.respond(call.forced_status, payloads.error("as you asked", call.forced_status))
        elif step is None:
            self._enter(call)
        elif step.fault is Fault.SERVE or step.fault in STREAM_FAULTS:
            self._later(step.after_ms, call, partial(self._enter, call))
        else:
            self._later(step.after_ms, call, partial(strike, exchange, step, call.prompt))

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

    def _enter(self, call: Call) -> None:
        """Let a call into the engine, unless it is refused at the door."""
        endpoint, exchange = call.endpoint, call.exchange
        open_here = self._ledger.endpoints[endpoint.name].calls.now
        open_cost = self._ledger.host.cost.now
        if call.problem:
            exchange.respond(400, payloads.error(call.problem, 400))
        elif call.model != endpoint.served_model:
            exchange.respond(404, payloads.error(f"The model `{call.model}` does not exist.", 404))
        elif _is_above(open_here, endpoint.refuse_above):
            exchange.respond(endpoint.refuse_status, payloads.encode({"error": endpoint.refuse_text}))
        elif _is_above(open_here, endpoint.oom_above) or _is_above(open_cost, self._memory.oom_above):
            exchange.respond(500, payloads.out_of_memory(call.prompt))
        else:
            self._engine.enter(call)

    def _probe(self, probe: Probe) -> None:
        """Answer for health, models and metrics, which cost nothing and tell nothing of the engine's health."""
        exchange, name = probe.exchange, probe.endpoint.name
        self._open[exchange] = probe
        step = self._script.decide_probe(name, exchange.path, probe.t_start)
        state = self._state(probe.t_start)
        if exchange.ending:
            return
        if state is HostState.DARK:
            self._meet_the_dark(exchange)
        elif step is not None:
            self._later(step.after_ms, probe, partial(strike, exchange, step, ""))
        elif state is HostState.LOADING:
            exchange.respond(503, _LOADING)
        else:
            tell(probe, self._engine.host, self._memory)

    def _meet_the_dark(self, exchange: Exchange) -> None:
        if self._memory.death != "silent":
            exchange.close()

    def _later(self, delay_ms: float, one: Call | Probe, what: Callable[[], None]) -> None:
        """Do something to a request after a while, unless it has ended by then."""
        if delay_ms:
            one.timer = self._loop.call_later(delay_ms / 1000, what)
        else:
            what()

    def _ended(self, exchange: Exchange) -> None:
        """Count a request out, once, and seat those that waited for its place."""
        one = self._open.pop(exchange, None)
        if one is None:
            return
        now = self._loop.time()
        self._log.add(one.line(now, self._clock_offset))
        if one.timer is not None:
            one.timer.cancel()
        if isinstance(one, Call):
            result = str(exchange.status or exchange.ending)
            self._ledger.close(one.endpoint.name, one.cost, one.priority, result, now)
            self._engine.leave(one)

    # --- ports, and the death of the host

    def _state(self, now: float) -> HostState:
        return self._engine.host.state(now)

    def _fall(self) -> None:
        """Take everything down after the host has died."""
        now = self._loop.time()
        if self._memory.death != "silent":
            for port in self._ports.values():
                port.shut(self._memory.death)
        for name in self.names:
            self._ledger.seats(name, 0, 0, now)
        self._move_ports()

    def _move_ports(self) -> None:
        """Open and close ports as host and script want it now, and come back when that changes."""
        now = self._loop.time()
        is_dark = self._state(now) is HostState.DARK
        if self._was_dark and not is_dark:
            for port in self._ports.values():
                port.shut("reset")  # what a silent host has kept hanging
        self._was_dark = is_dark
        for name, port in self._ports.items():
            refusal = self._script.refusing(name, now)
            if refusal is not None and port.is_open:
                port.shut(refusal.open_calls)
            elif refusal is None and (not is_dark or self._memory.death == "silent"):
                port.open()
        if self._port_timer is not None:
            self._port_timer.cancel()
        changes = (self._engine.host.next_change_at(now), self._script.next_change_at(now))
        next_at = min((at for at in changes if at is not None), default=None)
        self._port_timer = None if next_at is None else self._loop.call_at(next_at, self._move_ports)


def _is_above(number: int, limit: int | None) -> bool:
    return limit is not None and number > limit
