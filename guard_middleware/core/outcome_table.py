"""The published table of outcomes: which status, which type of error and which words mean what.

Data only; `outcome` reads it. `docs/outcomes.md` prints the same rows, and a test holds the two equal.
Errors are named `root.Class`: the first part of the module that defines the class, and the class's name. So the core
knows the clients without importing any of them, and without any of them being installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Outcome(StrEnum):
    """How a call ended, as evidence about its server's capacity.

    Attributes:
        SUCCESS: the server did the work.
        OVERLOAD: the server had too much to do, or could not be reached or heard to the end.
        BENIGN: an answer that says nothing about capacity, but that the server is there to give.
        NEUTRAL: a fault of the server that is not capacity.
        IGNORED: no evidence: a local fault, a cancelled call, a shutdown.
    """

    SUCCESS = "success"
    OVERLOAD = "overload"
    BENIGN = "benign"
    NEUTRAL = "neutral"
    IGNORED = "ignored"


WORST_FIRST = (Outcome.OVERLOAD, Outcome.NEUTRAL, Outcome.BENIGN, Outcome.SUCCESS, Outcome.IGNORED)
"""Which of several counts where one call ended in several ways (an exception group)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusRow:
    """One row about HTTP statuses: a list of single ones, or what is left of a whole hundred."""

    statuses: tuple[int, ...] = ()
    hundred: int = 0
    outcome: Outcome
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeRow:
    """One row about errors that carry no status of 400 or more.

    Attributes:
        names: `root.Class`; a subclass has the row of its nearest listed base.
        outcome: what such an error means.
        why: for the reader of the table.
        looks_inside: the error only passes on what happened below it, so that a cause that says something else wins.
    """

    names: tuple[str, ...]
    outcome: Outcome
    why: str
    looks_inside: bool = False


STATUS_ROWS = (
    StatusRow(statuses=(408,), outcome=Outcome.OVERLOAD, why="time-out, told by the server"),
    StatusRow(statuses=(425,), outcome=Outcome.NEUTRAL, why="too early: about replay, not about load"),
    StatusRow(statuses=(429,), outcome=Outcome.OVERLOAD, why="too many requests"),
    StatusRow(statuses=(499,), outcome=Outcome.IGNORED, why="the client went away; the server did nothing wrong"),
    StatusRow(
        statuses=(*range(400, 408), *range(409, 419), 421, 422, 423, 424, 426, 428, 431, 451),
        outcome=Outcome.BENIGN,
        why="about this request, its key or its size",
    ),
    StatusRow(
        statuses=(500, 501, 505, 506, 507, 508, 510, 511, 525, 526, 527, 530),
        outcome=Outcome.NEUTRAL,
        why="a fault that is not capacity; overload if its text says so, see the words below",
    ),
    StatusRow(statuses=(502, 503, 504), outcome=Outcome.OVERLOAD, why="unavailable, or a gateway's word for it"),
    StatusRow(
        statuses=(520, 521, 522, 523, 524),
        outcome=Outcome.OVERLOAD,
        why="a proxy's words for a server that broke off, refused, was not reachable or timed out",
    ),
    StatusRow(statuses=(529,), outcome=Outcome.OVERLOAD, why="overloaded"),
    StatusRow(hundred=1, outcome=Outcome.IGNORED, why="not a final answer"),
    StatusRow(hundred=2, outcome=Outcome.SUCCESS, why="done"),
    StatusRow(hundred=3, outcome=Outcome.BENIGN, why="the server answered: look elsewhere"),
    StatusRow(hundred=4, outcome=Outcome.BENIGN, why="about this request"),
    StatusRow(hundred=5, outcome=Outcome.NEUTRAL, why="as 500, words included"),
)

