"""What an error without a status means: by its type, and by what stands behind it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import http.client
import json
import socket
import ssl
import urllib.error

import dramatiq
import dramatiq.results
import httpcore
import httpx
import ollama
import openai
import pytest
import redis
import requests
import urllib3
from dramatiq.middleware import Interrupt, Shutdown, SkipMessage, TimeLimitExceeded

from guard_middleware.core.outcome import Classified, Outcome, classify_exception
from guard_middleware.errors import AdmissionDenied, StoreUnavailable

REQUEST = httpx.Request("POST", "http://model.example/v1/chat/completions")


class AppError(Exception):
    """An application's own exception."""

    def __init__(self, message="", **attributes):
        super().__init__(message)
        self.__dict__.update(attributes)


def outcome(exc):
    """Classify, and hold the promise of every answer: a reason that is there."""
    found = classify_exception(exc, now_epoch_s=0.0)
    assert found.reason
    return found.outcome


def caused(error, cause):
    """Set what `raise error from cause` sets."""
    error.__cause__ = cause
    return error


def during(error, context):
    """Set what raising `error` while `context` is handled sets."""
    error.__context__ = context
    return error


def named(module, name, *bases):
    """Make an exception class of a library that is not installed here."""
    return type(name, bases or (Exception,), {"__module__": module})


def answered(status):
    """What httpx raises for a status."""
    response = httpx.Response(status, request=REQUEST)
    return httpx.HTTPStatusError(f"status {status}", request=REQUEST, response=response)


def pool_timeout():
    """Our own pool had no connection in time."""
    return httpx.PoolTimeout("", request=REQUEST)


def certificate():
    """A certificate that does not fit."""
    return ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")


AIOHTTP = named("aiohttp.client_exceptions", "ClientError")
AIOHTTP_CONNECTION = named("aiohttp.client_exceptions", "ClientConnectionError", AIOHTTP)
ANTHROPIC = named("anthropic", "AnthropicError")
ANTHROPIC_API = named("anthropic", "APIError", ANTHROPIC)

OVERLOAD = [
    # time-outs
    httpx.ConnectTimeout(""),
    httpx.ReadTimeout(""),
    httpx.WriteTimeout(""),
    httpcore.ReadTimeout(),
    requests.Timeout(),
    requests.ConnectTimeout(),
    requests.ReadTimeout(),
    urllib3.exceptions.ReadTimeoutError(None, "/", "Read timed out."),
    openai.APITimeoutError(REQUEST),
    named("anthropic", "APITimeoutError", ANTHROPIC_API)(),
    named("aiohttp.client_exceptions", "ServerTimeoutError", AIOHTTP, TimeoutError)(),
    TimeoutError(),
    TimeoutError("timed out"),
    OSError(errno.ETIMEDOUT, "Connection timed out"),
    TimeLimitExceeded(),
    # refused, unreachable, not resolved
    httpx.ConnectError("All connection attempts failed"),
    httpx.ProxyError(""),
    httpcore.ConnectError(),
    requests.ConnectionError(),
    urllib3.exceptions.NewConnectionError(None, "Failed to establish a new connection"),
    named("aiohttp.client_exceptions", "ClientConnectorError", AIOHTTP_CONNECTION, OSError)(),
    ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    OSError(errno.EHOSTUNREACH, "No route to host"),
    OSError(errno.ENETUNREACH, "Network is unreachable"),
    socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    urllib.error.URLError(ConnectionRefusedError()),
    urllib.error.URLError("no host given"),
    # broken or half-sent
    httpx.ReadError(""),
    httpx.WriteError(""),
    httpx.CloseError(""),
    httpx.RemoteProtocolError("Server disconnected without sending a response."),
    requests.exceptions.ChunkedEncodingError(),
    requests.ConnectionError(urllib3.exceptions.ProtocolError("aborted", http.client.RemoteDisconnected())),
    urllib3.exceptions.ProtocolError("Connection broken"),
    urllib3.exceptions.IncompleteRead(3, 5),
    named("aiohttp.client_exceptions", "ServerDisconnectedError", AIOHTTP_CONNECTION)(),
    named("aiohttp.client_exceptions", "ClientPayloadError", AIOHTTP)(),
    http.client.IncompleteRead(b"abc", 5),
    http.client.RemoteDisconnected(),
    http.client.BadStatusLine("x"),
    ConnectionResetError(),
    ConnectionAbortedError(),
    BrokenPipeError(),
    asyncio.IncompleteReadError(b"", 5),
    ssl.SSLEOFError(8, "EOF occurred in violation of protocol"),
    ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed (EOF)"),
    openai.APIConnectionError(request=REQUEST),
    named("anthropic", "APIConnectionError", ANTHROPIC_API)(),
    # a known client, and no word about why
    httpx.HTTPError("?"),
    httpx.RequestError("?"),
    requests.RequestException(),
    openai.APIError("?", REQUEST, body=None),
    ANTHROPIC_API(),
    ollama.ResponseError("?"),
    named("openai", "SomethingNewError")(),
    named("httpx._exceptions", "SomethingNewError")(),
    named("my_app", "ModelTimeout", httpx.ReadTimeout)(""),
    named("litellm.exceptions", "Timeout", openai.APITimeoutError)(REQUEST),
]

