"""The application under test for breakers: `tests.support.app`, with what goes wrong on the caller's side.

Each request is written down before it leaves, with the process that makes it: a closed port counts nothing. And each
tells the server the breaker's generation in which it was let in, so that its log tells stragglers from probes.
"""

from __future__ import annotations

import functools
import json
import os
import queue
import socket
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import redis
from dramatiq import Middleware
from dramatiq.middleware import CurrentMessage, SkipMessage
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from guard_middleware import GuardMiddleware, GuardSettings, current_permit, guarded
from guard_middleware.queueing.delivery import current_delivery

if "APP_PROBE_DEADLINE_MS" in os.environ:  # a constant of the rule, that no test should have to wait for
    _rules = GuardSettings.rules
    GuardSettings.rules = lambda self: replace(_rules(self), probe_deadline_ms=int(os.environ["APP_PROBE_DEADLINE_MS"]))

from tests.support import app  # its guard publishes the rules

if TYPE_CHECKING:
    from collections.abc import Callable

ASKED = "please"
CHAT = {"messages": [{"role": "user", "content": ASKED}]}
CLOSED_PORT = 1
IMPATIENT = int(os.environ.get("APP_IMPATIENT_CALLS", "0"))
PATIENCE_S = float(os.environ.get("APP_PATIENCE_S", "0.4"))
"""The time-out of so many first calls. All others are patient: a busy machine is no sign of an overloaded server."""


def generation() -> str:
    """The breaker's generation in which this call was let in, for the server's log: whose failure it is."""
    delivery = current_delivery()
    return "" if delivery is None else str(delivery.holding.generation)


def note_attempt(request: httpx.Request) -> None:
    """Write down that a request is about to leave, and let the server know its generation."""
    request.headers["x-priority"] = generation()
    entry = {"id": request.headers["x-message-id"], "at": time.time(), "pid": os.getpid(), "generation": generation()}
    number = app.record.rpush(f"{app.NAMESPACE}:attempts", json.dumps(entry))
    if number <= IMPATIENT:
        request.extensions["timeout"]["read"] = PATIENCE_S


app._http.event_hooks = {"request": [note_attempt]}
app.record = redis.Redis.from_url(
    app.URL, retry=Retry(ConstantBackoff(0.05), 400), retry_on_error=[redis.ConnectionError]
)

if (
    "APP_RECORD_LATER" in os.environ
):  # the store that a test takes away also holds what ran: the actors do not wait for it
    _entries = queue.SimpleQueue()

    def _done(kind: str) -> None:
        message = CurrentMessage.get_current_message()
        _entries.put({"id": message.message_id, "kind": kind, "retries": message.options.get("retries", 0)})

    def _write() -> None:
        while True:
            app.record.rpush(f"{app.NAMESPACE}:done", json.dumps(_entries.get()))

    app.done = _done
    threading.Thread(target=_write, daemon=True).start()


class Dropper(Middleware):
    """Skips, once, a message that the guard has let through, as another middleware might."""

    def before_process_message(self, broker, message):
        if "guard_model" in broker.get_actor(message.actor_name).options and app.record.getdel(f"{app.NAMESPACE}:drop"):
            app.record.rpush(f"{app.NAMESPACE}:dropped", message.message_id)
            raise SkipMessage


app.broker.add_middleware(Dropper(), after=GuardMiddleware)


# -- the same failure in the shapes of several clients ---------------------------------------------------------------

_plain = httpx.Client(timeout=app.TIMEOUT_S, trust_env=False)


class StatusCodeError(Exception):
    """What an application makes of an answer, with `status_code`."""

    def __init__(self, status_code: int) -> None:
        super().__init__("the model call failed")
        self.status_code = status_code


class StatusError(Exception):
    """The same, with `status`."""

    def __init__(self, status: int) -> None:
        super().__init__("the model call failed")
        self.status = status


def with_httpx(base_url: str, model: str, headers: dict) -> None:
    """httpx: `HTTPStatusError`, or a transport error."""
    _plain.post(f"{base_url}/chat/completions", json={"model": model, **CHAT}, headers=headers).raise_for_status()


