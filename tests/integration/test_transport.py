"""httpx and OpenAI clients behind the guard's transports: what the server counts, what the store holds, both faces alike."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from guard_middleware import AdmissionDenied, ConfigurationError, transport
from guard_middleware.aguard import AsyncGuard
from guard_middleware.core.outcome import Outcome, classify_exception
from guard_middleware.testing.model_server import FakeEndpoint, Fault, Step
from guard_middleware.transport import AsyncGuardTransport, GuardTransport
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
STREAM = {**CHAT, "stream": True}
SETTLED_S = 5
"""How long the store may take to hear of an end."""


@pytest.fixture(autouse=True)
def _nothing_abandoned_before():
    """What other tests have left to the garbage collector is told of in none of these."""
    gc.collect()
    transport._nobody_closed.clear()


class Blocking:
    """The blocking face, driven from this thread."""

    def __init__(self, guard):
        self.guard = guard
        self.clients = []

    def client(self, **options):
        transport = GuardTransport(self.guard, **options)
        self.clients.append(httpx.Client(transport=transport, timeout=10))
        return self.clients[-1]

    def openai(self, base_url, **options):
        return openai.OpenAI(api_key="-", base_url=base_url, max_retries=0, http_client=self.client(**options))

    def run(self, found):
        return found

    def open(self, client, url, body):
        return client.send(client.build_request("POST", url, json=body), stream=True)

    def parts(self, response):
        return response.iter_raw()

    def next(self, parts):
        return next(parts)

    def items(self, stream):
        return list(stream)

    def close(self, response):
        response.close()

    def together(self, calls):
        with ThreadPoolExecutor(len(calls)) as pool:
            return list(pool.map(lambda call: call(), calls))

    def end(self):
        for client in self.clients:
            client.close()


class Async:
    """The async face, driven from this thread on a loop in another one."""

    def __init__(self, guard):
        self.guard = AsyncGuard(guard=guard)
        self.clients = []
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    def client(self, **options):
        transport = AsyncGuardTransport(self.guard, **options)
        self.clients.append(httpx.AsyncClient(transport=transport, timeout=10))
        return self.clients[-1]

    def openai(self, base_url, **options):
        return openai.AsyncOpenAI(api_key="-", base_url=base_url, max_retries=0, http_client=self.client(**options))

    def run(self, coming):
        async def wait():
            return await coming

        return asyncio.run_coroutine_threadsafe(wait(), self.loop).result(30)

    def open(self, client, url, body):
        return self.run(client.send(client.build_request("POST", url, json=body), stream=True))

    def parts(self, response):
        return response.aiter_raw()

    def next(self, parts):
        return self.run(anext(parts))

    def items(self, stream):
        async def read():
            return [item async for item in stream]

        return self.run(read())

    def close(self, response):
        self.run(response.aclose())

    def together(self, calls):
        async def wait():
            return await asyncio.gather(*(call() for call in calls))

        return self.run(wait())

    def end(self):
        async def close():
            for client in self.clients:
                await client.aclose()
            await self.guard.leave_loop()
            await self.loop.shutdown_asyncgens()

        self.run(close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10)
        self.loop.close()


@pytest.fixture(params=[Blocking, Async], ids=["blocking", "async"])
def face(request):
    """Make the face of a deployment's guard; what it opened is closed with the test."""
    made = []

    def make(deployment):
        made.append(request.param(deployment.guard))
        return made[-1]

    yield make
    for one in made:
        one.end()


def serving(deploy, ceiling=2, **options):
    """One endpoint without a reserve, and a server beside it that no model names."""
    options.setdefault("models", {"chat": {"max_concurrent_requests": ceiling, "reserve": 0}})
    return deploy(
        endpoints=[FakeEndpoint(name="chat", base_ms=20), FakeEndpoint(name="embed", base_ms=20)],
        kill_at_end=True,
        **options,
    )


def url_of(deployment, name="chat"):
    return f"{deployment.server.url(name)}/chat/completions"


def state(deployment, name="chat"):
    return deployment.guard.snapshot().endpoints[name]


def wait_free(deployment):
    """Wait until nothing is leased."""
    wait_until(lambda: not deployment.guard.snapshot().leases, SETTLED_S, "a lease is left over")


# ------------------------------------------------------------------------------------------------- permits


def test_clients_stay_below_the_ceiling(deploy, face):
    """Twelve requests at once on a ceiling of 3: all are answered, and the server counts 3, whatever its /v1."""
    deployment = serving(deploy, 3)
    driven = face(deployment)
    client = driven.client()
    responses = driven.together([lambda: client.post(url_of(deployment), json=CHAT)] * 12)
    assert [one.status_code for one in responses] == [200] * 12
    assert deployment.server.stats()["chat"].most_in_flight == 3
    wait_free(deployment)


