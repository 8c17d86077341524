"""The same application without the guard: the same queues, actors, client and calls, and Dramatiq's own Retries."""

from __future__ import annotations

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, CurrentMessage, Retries, default_middleware

from actors import client
from actors.demo.plan import MAX_BACKOFF_MS, MIN_BACKOFF_MS
from settings import deployment

_settings = deployment()
_bge_m3 = _settings.endpoint("bge-m3")
_qwen = _settings.endpoint("qwen/qwen3.6-27b")

broker = RedisBroker(  # type: ignore[no-untyped-call]  # dramatiq's class has no annotations
    url=_settings.redis_url.get_secret_value(),
    middleware=[
        *(kind() for kind in default_middleware if kind is not Retries),
        Retries(min_backoff=MIN_BACKOFF_MS, max_backoff=MAX_BACKOFF_MS),
        AsyncIO(),
        CurrentMessage(),
    ],
)
dramatiq.set_broker(broker)


@dramatiq.actor(queue_name="embedding")
def embed(texts: list[str]) -> list[list[float]]:
    """Return one vector per text."""
    return client.embeddings(texts, _bge_m3)


@dramatiq.actor(queue_name="enrichment")
def enrich(passage: str) -> list[str]:
    """Return one line per concept or fact."""
    return client.chat(passage, _qwen).splitlines()


@dramatiq.actor(queue_name="orchestration")
async def orchestrate(task: str) -> str:
    """Return the model's answer to a task."""
    return await client.chat_async(task, _qwen)
