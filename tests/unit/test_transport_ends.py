"""What the end of a response means, and that each permit goes back once, whatever happens on the way."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import itertools
import logging
import time

import httpx
import pytest

from guard_middleware import AdmissionDenied, ConfigurationError, GuardSettings, transport
from guard_middleware.config import EndpointConfig
from guard_middleware.core.outcome import Outcome, classify_exception, classify_status
from guard_middleware.permit import Permit, set_current
from guard_middleware.priority import Priority, current_priority, priority_scope
from guard_middleware.transport import AsyncGuardTransport, GuardTransport

URL = "http://h:8000/v1/chat/completions"
A = EndpointConfig(id="a", base_url="http://h:8000/v1")
B = EndpointConfig(id="b", base_url="http://i:8000/v1")
BUSY = b'{"error": "CUDA out of memory"}'


@pytest.fixture(autouse=True)
def _nothing_abandoned_before():
    """What other tests have left to the garbage collector is told of in none of these."""
    gc.collect()
    transport._nobody_closed.clear()


class FakePermit:
    """A permit that remembers what was done with it, and judges as the real ones do."""

    def __init__(self, endpoint, fails=None):
        self.endpoint, self.priority = endpoint, current_priority() or Priority.ORCHESTRATION
        self.fails, self.released, self.abandoned, self.found = fails, 0, 0, []

    def record(self, *, status=None, exception=None, headers=None, body=None):
        self.found.append(classify_status(status, headers=headers, body_text=body))

    def abandon(self):
        self.abandoned += 1

    def release(self, exc=None):
        self.released += 1
        if exc is not None:
            self.found.append(classify_exception(exc, now_epoch_s=time.time()))
        if self.fails is not None:
            raise self.fails

    @property
    def outcomes(self):
        return [one.outcome for one in self.found]


class AsyncFakePermit(FakePermit):
    """The same, with a release that takes a while."""

    pause_s = 0.0

    async def release(self, exc=None):
        await asyncio.sleep(self.pause_s)
        super().release(exc)


class FakeGuard:
    """A guard that gives its permits, in order, or refuses."""

    kind = FakePermit

    def __init__(self, *endpoints, refuses=None, fails=None):
        self.settings = GuardSettings(models=[A, B])
        self.endpoints, self.refuses, self.fails = endpoints or (A,), refuses, fails
        self.asked, self.permits = [], []

    def permit(self, model, *, priority=None, cost=1, timeout=30.0):
        self.asked.append((model, priority, cost, timeout))
        if self.refuses is not None:
            raise self.refuses
        self.permits.append(self.kind(self.endpoints[len(self.permits) % len(self.endpoints)], self.fails))
        return self.permits[-1]


class AsyncFakeGuard(FakeGuard):
    kind = AsyncFakePermit

    async def permit(self, model, **options):
        return super().permit(model, **options)


class Stream(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body in parts: bytes are passed on, an exception is raised, a number is a pause in seconds."""

    def __init__(self, *parts):
        self.parts, self.read, self.closed = parts, 0, 0

    def __iter__(self):
        for part in self.parts:
            if isinstance(part, BaseException):
                raise part
            self.read += 1
            yield part

    async def __aiter__(self):
        for part in self.parts:
            if isinstance(part, BaseException):
                raise part
            if isinstance(part, float):
                await asyncio.sleep(part)
                continue
            self.read += 1
            yield part

    def close(self):
        self.closed += 1

    async def aclose(self):
        self.closed += 1


class Face:
    """One of the two faces, driven alike."""

    def __init__(self, name):
        self.name = name
        self.guard_kind = FakeGuard if name == "blocking" else AsyncFakeGuard

    def guard(self, *endpoints, **options):
        return self.guard_kind(*endpoints, **options)

    def ask(self, guard, answer, *, parts=None, **options):
        """Make one request, and return the response's body, or its first `parts` parts, after which it is closed."""

        def handle(request):
            if isinstance(answer, BaseException):
                raise answer
            return answer(request) if callable(answer) else answer

        inner = httpx.MockTransport(handle)
        if self.name == "blocking":
            with httpx.Client(transport=GuardTransport(guard, inner, **options)) as client:
                if parts is None:
                    return client.post(URL, json={"model": "a"}).content
                with client.stream("POST", URL, json={"model": "a"}) as response:
                    return list(itertools.islice(response.iter_raw(), parts))
        return asyncio.run(self._ask(AsyncGuardTransport(guard, inner, **options), parts))

    async def _ask(self, transport, parts):
        async with httpx.AsyncClient(transport=transport) as client:
            if parts is None:
                return (await client.post(URL, json={"model": "a"})).content
            async with client.stream("POST", URL, json={"model": "a"}) as response:
                found = []
                async for part in response.aiter_raw():
                    found.append(part)
                    if len(found) == parts:
                        break
                return found