TYPE_ROWS = (
    TypeRow(
        names=(
            "httpx.PoolTimeout",
            "httpx.ConnectionNotAvailable",
            "urllib3.EmptyPoolError",
            "urllib3.FullPoolError",
            "urllib3.ClosedPoolError",
        ),
        outcome=Outcome.IGNORED,
        why="our own connection pool was full or closed: the request never left",
    ),
    TypeRow(
        names=(
            "httpx.InvalidURL",
            "httpx.UnsupportedProtocol",
            "httpx.LocalProtocolError",
            "httpx.CookieConflict",
            "httpx.StreamError",
            "h11.LocalProtocolError",
            "requests.InvalidURL",
            "requests.MissingSchema",
            "requests.InvalidSchema",
            "requests.InvalidHeader",
            "requests.InvalidJSONError",
            "requests.URLRequired",
            "requests.StreamConsumedError",
            "requests.UnrewindableBodyError",
            "urllib3.LocationValueError",
            "urllib3.InvalidHeader",
            "urllib3.ProxySchemeUnsupported",
            "urllib3.UnrewindableBodyError",
            "urllib3.BodyNotHttplibCompatible",
            "urllib3.TimeoutStateError",
            "aiohttp.InvalidURL",
            "http.InvalidURL",
            "http.ImproperConnectionState",
            "openai.OpenAIError",
            "openai.InvalidWebhookSignatureError",
            "anthropic.AnthropicError",
            "ollama.RequestError",
        ),
        outcome=Outcome.IGNORED,
        why="the client was used wrongly or could not build the request: nothing was asked of the server",
    ),
    TypeRow(
        names=(
            "httpx.TooManyRedirects",
            "httpx.DecodingError",
            "requests.TooManyRedirects",
            "requests.ContentDecodingError",
            "requests.JSONDecodeError",
            "urllib3.DecodeError",
            "urllib3.HeaderParsingError",
            "urllib3.HostChangedError",
            "aiohttp.TooManyRedirects",
            "aiohttp.ContentTypeError",
            "openai.APIResponseValidationError",
            "anthropic.APIResponseValidationError",
        ),
        outcome=Outcome.NEUTRAL,
        why="an answer came, and cannot be understood",
    ),
    TypeRow(
        names=(
            "ssl.SSLError",
            "requests.SSLError",
            "urllib3.SSLError",
            "aiohttp.ClientSSLError",
            "aiohttp.ClientConnectorCertificateError",
            "aiohttp.ServerFingerprintMismatch",
        ),
        outcome=Outcome.NEUTRAL,
        why="TLS: a certificate or protocol that does not fit is configuration, not load",
        looks_inside=True,
    ),
    TypeRow(
        names=("openai.LengthFinishReasonError", "openai.ContentFilterFinishReasonError"),
        outcome=Outcome.BENIGN,
        why="the server did its work; the answer is not usable",
    ),
    TypeRow(
        names=("dramatiq.TimeLimitExceeded",),
        outcome=Outcome.OVERLOAD,
        why="the actor's time limit: a time-out like any other",
    ),
    TypeRow(
        names=(
            "builtins.TimeoutError",
            "httpx.TimeoutException",
            "requests.Timeout",
            "urllib3.TimeoutError",
            "aiohttp.ServerTimeoutError",
            "openai.APITimeoutError",
            "anthropic.APITimeoutError",
        ),
        outcome=Outcome.OVERLOAD,
        why="time-out",
        looks_inside=True,
    ),
    TypeRow(
        names=(
            "builtins.ConnectionError",
            "socket.gaierror",
            "socket.herror",
            "ssl.SSLEOFError",
            "ssl.SSLZeroReturnError",
            "ssl.SSLSyscallError",
            "asyncio.IncompleteReadError",
            "anyio.BrokenResourceError",
            "anyio.EndOfStream",
            "h11.RemoteProtocolError",
            "http.HTTPException",
            "urllib.URLError",
            "httpx.NetworkError",
            "httpx.RemoteProtocolError",
            "httpx.ProxyError",
            "requests.ConnectionError",
            "requests.ChunkedEncodingError",
            "urllib3.ProtocolError",
            "urllib3.NewConnectionError",
            "urllib3.ProxyError",
            "aiohttp.ClientConnectionError",
            "aiohttp.ClientPayloadError",
            "openai.APIConnectionError",
            "openai.WebSocketConnectionClosedError",
            "anthropic.APIConnectionError",
        ),
        outcome=Outcome.OVERLOAD,
        why="name not resolved, connection refused, unreachable, broken or cut before the end",
        looks_inside=True,
    ),
    TypeRow(
        names=(
            "httpx.HTTPError",
            "requests.RequestException",
            "urllib3.HTTPError",
            "aiohttp.ClientError",
            "openai.APIError",
            "anthropic.APIError",
            "ollama.ResponseError",
        ),
        outcome=Outcome.OVERLOAD,
        why="a known client failed and names no status, as in an error event of a stream: opaque under load",
        looks_inside=True,
    ),
)