NEUTRAL = [
    certificate(),
    ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number"),
    requests.exceptions.SSLError(),
    urllib3.exceptions.SSLError(),
    named("aiohttp.client_exceptions", "ClientConnectorCertificateError", AIOHTTP_CONNECTION)(),
    httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: self-signed certificate"),
    httpx.TooManyRedirects(""),
    httpx.DecodingError(""),
    requests.TooManyRedirects(),
    requests.exceptions.ContentDecodingError(),
    requests.JSONDecodeError("Expecting value", "", 0),
    named("aiohttp.client_exceptions", "ContentTypeError", AIOHTTP)(),
    openai.APIResponseValidationError(httpx.Response(200, request=REQUEST), None),
]

BENIGN = [
    openai.ContentFilterFinishReasonError(),
    named("openai", "LengthFinishReasonError", openai.OpenAIError)(),
]

IGNORED = [
    # our own connection pool
    pool_timeout(),
    httpcore.PoolTimeout(),
    urllib3.exceptions.EmptyPoolError(None, ""),
    urllib3.exceptions.ClosedPoolError(None, ""),
    # the client was used wrongly
    httpx.InvalidURL(""),
    httpx.UnsupportedProtocol(""),
    httpx.LocalProtocolError(""),
    httpx.CookieConflict(""),
    httpx.StreamConsumed(),
    httpx.ResponseNotRead(),
    requests.exceptions.InvalidURL(),
    requests.exceptions.MissingSchema(),
    requests.exceptions.InvalidHeader(),
    requests.exceptions.InvalidJSONError(),
    requests.exceptions.StreamConsumedError(),
    urllib3.exceptions.LocationParseError(""),
    http.client.InvalidURL(),
    http.client.CannotSendRequest(),
    openai.OpenAIError("api_key missing"),
    ollama.RequestError("must provide a model"),
    # cancelled, interrupted, shut down
    asyncio.CancelledError(),
    concurrent.futures.CancelledError(),
    GeneratorExit(),
    KeyboardInterrupt(),
    SystemExit(503),
    Shutdown(),
    Interrupt(),
    named("dramatiq_abort.middleware", "Abort", Interrupt)(),
    BaseExceptionGroup("tasks", [asyncio.CancelledError()]),
    # nobody's
    Exception(),
    TypeError(),
    ValueError("llm busy"),
    KeyError("status_code"),
    RuntimeError("503 Service Unavailable"),
    json.JSONDecodeError("Expecting value", "", 0),
    AssertionError(),
    MemoryError(),
    RecursionError(),
    StopIteration(),
    FileNotFoundError(errno.ENOENT, "No such file or directory"),
    PermissionError(errno.EACCES, "Permission denied"),
    OSError("Could not find a suitable TLS CA certificate bundle"),
    OSError(errno.EMFILE, "Too many open files"),
    DeprecationWarning(),
    requests.exceptions.RequestsDependencyWarning(),
    urllib3.exceptions.InsecureRequestWarning(),
    ExceptionGroup("tasks", [ValueError(), KeyError()]),
    # other systems'
    redis.ConnectionError(),
    redis.TimeoutError(),
    redis.exceptions.BusyLoadingError(),
    named("my_app", "CacheDown", redis.ConnectionError)(),
    named("psycopg.errors", "OperationalError")(),
    named("sqlalchemy.exc", "TimeoutError")(),
    named("pymongo.errors", "NetworkTimeout", ConnectionError)(),
    named("kombu.exceptions", "OperationalError")(),
    named("pika.exceptions", "AMQPConnectionError")(),
    named("pika.exceptions", "StreamLostError", ConnectionError)(),
    dramatiq.RateLimitExceeded("x"),
    dramatiq.Retry("x"),
    dramatiq.results.ResultTimeout("x"),
    dramatiq.errors.ConnectionClosed("x"),
    SkipMessage(),
    # our own
    AdmissionDenied("m", "interactive", "endpoint_full"),
    StoreUnavailable("READONLY"),
    # nothing at all
    None,
    object(),
    "503",
    503,
]


