"""httpx transports that stand in the guard's line: any httpx client behind one, an OpenAI client too, obeys ceilings.

Two thin faces over one design: what a request means and becomes stands in `transport_route`, what a response's end
means in `_Ending`; the faces wait, send and release.
"""

from __future__ import annotations

import asyncio
import weakref
import zlib
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING

import httpx

from guard_middleware.errors import ConfigurationError
from guard_middleware.observe import events
from guard_middleware.permit import current_permit
from guard_middleware.transport_route import Located, Routes, Unknown, asks_about_the_server, outgoing

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from types import TracebackType
    from typing import Literal, Self

    from guard_middleware.aguard import AsyncGuard
    from guard_middleware.config import GuardSettings
    from guard_middleware.guard import Guard
    from guard_middleware.permit import AsyncPermit, Permit

_KEPT_BYTES = 65_536
_READABLE_BYTES = 16_384
_MOST_WARNINGS = 1_000
_FIRST_ERROR = 400
_FIRST_SERVER_ERROR = 500
_DEFLATE_OR_GZIP = 47
_SETTINGS = ("pass", "refuse")


# ------------------------------------------------------------------------------------------------- what both share


class _Line:
    """Which requests stand in line, and for which endpoint; what becomes of the others.

    Args:
        settings: the guard's.
        model: id of the endpoint that every request means; `None` to go by URLs.
        unknown: "pass" or "refuse"; `None` for the setting.

    Raises:
        ConfigurationError: `model` is no configured one, or `unknown` is neither word.
    """

    def __init__(self, settings: GuardSettings, model: str | None, unknown: str | None) -> None:
        self._routes = Routes(settings.models, None if model is None else settings.endpoint(model))
        self._refuses = (settings.unknown_servers if unknown is None else unknown) == "refuse"
        self._namespace = settings.namespace
        self._warned: dict[str, object] = {}

    def locate(self, request: httpx.Request) -> Located | None:
        """Find the endpoint that a request means; `None` for one that passes unguarded.

        Raises:
            ConfigurationError: it means none, and such requests are refused.
        """
        _check_kind(request)
        if asks_about_the_server(request):
            return None
        found = self._routes.find(request)
        if isinstance(found, Located):
            return found
        if self._refuses:
            msg = f"the guard does not know what a request to {found.server} is for: {found.advice}"
            msg += ", or let such requests pass with GUARD_UNKNOWN_SERVERS=pass"
            raise ConfigurationError(msg)
        self._warn_once(found)
        return None

    def asked(self, located: Located) -> str:
        """The id to ask a permit for.

        Inside of an actor that was given this very endpoint, as a fallback, that is the endpoint which the actor
        asked for: so its own permit serves, and the call counts once.
        """
        outer = current_permit()
        if outer is None or outer.endpoint.id != located.endpoint.id or outer.namespace != self._namespace:
            return located.endpoint.id
        return outer.model

    def _warn_once(self, unknown: Unknown) -> None:
        mark = object()
        if len(self._warned) < _MOST_WARNINGS and self._warned.setdefault(unknown.server, mark) is mark:
            events.warning("guard.unknown_server", server=unknown.server, advice=unknown.advice)


def _check_kind(request: object) -> None:
    if not isinstance(request, httpx.Request):
        root = type(request).__module__.partition(".")[0]
        msg = f"this transport is for clients of httpx, not of {root}: use httpx.Client or httpx.AsyncClient"
        raise ConfigurationError(msg)


def _check_unknown(unknown: str | None) -> None:
    if unknown is not None and unknown not in _SETTINGS:
        msg = 'unknown must be "pass", "refuse", or None for the setting GUARD_UNKNOWN_SERVERS'
        raise ConfigurationError(msg)


class _Ending:
    """What the end of one response means.

    Attributes:
        permit: that the call was made under.
    """

    def __init__(self, permit: Permit | AsyncPermit, response: httpx.Response) -> None:
        self.permit = permit
        self._status = response.status_code
        self._headers = response.headers
        self._kept = bytearray()
        if response.is_closed and response.is_stream_consumed:  # an inner transport that has read it
            with suppress(httpx.ResponseNotRead):
                self.saw(response.content)

    def saw(self, part: bytes) -> None:
        """Keep the beginning of a body that may tell of an overload, while it passes by."""
        if self._status >= _FIRST_SERVER_ERROR and len(self._kept) < _KEPT_BYTES:
            self._kept += part[: _KEPT_BYTES - len(self._kept)]

    def record(self, exc: BaseException | None) -> None:
        """Tell the permit what the status says.

        A good status counts only if the body did not break off: closed early it is a success (clients close a stream
        after its last event), cut or cancelled it is what the exception says. A bad status was said in any case.
        """
        if exc is None or self._status >= _FIRST_ERROR:
            body = _readable(bytes(self._kept), self._headers.get("content-encoding", ""))
            self.permit.record(status=self._status, headers=self._headers, body=body)


