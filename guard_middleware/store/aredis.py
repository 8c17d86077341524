"""The store on Redis or Valkey for callers on an event loop: the verbs that a call needs, without a thread.

Everything else (beats, notifications, what is sent later) goes through the process's heartbeat and its own store.
"""

from __future__ import annotations

from contextlib import suppress
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
    MOST_CONNECTIONS,
    WRONG_URL,
    drops,
    is_loaded,
    is_unloaded,
    pack_command,
    unavailable,
)

if TYPE_CHECKING:
    from typing import Self

    from guard_middleware.core.commands import Ask, Finish, Reply, Snapshot


class AsyncRedisStore:
    """Admit, finish and snapshot in one database of a Redis or Valkey server, for the tasks of one event loop."""

    def __init__(self, client: redis.asyncio.Redis, namespace: str) -> None:
        """Prepare; nothing is connected before the first verb.

        Args:
            client: whose connections are used. Its socket timeouts bound every verb; `from_url` sets them.
            namespace: guards with different namespaces share nothing.
        """
        self._client = client
        self._pool: Any = client.connection_pool
        self._namespace = namespace
        self._root = keys.root(namespace)
        self._idle: list[Any] = []

    @classmethod
    def from_url(cls, url: str, namespace: str, timeout_s: float = 2.0) -> Self:
        """A store with a client of its own. Arguments and errors as for `RedisStore.from_url`."""
        try:
            client = redis.asyncio.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                socket_keepalive=True,
                health_check_interval=HEALTH_CHECK_S,
                retry=Retry(NoBackoff(), 0),
                decode_responses=False,
                max_connections=MOST_CONNECTIONS,
            )
        except ValueError:
            raise ConfigurationError(WRONG_URL) from None  # the library's own message may show the password
        return cls(client, namespace)

    def __repr__(self) -> str:
        return f"<AsyncRedisStore {self._namespace!r}>"

    async def admit(self, command: Ask) -> Reply:
        """Lease a permit, wait, or refuse."""
        return codec.decode_reply(await self._run(codec.encode_admit(command)))

    async def finish(self, command: Finish) -> Reply:
        """Release a lease and count its outcome."""
        return codec.decode_reply(await self._run(codec.encode_finish(command)))

    async def snapshot(self) -> Snapshot:
        """Read everything, change nothing."""
        return codec.decode_snapshot(await self._run(codec.encode_snapshot()))

    async def close(self) -> None:
        """Give up the connections."""
        await self._drop_idle()
        with suppress(RedisError, OSError):
            await self._client.aclose()

    async def _run(self, call: codec.Call) -> Any:
        """Run one command, and put every trouble into one error, as `RedisStore` does."""
        function = scripts.library().functions[call.script]
        words = ("FCALL", function, len(call.keys) + 1, self._root, *call.keys, "", *call.args)
        try:
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
        try:
            return await self._pool.get_connection()
        except TypeError:  # older client libraries want to be told what for
            return await self._pool.get_connection("FCALL")

    async def _exchange(self, connection: Any, words: tuple[Any, ...]) -> Any:
        """Send and read on one connection, which stays ours if what came back was a whole reply."""
        whole = False
        try:
            try:
                reply = await _ask(connection, words)
            except ResponseError as exc:
                if not is_unloaded(exc):
                    raise
                try:
                    await _ask(connection, ("FUNCTION", "LOAD", scripts.library().source))
                except ResponseError as late:
                    if not is_loaded(late):
                        raise
                reply = await _ask(connection, words)
            whole = True
        except ResponseError as exc:
            whole = not isinstance(exc, DROPPING)
            raise
        finally:  # also if the task is cancelled in the middle of a reply: nobody else may read the rest of it
            if whole:
                self._idle.append(connection)
            else:
                await self._discard(connection)
        return reply

    async def _drop_idle(self) -> None:
        while self._idle:
            await self._discard(self._idle.pop())

    async def _discard(self, connection: Any) -> None:
        """Hang up, and tell the pool that the connection is free to be connected again."""
        with suppress(RedisError, OSError):
            await connection.disconnect(nowait=True)
        with suppress(RedisError, OSError):
            await self._pool.release(connection)


async def _ask(connection: Any, words: tuple[Any, ...]) -> Any:
    await connection.send_packed_command(pack_command(connection, words))
    return await connection.read_response(disable_decoding=True)
