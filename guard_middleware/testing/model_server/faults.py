"""What a fault does to a call's socket."""

from __future__ import annotations

from typing import TYPE_CHECKING

from guard_middleware.testing.model_server import payloads
from guard_middleware.testing.model_server.protocol import JSON_TYPE, TEXT_TYPE
from guard_middleware.testing.model_server.script import Fault

if TYPE_CHECKING:
    from guard_middleware.testing.model_server.protocol import Exchange
    from guard_middleware.testing.model_server.script import Step

_HTML = b"<html><body><h1>It works!</h1></body></html>"
_GARBAGE = b"\x00\x01 this is not HTTP\r\n\r\n"
_HALF = b'HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n{"object": "chat'


def strike(exchange: Exchange, step: Step, prompt: str) -> None:
    """Do to an exchange that has not been answered what the step says.

    Args:
        exchange: what to strike.
        step: with a fault that is neither ``serve`` nor one of a stream.
        prompt: what the caller asked, for a body that quotes it.
    """
    match step.fault:
        case Fault.STATUS:
            _give_status(exchange, step, prompt)
        case Fault.DROP:
            exchange.close()
        case Fault.RESET:
            exchange.reset()
        case Fault.TRUNCATE:
            exchange.send_raw(_HALF, status=200)
        case Fault.GARBAGE:
            exchange.send_raw(_GARBAGE)
        case Fault.NOT_JSON:
            exchange.respond(200, _HTML, b"text/html")
        case _:
            """Hang: nothing is the whole of it."""


def break_stream(exchange: Exchange, step: Step, prompt: str) -> None:
    """Do to a stream that has begun what the step says.

    Args:
        exchange: what to break.
        step: with a fault of a stream.
        prompt: what the caller asked, for a body that quotes it.
    """
    match step.fault:
        case Fault.STREAM_RESET:
            exchange.reset()
        case Fault.STREAM_NO_END:
            exchange.end_stream()
        case Fault.STREAM_ERROR:
            body = payloads.encode(payloads.OVERLOADED) if step.body is None else payloads.filled(step.body, prompt)
            exchange.send_chunk(b"data: " + body + b"\n\n")
            exchange.end_stream()
        case _:
            """Silence: nothing is the whole of it."""


def _give_status(exchange: Exchange, step: Step, prompt: str) -> None:
    body, kind = payloads.error("scripted", step.status), JSON_TYPE
    if step.body is not None:
        body = payloads.filled(step.body, prompt)
        kind = TEXT_TYPE if isinstance(step.body, str) else JSON_TYPE
    exchange.respond(step.status, body, kind, step.headers.items())
