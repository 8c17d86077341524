"""What real clients really raise, when a server on loopback refuses, hangs, hangs up, or does not speak TLS.

The shapes in the other tests are built by hand; these are not, so a client that changes its layers is noticed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import threading
import urllib.request

import httpx
import ollama
import openai
import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from guard_middleware.core.outcome import Classified, Outcome, classify_exception

# Some clients leave a socket open where the connection failed: their affair, not what is tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 1000\r\n\r\n"
EVENT = b'data: {"error": {"message": "overloaded", "type": "overloaded_error"}}\n\n'


class Server:
    """A server that answers each connection with the same bytes, then hangs up or hangs."""

    def __init__(self, reply, *, hang):
        self._reply, self._hang = reply, hang
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def _serve(self):
        while True:
            connection, _ = self._listener.accept()
            if self._over.is_set():
                connection.close()
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection):
        with connection, contextlib.suppress(OSError):
            connection.recv(65_536)
            connection.sendall(self._reply)
            if self._hang:
                self._over.wait(30)

    def close(self):
        self._over.set()
        with contextlib.suppress(OSError), socket.create_connection(self._listener.getsockname()):
            pass
        self._thread.join(5)
        self._listener.close()


@pytest.fixture(autouse=True, scope="module")
def collected():
    """Let what was left open be found here, and not in another file's test."""
    yield
    gc.collect()


@pytest.fixture
def serve():
    """Start servers that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(reply=b"", *, hang=False):
            server = Server(reply, hang=hang)
            stack.callback(server.close)
            return server.url

        yield start


@pytest.fixture
def refused():
    """Hold a port on which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def by_httpx(url, timeout_s):
    """Ask with httpx, blocking."""
    with httpx.Client(timeout=timeout_s, trust_env=False) as client:
        client.post(url, content=b"x").raise_for_status()


def by_async_httpx(url, timeout_s):
    """Ask with httpx, async."""

    async def post():
        async with httpx.AsyncClient(timeout=timeout_s, trust_env=False) as client:
            (await client.post(url, content=b"x")).raise_for_status()

    asyncio.run(post())


def by_openai(url, timeout_s):
    """Ask with openai's client."""
    with openai.OpenAI(api_key="k", base_url=url, max_retries=0, timeout=timeout_s) as client:
        client.embeddings.create(model="m", input="x")


def by_openai_stream(url, timeout_s):
    """Ask with openai's client, reading a stream."""
    messages = [{"role": "user", "content": "x"}]
    with (
        openai.OpenAI(api_key="k", base_url=url, max_retries=0, timeout=timeout_s) as client,
        client.chat.completions.create(model="m", messages=messages, stream=True) as stream,
    ):
        list(stream)


def by_async_openai(url, timeout_s):
    """Ask with openai's async client."""

    async def create():
        async with openai.AsyncOpenAI(api_key="k", base_url=url, max_retries=0, timeout=timeout_s) as client:
            await client.embeddings.create(model="m", input="x")

    asyncio.run(create())


def by_requests(url, timeout_s):
    """Ask with requests."""
    with requests.Session() as session:
        session.trust_env = False
        session.post(url, data=b"x", timeout=timeout_s).raise_for_status()


def by_retrying_requests(url, timeout_s):
    """Ask with requests, with retries of its own."""
    with requests.Session() as session:
        session.trust_env = False
        session.mount("http://", HTTPAdapter(max_retries=Retry(1, backoff_factor=0, status_forcelist=[500, 503])))
        session.get(url, timeout=timeout_s)


def by_ollama(url, timeout_s):
    """Ask with ollama's client."""
    client = ollama.Client(host=url, timeout=timeout_s, trust_env=False)
    with client._client:
        client.embed(model="m", input="x")


def by_urllib(url, timeout_s):
    """Ask with the standard library."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=timeout_s) as response:
        response.read()


CLIENTS = [by_httpx, by_async_httpx, by_openai, by_openai_stream, by_async_openai, by_requests, by_ollama, by_urllib]
by_client = pytest.mark.parametrize("call", CLIENTS, ids=lambda call: call.__name__)


def end_of(call, url, timeout_s=10.0):
    """Call, and classify what it raises."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is the client's affair
        call(url, timeout_s)
    return classify_exception(caught.value, now_epoch_s=0.0)


@by_client
def test_refused_connection_is_overload(call, refused):
    """Nobody listens: the server is down, or not up yet."""
    assert end_of(call, refused).outcome is Outcome.OVERLOAD


@by_client
def test_silence_is_overload(call, serve):
    """The server accepts and never sends a byte."""
    assert end_of(call, serve(hang=True), timeout_s=0.2).outcome is Outcome.OVERLOAD


@by_client
def test_connection_closed_without_an_answer_is_overload(call, serve):
    """The process behind the port died."""
    assert end_of(call, serve()).outcome is Outcome.OVERLOAD


@by_client
@pytest.mark.parametrize("hang", [False, True], ids=["cut", "silent"])
def test_answer_cut_in_the_middle_is_overload(call, serve, hang):
    """The answer began with 200 and did not end."""
    found = end_of(call, serve(HEAD + b"data: {}\n\n", hang=hang), timeout_s=0.2 if hang else 10.0)
    assert (found.outcome, found.status) == (Outcome.OVERLOAD, None)


@by_client
def test_server_without_tls_is_a_configuration_fault(call, serve):
    """A client that speaks TLS to a plain port will do so for ever; no pause helps."""
    url = serve(b"HTTP/1.1 400 Bad Request\r\n\r\n").replace("http:", "https:")
    assert end_of(call, url).outcome is Outcome.NEUTRAL


@by_client
def test_unknown_host_is_overload(call, monkeypatch):
    """A name that does not resolve: the server cannot be reached."""

    def nowhere(*args, **kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    assert end_of(call, "http://model.invalid:8000").outcome is Outcome.OVERLOAD


@by_client
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_status_is_found(call, serve, status):
    """The same answer, whoever asks."""
    reply = f"HTTP/1.1 {status} No\r\nRetry-After: 7\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{{}}".encode()
    found = end_of(call, serve(reply))
    assert found.status == status
    assert found.retry_after_ms == (7_000 if status in {429, 503} else None)


@pytest.mark.parametrize(("status", "expected"), [(500, Outcome.NEUTRAL), (503, Outcome.OVERLOAD)])
def test_status_is_found_behind_a_session_s_own_retries(serve, status, expected):
    """The session gave up by itself; the status stands in words only."""
    reply = f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
    found = end_of(by_retrying_requests, serve(reply))
    assert (found.outcome, found.status) == (expected, status)


def test_error_event_in_a_stream_is_overload(serve):
    """200, then an event that says "overloaded": the call failed, whatever its first byte was."""
    found = end_of(by_openai_stream, serve(HEAD + EVENT, hang=True))
    assert found == Classified(outcome=Outcome.OVERLOAD, reason="APIError")


@pytest.mark.parametrize("module", ["httpx", "openai"])
def test_full_connection_pool_is_ignored(serve, module):
    """Our own pool had no connection to give: the server was not even asked."""
    url = serve(HEAD, hang=True)
    limits = httpx.Limits(max_connections=1)
    with httpx.Client(limits=limits, timeout=httpx.Timeout(5, pool=0.1), trust_env=False) as http:
        client = openai.OpenAI(api_key="k", base_url=url, max_retries=0, http_client=http)

        def call(*_):
            return client.models.list() if module == "openai" else http.get(url)

        with http.stream("GET", url):
            assert end_of(call, url) == Classified(outcome=Outcome.IGNORED, reason="PoolTimeout")
