"""What tests and people may ask of the server itself: statistics, the log, another script, a fresh start."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Protocol

from guard_middleware.testing.model_server import payloads
from guard_middleware.testing.model_server.config import check_names
from guard_middleware.testing.model_server.script import Script
from guard_middleware.testing.model_server.stats import Request

if TYPE_CHECKING:
    from guard_middleware.testing.model_server.protocol import Exchange
    from guard_middleware.testing.model_server.stats import ServerStats


class Controlled(Protocol):
    """What can be asked of a server."""

    names: list[str]

    def stats(self) -> ServerStats:
        """Return all counts as they stand."""

    def log(self) -> tuple[list[Request], int]:
        """Return the remembered requests, and how many have been forgotten."""

    def reset(self) -> None:
        """Begin to count afresh, with no script."""

    def follow(self, script: Script) -> None:
        """Follow another script."""

    def die(self) -> None:
        """Go dark now."""


def answer_control(server: Controlled, exchange: Exchange) -> None:
    """Answer a request whose path begins with ``/_``; what it asks for is in force when the answer comes.

    ``GET /_stats``, ``GET /_log``, ``POST /_reset``, ``POST /_script`` with a script in JSON, ``POST /_die``.
    """
    match exchange.method, exchange.path:
        case "GET", "/_stats":
            exchange.respond(200, server.stats().model_dump_json().encode())
        case "GET", "/_log":
            rows, forgotten = server.log()
            exchange.respond(200, payloads.encode({"fields": Request._fields, "rows": rows, "forgotten": forgotten}))
        case "POST", "/_reset":
            server.reset()
            _confirm(exchange)
        case "POST", "/_script":
            _follow(server, exchange)
        case "POST", "/_die":
            server.die()
            _confirm(exchange)
        case _:
            exchange.respond(404, payloads.error(f"no {exchange.method} {exchange.path} here", 404))


def _follow(server: Controlled, exchange: Exchange) -> None:
    try:
        script = Script.model_validate(json.loads(exchange.body))
        check_names(script.steps, server.names)
    except ValueError as exc:
        exchange.respond(400, payloads.error(str(exc), 400))
    else:
        server.follow(script)
        _confirm(exchange)


def _confirm(exchange: Exchange) -> None:
    """Say yes one turn of the loop later, when the sockets that were closed meanwhile really are."""
    asyncio.get_running_loop().call_soon(exchange.respond, 200, b"{}")
