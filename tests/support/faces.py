"""Both faces of the guard behind one: a scenario is written once, as a coroutine, and played through each."""

from __future__ import annotations

import asyncio
import contextvars
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from guard_middleware import AsyncGuard, Guard, GuardSettings
from guard_middleware.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

    from guard_middleware import AsyncPermit, Permit
    from guard_middleware.core.commands import EndpointSnapshot, Snapshot

LEASE_S = 30.0
"""So long that nothing in a test is explained by a lease that ran out."""
HEARTBEAT_S = 0.5
AT_ONCE_S = 3.0
"""Far less than a lease; a few beats."""


def settings_of(url: str, namespace: str, models: dict[str, dict[str, Any]], **fields: Any) -> GuardSettings:
    """The settings of a deployment without a reserve and with long leases."""
    return GuardSettings(
        **{
            "redis_url": url,
            "namespace": namespace,
            "models": [{"id": name, "reserve": 0, **more} for name, more in models.items()],
            "first_start_hold_s": 0,
            "lease_s": LEASE_S,
            "heartbeat_s": HEARTBEAT_S,
            **fields,
        }
    )


async def until(condition: Callable[[], Any], timeout_s: float = AT_ONCE_S, what: object = "") -> Any:
    """Wait for a condition without keeping the event loop, and return what it returned.

    Raises:
        AssertionError: if it does not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            msg = f"not within {timeout_s} s: {what() if callable(what) else what or condition}"
            raise AssertionError(msg)
        await asyncio.sleep(0.01)
    return found


class Truth:
    """What the store itself says, read past both faces."""

    def __init__(self, settings: GuardSettings) -> None:
        self.store = RedisStore.from_url(settings.redis_url.get_secret_value(), settings.namespace, timeout_s=5)

    def snapshot(self) -> Snapshot:
        """Everything."""
        return self.store.snapshot()

    def of(self, model: str = "chat") -> EndpointSnapshot:
        """One endpoint."""
        return self.snapshot().endpoints[model]

    def waiting(self, model: str = "chat") -> int:
        """How many stand in line."""
        found = self.snapshot().endpoints.get(model)
        return sum(found.waiting.values()) if found is not None else 0

    def leases(self) -> dict[str, str]:
        """Endpoint of each live lease."""
        return {lease: endpoint for lease, (endpoint, _, _) in self.snapshot().leases.items()}

    def nothing_left(self) -> bool:
        """Whether nobody waits and nothing is leased."""
        now = self.snapshot()
        return (
            not now.leases and not any(now.lines.values()) and all(one.in_flight == 0 for one in now.endpoints.values())
        )

    def close(self) -> None:
        """Hang up."""
        self.store.close()


class SyncFace:
    """`Guard`, awaited. None of its coroutines gives the event loop a turn."""

    name = "sync"

    def __init__(self, settings: GuardSettings) -> None:
        self.guard = Guard(settings)
        self.truth = Truth(settings)

    @asynccontextmanager
    async def permit(self, *args: Any, **options: Any) -> AsyncIterator[Permit]:
        """A permit for a block."""
        with self.guard.permit(*args, **options) as permit:
            yield permit

    async def get(self, *args: Any, **options: Any) -> Permit:
        """A permit to be released by hand."""
        return self.guard.permit(*args, **options)

    async def try_permit(self, *args: Any, **options: Any) -> Permit | None:
        """A permit, or none."""
        return self.guard.try_permit(*args, **options)

    async def release(self, permit: Permit, exc: BaseException | None = None) -> None:
        """Give it back by hand."""
        permit.release(exc)

    async def snapshot(self) -> Snapshot:
        """As the face reads it."""
        return self.guard.snapshot()

    def beside(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        """Play something beside: in a thread."""
        context = contextvars.copy_context()
        return asyncio.get_running_loop().run_in_executor(None, context.run, _drive, coroutine)

    async def close(self) -> None:
        """Close the guard."""
        await asyncio.to_thread(self.guard.close)


class AsyncFace:
    """`AsyncGuard` as it is."""

    name = "async"

    def __init__(self, settings: GuardSettings) -> None:
        self.guard = AsyncGuard(settings)
        self.truth = Truth(settings)
        self.permit = self.guard.permit
        self.try_permit = self.guard.try_permit
        self.snapshot = self.guard.snapshot
        self.close = self.guard.close

    async def get(self, *args: Any, **options: Any) -> AsyncPermit:
        """A permit to be released by hand."""
        return await self.guard.permit(*args, **options)

    async def release(self, permit: AsyncPermit, exc: BaseException | None = None) -> None:
        """Give it back by hand."""
        await permit.release(exc)

    def beside(self, coroutine: Coroutine[Any, Any, Any]) -> Awaitable[Any]:
        """Play something beside: as a task."""
        return asyncio.create_task(coroutine)


FACES = {"sync": SyncFace, "async": AsyncFace}


def _drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Carry out a coroutine that never waits for an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    msg = "this scenario waits for an event loop"
    raise AssertionError(msg)