def _readable(body: bytes, encoding: str) -> bytes:
    """Decompress the beginning of a body as far as its text is looked at; what cannot be read stays as it is."""
    if encoding.strip().lower() in {"gzip", "x-gzip", "deflate"}:
        with suppress(zlib.error):
            return zlib.decompressobj(_DEFLATE_OR_GZIP).decompress(body, _READABLE_BYTES)
    return body


# ------------------------------------------------------------------------------------------ what nobody closed

_nobody_closed: deque[str] = deque(maxlen=_MOST_WARNINGS)
"""Endpoints of abandoned responses that were not told of yet."""


def _abandoned(permit: Permit | AsyncPermit, endpoint: str) -> None:
    """Give back the permit of a response that was never closed.

    The garbage collector calls this in any thread, between any two instructions, also while that thread holds a lock
    of the logging or of a queue. So: no lock, no log, no waiting; the event is told with the next request.
    """
    permit.abandon()
    _nobody_closed.append(endpoint)


def _tell_abandoned() -> None:
    while _nobody_closed:
        try:
            endpoint = _nobody_closed.popleft()
        except IndexError:  # another thread was faster
            return
        events.warning("guard.response_abandoned", endpoint=endpoint)


def _when_lost(stream: object, permit: Permit | AsyncPermit) -> weakref.finalize[..., object]:
    """Arm the last resort of a response's permit. At the interpreter's exit the guard's own goodbye does it."""
    lost = weakref.finalize(stream, _abandoned, permit, permit.endpoint.id)
    lost.atexit = False
    return lost


def _with_stream(
    response: httpx.Response, stream: httpx.SyncByteStream | httpx.AsyncByteStream, request: httpx.Request
) -> httpx.Response:
    """The same response over another stream."""
    return httpx.Response(
        response.status_code, headers=response.headers, stream=stream, extensions=response.extensions, request=request
    )


# ------------------------------------------------------------------------------------------------- the blocking face