SAME_FAMILY = {"httpcore": "httpx", "httpx2": "httpx", "httpcore2": "httpx"}
"""Roots whose classes have the names, and the rows, of another root."""

MODEL_CLIENTS = frozenset({"openai", "anthropic", "ollama"})
"""Clients that talk to model servers only. A class of theirs without a row is in the last row."""

HTTP_CLIENTS = frozenset({"httpx", "requests", "urllib3", "aiohttp"})
"""Clients that may talk to anything. A class of theirs without a row is in the last row as well."""

CATCH_ALL = frozenset({"openai.APIConnectionError", "anthropic.APIConnectionError"})
"""Raised by the client's own `except Exception`: if the cause is no client's error, the fault is local."""

GUARD = "guard_middleware"
"""Root of our own errors: always ignored, whatever stands behind them."""

OTHER_SYSTEMS = frozenset(
    {"redis", "valkey", "dramatiq", "dramatiq_abort", "kombu", "amqp", "pika", "aio_pika", "aiormq", "celery", "kafka"}
    | {"aiokafka", "confluent_kafka", "nats", "pymemcache", "sqlite3", "psycopg", "psycopg2", "asyncpg", "sqlalchemy"}
    | {"MySQLdb", "pymysql", "aiomysql", "pymongo", "motor", "neo4j", "elasticsearch", "elastic_transport", "django"}
    | {"opensearchpy", "qdrant_client", "weaviate", "pymilvus", "chromadb", "boto3", "botocore", "aiobotocore", "minio"}
    | {"smtplib", "ftplib", "paramiko"}
)
"""Roots of brokers, caches, databases and stores. Their time-outs and statuses are not the model server's: ignored."""

CANCELLED = frozenset({"concurrent.CancelledError"})
"""Ordinary exceptions that mean a cancelled call. What is no `Exception` (asyncio's, `KeyboardInterrupt`) needs no row.
"""

SIGNALS = frozenset({"dramatiq.Retry"})
"""Raised by an actor on purpose, so that only what stands behind them is evidence."""

LOCAL_ERRNOS = ("EMFILE", "ENFILE", "ENOBUFS", "ENOMEM", "EADDRNOTAVAIL")
"""Our own host has run out of files, ports or memory: ignored."""

UNREACHABLE_ERRNOS = ("ENETUNREACH", "EHOSTUNREACH", "ENETDOWN", "EHOSTDOWN", "ENETRESET")
"""Network trouble that Python raises as a plain `OSError`: as the row of refused connections."""

OVERLOAD_WORDS = (
    "busy",
    "overloaded",
    "no slot available",
    "no slots available",
    "slot unavailable",
    "no permits available",
    "maximum pending requests",
    "too many requests",
    "too many concurrent requests",
    "queue full",
    "queue is full",
    "at capacity",
    "resource exhausted",
    "service unavailable",
    "temporarily unavailable",
    "loading model",
    "model is loading",
    "currently loading",
    "still loading",
    "engine dead",
    "engine is dead",
    "already dead",
    "engine loop",
    "engine core encountered",
    "background loop has errored",
    "runner process has terminated",
    "runner process no longer running",
    "post predict",
    "do embedding request",
    "out of memory",
    "oom",
    "alloc failed",
    "failed to allocate",
    "no available memory",
    "insufficient memory",
    "more system memory",
    "timed out",
    "deadline exceeded",
    "connection refused",
    "connection reset",
)
"""Text that makes a neutral 5xx an overload.

Case does not matter, nor what stands between two words (`out of memory`, `out-of-memory`, `OutOfMemoryError`); an
entry of one word must stand alone.
"""

CERTIFICATE_WORDS = "certificate verify failed"
"""How a connection error says that TLS refused it, if the error below it was lost on the way."""

SCANNED_CHARACTERS = 4_096
"""How much of each text is looked at."""
