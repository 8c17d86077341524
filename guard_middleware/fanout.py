"""Fan-out at one call site: many items, each call with its own permit, no more at once than the endpoint takes.

Each worker (a task, or a thread) takes the next item, gets a permit for it, and calls; both faces do what `_work` says.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import isawaitable, iscoroutine, iscoroutinefunction
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from guard_middleware.aguard import AsyncGuard, default_async_guard
from guard_middleware.calls import CallOff
from guard_middleware.errors import AdmissionDenied, ConfigurationError, StoreUnavailable
from guard_middleware.guard import default_guard
from guard_middleware.permit import UNUSED, current_permit
from guard_middleware.steps import perform, perform_async

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Iterator

    from guard_middleware.config import GuardSettings
    from guard_middleware.core.commands import Snapshot
    from guard_middleware.guard import Guard
    from guard_middleware.permit import AsyncPermit, Permit
    from guard_middleware.priority import Priority

TIMEOUT_S = 600.0
"""How long each call may wait for its permit if nothing is said: background work may have to wait out its ageing time
more than once."""

T = TypeVar("T")
R = TypeVar("R")


async def map_concurrent(
    fn: Callable[[T], Awaitable[R]] | Callable[[T], R],
    items: Iterable[T],
    *,
    model: str | None = None,
    width: int | None = None,
    priority: Priority | str | None = None,
    cost: int = 1,
    timeout: float = TIMEOUT_S,  # noqa: ASYNC109  # of each call, as in `permit`
    guard: AsyncGuard | None = None,
) -> list[R]:
    """Call `fn` with each item, each call under a permit of its own, as many at once as the endpoint takes.

    Where the caller holds a permit already (in a guarded actor), the first call uses that one, and no call waits: as
    many run at once as there are permits to be had now.

    Args:
        fn: takes one item. A coroutine function runs as tasks, any other in threads.
        items: what to call it with, in this order.
        model: id of the endpoint; where the caller holds a permit, that one's.
        width: the most calls at once; never more than the endpoint's ceiling.
        priority: of the calls; else that of the scope in force, else that of the caller's permit, else orchestration.
        cost: units of each call.
        timeout: how long each call may wait for its permit, in seconds.
        guard: whose permits; the process's own, with the environment's configuration, if not given.

    Returns:
        What `fn` returned, in the order of the items.

    Raises:
        AdmissionDenied: a call got no permit in time, or none at all where it may not wait.
        ConfigurationError: the model, the width, the priority or the cost can never be.
        StoreUnavailable: the store gave no answer in time.
        Exception: the first that `fn` raised, once the running calls have ended. No further call begins after it.
    """
    face = guard or default_async_guard()
    plan: _Plan[T, R] = _Plan(items, model, width)
    if not plan.items:
        return []
    workers = plan.workers(face.settings, await _seen(face) if plan.asks_width else None)
    threads = None if _is_asynchronous(fn) else ThreadPoolExecutor(workers, thread_name_prefix="guard-map")

    async def do(step: _Get | _Call) -> Any:
        if isinstance(step, _Get):
            return await face.get(plan.model, priority, cost, timeout, plan.call_off)
        async with cast("AsyncPermit", step.permit):
            if step.unused:
                step.permit.add(UNUSED)
                return None
            item = plan.items[step.index]
            with plan.calling():
                result = fn(item) if threads is None else await _in_thread(threads, fn, item)
                return await result if isawaitable(result) else result

    try:
        tasks = [asyncio.create_task(perform_async(_work(plan), do)) for _ in range(workers)]
        await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        plan.call_off.now()
        if threads is not None:
            threads.shutdown(wait=False)
    return plan.end()


def map_concurrent_sync(
    fn: Callable[[T], Awaitable[R]] | Callable[[T], R],
    items: Iterable[T],
    *,
    model: str | None = None,
    width: int | None = None,
    priority: Priority | str | None = None,
    cost: int = 1,
    timeout: float = TIMEOUT_S,
    guard: Guard | None = None,
) -> list[R]:
    """Call `fn` with each item from threads: see `map_concurrent`.

    A coroutine function runs on an event loop that is made for it; on a running one, await `map_concurrent`.
    """
    face = guard or default_guard()
    if _is_asynchronous(fn):
        options = {"model": model, "width": width, "priority": priority, "cost": cost, "timeout": timeout}
        coming = _on_a_loop(fn, items, face, options)
        try:
            return asyncio.run(coming)
        finally:
            coming.close()  # it never began where a loop runs already
    plan: _Plan[T, R] = _Plan(items, model, width)
    if not plan.items:
        return []
    workers = plan.workers(face.settings, _seen_sync(face) if plan.asks_width else None)

    def do(step: _Get | _Call) -> Any:
        if isinstance(step, _Get):
            return face.get(plan.model, priority, cost, timeout, plan.call_off)
        with cast("Permit", step.permit):
            if step.unused:
                return step.permit.add(UNUSED)
            with plan.calling():
                result = fn(plan.items[step.index])
                if iscoroutine(result):
                    result.close()
                    msg = "fn returned a coroutine: give the coroutine function itself, or await map_concurrent"
                    raise TypeError(msg)
                return result

    def work() -> None:
        perform(_work(plan), do)

    with ThreadPoolExecutor(max(1, workers - 1), thread_name_prefix="guard-map") as threads:
        try:
            for _ in range(workers - 1):
                threads.submit(contextvars.copy_context().run, work)
            work()
        except BaseException as exc:
            plan.failed(exc)
            if not isinstance(exc, Exception):  # this thread is to end; the others end what they have begun
                raise
    return plan.end()


async def _seen(face: AsyncGuard) -> Snapshot | None:
    """What the store says of the endpoints; `None` if it is away for a moment, which is no reason to give up."""
    try:
        return await face.snapshot()
    except StoreUnavailable:
        return None


def _seen_sync(face: Guard) -> Snapshot | None:
    try:
        return face.snapshot()
    except StoreUnavailable:
        return None


async def _on_a_loop(fn: Any, items: Any, guard: Guard, options: dict[str, Any]) -> list[Any]:
    face = AsyncGuard(guard=guard)
    try:
        return await map_concurrent(fn, items, **options, guard=face)
    finally:
        await face.leave_loop()


async def _in_thread(threads: ThreadPoolExecutor, fn: Callable[[T], Any], item: T) -> Any:
    """Call a function in a thread; a cancellation waits for its end, because it loads the server until then."""
    context = contextvars.copy_context()
    running = asyncio.get_running_loop().run_in_executor(threads, context.run, fn, item)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        running.exception()  # seen, and of no interest any more
        raise cancelled
    return running.result()


def _is_asynchronous(fn: object) -> bool:
    """Whether it is a coroutine function, or an object that is called as one."""
    return iscoroutinefunction(fn) or iscoroutinefunction(getattr(fn, "__call__", None))  # noqa: B004


# ---------------------------------------------------------------------- what both faces do


@dataclass(frozen=True, slots=True)
class _Get:
    """Get a permit."""


@dataclass(frozen=True, slots=True)
class _Call:
    """Call with an item under a permit; or only give the permit back, because nothing more is to begin."""

    permit: Permit | AsyncPermit
    index: int
    unused: bool


def _work(plan: _Plan[Any, Any]) -> Generator[_Get | _Call, Any, None]:
    """What one worker does, until nothing is left for it."""
    while (turn := plan.next()) is not None:
        index, alone = turn
        try:
            permit = yield _Get()
        except AdmissionDenied as exc:
            if plan.goes_on_without(index, exc, alone=alone):
                continue
            return
        except BaseException as exc:
            plan.failed(exc)
            raise
        unused = plan.call_off.over
        try:
            result = yield _Call(permit, index, unused)
        except BaseException as exc:
            plan.failed(exc)
            raise
        if not unused:
            plan.results[index] = result


class _Plan(Generic[T, R]):
    """What is left to do, and what came of the rest. Tasks or threads share it."""

    def __init__(self, items: Iterable[T], model: str | None, width: int | None) -> None:
        if width is not None and (type(width) is not int or width < 1):  # a boolean is no number here
            msg = "width must be a whole number of at least 1"
            raise ConfigurationError(msg)
        outer = current_permit()
        if model is None and outer is None:
            msg = "model is missing: name the endpoint that the calls go to"
            raise ConfigurationError(msg)
        self.items = list(items)
        self.model: str = model or (outer.model if outer is not None else "")
        self.results: list[Any] = [None] * len(self.items)
        self.call_off = CallOff()
        self._width = width
        self._nested = outer is not None
        self._left = deque(range(len(self.items)))
        self._lock = threading.Lock()
        self._workers = 0
        self._error: BaseException | None = None

    @property
    def asks_width(self) -> bool:
        """Whether the endpoint's ceiling could make a difference."""
        return min(self._width or len(self.items), len(self.items)) > 1

    def workers(self, settings: GuardSettings, snapshot: Snapshot | None) -> int:
        """How many calls to make at once: the ceiling in force counts, since the limit may rise meanwhile."""
        own = settings.endpoint(self.model).ceiling(settings.model_max_concurrent_requests)
        known = snapshot.endpoints.get(self.model) if snapshot is not None else None
        ceiling = own if known is None else known.ceiling
        self._workers = max(1, min(self._width or ceiling, ceiling, len(self.items)))
        return self._workers

    def next(self) -> tuple[int, bool] | None:
        """Take the next item for a worker.

        Returns:
            Its index, and whether no other worker is left; `None` if nothing more is to begin, and the worker leaves.
        """
        with self._lock:
            if self._left and self._error is None:
                return self._left.popleft(), self._workers == 1
            self._workers -= 1
            return None

    def goes_on_without(self, index: int, exc: AdmissionDenied, *, alone: bool) -> bool:
        """A worker got no permit. Where none may wait it leaves, and its item to the others.

        Args:
            index: of its item.
            exc: why not.
            alone: nobody else was left when it asked.

        Returns:
            Whether it tries again: the others have left meanwhile, and what they called under is free.
        """
        with self._lock:
            if self._nested and not alone:
                self._left.appendleft(index)
                if self._workers == 1:
                    return True
                self._workers -= 1
                return False
        self.failed(exc)
        return False

    @contextmanager
    def calling(self) -> Iterator[None]:
        """While one item is called with. A failure is known before its permit is free: nothing begins with that."""
        try:
            yield
        except BaseException as exc:
            self.failed(exc)
            raise

    def failed(self, exc: BaseException) -> None:
        """Let nothing more begin; the first reason is the one that is raised."""
        with self._lock:
            if self._error is None:
                self._error = exc
        self.call_off.now()

    def end(self) -> list[R]:
        """What came of all items."""
        if self._error is not None:
            raise self._error
        return self.results
