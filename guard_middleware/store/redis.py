"""The store on Redis or Valkey: one function call per verb, and every trouble as one error.

Commands do not go through `redis.Redis.execute_command` but over connections of the client's own pool, kept open and
reused: that path is half as long as the client's, and its hidden retries would repeat a command for longer than any
hook may wait. The connections are the client's in every other way (address, TLS, password, Sentinel).
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import redis
import redis.connection
from redis.backoff import NoBackoff
from redis.exceptions import BusyLoadingError, ReadOnlyError, RedisError, ResponseError
from redis.retry import Retry

from guard_middleware.errors import ConfigurationError, StoreUnavailable
from guard_middleware.store import codec, keys, scripts

if TYPE_CHECKING:
    from typing import Self

    from guard_middleware.core.commands import Ask, Beat, Configure, Finish, Operate, Reply, Snapshot

HEALTH_CHECK_S = 30
NONCE_S = 60
MOST_CONNECTIONS = 100_000
"""One for each thread that asks at the same time; their number is not ours to bound."""
OLDEST_SERVER = 7
WRONG_URL = "the store's URL must begin with redis://, rediss:// or unix:// and end with a database number"

_pack: Any = getattr(getattr(redis.connection, "hiredis", None), "pack_command", None)
"""The library's packer in C, if it has one, without its wrapper in Python, which costs as much as all the rest."""

DROPPING = (ReadOnlyError, BusyLoadingError)
"""Answers of a server that is not, or not yet, the one to talk to: connect anew, so that a failover is found."""
_DROPPING_WORDS = ("READONLY", "LOADING", "MASTERDOWN")