class GuardTransport(httpx.BaseTransport):
    """A transport whose requests wait for a permit, and hold it until the response's body is closed.

    ::

        client = openai.OpenAI(http_client=httpx.Client(transport=GuardTransport(guard)), max_retries=0)

    Which endpoint a request means is found by its URL, and by its JSON body's ``model`` where a server has several. The
    priority is the ambient one (`priority_scope`). A request whose endpoint's breaker is not closed may go to the
    fallback: URL, ``Host``, credentials and model are rewritten, and no key of one server reaches another. The outcome
    is taken from status, ``Retry-After``, a 5xx's text, or the exception. While a streamed response is open its permit
    is in use: who asks for another one meanwhile may wait for himself.

    Switch OpenAI's own retries off, as above. An `AdmissionDenied` comes through its client as it is, or, from clients
    before its third version, as the ``__cause__`` of an ``openai.APIConnectionError``; neither counts as an overload.

    The settings that a client gives to its own transport (``verify``, ``limits``, ``http2``, proxies) go to `inner`.

    Args:
        guard: that gives the permits; `None` for the process's default, made by the first request.
        inner: that sends; `httpx.HTTPTransport()` if not given. `close` closes it, and not the guard.
        model: id of the endpoint that every request means, whatever its URL; `None` to go by URLs.
        timeout: the longest wait for a permit, in seconds. The client's own time-outs begin after it.
        cost: units of a request, 1 to the ceiling.
        unknown: what becomes of a request to an unknown server: "pass" lets it through unguarded, with one warning for
            each server; "refuse" raises; `None` for the setting GUARD_UNKNOWN_SERVERS.

    Raises:
        ConfigurationError: `unknown` is neither word, or `model` is no configured one.
    """

    def __init__(
        self,
        guard: Guard | None = None,
        inner: httpx.BaseTransport | None = None,
        *,
        model: str | None = None,
        timeout: float = 30.0,
        cost: int = 1,
        unknown: Literal["pass", "refuse"] | None = None,
    ) -> None:
        _check_unknown(unknown)
        self._guard = guard
        self._inner = httpx.HTTPTransport() if inner is None else inner
        self._model = model
        self._timeout_s = timeout
        self._cost = cost
        self._unknown = unknown
        self._line = None if guard is None else _Line(guard.settings, model, unknown)

    def _ready(self) -> tuple[Guard, _Line]:
        if self._guard is None:
            from guard_middleware.guard import default_guard  # noqa: PLC0415  # only who needs it has one

            self._guard = default_guard()
        if self._line is None:
            self._line = _Line(self._guard.settings, self._model, self._unknown)
        return self._guard, self._line

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Wait for a permit, send, and return the response, which holds the permit until it is closed.

        Raises:
            AdmissionDenied: no permit was free in time.
            ConfigurationError: an unknown server, or a fallback that cannot be called.
            StoreUnavailable: the store gave no answer in time.
        """
        _tell_abandoned()
        guard, line = self._ready()
        located = line.locate(request)
        if located is None:
            return self._inner.handle_request(request)
        permit = guard.permit(line.asked(located), cost=self._cost, timeout=self._timeout_s)
        try:
            response = self._inner.handle_request(outgoing(located, permit.endpoint, permit.priority))
            ending = _Ending(permit, response)
            if not response.is_closed:
                return _with_stream(response, _GuardedStream(response.stream, ending, permit), request)
        except BaseException as exc:
            _release(permit, None, exc)
            raise
        _release(permit, ending, None)
        return response

    def close(self) -> None:
        """Close the inner transport. The guard stays as it is."""
        _tell_abandoned()
        self._inner.close()

    def __enter__(self) -> Self:
        self._inner.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        _tell_abandoned()
        self._inner.__exit__(exc_type, exc_value, traceback)


class _GuardedStream(httpx.SyncByteStream):
    """The body of a response: while it is open, the permit is held."""

    def __init__(self, stream: httpx.SyncByteStream | httpx.AsyncByteStream, ending: _Ending, permit: Permit) -> None:
        assert isinstance(stream, httpx.SyncByteStream)
        self._stream = stream
        self._ending = ending
        self._permit = permit
        self._is_over = False
        self._lost = _when_lost(self, permit)

    def __iter__(self) -> Iterator[bytes]:
        try:
            for part in self._stream:
                self._ending.saw(part)
                yield part
        except GeneratorExit:  # the caller reads no further: `close` follows, or nobody holds this any more
            raise
        except BaseException as exc:
            self._end(exc)
            raise
        self._end(None)

    def close(self) -> None:
        try:
            self._stream.close()
        finally:
            self._end(None)

    def _end(self, exc: BaseException | None) -> None:
        if not self._is_over:
            self._is_over = True
            _release(self._permit, self._ending, exc)
            self._lost.detach()  # last: an interrupt on the way here leaves the permit to the finalizer


def _release(permit: Permit, ending: _Ending | None, exc: BaseException | None) -> None:
    """Give a permit back. What goes wrong with that is not the caller's affair, who has his response."""
    try:
        if ending is not None:
            ending.record(exc)
        permit.release(exc)
    except BaseException as error:
        permit.abandon()
        if not isinstance(error, Exception):
            raise
        _tell_failed(permit, error)


def _tell_failed(permit: Permit | AsyncPermit, error: BaseException) -> None:
    events.warning("guard.release_failed", endpoint=permit.endpoint.id, error=type(error).__name__)


# ------------------------------------------------------------------------------------------------- the async face


