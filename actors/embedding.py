"""Ingestion: texts to vectors."""

from __future__ import annotations

import dramatiq

from actors import client
from guard_middleware import Priority, guarded


@guarded(model="bge-m3", priority=Priority.BACKGROUND_INGESTION)  # on top of an actor
@dramatiq.actor(queue_name="embedding", store_results=True)
def embed(texts: list[str]) -> list[list[float]]:
    """Return one vector per text."""
    return client.embeddings(texts)
