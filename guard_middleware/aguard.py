"""The guard for callers on an event loop: the same line, the same permits, and no thread that waits."""

from __future__ import annotations

import asyncio
import functools
from typing import TYPE_CHECKING, Any, Self

from guard_middleware.calls import acquire, ending, give_back_unused, release
from guard_middleware.core.commands import Ask, Finish, Operate
from guard_middleware.errors import AdmissionDenied
from guard_middleware.guard import Guard, default_guard
from guard_middleware.permit import AsyncPermit
from guard_middleware.steps import Hear, Publish, perform_async
from guard_middleware.store.aredis import AsyncRedisStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
    from types import TracebackType

    from guard_middleware.calls import CallOff
    from guard_middleware.config import GuardSettings
    from guard_middleware.core.commands import Reply, Snapshot
    from guard_middleware.core.outcome import Classified
    from guard_middleware.heartbeat import Heartbeat
    from guard_middleware.priority import Priority
    from guard_middleware.steps import Step
    from guard_middleware.store.base import Store


class AsyncGuard:
    """`Guard` for coroutines. Beats and notifications go on in two threads, also while the event loop is busy.

    Safe to create at import, and to use from several event loops.
    """

    def __init__(self, settings: GuardSettings | None = None, *, guard: Guard | None = None) -> None:
        """Keep the configuration.

        Args:
            settings: the configuration; read from the environment if not given.
            guard: a guard whose configuration and life line it shares, instead of `settings`.

        Raises:
            ConfigurationError: if the environment is wrong.
        """
        self.guard = guard or Guard(settings)
        self._stores: dict[asyncio.AbstractEventLoop, tuple[AsyncRedisStore, AsyncGenerator[None]]] = {}

    @classmethod
    def from_settings(cls, settings: GuardSettings | None = None) -> Self:
        """A guard with the configuration of the environment, or with the given one."""
        return cls(settings)

    def __repr__(self) -> str:
        """The namespace and the ids, no URL."""
        return f"<Async{repr(self.guard)[1:]}"

    @property
    def settings(self) -> GuardSettings:
        """The configuration."""
        return self.guard.settings

    def permit(
        self, model: str, *, priority: Priority | str | None = None, cost: int = 1, timeout: float = 30.0
    ) -> Waiting:
        """Wait for a permit: ``async with guard.permit(...) as permit``, or ``permit = await guard.permit(...)``.

        Arguments and errors as for `Guard.permit`. A cancelled wait leaves nothing behind.
        """
        return Waiting(self.get(model, priority, cost, timeout))

    async def try_permit(
        self, model: str, *, priority: Priority | str | None = None, cost: int = 1
    ) -> AsyncPermit | None:
        """A permit if one is free now, else `None`. Arguments and errors as for `Guard.permit`."""
        try:
            return await self.get(model, priority, cost, 0.0)
        except AdmissionDenied:
            return None

    async def snapshot(self) -> Snapshot:
        """Read the store without changing anything.

        Raises:
            StoreUnavailable: the store gave no answer.
        """
        return await (await self._store()).snapshot()

    async def close(self) -> None:
        """Give back what this process's callers hold, and end its threads and this loop's connections."""
        await asyncio.to_thread(self.guard.close)
        await self.leave_loop()

    async def leave_loop(self) -> None:
        """Give up this event loop's connections; the rest stays."""
        known = self._stores.get(asyncio.get_running_loop())
        if known is not None:
            await known[1].aclose()

    async def __aenter__(self) -> Self:
        """Nothing happens before the first call."""
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        await self.close()

    async def get(
        self,
        model: str,
        priority: Priority | str | None,
        cost: int,
        timeout_s: float,
        call_off: CallOff | None = None,
    ) -> AsyncPermit:
        """As `Guard.get`."""
        wanted = self.guard.wanted(model, priority, cost, timeout_s)
        if wanted.lender is not None:
            return AsyncPermit(
                **wanted.lent(), release=_at_once(wanted.lender.take_back), give_up=wanted.lender.take_back
            )
        heartbeat = await self._heartbeat()
        store = await self._store()
        ask = wanted.ask(heartbeat.process)
        loop, granted = asyncio.get_running_loop(), asyncio.Event()

        async def do(step: Step) -> Any:
            match step:
                case Hear(seconds=seconds):
                    try:
                        async with asyncio.timeout(seconds):
                            await granted.wait()
                    except TimeoutError:
                        return None
                    granted.clear()
                case Publish():
                    await asyncio.to_thread(heartbeat.carry_out, step)
                case Ask() | Finish() | Operate():
                    return await _carry_out(step, store)
            return None

        ears = [one for one in (heartbeat, call_off) if ask.wait and one is not None]
        for one in ears:
            one.hear(ask.lease, functools.partial(loop.call_soon_threadsafe, granted.set))
        try:
            acquiring = acquire(heartbeat, ask, wanted.priority, wanted.deadline_s, call_off)
            holding, reply = await perform_async(acquiring, do)
            return AsyncPermit(
                **self.guard.given(wanted, holding, reply),
                release=lambda ended: perform_async(release(heartbeat, holding, ended), do),
                give_up=lambda ended: heartbeat.give_up(ending(heartbeat, holding, ended)),
            )
        except GeneratorExit:  # thrown away while it asked: what it asked for is withdrawn already
            raise
        except BaseException:
            give_back_unused(heartbeat, ask.lease)
            raise
        finally:
            for one in ears:
                one.deafen(ask.lease)

    # -- how ---------------------------------------------------------------------------------------------------------

    async def _store(self) -> AsyncRedisStore | _InThreads:
        """This event loop's store. It hangs up when the loop shuts down."""
        if self.guard.makes_stores:
            return _InThreads(self.guard.reader())
        loop = asyncio.get_running_loop()
        known = self._stores.get(loop)
        if known is not None:
            return known[0]
        for ended in [one for one in list(self._stores) if one.is_closed()]:
            self._stores.pop(ended, None)
        settings = self.settings
        url = settings.redis_url.get_secret_value()
        store = AsyncRedisStore.from_url(url, settings.namespace, timeout_s=settings.store_timeout_s)
        open_until = self._open_until_the_loop_ends(loop, store)
        self._stores[loop] = store, open_until
        await anext(open_until)
        return store

    async def _open_until_the_loop_ends(
        self, loop: asyncio.AbstractEventLoop, store: AsyncRedisStore
    ) -> AsyncGenerator[None]:
        """A loop that shuts down closes the generators that were begun on it, and so these connections."""
        try:
            yield
        finally:
            self._stores.pop(loop, None)
            await store.close()

    async def _heartbeat(self) -> Heartbeat:
        """The life line of this process's callers; its start waits for the store, so it is made beside the loop."""
        started = self.guard.started
        return await asyncio.to_thread(self.guard.heartbeat) if started is None else started