class AsyncGuardTransport(httpx.AsyncBaseTransport):
    """`GuardTransport` for async clients: the same arguments and rules, with an `AsyncGuard`.

    ::

        http = httpx.AsyncClient(transport=AsyncGuardTransport(aguard))
        client = openai.AsyncOpenAI(http_client=http, max_retries=0)

    A cancelled request says nothing about its server, and gives its permit back, also if it is cancelled again while
    it does so.

    Args:
        guard: that gives the permits; `None` for the process's default, made by the first request.
        inner: that sends; `httpx.AsyncHTTPTransport()` if not given. `aclose` closes it, and not the guard.
        model: id of the endpoint that every request means, whatever its URL; `None` to go by URLs.
        timeout: the longest wait for a permit, in seconds. The client's own time-outs begin after it.
        cost: units of a request, 1 to the ceiling.
        unknown: "pass", "refuse", or `None` for the setting GUARD_UNKNOWN_SERVERS.

    Raises:
        ConfigurationError: `unknown` is neither word, or `model` is no configured one.
    """

    def __init__(
        self,
        guard: AsyncGuard | None = None,
        inner: httpx.AsyncBaseTransport | None = None,
        *,
        model: str | None = None,
        timeout: float = 30.0,
        cost: int = 1,
        unknown: Literal["pass", "refuse"] | None = None,
    ) -> None:
        _check_unknown(unknown)
        self._guard = guard
        self._inner = httpx.AsyncHTTPTransport() if inner is None else inner
        self._model = model
        self._timeout_s = timeout
        self._cost = cost
        self._unknown = unknown
        self._line = None if guard is None else _Line(guard.settings, model, unknown)

    def _ready(self) -> tuple[AsyncGuard, _Line]:
        if self._guard is None:
            from guard_middleware.aguard import default_async_guard  # noqa: PLC0415  # only who needs it has one

            self._guard = default_async_guard()
        if self._line is None:
            self._line = _Line(self._guard.settings, self._model, self._unknown)
        return self._guard, self._line

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Wait for a permit, send, and return the response, which holds the permit until it is closed.

        Raises:
            AdmissionDenied: no permit was free in time.
            ConfigurationError: an unknown server, or a fallback that cannot be called.
            StoreUnavailable: the store gave no answer in time.
        """
        _tell_abandoned()
        guard, line = self._ready()
        located = line.locate(request)
        if located is None:
            return await self._inner.handle_async_request(request)
        permit = await guard.permit(line.asked(located), cost=self._cost, timeout=self._timeout_s)
        try:
            response = await self._inner.handle_async_request(outgoing(located, permit.endpoint, permit.priority))
            ending = _Ending(permit, response)
            if not response.is_closed:
                return _with_stream(response, _AsyncGuardedStream(response.stream, ending, permit), request)
        except BaseException as exc:
            await asyncio.wait((_releasing(permit, None, exc),))
            raise
        await asyncio.wait((_releasing(permit, ending, None),))
        return response

    async def aclose(self) -> None:
        """Close the inner transport. The guard stays as it is."""
        _tell_abandoned()
        await self._inner.aclose()

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None = None,
        exc_value: BaseException | None = None,
        traceback: TracebackType | None = None,
    ) -> None:
        _tell_abandoned()
        await self._inner.__aexit__(exc_type, exc_value, traceback)


class _AsyncGuardedStream(httpx.AsyncByteStream):
    """The body of a response: while it is open, the permit is held."""

    def __init__(
        self, stream: httpx.SyncByteStream | httpx.AsyncByteStream, ending: _Ending, permit: AsyncPermit
    ) -> None:
        assert isinstance(stream, httpx.AsyncByteStream)
        self._stream = stream
        self._ending = ending
        self._permit = permit
        self._is_over = False
        self._lost = _when_lost(self, permit)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        try:
            async for part in self._stream:
                self._ending.saw(part)
                yield part
        except GeneratorExit:  # the caller reads no further: `aclose` follows, or nobody holds this any more
            raise
        except BaseException as exc:
            await self._end(exc)
            raise
        await self._end(None)

    async def aclose(self) -> None:
        try:
            await self._stream.aclose()
        finally:
            await self._end(None)

    async def _end(self, exc: BaseException | None) -> None:
        if not self._is_over:
            self._is_over = True
            release = _releasing(self._permit, self._ending, exc)
            self._lost.detach()  # from here the task is answerable
            await asyncio.wait((release,))


_under_way: set[asyncio.Task[None]] = set()
"""Releases that run: the loop itself keeps tasks alive only weakly."""


def _releasing(permit: AsyncPermit, ending: _Ending | None, exc: BaseException | None) -> asyncio.Task[None]:
    """Begin to give a permit back, in a task of its own.

    To be waited for with `asyncio.wait`, which neither raises what went wrong nor hands a cancellation on: whoever
    waits may be cancelled again, the release goes on. If the task ends without it (the loop shuts down), the permit is
    abandoned.
    """

    async def release() -> None:
        if ending is not None:
            ending.record(exc)
        await permit.release(exc)

    def ended(task: asyncio.Task[None]) -> None:
        _under_way.discard(task)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            permit.abandon()
        if error is not None:
            _tell_failed(permit, error)

    task = asyncio.ensure_future(release())
    _under_way.add(task)
    task.add_done_callback(ended)
    return task