def test_stream_holds_its_permit_until_it_is_closed(deploy, face):
    """While the server sends, and after it has ended as long as the caller has not closed; then the permit is free."""
    deployment = serving(deploy, 1)
    driven = face(deployment)
    client = driven.client(timeout=0.2)
    # Given a stream of which the first part is read
    deployment.server.script([Step(fault=Fault.SERVE, ms=400)])
    response = driven.open(client, url_of(deployment), STREAM)
    parts = driven.parts(response)
    driven.next(parts)
    # Then the server works on it, and the store has its lease
    assert deployment.server.stats()["chat"].in_flight == 1
    assert state(deployment).in_flight == 1
    # When the server is done, but the reader is not
    deployment.server.wait_until(lambda stats: stats["chat"].in_flight == 0)
    assert state(deployment).in_flight == 1
    with pytest.raises(AdmissionDenied) as caught:
        driven.open(client, url_of(deployment), CHAT)
    assert (caught.value.model, caught.value.reason) == ("chat", "endpoint_full")
    # Then only the close frees it, once and as a success
    driven.close(response)
    wait_free(deployment)
    assert state(deployment).breaker == "closed"
    assert driven.run(client.post(url_of(deployment), json=CHAT)).status_code == 200


def test_abandoned_response_gives_its_permit_back(deploy, face, caplog):
    """A response that nobody closed and nobody holds any more does not keep its permit."""
    deployment = serving(deploy, 1, env={"GUARD_HEARTBEAT_S": "0.3", "GUARD_LEASE_S": "60"})
    driven = face(deployment)
    client = driven.client(timeout=5)
    response = driven.open(client, url_of(deployment), STREAM)
    assert state(deployment).in_flight == 1
    del response
    gc.collect()
    wait_free(deployment)
    assert driven.run(client.post(url_of(deployment), json=CHAT)).status_code == 200
    told = [one.getMessage() for one in caplog.records if "guard.response_abandoned" in one.getMessage()]
    assert told == ["event='guard.response_abandoned' endpoint='chat'"]


# ------------------------------------------------------------------------------------------------- outcomes


def test_503_trips_the_breaker_for_as_long_as_the_server_asks(deploy, face):
    """The caller has the answer; the next request is refused by the guard, not sent."""
    deployment = serving(deploy)
    driven = face(deployment)
    client = driven.client(timeout=0)
    deployment.server.script([Step(fault=Fault.STATUS, status=503, headers={"retry-after": "7"})])
    response = driven.run(client.post(url_of(deployment), json=CHAT))
    assert (response.status_code, response.json()["error"]["message"]) == (503, "scripted")
    found = state(deployment)
    assert (found.breaker, found.trips) == ("open", 1)
    assert 6_000 < found.open_for_ms <= 7_000
    with pytest.raises(AdmissionDenied) as caught:
        driven.run(client.post(url_of(deployment), json=CHAT))
    assert caught.value.reason == "breaker_open"
    assert deployment.server.stats()["chat"].calls == 1
    wait_free(deployment)


@pytest.mark.parametrize("fault", [Fault.DROP, Fault.TRUNCATE, Fault.STREAM_RESET])
def test_answer_that_breaks_off_trips_the_breaker(deploy, face, fault):
    """Without a head, within a promised body, within a stream whose head said 200."""
    deployment = serving(deploy)
    driven = face(deployment)
    client = driven.client()
    details = {"chunks": 1} if fault is Fault.STREAM_RESET else {}
    deployment.server.script([Step(fault=fault, **details)])

    def read():
        response = driven.open(client, url_of(deployment), STREAM)
        try:
            driven.items(driven.parts(response))
        finally:
            driven.close(response)

    with pytest.raises(httpx.TransportError):
        read()
    assert state(deployment).breaker == "open"
    wait_free(deployment)


def test_500_that_tells_of_memory_trips_and_another_does_not(deploy, face):
    """The text of a server error is looked at while it passes by."""
    deployment = serving(deploy)
    driven = face(deployment)
    client = driven.client()
    texts = ("division by zero", {"error": "CUDA out of memory"})
    deployment.server.script(
        [
            Step(calls=(number, number), fault=Fault.STATUS, status=500, body=text)
            for number, text in enumerate(texts, 1)
        ]
    )
    for expected in ("closed", "open"):
        assert driven.run(client.post(url_of(deployment), json=CHAT)).status_code == 500
        assert state(deployment).breaker == expected


def test_cancelled_request_gives_its_permit_back_and_trips_nothing(deploy):
    """Within the body of a hanging stream, and before the head; the server is not to blame."""
    deployment = serving(deploy, 2)
    driven = Async(deployment.guard)
    try:
        client = driven.client()
        hangs = Step(calls=(2, 2), fault=Fault.HANG)
        deployment.server.script([Step(calls=(1, 1), fault=Fault.STREAM_SILENCE, chunks=1), hangs])

        async def cancel():
            tasks = []
            for calls in (1, 2):
                tasks.append(asyncio.create_task(client.post(url_of(deployment), json=STREAM)))
                await asyncio.to_thread(deployment.server.wait_until, lambda stats, n=calls: stats["chat"].calls == n)
            for task in tasks:
                task.cancel()
            return await asyncio.gather(*tasks, return_exceptions=True)

        assert [type(one) for one in driven.run(cancel())] == [asyncio.CancelledError] * 2
        wait_free(deployment)
        assert state(deployment).breaker == "closed"
    finally:
        driven.end()