@pytest.mark.parametrize(
    ("exc", "expected"),
    [
        *((exc, Outcome.OVERLOAD) for exc in OVERLOAD),
        *((exc, Outcome.NEUTRAL) for exc in NEUTRAL),
        *((exc, Outcome.BENIGN) for exc in BENIGN),
        *((exc, Outcome.IGNORED) for exc in IGNORED),
    ],
    ids=lambda value: value.value if isinstance(value, Outcome) else type(value).__name__,
)
def test_type_has_the_published_outcome(exc, expected):
    """Without a status the type decides, and its name is the reason, also where its text is empty."""
    found = classify_exception(exc, now_epoch_s=0.0)
    assert found == Classified(outcome=expected, reason=type(exc).__name__)


BEHIND = [
    # a wrapper of a client yields to a cause that says something else
    (lambda: caused(openai.APITimeoutError(REQUEST), pool_timeout()), Outcome.IGNORED),
    (lambda: caused(openai.APIConnectionError(request=REQUEST), pool_timeout()), Outcome.IGNORED),
    (lambda: caused(TimeoutError(), pool_timeout()), Outcome.IGNORED),
    (lambda: requests.ConnectionError(urllib3.exceptions.EmptyPoolError(None, "")), Outcome.IGNORED),
    (lambda: caused(openai.APIConnectionError(request=REQUEST), TypeError()), Outcome.IGNORED),
    (lambda: caused(openai.APIConnectionError(request=REQUEST), AppError()), Outcome.IGNORED),
    (lambda: caused(openai.APIConnectionError(request=REQUEST), httpx.InvalidURL("")), Outcome.IGNORED),
    (
        lambda: caused(openai.APIConnectionError(request=REQUEST), AdmissionDenied("m", "p", "endpoint_full")),
        Outcome.IGNORED,
    ),
    (lambda: caused(openai.APIConnectionError(request=REQUEST), answered(400)), Outcome.BENIGN),
    (lambda: caused(openai.APIConnectionError(request=REQUEST), AppError(status_code=400)), Outcome.BENIGN),
    (
        lambda: caused(
            openai.APIConnectionError(request=REQUEST),
            caused(httpx.ConnectError(""), caused(httpcore.ConnectError(), certificate())),
        ),
        Outcome.NEUTRAL,
    ),
    (
        lambda: caused(httpx.ConnectError(""), caused(httpcore.ConnectError(), OSError(errno.EMFILE, "too many"))),
        Outcome.IGNORED,
    ),
    (
        lambda: requests.ConnectionError(
            urllib3.exceptions.MaxRetryError(None, "/", urllib3.exceptions.SSLError(certificate()))
        ),
        Outcome.NEUTRAL,
    ),
    (
        lambda: requests.exceptions.SSLError(
            urllib3.exceptions.MaxRetryError(None, "/", urllib3.exceptions.SSLError(ssl.SSLEOFError(8, "EOF")))
        ),
        Outcome.OVERLOAD,
    ),
    (lambda: urllib.error.URLError(certificate()), Outcome.NEUTRAL),
    (lambda: caused(TimeoutError(), redis.TimeoutError()), Outcome.IGNORED),
    (lambda: caused(ConnectionError(), redis.ConnectionError()), Outcome.IGNORED),
    # ... but not to one that does not
    (lambda: caused(openai.APIConnectionError(request=REQUEST), httpx.ConnectError("")), Outcome.OVERLOAD),
    (lambda: caused(TimeoutError(), asyncio.CancelledError()), Outcome.OVERLOAD),
    (lambda: caused(httpx.ReadTimeout(""), caused(httpcore.ReadTimeout(), TimeoutError())), Outcome.OVERLOAD),
    (lambda: caused(httpx.ReadError(""), RuntimeError("closed")), Outcome.OVERLOAD),
    (
        lambda: caused(
            httpx.ConnectError(""),
            caused(
                OSError("All connection attempts failed"),
                ExceptionGroup("attempts", [OSError(errno.EADDRNOTAVAIL, "no ::1"), ConnectionRefusedError()]),
            ),
        ),
        Outcome.OVERLOAD,
    ),
    # ... nor to what was caught before it: that was another attempt
    (lambda: during(httpx.ReadTimeout(""), answered(400)), Outcome.OVERLOAD),
    (lambda: during(openai.APITimeoutError(REQUEST), pool_timeout()), Outcome.OVERLOAD),
    (lambda: during(answered(400), httpx.ReadTimeout("")), Outcome.BENIGN),
    (lambda: caused(answered(400), answered(503)), Outcome.BENIGN),
    # an exception of nobody we know is what stands behind it
    (lambda: caused(RuntimeError(), answered(503)), Outcome.OVERLOAD),
    (lambda: during(AttributeError(), answered(503)), Outcome.OVERLOAD),
    (lambda: caused(RuntimeError(), TimeoutError()), Outcome.OVERLOAD),
    (lambda: during(RuntimeError(), ConnectionResetError()), Outcome.OVERLOAD),
    (lambda: caused(RuntimeError(), AppError(status=429)), Outcome.OVERLOAD),
    (lambda: caused(RuntimeError(), TimeLimitExceeded()), Outcome.OVERLOAD),
    (lambda: caused(RuntimeError(), answered(400)), Outcome.BENIGN),
    (lambda: caused(RuntimeError(), answered(500)), Outcome.NEUTRAL),
    (lambda: caused(RuntimeError(), pool_timeout()), Outcome.IGNORED),
    (lambda: caused(RuntimeError(), asyncio.CancelledError()), Outcome.IGNORED),
    (lambda: caused(RuntimeError(), KeyError()), Outcome.IGNORED),
    (lambda: caused(RuntimeError(), redis.ConnectionError()), Outcome.IGNORED),
    (lambda: caused(dramatiq.Retry("x"), answered(503)), Outcome.OVERLOAD),
    (lambda: caused(OSError("All connection attempts failed"), ConnectionRefusedError()), Outcome.OVERLOAD),
    # ... unless it was raised `from None`, or names another cause
    (lambda: caused(during(RuntimeError(), answered(503)), None), Outcome.IGNORED),
    (lambda: during(caused(RuntimeError(), answered(400)), answered(503)), Outcome.BENIGN),
    # below another system's error, sockets and HTTP are that system's; a model client is not
    (lambda: caused(redis.ConnectionError(), ConnectionRefusedError()), Outcome.IGNORED),
    (lambda: caused(named("qdrant_client.http", "Oops")(), httpx.ConnectError("")), Outcome.IGNORED),
    (lambda: caused(named("elasticsearch", "Oops")(), answered(503)), Outcome.IGNORED),
    (lambda: during(redis.ConnectionError(), ollama.ResponseError("busy", 503)), Outcome.OVERLOAD),
    # an application's own status yields to a client's error, and to nothing less
    (lambda: caused(AppError(status_code=503), answered(400)), Outcome.BENIGN),
    (lambda: during(AppError(status_code=503), answered(400)), Outcome.BENIGN),
    (lambda: caused(AppError(status_code=400), httpx.ReadTimeout("")), Outcome.OVERLOAD),
    (lambda: caused(AppError(status_code=400), TimeoutError()), Outcome.OVERLOAD),
    (lambda: caused(AppError(status_code=503), redis.ConnectionError()), Outcome.IGNORED),
    (lambda: during(AppError(status_code=503), redis.ConnectionError()), Outcome.OVERLOAD),
    (lambda: during(AppError(status_code=400), ConnectionResetError()), Outcome.BENIGN),
    (lambda: caused(AppError(status_code=503), ValueError()), Outcome.OVERLOAD),
    (lambda: caused(AppError(status_code=503), AppError(status_code=400)), Outcome.OVERLOAD),
    # what stops a call stops it, whatever went before
    (lambda: during(asyncio.CancelledError(), answered(503)), Outcome.IGNORED),
    (lambda: during(Shutdown(), answered(503)), Outcome.IGNORED),
    (lambda: during(TimeLimitExceeded(), answered(400)), Outcome.OVERLOAD),
    (lambda: during(AdmissionDenied("m", "p", "endpoint_full"), answered(503)), Outcome.IGNORED),
    (lambda: caused(StoreUnavailable("down"), redis.ConnectionError()), Outcome.IGNORED),
    # groups: the worst inside
    (lambda: ExceptionGroup("", [answered(400), answered(500), answered(503)]), Outcome.OVERLOAD),
    (lambda: ExceptionGroup("", [answered(400), answered(500)]), Outcome.NEUTRAL),
    (lambda: ExceptionGroup("", [answered(400), ValueError()]), Outcome.BENIGN),
    (lambda: ExceptionGroup("", [pool_timeout(), answered(404)]), Outcome.BENIGN),
    (lambda: BaseExceptionGroup("", [asyncio.CancelledError(), answered(503)]), Outcome.OVERLOAD),
    (lambda: BaseExceptionGroup("", [KeyboardInterrupt(), ValueError()]), Outcome.IGNORED),
    (lambda: ExceptionGroup("", [ValueError(), ExceptionGroup("", [answered(502)])]), Outcome.OVERLOAD),
    (lambda: caused(RuntimeError(), ExceptionGroup("", [answered(502)])), Outcome.OVERLOAD),
    (lambda: caused(ExceptionGroup("", [ValueError()]), answered(502)), Outcome.OVERLOAD),
]