class RedisStore:
    """The guard's store in one database of a Redis or Valkey server (see `guard_middleware.store.base.Store`).

    Threads may share it. A fork may go on using it: it leaves the parent's connections alone.
    """

    def __init__(self, client: redis.Redis, namespace: str, *, now_ms: int | None = None) -> None:
        """Prepare; nothing is connected before the first verb.

        Args:
            client: whose connections are used. Its socket timeouts bound every verb; `from_url` sets them.
            namespace: guards with different namespaces share nothing.
            now_ms: for tests, the clock to use instead of the server's; see `set_clock`.
        """
        self._client = client
        self._pool: Any = client.connection_pool
        self._namespace = namespace
        self._root = keys.root(namespace)
        self._now: int | str = "" if now_ms is None else now_ms
        self._heads = {
            (script, count): ("FCALL", function, count + 1, self._root)
            for script, function in scripts.library().functions.items()
            for count in (0, 1)
        }
        self._idle: list[Any] = []
        self._pid = os.getpid()

    @classmethod
    def from_url(cls, url: str, namespace: str, timeout_s: float = 2.0) -> Self:
        """A store with a client of its own.

        Args:
            url: ``redis://``, ``rediss://`` or ``unix://``, with the database.
            namespace: guards with different namespaces share nothing.
            timeout_s: bound on connecting, and on waiting for each reply.

        Raises:
            ConfigurationError: if the URL cannot be one.
        """
        try:
            client = redis.Redis.from_url(
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
        return f"<RedisStore {self._namespace!r}>"

    @property
    def client(self) -> redis.Redis:
        """The client whose connections are used."""
        return self._client

    def set_clock(self, now_ms: int | None) -> None:
        """For tests: let the clock stand at an instant, or follow the server's again."""
        self._now = "" if now_ms is None else now_ms

    # ------------------------------------------------------------------ the verbs

    def admit(self, command: Ask) -> Reply:
        """Lease a permit, park the message, wait, or refuse."""
        return codec.decode_reply(self._run(codec.encode_admit(command)))

    def finish(self, command: Finish) -> Reply:
        """Release a lease, count its outcome, perhaps park, and take."""
        return codec.decode_reply(self._run(codec.encode_finish(command)))

    def beat(self, command: Beat) -> Reply:
        """Renew, report, give back, assert, and take."""
        return codec.decode_reply(self._run(codec.encode_beat(command)))

    def configure(self, command: Configure) -> Reply:
        """Publish a process's configuration."""
        return codec.decode_reply(self._run(codec.encode_configure(command)))

    def operate(self, command: Operate) -> Reply:
        """Carry out an operator's wish."""
        return codec.decode_reply(self._run(codec.encode_operate(command)))

    def snapshot(self) -> Snapshot:
        """Read everything, change nothing."""
        return codec.decode_snapshot(self._run(codec.encode_snapshot()))

    def close(self) -> None:
        """Give up the connections. The store can be used again, and then connects anew."""
        self._drop_idle()
        with suppress(RedisError, OSError):
            self._client.close()

    # ------------------------------------------------------------------ around the verbs

    def check_server(self) -> list[str]:
        """Look at the server before work begins.

        Returns:
            Warnings, each a sentence that says what to change.

        Raises:
            ConfigurationError: if it is a Redis Cluster, or too old for functions.
            StoreUnavailable: if there is no answer.
        """
        info = self._info()
        if info.get("cluster_enabled") == "1":
            msg = "the store is a Redis Cluster, which is not supported: name a single server (or its Sentinel)"
            raise ConfigurationError(msg)
        warnings = []
        policy = info.get("maxmemory_policy", "noeviction")
        if policy != "noeviction":
            warnings.append(
                f"the store's maxmemory-policy is {policy!r}: leases and waiting messages may vanish; set noeviction"
            )
        version = info.get("valkey_version") or info.get("redis_version", "")
        major = version.partition(".")[0]
        if major.isdigit() and int(major) < OLDEST_SERVER:
            msg = f"the store runs version {version}, which has no functions: use Redis 7, Valkey, or newer"
            raise ConfigurationError(msg)
        return warnings

    def _info(self) -> dict[str, str]:
        raw = self._command("INFO")
        text = raw.decode(errors="replace") if isinstance(raw, bytes) else ""
        return dict(line.split(":", 1) for line in text.splitlines() if ":" in line and not line.startswith("#"))

    def leave_nonce(self) -> str:
        """Write a fresh key that expires, to be looked for with `client_sees_nonce`.

        Returns:
            The nonce.
        """
        nonce = uuid4().hex
        self._command("SET", keys.nonce(self._root, nonce), 1, "EX", NONCE_S)
        return nonce

    def shares_server(self, client: object) -> bool:
        """Whether a broker's client reaches the same server and database as this store, proved by a nonce.

        Raises:
            StoreUnavailable: if there is no answer.
        """
        return isinstance(client, redis.Redis) and client_sees_nonce(client, self._namespace, self.leave_nonce())

    def wakeups(self, process: str) -> Wakeups:
        """Listen for the notifications of a process, on a connection of its own.

        Raises:
            StoreUnavailable: if there is no connection; and from `Wakeups.get`, if it breaks. Call again then.
        """
        return Wakeups(self._client, keys.wake(self._root, process))

    # ------------------------------------------------------------------ how

    def _run(self, call: codec.Call) -> Any:
        words = (*self._heads[call.script, len(call.keys)], *call.keys, self._now, *call.args)
        return self._command(*words)

    def _command(self, *words: Any) -> Any:
        """Run one command, and put every trouble into one error.

        A connection that was kept open may have died meanwhile; then, and only then, the command is sent once more,
        over a new one (I11: it can be repeated).
        """
        if self._pid != os.getpid():
            self._idle = []  # the parent's, which goes on using them
            self._pid = os.getpid()
        try:
            while True:
                try:
                    connection, reused = self._idle.pop(), True
                except IndexError:
                    connection, reused = _connect(self._pool), False
                try:
                    return self._exchange(connection, words)
                except (redis.ConnectionError, OSError) as exc:
                    if not reused or isinstance(exc, DROPPING):
                        raise
                    self._drop_idle()
        except (RedisError, OSError) as exc:
            if drops(exc):
                self._drop_idle()
            raise unavailable(exc) from exc

    def _exchange(self, connection: Any, words: tuple[Any, ...]) -> Any:
        """Send and read on one connection, which stays ours if what came back was a whole reply."""
        whole = False
        try:
            try:
                reply = _ask(connection, words)
            except ResponseError as exc:
                if not is_unloaded(exc):
                    raise
                try:
                    _ask(connection, ("FUNCTION", "LOAD", scripts.library().source))
                except ResponseError as late:
                    if not is_loaded(late):
                        raise
                reply = _ask(connection, words)
            whole = True
        except ResponseError as exc:
            whole = not isinstance(exc, DROPPING)
            raise
        finally:  # also if a time limit strikes this thread in the middle of a reply
            if whole:
                self._idle.append(connection)
            else:
                _discard(self._pool, connection)
        return reply

    def _drop_idle(self) -> None:
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return
            _discard(self._pool, connection)


class Wakeups:
    """The notifications of one process. For one thread."""

    def __init__(self, client: redis.Redis, channel: str) -> None:
        """Subscribe, and return when the server has confirmed it: from then on nothing is missed."""
        self._pubsub = client.pubsub()  # type: ignore[no-untyped-call]  # the library leaves it untyped
        try:
            self._pubsub.subscribe(channel)
            confirmed = self._next(timeout_s=client.connection_pool.connection_kwargs.get("socket_timeout") or 5.0)
        except (RedisError, OSError) as exc:
            self.close()
            raise _silent(exc) from exc
        if confirmed is None:
            self.close()
            raise _silent(TimeoutError())

    def get(self, timeout_s: float) -> str | None:
        """Wait for a notification.

        Args:
            timeout_s: how long to wait, 0 for not at all.

        Returns:
            The lease id of a caller of this process that got a permit, "" if there is something to take, `None` if
            the time is over.

        Raises:
            StoreUnavailable: if the connection broke: what was sent meanwhile is lost. Close, and subscribe again.
        """
        until = time.monotonic() + timeout_s
        try:
            while True:
                got = self._next(timeout_s=max(0.0, until - time.monotonic()))
                if got is not None and got["type"] == "message":
                    data = got["data"]
                    return data.decode() if isinstance(data, bytes) else str(data)
                if time.monotonic() >= until:
                    return None
        except (RedisError, OSError) as exc:
            self.close()
            raise _silent(exc) from exc

    def _next(self, *, timeout_s: float) -> Any:
        return self._pubsub.get_message(timeout=timeout_s)

    def close(self) -> None:
        """Give up the connection."""
        with suppress(RedisError, OSError):
            self._pubsub.close()


def client_sees_nonce(client: redis.Redis, namespace: str, nonce: str) -> bool:
    """Whether a client reaches the server and database in which a store has left a nonce.

    Args:
        client: of a broker.
        namespace: of the store.
        nonce: from `RedisStore.leave_nonce`.

    Raises:
        StoreUnavailable: if there is no answer.
    """
    try:
        return bool(client.exists(keys.nonce(keys.root(namespace), nonce)))
    except (RedisError, OSError) as exc:
        raise _silent(exc) from exc


# ---------------------------------------------------------------------- connections


def _connect(pool: Any) -> Any:
    """A connection of the pool, connected. Older client libraries want to be told what for."""
    try:
        return pool.get_connection()
    except TypeError:
        return pool.get_connection("FCALL")


def _ask(connection: Any, words: tuple[Any, ...]) -> Any:
    connection.send_packed_command(pack_command(connection, words))
    return connection.read_response(disable_decoding=True)


def pack_command(connection: Any, words: tuple[Any, ...]) -> Any:
    """A command in the form that a connection sends."""
    return [_pack(words)] if _pack else connection.pack_command(*words)


def _discard(pool: Any, connection: Any) -> None:
    """Hang up, and tell the pool that the connection is free to be connected again."""
    with suppress(RedisError, OSError):
        connection.disconnect()
    with suppress(RedisError, OSError):
        pool.release(connection)


def is_unloaded(exc: ResponseError) -> bool:
    """Whether the server does not know the library of functions: a new one, or one that was restarted."""
    return "Function not found" in str(exc)


def is_loaded(exc: ResponseError) -> bool:
    """Whether somebody else has loaded the library meanwhile."""
    return "already exists" in str(exc)


def drops(exc: BaseException) -> bool:
    """Whether the server says that it is not the one to talk to: connections to it are given up."""
    return isinstance(exc, DROPPING) or str(exc).startswith(_DROPPING_WORDS)


def unavailable(exc: BaseException) -> StoreUnavailable:
    """What a verb raises for an error of the client library or of the network."""
    return StoreUnavailable(f"the store does not serve ({_told(exc)}): nothing starts until it is back")


def _silent(exc: BaseException) -> StoreUnavailable:
    return StoreUnavailable(f"the store does not answer ({_told(exc)}): try again")


def _told(exc: BaseException) -> str:
    """What may be told of an error, never a URL (I13): its type, and of the server's answer the first word.

    A fault of a script is told in full: it names a line of the library, and nothing of a message.
    """
    told = str(exc) if isinstance(exc, ResponseError) else ""
    if not told.startswith("user_function:"):
        told = told.partition(" ")[0]
    return f"{type(exc).__name__} {told[:200]}".strip()
