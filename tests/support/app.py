"""The application under test, run by Dramatiq's own CLI. Everything comes from the environment.

Each actor makes one request to the fake model server at the base URL that its permit names, and then writes down in
Redis that it ran: the truth about what ran, and how often, is in the broker's database, not in the guard.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time

import dramatiq
import httpx
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, GroupCallbacks
from dramatiq.rate_limits.backends import RedisBackend as Barriers
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from guard_middleware import Guard, GuardMiddleware, GuardSettings, current_permit, guarded

URL = os.environ["APP_REDIS_URL"]
NAMESPACE = os.environ["APP_NAMESPACE"]
GUARDED = os.environ.get("APP_GUARDED", "1") == "1"
TIMEOUT_S = float(os.environ.get("APP_CLIENT_TIMEOUT_S", "30"))
MAX_RETRIES = int(os.environ.get("APP_MAX_RETRIES", "20"))
MIN_BACKOFF_MS = int(os.environ.get("APP_MIN_BACKOFF_MS", "100"))

record = redis.Redis.from_url(URL)
broker = RedisBroker(
    url=URL,
    namespace=NAMESPACE,
    heartbeat_timeout=int(os.environ.get("APP_HEARTBEAT_TIMEOUT_MS", "60000")),
    maintenance_chance=int(os.environ.get("APP_MAINTENANCE_CHANCE", "1000")),
)
broker.add_middleware(Results(backend=RedisBackend(url=URL, namespace=f"{NAMESPACE}-results")))
broker.add_middleware(GroupCallbacks(Barriers(url=URL)))
broker.add_middleware(AsyncIO())
if GUARDED:
    broker.add_middleware(GuardMiddleware(Guard(GuardSettings())))
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)

_http = httpx.Client(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))


def done(kind: str) -> None:
    """Write down that the current message ran to its end."""
    message = CurrentMessage.get_current_message()
    entry = {"id": message.message_id, "kind": kind, "retries": message.options.get("retries", 0), "at": time.time()}
    record.rpush(f"{NAMESPACE}:done", json.dumps(entry))


def request(path: str, body: dict, ms: float | None) -> dict:
    """Make one request under the current permit."""
    permit = current_permit()
    message = CurrentMessage.get_current_message()
    base_url = permit.endpoint.base_url if permit is not None else os.environ["APP_BASE_URL"]
    headers = {
        "x-message-id": message.message_id,
        "x-priority": str(message.options.get("guard_priority", "")),
        "x-fake-cost": str(message.options.get("guard_cost", 1)),
    }
    if ms is not None:
        headers["x-fake-ms"] = str(ms)
    response = _http.post(f"{base_url}{path}", json=body, headers=headers)
    response.raise_for_status()
    return response.json()


def chat(ms: float | None = None, model: str | None = None) -> dict:
    """One chat completion."""
    permit = current_permit()
    served = model or (permit.endpoint.model if permit is not None else "chat")
    return request("/chat/completions", {"model": served, "messages": [{"role": "user", "content": "hello"}]}, ms)


OPTIONS = {"max_retries": MAX_RETRIES, "min_backoff": MIN_BACKOFF_MS, "max_backoff": 2_000}


@guarded(model="embed", priority="background_ingestion", queue_name="embedding", **OPTIONS)
def embed(ms: float | None = None) -> None:
    """Ingestion: one embedding."""
    permit = current_permit()
    served = permit.endpoint.model if permit is not None else "embed"
    request("/embeddings", {"model": served, "input": "text"}, ms)
    done("embed")


@guarded(model="chat", priority="background_ingestion", queue_name="enrichment", **OPTIONS)
def enrich(ms: float | None = None) -> None:
    """Enrichment: one completion in the background."""
    chat(ms)
    done("enrich")


@guarded(model="chat", queue_name="orchestration", **OPTIONS)
def orchestrate(ms: float | None = None) -> None:
    """Agents: one completion at the usual priority."""
    chat(ms)
    done("orchestrate")


@guarded(model="chat", queue_name="orchestration", **OPTIONS)
async def orchestrate_async(ms: float | None = None) -> None:
    """Agents: one completion from a coroutine."""
    await asyncio.to_thread(chat, ms)
    done("orchestrate_async")


@guarded(model="chat", queue_name="orchestration", store_results=True, **OPTIONS)
def answer(value: int, ms: float | None = None) -> int:
    """One completion, and a result."""
    chat(ms)
    done("answer")
    return value + 1


@guarded(model="chat", queue_name="orchestration", **OPTIONS)
def fail_before_call() -> None:
    """A fault of our own, before any request."""
    done("fail_before_call")
    msg = "no call was made"
    raise TypeError(msg)


@guarded(model="chat", queue_name="orchestration", **OPTIONS)
def poison() -> None:
    """A message that kills its worker."""
    record.rpush(f"{NAMESPACE}:poison", os.getpid())
    os.kill(os.getpid(), signal.SIGKILL)


@guarded(model="chat", queue_name="orchestration", time_limit=500, **OPTIONS)
def slow_limited(ms: float) -> None:
    """A call that may be longer than its time limit."""
    chat(ms)
    done("slow_limited")


@dramatiq.actor(queue_name="plain", **OPTIONS)
def plain(ms: float = 0) -> None:
    """Work without a guard."""
    time.sleep(ms / 1000)
    done("plain")


@dramatiq.actor(queue_name="plain", store_results=True, **OPTIONS)
def plain_value(value: int) -> int:
    """Work without a guard, and a result."""
    done("plain_value")
    return value + 1


@dramatiq.actor(queue_name="callbacks")
def on_success(message: dict, result: object) -> None:
    """A success callback."""
    record.rpush(f"{NAMESPACE}:called", json.dumps({"success": message["message_id"], "result": result}))


@dramatiq.actor(queue_name="callbacks")
def on_failure(message: dict, exception: dict) -> None:
    """A failure callback."""
    record.rpush(f"{NAMESPACE}:called", json.dumps({"failure": message["message_id"], "type": exception["type"]}))


@dramatiq.actor(queue_name="callbacks")
def group_done() -> None:
    """A group's completion callback."""
    record.rpush(f"{NAMESPACE}:called", json.dumps({"group": True}))