async def _carry_out(command: Ask | Finish | Operate, store: AsyncRedisStore | _InThreads) -> Reply:
    if isinstance(command, Ask):
        return await store.admit(command)
    if isinstance(command, Finish):
        return await store.finish(command)
    return await store.operate(command)


def _at_once(take_back: Callable[[Classified], None]) -> Callable[[Classified], Awaitable[None]]:
    async def release(ended: Classified) -> None:
        take_back(ended)

    return release


class _InThreads:
    """A store of the other face's: each of its verbs in a thread."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def admit(self, command: Ask) -> Reply:
        return await asyncio.to_thread(self._store.admit, command)

    async def finish(self, command: Finish) -> Reply:
        return await asyncio.to_thread(self._store.finish, command)

    async def operate(self, command: Operate) -> Reply:
        return await asyncio.to_thread(self._store.operate, command)

    async def snapshot(self) -> Snapshot:
        return await asyncio.to_thread(self._store.snapshot)


class Waiting:
    """A permit that is waited for: as ``async with``, or with ``await``."""

    def __init__(self, permit: Coroutine[Any, Any, AsyncPermit]) -> None:
        self._coming = permit
        self._permit: AsyncPermit | None = None

    def __await__(self) -> Generator[Any, Any, AsyncPermit]:
        """Wait for the permit."""
        return self._coming.__await__()

    async def __aenter__(self) -> AsyncPermit:
        """Wait for the permit, and make it the current one of the block."""
        self._permit = await self._coming
        return await self._permit.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release it, and classify the exception that leaves the block."""
        if self._permit is not None:
            await self._permit.__aexit__(exc_type, exc, traceback)


@functools.cache
def default_async_guard() -> AsyncGuard:
    """The process's guard for coroutines where none is given: it shares `default_guard`'s life line."""
    return AsyncGuard(guard=default_guard())