@pytest.mark.parametrize(("build", "expected"), BEHIND)
def test_what_stands_behind_an_error_counts_where_it_knows_better(build, expected):
    """Each way in which clients and applications wrap errors, and which of the layers is believed."""
    assert outcome(build()) is expected


def test_reason_names_the_error_that_decided():
    """A log must tell more than an empty text: the type, and of the layer that was believed."""
    assert classify_exception(httpx.ReadTimeout(""), now_epoch_s=0.0).reason == "ReadTimeout"
    wrapped = caused(openai.APITimeoutError(REQUEST), pool_timeout())
    assert classify_exception(wrapped, now_epoch_s=0.0).reason == "PoolTimeout"
    assert classify_exception(caused(RuntimeError("x"), answered(503)), now_epoch_s=0.0).reason == "status 503"


def test_group_takes_the_longest_hint_of_its_overloads():
    """Several calls were told to wait: the longest wait counts."""
    errors = [AppError(status_code=429, headers={"Retry-After": seconds}) for seconds in ("3", "40", "5")]
    assert classify_exception(ExceptionGroup("", errors), now_epoch_s=0.0).retry_after_ms == 40_000


@pytest.mark.parametrize("name", ["last_attempt", "args"])
def test_future_that_is_not_finished_is_not_waited_for(name):
    """A retry library's future is read only if it is done; a cancelled one has no exception."""
    pending: concurrent.futures.Future[None] = concurrent.futures.Future()
    cancelled: concurrent.futures.Future[None] = concurrent.futures.Future()
    cancelled.cancel()
    good: concurrent.futures.Future[None] = concurrent.futures.Future()
    good.set_result(None)
    for future in (pending, cancelled, good):
        error = AppError(future) if name == "args" else AppError(last_attempt=future)
        assert outcome(error) is Outcome.IGNORED


def test_task_inside_an_error_is_read():
    """A future of asyncio is as good as any."""

    async def scenario():
        future = asyncio.get_running_loop().create_future()
        before = outcome(AppError(future))
        future.set_exception(answered(503))
        return before, outcome(AppError(future))

    assert asyncio.run(scenario()) == (Outcome.IGNORED, Outcome.OVERLOAD)
