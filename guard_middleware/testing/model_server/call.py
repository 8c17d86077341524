"""One call as the server sees it, read from its request once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from guard_middleware.testing.model_server import payloads

if TYPE_CHECKING:
    import asyncio

    from guard_middleware.testing.model_server.config import FakeEndpoint
    from guard_middleware.testing.model_server.protocol import Exchange
    from guard_middleware.testing.model_server.script import Step

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
CALL_PATHS = frozenset({CHAT_PATH, EMBEDDINGS_PATH})


class Call:
    """A request for a completion or an embedding, from its arrival to its end.

    Attributes:
        exchange: its request and connection.
        endpoint: where it came to.
        t_start: when, on the server's clock.
        message_id: of the header ``x-message-id``.
        priority: of the header ``x-priority``.
        cost: of the header ``x-fake-cost``.
        body: of the request; empty if ``problem`` is set.
        usual_ms: how long it takes, script aside: of the header ``x-fake-ms``, the body's ``fake_ms``, or the endpoint.
        chunks: content chunks that a stream is cut into: of the header ``x-fake-chunks``, or the endpoint.
        forced_status: status that the caller asks to be given at once, of the header ``x-fake-status``; or 0.
        problem: what is wrong with the request, "" if nothing is.
        number: which call of its endpoint it is.
        step: what the script does to it, if anything.
        timer: what will happen to it outside the engine.
        in_engine: whether it runs, or waits to run.
        stage: content chunks that it has sent.
    """

    __slots__ = (
        "body",
        "chunks",
        "cost",
        "endpoint",
        "exchange",
        "forced_status",
        "in_engine",
        "message_id",
        "number",
        "priority",
        "problem",
        "stage",
        "step",
        "t_start",
        "timer",
        "usual_ms",
    )

    def __init__(self, exchange: Exchange, endpoint: FakeEndpoint, t_start: float) -> None:
        self.exchange = exchange
        self.endpoint = endpoint
        self.t_start = t_start
        self.message_id = exchange.headers.get("x-message-id", "")
        self.priority = exchange.headers.get("x-priority", "")
        self.problem = ""
        self.body: dict[str, Any] = {}
        self.cost = 1
        try:
            self.body = _object(exchange.body)
            self.cost = int(exchange.headers.get("x-fake-cost", 1))
            self.usual_ms = self._number("x-fake-ms", float(self.body.get("fake_ms", endpoint.base_ms)))
            self.chunks = int(self._number("x-fake-chunks", endpoint.chunks))
            self.forced_status = int(self._number("x-fake-status", 0))
        except (TypeError, ValueError) as exc:
            self.problem = f"cannot read the request: {exc}"
            self.usual_ms = self.chunks = self.forced_status = 0
        self.number = 0
        self.step: Step | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.in_engine = False
        self.stage = 0

    @property
    def is_stream(self) -> bool:
        """Whether the answer is to come in chunks."""
        return self.exchange.path == CHAT_PATH and bool(self.body.get("stream"))

    @property
    def prompt(self) -> str:
        """What the caller asked."""
        return payloads.prompt_of(self.body)

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with its usage."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    @property
    def request_id(self) -> str:
        """What the answer's id is made of."""
        return f"{self.endpoint.name}-{self.number}"

    @property
    def work_s(self) -> float:
        """Seconds that it takes on a host that is not overloaded."""
        if self.step is None:
            return self.usual_ms / 1000
        return (self.usual_ms if self.step.ms is None else self.step.ms) * self.step.factor / 1000

    def _number(self, header: str, default: float) -> float:
        text = self.exchange.headers.get(header)
        return default if text is None else float(text)


def _object(body: bytes) -> dict[str, Any]:
    value = json.loads(body)
    if not isinstance(value, dict):
        msg = "the body must be a JSON object"
        raise ValueError(msg)  # noqa: TRY004 - the caller maps every fault of the body alike
    return value
