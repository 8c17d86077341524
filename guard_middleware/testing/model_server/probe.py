"""Requests that are no calls: health, models and metrics. They cost nothing and tell nothing of the engine's health."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard_middleware.testing.model_server import payloads
from guard_middleware.testing.model_server.protocol import METRICS_TYPE, TEXT_TYPE
from guard_middleware.testing.model_server.stats import Request

if TYPE_CHECKING:
    import asyncio

    from guard_middleware.testing.model_server.call import Call
    from guard_middleware.testing.model_server.config import FakeEndpoint, HostMemory
    from guard_middleware.testing.model_server.memory import Host
    from guard_middleware.testing.model_server.protocol import Exchange


class Probe:
    """A request that is no call, from its arrival to its end.

    Args:
        exchange: its request and connection.
        endpoint: where it came to.
        t_start: when, on the server's clock.
    """

    __slots__ = ("endpoint", "exchange", "t_start", "timer")

    def __init__(self, exchange: Exchange, endpoint: FakeEndpoint, t_start: float) -> None:
        self.exchange = exchange
        self.endpoint = endpoint
        self.t_start = t_start
        self.timer: asyncio.TimerHandle | None = None

    def line(self, ended_at: float | None, clock_offset: float) -> Request:
        """Return its line in the log."""
        return Request(
            t_start=self.t_start + clock_offset,
            t_end=0.0 if ended_at is None else ended_at + clock_offset,
            endpoint=self.endpoint.name,
            path=self.exchange.path,
            status=self.exchange.status,
            ending=self.exchange.ending,
        )


def tell(probe: Probe, host: Host[Call], memory: HostMemory) -> None:
    """Answer a probe of a server that is well."""
    exchange, endpoint = probe.exchange, probe.endpoint
    match exchange.method, exchange.path:
        case "GET", "/health":
            exchange.respond(200, b"", TEXT_TYPE)
        case "GET", "/v1/models":
            exchange.respond(200, payloads.model_list(endpoint.served_model))
        case "GET", "/metrics":
            room = memory.edge or memory.knee or endpoint.max_num_seqs or 0
            text = payloads.metrics(
                endpoint.served_model,
                host.running(endpoint.name),
                host.waiting(endpoint.name),
                min(1.0, host.load / room) if room else 0.0,
                old_names=endpoint.old_metric_names,
            )
            exchange.respond(200, text, METRICS_TYPE)
        case _:
            exchange.respond(404, b'{"detail":"Not Found"}')