def with_openai(base_url: str, model: str, headers: dict) -> None:
    """openai: `APIStatusError`, `APIConnectionError`, `APITimeoutError`."""
    import openai  # noqa: PLC0415  # slow, and needed by few tests

    with openai.OpenAI(base_url=base_url, api_key="-", max_retries=0, timeout=app.TIMEOUT_S) as client:
        client.chat.completions.create(model=model, extra_headers=headers, **CHAT)


def with_requests(base_url: str, model: str, headers: dict) -> None:
    """requests: `HTTPError`, `ConnectionError`, `Timeout`."""
    import requests  # noqa: PLC0415

    url = f"{base_url}/chat/completions"
    requests.post(url, json={"model": model, **CHAT}, headers=headers, timeout=app.TIMEOUT_S).raise_for_status()


def with_ollama(base_url: str, model: str, headers: dict) -> None:
    """ollama: its `ResponseError`, raised as its client does."""
    import ollama  # noqa: PLC0415

    try:
        with_httpx(base_url, model, headers)
    except httpx.HTTPStatusError as exc:
        raise ollama.ResponseError(exc.response.text, exc.response.status_code) from None


def with_status_code(base_url: str, model: str, headers: dict) -> None:
    """An application's own error that has a `status_code`."""
    try:
        with_httpx(base_url, model, headers)
    except httpx.HTTPStatusError as exc:
        raise StatusCodeError(exc.response.status_code) from None


def with_status(base_url: str, model: str, headers: dict) -> None:
    """An application's own error that has a `status`."""
    try:
        with_httpx(base_url, model, headers)
    except httpx.HTTPStatusError as exc:
        raise StatusError(exc.response.status_code) from None


def with_cause(base_url: str, model: str, headers: dict) -> None:
    """An application's own error that names the client's as its cause."""
    try:
        with_httpx(base_url, model, headers)
    except httpx.HTTPError as exc:
        msg = "failed to embed"
        raise RuntimeError(msg) from exc


CLIENTS: dict[str, Callable[[str, str, dict], None]] = {
    "httpx": with_httpx,
    "openai": with_openai,
    "requests": with_requests,
    "ollama": with_ollama,
    "status_code": with_status_code,
    "status": with_status,
    "cause": with_cause,
}


def pool_is_full(base_url: str) -> None:
    """Make httpx time out while it waits for a connection of its own pool."""
    limits = httpx.Limits(max_connections=1)
    with (
        httpx.Client(timeout=httpx.Timeout(5, pool=0.02), limits=limits, trust_env=False) as client,
        client.stream("GET", f"{base_url}/models"),
    ):
        client.post(f"{base_url}/chat/completions", json=CHAT)


@functools.cache
def port_without_tls() -> int:
    """A port that answers a TLS greeting in plain text, which is no TLS at all."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            client, _ = listener.accept()
            with client:
                client.recv(4096)
                client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=answer, daemon=True).start()
    return listener.getsockname()[1]


def where(trouble: str, base_url: str) -> str:
    """The base URL that brings a caller into this trouble."""
    match trouble:
        case "refused":
            return f"http://127.0.0.1:{CLOSED_PORT}/v1"
        case "dns":
            return "http://no-such-host.invalid/v1"
        case "tls":
            return f"https://127.0.0.1:{port_without_tls()}/v1"
        case _:
            return base_url


@guarded(model="chat", queue_name="orchestration", **app.OPTIONS)
def ask_with(client: str, trouble: str = "", times: int = 0) -> None:
    """One completion through a certain client; the endpoint's first so many calls meet a trouble of the caller's."""
    endpoint = current_permit().endpoint
    message = CurrentMessage.get_current_message()
    base_url = endpoint.base_url
    if trouble and app.record.incr(f"{app.NAMESPACE}:trouble:{endpoint.id}") <= times:
        if trouble == "pool":
            pool_is_full(base_url)
        base_url = where(trouble, base_url)
    headers = {"x-message-id": message.message_id, "x-priority": generation()}
    CLIENTS[client](base_url, endpoint.model, headers)
    app.done("ask_with")
