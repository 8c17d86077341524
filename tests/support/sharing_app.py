"""The application under test for shared servers: `tests.support.app`, with runs that go wrong and calls inside calls.

When each message reaches a worker is written down before the guard sees it: what waits in the broker does not wait for
a permit.
"""

from __future__ import annotations

import json
import os
import time

import dramatiq
import httpx
from dramatiq import Middleware
from dramatiq.middleware import CurrentMessage

from guard_middleware import GuardMiddleware, current_permit, guarded
from guard_middleware.queueing.delivery import Delivery
from tests.support import app

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
IMPATIENCE_S = 0.3

_guard = next((one.guard for one in app.broker.middleware if isinstance(one, GuardMiddleware)), None)


class Arrivals(Middleware):
    """Writes down when a message reaches a thread of a worker."""

    def before_process_message(self, broker, message):
        entry = {"id": message.message_id, "at": time.time(), "pid": os.getpid()}
        app.record.rpush(f"{app.NAMESPACE}:arrivals", json.dumps(entry))


app.broker.add_middleware(Arrivals(), before=GuardMiddleware)

if os.environ.get("APP_FORGET_RELEASE") == "1":  # what a lost release would do
    Delivery._release = lambda *_: None


def call(*, timeout_s: float = app.TIMEOUT_S, **headers: str) -> None:
    """One chat completion under the current permit, with these headers."""
    permit = current_permit()
    message = CurrentMessage.get_current_message()
    named = {"x-message-id": message.message_id, **{f"x-fake-{key}": value for key, value in headers.items()}}
    url = f"{permit.endpoint.base_url}/chat/completions"
    body = {"model": permit.endpoint.model, **CHAT}
    app._http.post(url, json=body, headers=named, timeout=timeout_s).raise_for_status()


@guarded(model="chat", queue_name="orchestration", **app.OPTIONS)
def mixed(kind: str, ms: float | None = None) -> None:
    """The first run goes wrong as the kind says; any later one is an ordinary completion."""
    message = CurrentMessage.get_current_message()
    runs = app.record.hincrby(f"{app.NAMESPACE}:runs", message.message_id, 1)
    match kind if runs == 1 else "fine":
        case "502":
            call(status="502")
        case "timeout":
            call(ms="60000", timeout_s=IMPATIENCE_S)
        case "empty":
            text = ""
            raise httpx.ReadTimeout(text)
        case "fault":
            msg = "no call was made"
            raise TypeError(msg)
        case "fine":
            app.chat(ms)
    app.done(kind)


@guarded(model="chat", queue_name="orchestration", **app.OPTIONS)
def nested(model: str, ms: float | None = None) -> None:
    """A call inside of a guarded actor, which asks for a permit once more."""
    with _guard.permit(model, timeout=30):
        app.chat(ms)
    app.done("nested")


@dramatiq.actor(queue_name="orchestration")
def unguarded() -> None:
    """Work without a guard in the queue of guarded work."""
    app.done("unguarded")