@pytest.fixture(params=["blocking", "async"])
def face(request):
    return Face(request.param)


def only(guard):
    """The only permit that a guard gave; it went back once, and was not abandoned."""
    [permit] = guard.permits
    assert (permit.released, permit.abandoned) == (1, 0)
    return permit


# ------------------------------------------------------------------------------------------------- asking


def test_permit_is_asked_for_the_endpoint_with_cost_and_time_out(face):
    """The ambient priority is the guard's to read, and is told to the server by a header."""
    guard, seen = face.guard(), []

    def answer(request):
        seen.append(request.headers["x-resource-priority"])
        return httpx.Response(200)

    with priority_scope("interactive"):
        face.ask(guard, answer, cost=2, timeout=7.5)
    face.ask(guard, answer, model="b")
    assert guard.asked == [("a", None, 2, 7.5), ("b", None, 1, 30.0)]
    assert seen == ["interactive", "orchestration"]


def test_process_default_guard_is_looked_up_by_the_first_request(face, monkeypatch):
    """A transport may be made at import: the environment is read when it is used, once."""
    guard, looked = face.guard(), []
    home = "guard.default_guard" if face.name == "blocking" else "aguard.default_async_guard"
    monkeypatch.setattr(f"guard_middleware.{home}", lambda: looked.append(1) or guard)
    GuardTransport(), AsyncGuardTransport()
    assert looked == []
    face.ask(None, httpx.Response(200), model="b")
    assert (looked, guard.asked[0][0]) == ([1], "b")


@pytest.mark.parametrize("error", [AdmissionDenied("a", "interactive", "endpoint_full"), ConfigurationError("x")])
def test_refusal_of_the_guard_reaches_the_caller_unchanged(face, error):
    """Nothing is sent, and the error is the guard's own."""
    with pytest.raises(type(error)) as caught:
        face.ask(face.guard(refuses=error), AssertionError("it was sent"))
    assert caught.value is error


def test_fallback_is_called_under_its_permit(face):
    """The request goes where the permit says, and the caller's response is that of his own request."""
    guard, seen = face.guard(B), []

    def answer(request):
        seen.append(str(request.url))
        return httpx.Response(200, stream=Stream(b"x"))

    assert face.ask(guard, answer) == b"x"
    assert seen == ["http://i:8000/v1/chat/completions"]
    assert only(guard).outcomes == [Outcome.SUCCESS]


def test_fallback_that_cannot_be_called_gives_its_permit_back_without_an_outcome(face):
    """A mistake of the configuration says nothing about a server."""
    guard = face.guard(EndpointConfig(id="c"))
    with pytest.raises(ConfigurationError, match="no base_url"):
        face.ask(guard, httpx.Response(200))
    assert only(guard).outcomes == [Outcome.IGNORED]


def test_actor_that_calls_the_fallback_it_was_given_uses_its_own_permit(face):
    """The id asked for is the one of the actor's permit, under which the guard lends it; a stranger's is not."""
    for namespace, asked in (("default", "primary"), ("another", "a")):
        guard = face.guard()
        outer = {"endpoint": A, "model": "primary", "priority": Priority.HYDRATION, "cost": 1, "probe": False}
        permit = Permit(**outer, release=lambda ended: None, namespace=namespace, lease="x")
        set_current(permit)
        try:
            face.ask(guard, httpx.Response(200))
        finally:
            set_current(None)
        assert [one[0] for one in guard.asked] == [asked]


