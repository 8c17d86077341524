"""Ingestion: the concepts and facts in a passage."""

from __future__ import annotations

import dramatiq

from actors import client
from guard_middleware import Priority, guarded

_TASK = "List the concepts in this passage, and the facts it states about them, one per line:\n\n"


@guarded(model="qwen/qwen3.6-27b", priority=Priority.BACKGROUND_INGESTION)
@dramatiq.actor(queue_name="enrichment", store_results=True)
def enrich(passage: str) -> list[str]:
    """Return one line per concept or fact."""
    return client.chat(_TASK + passage).splitlines()
