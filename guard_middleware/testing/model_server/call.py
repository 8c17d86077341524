"""One call as the server sees it, read from its request once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from guard_middleware.testing.model_server import payloads
from guard_middleware.testing.model_server.stats import Request

if TYPE_CHECKING:
    import asyncio

    from guard_middleware.testing.model_server.config import FakeEndpoint
    from guard_middleware.testing.model_server.protocol import Exchange
    from guard_middleware.testing.model_server.script import Step

CHAT_PATH = "/v1/chat/completions"
EMBEDDINGS_PATH = "/v1/embeddings"
_MOST = 1_000_000_000
CALL_PATHS = frozenset({CHAT_PATH, EMBEDDINGS_PATH})


class Call:
    """A request for a completion or an embedding, from its arrival to its end.

    Attributes:
        exchange: its request and connection.
        endpoint: where it came to.
        t_start: when, on the server's clock.
        created: when, in seconds since the epoch.
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
        "created",
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

    def __init__(self, exchange: Exchange, endpoint: FakeEndpoint, t_start: float, clock_offset: float) -> None:
        self.exchange = exchange
        self.endpoint = endpoint
        self.t_start = t_start
        self.created = int(t_start + clock_offset)
        self.message_id = exchange.headers.get("x-message-id", "")
        self.priority = exchange.headers.get("x-priority", "")
        self.problem = ""
        self.body: dict[str, Any] = {}
        self.cost = 1
        try:
            self.body = _checked(json.loads(exchange.body), exchange.path)
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
    def model(self) -> str:
        """The model that was asked for; the one that is served if the request does not say."""
        return str(self.body.get("model", self.endpoint.served_model))

    @property
    def stage_s(self) -> float:
        """Seconds of work until its answer, or until a stream's next chunk, on a host that is not overloaded."""
        step = self.step
        whole_ms = self.usual_ms if step is None or step.ms is None else step.ms
        if step is not None:
            whole_ms *= step.factor
        return whole_ms / 1000 / (max(1, self.chunks) if self.is_stream else 1)

    def line(self, ended_at: float | None, clock_offset: float) -> Request:
        """Return its line in the log."""
        return Request(
            t_start=self.t_start + clock_offset,
            t_end=0.0 if ended_at is None else ended_at + clock_offset,
            endpoint=self.endpoint.name,
            path=self.exchange.path,
            status=self.exchange.status,
            ending=self.exchange.ending,
            number=self.number,
            cost=self.cost,
            message_id=self.message_id,
            priority=self.priority,
            user=str(self.body.get("user", "")),
        )

    def _number(self, header: str, default: float) -> float:
        text = self.exchange.headers.get(header)
        number = default if text is None else float(text)
        if not 0 <= number <= _MOST:
            msg = f"{header} {number} is not between 0 and {_MOST}"
            raise ValueError(msg)
        return number


def _checked(body: Any, path: str) -> dict[str, Any]:
    """Return the body of a request if all that is used of it has the right form.

    Raises:
        TypeError: if not; with what a server would complain about.
    """
    if not isinstance(body, dict):
        msg = "the body must be an object"
        raise TypeError(msg)
    asked = body.get("messages" if path == CHAT_PATH else "input")
    parts = asked if isinstance(asked, list) else [asked]
    form = dict if path == CHAT_PATH else (str, int, list)
    if not parts or not all(isinstance(part, form) for part in parts):
        msg = "messages must be a list of objects, input a text or a list"
        raise TypeError(msg)
    if not isinstance(body.get("stream_options") or {}, dict) or not isinstance(body.get("dimensions") or 1, int):
        msg = "stream_options must be an object, dimensions a number"
        raise TypeError(msg)
    return body