# ------------------------------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("status", "outcome"),
    [
        (200, Outcome.SUCCESS),
        (307, Outcome.BENIGN),
        (404, Outcome.BENIGN),
        (429, Outcome.OVERLOAD),
        (500, Outcome.NEUTRAL),
        (503, Outcome.OVERLOAD),
    ],
)
@pytest.mark.parametrize("loaded", [True, False])
def test_status_is_the_outcome(face, status, outcome, loaded):
    """Whether the inner transport has read the body already or leaves it to the caller."""
    guard = face.guard()
    body = {"content": b"body"} if loaded else {"stream": Stream(b"bo", b"dy")}
    assert face.ask(guard, httpx.Response(status, headers={"retry-after": "2"}, **body)) == b"body"
    [found] = only(guard).found
    assert (found.outcome, found.status) == (outcome, status)
    assert found.retry_after_ms == (2000 if outcome is Outcome.OVERLOAD else None)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("loaded", [True, False])
def test_text_of_a_500_is_looked_at(face, packed, loaded):
    """A server error that tells of an overload is one, also compressed; the text comes to the caller as it was."""
    guard = face.guard()
    raw = gzip.compress(BUSY) if packed else BUSY
    body = {"content": raw} if loaded else {"stream": Stream(raw[:9], raw[9:])}
    headers = {"content-encoding": "gzip"} if packed else {}
    assert face.ask(guard, httpx.Response(500, headers=headers, **body)) == BUSY
    assert only(guard).found[0].reason == "status 500, overload text"


def test_no_more_than_the_beginning_of_a_body_is_kept(face):
    """64 KiB of a server error, nothing of anything else, and never ahead of the caller."""
    guard, kept = face.guard(), []
    guard.kind = type("Keeping", (guard.kind,), {"record": lambda self, **ended: kept.append(len(ended["body"]))})
    long = [b"x" * 40_000] * 3
    face.ask(guard, httpx.Response(500, stream=Stream(*long)))
    face.ask(guard, httpx.Response(200, stream=Stream(*long)))
    read_little = Stream(*long)
    face.ask(guard, httpx.Response(500, stream=read_little), parts=1)
    assert kept == [65_536, 0, 40_000]
    assert read_little.read == 1


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (httpx.ConnectError("refused"), Outcome.OVERLOAD),
        (httpx.ReadTimeout("slow"), Outcome.OVERLOAD),
        (httpx.PoolTimeout("ours"), Outcome.IGNORED),
        (httpx.LocalProtocolError("ours"), Outcome.IGNORED),
        (KeyboardInterrupt(), Outcome.IGNORED),
    ],
)
def test_exception_of_the_inner_transport_is_the_outcome(face, error, outcome):
    """It reaches the caller unchanged."""
    guard = face.guard()
    with pytest.raises(type(error)) as caught:
        face.ask(guard, error)
    assert caught.value is error
    assert only(guard).outcomes == [outcome]


@pytest.mark.parametrize(("status", "outcomes"), [(200, []), (503, [Outcome.OVERLOAD])])
@pytest.mark.parametrize("parts", [None, 3])
def test_body_cut_half_way_is_what_broke_it(face, status, outcomes, parts):
    """A good status does not count then; a bad one was said all the same, with its Retry-After."""
    guard = face.guard()
    cut = httpx.RemoteProtocolError("cut")
    with pytest.raises(httpx.RemoteProtocolError):
        face.ask(guard, httpx.Response(status, stream=Stream(b"a", b"b", cut)), parts=parts)
    assert only(guard).outcomes == [*outcomes, Outcome.OVERLOAD]


def test_stream_that_its_reader_closes_early_is_a_success(face):
    """Clients close a stream after its last event without reading to the end."""
    guard = face.guard()
    stream = Stream(b"a", b"b", httpx.ReadError("never read"))
    assert face.ask(guard, httpx.Response(200, stream=stream), parts=2) == [b"a", b"b"]
    assert stream.closed
    assert only(guard).outcomes == [Outcome.SUCCESS]


def test_redirects_take_a_permit_each(face):
    """The permit of an answer goes back before the next request asks."""
    guard = face.guard()
    hops = iter([httpx.Response(307, headers={"location": URL}, stream=Stream(b"x")), httpx.Response(200)])

    def handle(request):
        assert all(permit.released == 1 for permit in guard.permits[:-1])
        return next(hops)

    inner = httpx.MockTransport(handle)
    if face.name == "blocking":
        with httpx.Client(transport=GuardTransport(guard, inner), follow_redirects=True) as client:
            client.post(URL)
    else:

        async def run():
            transport = AsyncGuardTransport(guard, inner)
            async with httpx.AsyncClient(transport=transport, follow_redirects=True) as client:
                await client.post(URL)

        asyncio.run(run())
    assert [permit.outcomes for permit in guard.permits] == [[Outcome.BENIGN], [Outcome.SUCCESS]]


