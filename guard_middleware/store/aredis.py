"""The store on Redis or Valkey for callers on an event loop: the verbs that a call needs, without a thread.

Everything else (beats, notifications, what is sent later) goes through the process's heartbeat and its own store.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from guard_middleware.errors import ConfigurationError
from guard_middleware.store import codec, keys, scripts
from guard_middleware.store.redis import (
    DROPPING,
    HEALTH_CHECK_S,
    WRONG_URL,
    drops,
    is_loaded,
    is_unloaded,
    pack_command,
    unavailable,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from typing import Self

    from guard_middleware.core.commands import Ask, Finish, Operate, Reply, Snapshot

MOST_AT_ONCE = 32
"""Commands on their way at the same time, each on a connection of its own; the tasks behind them go in order."""


class AsyncRedisStore:
    """Four of the verbs in one database of a Redis or Valkey server, for the tasks of one event loop."""

    def __init__(self, client: redis.asyncio.Redis, namespace: str, timeout_s: float = 2.0) -> None:
        """Prepare; nothing is connected before the first verb.

        Args:
            client: whose kind of connections is used. It has no socket timeouts of its own: on Python 3.11 those lose a
                cancellation that arrives while a command is sent.
            namespace: guards with different namespaces share nothing.
            timeout_s: bound on each verb, with the wait for a connection.
        """
        self._client = client
        self._pool: Any = client.connection_pool
        self._namespace = namespace
        self._timeout_s = timeout_s
        self._root = keys.root(namespace)
        self._idle: list[Any] = []
        self._keeps = True
        self._turns = asyncio.Semaphore(MOST_AT_ONCE)

    @classmethod
    def from_url(cls, url: str, namespace: str, timeout_s: float = 2.0) -> Self:
        """A store with a client of its own. Arguments and errors as for `RedisStore.from_url`."""
        try:
            client = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=None,
                socket_connect_timeout=None,
                socket_keepalive=True,
                health_check_interval=HEALTH_CHECK_S,
                retry=Retry(NoBackoff(), 0),
                decode_responses=False,
            )
        except ValueError:
            raise ConfigurationError(WRONG_URL) from None  # the library's own message may show the password
        return cls(client, namespace, timeout_s)

    def __repr__(self) -> str:
        return f"<AsyncRedisStore {self._namespace!r}>"

    async def admit(self, command: Ask) -> Reply:
        """Lease a permit, wait, or refuse."""
        return codec.decode_reply(await self._run(codec.encode_admit(command)))

    async def finish(self, command: Finish) -> Reply:
        """Release a lease and count its outcome."""
        return codec.decode_reply(await self._run(codec.encode_finish(command)))

    async def operate(self, command: Operate) -> Reply:
        """Carry out one operation: a caller that gives up leaves the line."""
        return codec.decode_reply(await self._run(codec.encode_operate(command)))

    async def snapshot(self) -> Snapshot:
        """Read everything, change nothing."""
        return codec.decode_snapshot(await self._run(codec.encode_snapshot()))

    async def close(self) -> None:
        """Give up the connections. What is released later connects for that one command."""
        self._keeps = False
        await self._drop_idle()
        with suppress(RedisError, OSError):
            await self._client.aclose()

    async def _run(self, call: codec.Call) -> Any:
        """Run one command, and put every trouble into one error, as `RedisStore` does."""
        function = scripts.library().functions[call.script]
        words = ("FCALL", function, len(call.keys) + 1, self._root, *call.keys, "", *call.args)
        try:
            async with _at_most(self._timeout_s), self._turns:
                while True:
                    connection, reused = (self._idle.pop(), True) if self._idle else (await self._connect(), False)
                    try:
                        return await self._exchange(connection, words)
                    except (redis.ConnectionError, OSError) as exc:
                        if not reused or isinstance(exc, DROPPING):
                            raise
                        await self._drop_idle()
        except (RedisError, OSError) as exc:
            if drops(exc):
                await self._drop_idle()
            raise unavailable(exc) from exc

    async def _connect(self) -> Any:
        """A connection that no pool knows: one that was cut off in its middle cannot come back from there."""
        connection = self._pool.make_connection()
        try:
            await connection.connect()
        except BaseException:
            await _hang_up(connection)
            raise
        return connection

    async def _exchange(self, connection: Any, words: tuple[Any, ...]) -> Any:
        """Send and read on one connection, which stays ours if what came back was a whole reply."""
        whole = False
        try:
            reply = await _ask_loaded(connection, words)
            whole = True
        except ResponseError as exc:
            whole = not isinstance(exc, DROPPING)
            raise
        finally:  # also if the task is cancelled in the middle of a reply: nobody else may read the rest of it
            if whole and self._keeps:
                self._idle.append(connection)
            else:
                await _hang_up(connection)
        return reply

    async def _drop_idle(self) -> None:
        while self._idle:
            await _hang_up(self._idle.pop())


async def _ask_loaded(connection: Any, words: tuple[Any, ...]) -> Any:
    """Ask, and load the library first if the server does not have it."""
    try:
        return await _ask(connection, words)
    except ResponseError as exc:
        if not is_unloaded(exc):
            raise
    try:
        await _ask(connection, ("FUNCTION", "LOAD", scripts.library().source))
    except ResponseError as late:
        if not is_loaded(late):
            raise
    return await _ask(connection, words)


async def _ask(connection: Any, words: tuple[Any, ...]) -> Any:
    await connection.send_packed_command(pack_command(connection, words))
    return await connection.read_response(disable_decoding=True)


async def _hang_up(connection: Any) -> None:
    with suppress(RedisError, OSError, RuntimeError):  # the last: a coroutine is thrown away, and its loop is gone
        await connection.disconnect(nowait=True)


@asynccontextmanager
async def _at_most(seconds: float) -> AsyncIterator[None]:
    """Bound a block, with an error of the client library's kind."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as exc:
        msg = "no answer in time"
        raise redis.TimeoutError(msg) from exc