# ------------------------------------------------------------------------------------------------- servers


def test_unknown_server_is_passed_or_refused(deploy, face, caplog):
    """A server that no model names takes no permit, and one warning; refused, it sees no request."""
    deployment = serving(deploy)
    driven = face(deployment)
    body = {**CHAT, "model": "embed"}
    client = driven.client()
    for _ in range(2):
        assert driven.run(client.post(url_of(deployment, "embed"), json=body)).status_code == 200
    port = deployment.server.port("embed")
    [told] = [one.getMessage() for one in caplog.records if "guard.unknown_server" in one.getMessage()]
    assert f"server='http://127.0.0.1:{port}'" in told
    with pytest.raises(ConfigurationError, match=f"http://127.0.0.1:{port} .* the nearest is http://127.0.0.1:"):
        driven.run(driven.client(unknown="refuse").post(url_of(deployment, "embed"), json=body))
    assert deployment.server.stats()["embed"].calls == 2


def test_fallback_is_called_while_the_breaker_is_open(deploy, face, monkeypatch):
    """The same client, the same URL: the fallback's server gets its own model, key and path, and the answer is its."""
    models = {
        "chat": {"max_concurrent_requests": 2, "fallback": "embed", "fallback_other_model": True},
        "embed": {"max_concurrent_requests": 2, "api_key_env": "EMBED_KEY"},
    }
    deployment = serving(deploy, models=models)
    monkeypatch.setenv("EMBED_KEY", "other")
    driven = face(deployment)
    client = driven.client()
    deployment.server.script([Step(endpoint="chat", fault=Fault.STATUS, status=503, headers={"retry-after": "30"})])
    answers = [driven.run(client.post(url_of(deployment), json=CHAT)) for _ in range(2)]
    assert [one.status_code for one in answers] == [503, 200]
    assert answers[1].json()["model"] == "embed"
    assert str(answers[1].request.url) == url_of(deployment)
    stats = deployment.server.stats()
    assert (stats["chat"].calls, stats["embed"].calls) == (1, 1)
    wait_free(deployment)


# ------------------------------------------------------------------------------------------------- OpenAI's client


def test_openai_client_talks_through_the_guard(deploy, face):
    """A completion, a stream and embeddings, with the base_url that the models have; each takes one permit."""
    models = {name: {"max_concurrent_requests": 1, "reserve": 0} for name in ("chat", "embed")}
    deployment = serving(deploy, models=models)
    driven = face(deployment)
    chat = driven.openai(deployment.server.url("chat"))
    answer = driven.run(chat.chat.completions.create(**CHAT))
    stream = driven.run(chat.chat.completions.create(**STREAM))
    assert state(deployment).in_flight == 1
    text = "".join(part.choices[0].delta.content or "" for part in driven.items(stream) if part.choices)
    assert text == answer.choices[0].message.content
    wait_free(deployment)
    embed = driven.openai(deployment.server.url("embed").removesuffix("/v1") + "/v1/")
    found = driven.run(embed.embeddings.create(model="embed", input=["a", "b"]))
    assert len(found.data) == 2
    stats = deployment.server.stats()
    assert (stats["chat"].statuses, stats["embed"].statuses) == ({"200": 2}, {"200": 1})
    assert {state(deployment, name).breaker for name in models} == {"closed"}
    wait_free(deployment)


def test_openai_stream_that_is_left_early_frees_its_permit(deploy, face):
    """The client's own close is enough, and counts as a success."""
    deployment = serving(deploy, 1)
    driven = face(deployment)
    deployment.server.script([Step(fault=Fault.STREAM_SILENCE, chunks=1)])
    client = driven.openai(deployment.server.url("chat"))
    stream = driven.run(client.chat.completions.create(**STREAM))
    assert state(deployment).in_flight == 1
    driven.run(stream.close())
    wait_free(deployment)
    assert state(deployment).breaker == "closed"


def test_refusal_within_openais_client_counts_against_no_server(deploy, face):
    """As it comes, or wrapped in the client's own connection error, a denial is found, and is no overload."""
    deployment = serving(deploy, 1)
    driven = face(deployment)
    client = driven.openai(deployment.server.url("chat"), timeout=0.1)
    held = deployment.guard.permit("chat")
    with pytest.raises((AdmissionDenied, openai.APIConnectionError)) as caught:
        driven.run(client.chat.completions.create(**CHAT))
    held.release()
    denied = caught.value if isinstance(caught.value, AdmissionDenied) else caught.value.__cause__
    assert isinstance(denied, AdmissionDenied)
    assert classify_exception(caught.value, now_epoch_s=time.time()).outcome is Outcome.IGNORED
    assert deployment.server.stats()["chat"].calls == 0