# ------------------------------------------------------------------------------------------------- releases


def test_permit_is_held_until_the_body_is_closed():
    """Not until the head is there, and not until the caller has read the first part."""
    guard, stream = FakeGuard(), Stream(b"a", b"b")
    inner = httpx.MockTransport(lambda request: httpx.Response(200, stream=stream))
    with httpx.Client(transport=GuardTransport(guard, inner)) as client:
        with client.stream("POST", URL) as response:
            parts = response.iter_raw()
            assert next(parts) == b"a"
            assert guard.permits[0].released == 0
            response.close()
            assert (guard.permits[0].released, stream.closed) == (1, 1)
            response.close()
        assert only(guard).outcomes == [Outcome.SUCCESS]


def test_body_that_is_read_from_the_transport_without_closing_gives_its_permit_back():
    """Who uses a transport without a client may read to the end and leave."""
    guard = FakeGuard()
    inner = httpx.MockTransport(lambda request: httpx.Response(200, stream=Stream(b"a", b"b")))
    response = GuardTransport(guard, inner).handle_request(httpx.Request("POST", URL))
    assert b"".join(response.stream) == b"ab"
    assert only(guard).outcomes == [Outcome.SUCCESS]


def test_failed_release_does_not_hide_the_body(face, caplog):
    """The caller has his answer; the permit is abandoned, and the failure is told."""
    for body in ({"content": b"body"}, {"stream": Stream(b"body")}):
        guard = face.guard(fails=RuntimeError("S3cr"))
        assert face.ask(guard, httpx.Response(200, **body)) == b"body"
        assert (guard.permits[0].released, guard.permits[0].abandoned) == (1, 1)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert all("guard.release_failed" in one and "RuntimeError" in one and "S3cr" not in one for one in told)


