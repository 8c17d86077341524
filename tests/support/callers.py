"""A process of callers under test: ``python -m tests.support.callers sync|async``.

It makes one call under a permit for each line of JSON that it is given (``name``, ``priority``), all at once, prints
what goes wrong, and ends when its input has ended and its calls are done.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from typing import Any

import httpx

from guard_middleware import AsyncGuard, Guard

TIMEOUT_S = 30
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


def request(permit: Any, name: str) -> dict[str, Any]:
    """One chat completion."""
    return {
        "url": f"{permit.endpoint.base_url}/chat/completions",
        "json": CHAT,
        "headers": {"x-message-id": name},
        "timeout": TIMEOUT_S,
    }


def threads() -> None:
    """Make each call in a thread."""
    guard = Guard.from_settings()
    running = []

    def call(name: str, priority: str) -> None:
        try:
            with guard.permit("chat", priority=priority, timeout=TIMEOUT_S) as permit:
                httpx.post(**request(permit, name)).raise_for_status()
        except Exception as exc:  # noqa: BLE001  # shown by the test
            print(name, repr(exc), flush=True)  # noqa: T201  # so

    guard.snapshot()
    print("ready", flush=True)  # noqa: T201  # read by the test
    for line in sys.stdin:
        running.append(threading.Thread(target=call, kwargs=json.loads(line)))
        running[-1].start()
    for one in running:
        one.join()
    guard.close()


async def tasks() -> None:
    """Make each call in a task."""

    async def call(name: str, priority: str) -> None:
        try:
            async with guard.permit("chat", priority=priority, timeout=TIMEOUT_S) as permit:
                (await client.post(**request(permit, name))).raise_for_status()
        except Exception as exc:  # noqa: BLE001  # shown by the test
            print(name, repr(exc), flush=True)  # noqa: T201  # so

    limits = httpx.Limits(max_connections=None)
    async with AsyncGuard.from_settings() as guard, httpx.AsyncClient(limits=limits) as client:
        await guard.snapshot()
        print("ready", flush=True)  # noqa: T201  # read by the test
        async with asyncio.TaskGroup() as running:
            while line := await asyncio.to_thread(sys.stdin.readline):
                running.create_task(call(**json.loads(line)))


if __name__ == "__main__":
    if sys.argv[1] == "sync":
        threads()
    else:
        asyncio.run(tasks())
