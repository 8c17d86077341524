"""The application under test for fan-outs: `tests.support.app`, with guarded actors that make many calls at once.

What each fan-out returned, and under which leases it called, is written down in Redis.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from dramatiq.middleware import CurrentMessage

from guard_middleware import AsyncGuard, GuardMiddleware, current_permit, guarded, map_concurrent, map_concurrent_sync
from tests.support import app

_guard = next(one.guard for one in app.broker.middleware if isinstance(one, GuardMiddleware))
_async_guard = AsyncGuard(guard=_guard)


def request(name: str, ms: float | None) -> dict[str, Any]:
    """One chat completion under the current permit, which says what its priority is."""
    permit = current_permit()
    headers = {"x-message-id": name, "x-priority": permit.priority.value}
    if ms is not None:
        headers["x-fake-ms"] = str(ms)
    body = {"model": permit.endpoint.model, "messages": [{"role": "user", "content": "hello"}]}
    return {"url": f"{permit.endpoint.base_url}/chat/completions", "json": body, "headers": headers}


def written_down(results: list[tuple[str, str]]) -> None:
    """Write down what a fan-out returned: names and leases."""
    entry = {"id": CurrentMessage.get_current_message().message_id, "own": current_permit().lease, "results": results}
    app.record.rpush(f"{app.NAMESPACE}:spread", json.dumps(entry))
    app.done("spread")


@guarded(model="chat", queue_name="orchestration", **app.OPTIONS)
def spread(names: list[str], model: str | None = None, ms: float | None = None) -> None:
    """Many calls from threads."""

    def call(name: str) -> tuple[str, str]:
        app._http.post(**request(name, ms)).raise_for_status()
        return name, current_permit().lease

    written_down(map_concurrent_sync(call, names, model=model, guard=_guard))


@guarded(model="chat", queue_name="orchestration", **app.OPTIONS)
async def spread_async(names: list[str], model: str | None = None, ms: float | None = None) -> None:
    """Many calls from tasks."""
    async with httpx.AsyncClient(timeout=app.TIMEOUT_S) as client:

        async def call(name: str) -> tuple[str, str]:
            (await client.post(**request(name, ms))).raise_for_status()
            return name, current_permit().lease

        written_down(await map_concurrent(call, names, model=model, guard=_async_guard))