def test_interrupt_within_a_release_reaches_the_caller_and_abandons_the_permit():
    """A shutdown is not swallowed, and strands nothing."""
    guard = FakeGuard(fails=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Face("blocking").ask(guard, httpx.Response(200, stream=Stream(b"x")))
    assert guard.permits[0].abandoned >= 1


def test_failing_close_of_the_inner_stream_gives_the_permit_back(face):
    """Its error is the caller's to see."""
    guard, stream, error = face.guard(), Stream(b"a", b"b"), httpx.CloseError("x")

    def close():
        raise error

    async def aclose():
        raise error

    stream.close, stream.aclose = close, aclose
    with pytest.raises(httpx.CloseError):
        face.ask(guard, httpx.Response(200, stream=stream), parts=1)
    only(guard)


@pytest.mark.parametrize("read", [False, True])
def test_abandoned_response_gives_its_permit_back_and_is_told_of_later(face, read, caplog):
    """Nothing is logged within the garbage collection; the next request tells, with the endpoint's id only."""
    guard = face.guard()
    inner = httpx.MockTransport(lambda request: httpx.Response(200, stream=Stream(b"a", b"b")))

    async def begin():
        client = httpx.AsyncClient(transport=AsyncGuardTransport(guard, inner))
        response = await client.send(httpx.Request("POST", URL), stream=True)
        if read:
            await anext(response.aiter_raw())
        del response
        for _ in range(9):  # the loop closes what was iterated, from the outside in
            gc.collect()
            await asyncio.sleep(0)

    if face.name == "blocking":
        response = httpx.Client(transport=GuardTransport(guard, inner)).send(httpx.Request("POST", URL), stream=True)
        if read:
            next(response.iter_raw())
        del response
    else:
        asyncio.run(begin())
    gc.collect()
    assert (guard.permits[-1].released, guard.permits[-1].abandoned) == (0, 1)
    assert "guard.response_abandoned" not in caplog.text
    face.ask(guard, httpx.Response(200))
    told = [record.getMessage() for record in caplog.records if "guard.response_abandoned" in record.getMessage()]
    assert told == ["event='guard.response_abandoned' endpoint='a'"]


def test_finalizer_takes_no_lock_of_the_logging(caplog):
    """A response that is collected while its thread writes a log line, whose handler is not reentrant, is no deadlock."""
    guard = FakeGuard()
    inner = httpx.MockTransport(lambda request: httpx.Response(200, stream=Stream(b"a")))
    held = [GuardTransport(guard, inner).handle_request(httpx.Request("POST", URL))]
    lines = []

    class Handler(logging.Handler):
        inside = False

        def emit(self, record):
            assert not self.inside
            self.inside = True
            held.clear()  # what a collection in the middle of it does
            gc.collect()
            lines.append(record.getMessage())
            self.inside = False

    handler = Handler()
    logger = logging.getLogger("guard_middleware")
    logger.addHandler(handler)
    try:
        logger.warning("busy")
        assert (guard.permits[0].abandoned, lines) == (1, ["busy"])
        GuardTransport(guard, inner).close()
    finally:
        logger.removeHandler(handler)
    assert lines[1:] == ["event='guard.response_abandoned' endpoint='a'"]


def test_closing_a_transport_closes_the_inner_one_only(face):
    """The guard is the process's, not the client's."""
    closed = []

    class Inner(httpx.BaseTransport, httpx.AsyncBaseTransport):
        def close(self):
            closed.append("inner")

        async def aclose(self):
            closed.append("inner")

    guard = face.guard()  # it has no close
    if face.name == "blocking":
        with httpx.Client(mounts={"http://h:8000": GuardTransport(guard, Inner())}):
            pass
    else:

        async def run():
            async with httpx.AsyncClient(mounts={"http://h:8000": AsyncGuardTransport(guard, Inner())}):
                pass

        asyncio.run(run())
    assert closed == ["inner"]


def test_mounted_transport_guards_its_own_urls(face):
    """Beside others in one client."""
    guard = face.guard()
    inner = httpx.MockTransport(
        lambda request: httpx.Response(200, text=request.headers.get("x-resource-priority", ""))
    )

    async def run():
        mounts = {"http://h:8000": AsyncGuardTransport(guard, inner)}
        async with httpx.AsyncClient(transport=inner, mounts=mounts) as client:
            return [(await client.get(url)).text for url in (URL, "http://other/")]

    if face.name == "blocking":
        with httpx.Client(transport=inner, mounts={"http://h:8000": GuardTransport(guard, inner)}) as client:
            texts = [client.get(url).text for url in (URL, "http://other/")]
    else:
        texts = asyncio.run(run())
    assert texts == ["orchestration", ""]
    only(guard)


# ------------------------------------------------------------------------------------------------- cancellation


class Slow(httpx.AsyncBaseTransport):
    """An inner transport that answers, or goes on with its body, after a long while."""

    def __init__(self, *, body):
        self.body, self.begun = body, asyncio.Event()

    async def handle_async_request(self, request):
        self.begun.set()
        if not self.body:
            await asyncio.Event().wait()  # for ever
        return httpx.Response(200, stream=Stream(b"a", 60.0))


@pytest.mark.parametrize("body", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_cancelled_request_says_nothing_and_gives_its_permit_back(body, again):
    """Before the head or within the body; a second cancellation during the release does not lose it."""

    async def run():
        guard, inner = AsyncFakeGuard(), Slow(body=body)
        guard.kind = type("Lingering", (AsyncFakePermit,), {"pause_s": 0.05})
        async with httpx.AsyncClient(transport=AsyncGuardTransport(guard, inner)) as client:
            task = asyncio.create_task(client.post(URL))
            await inner.begun.wait()
            for _ in range(20):  # into the pause before the head, or that of the body
                await asyncio.sleep(0)
            task.cancel()
            if again:
                for _ in range(5):
                    await asyncio.sleep(0)
                assert guard.permits[0].released == 0
                task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert guard.permits[0].released == (0 if again else 1)
            await asyncio.sleep(0.1)
        return guard

    assert only(asyncio.run(run())).outcomes == [Outcome.IGNORED]


def test_release_that_the_end_of_the_loop_cuts_off_abandons_the_permit():
    """Nobody is there to finish it: the next beat gives the lease back."""
    guard = AsyncFakeGuard()
    guard.kind = type("Endless", (AsyncFakePermit,), {"pause_s": 60.0})

    async def run():
        inner = httpx.MockTransport(lambda request: httpx.Response(200, stream=Stream(b"a")))
        async with httpx.AsyncClient(transport=AsyncGuardTransport(guard, inner)) as client:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.post(URL), 0.05)

    asyncio.run(run())
    assert (guard.permits[0].released, guard.permits[0].abandoned) == (0, 1)
