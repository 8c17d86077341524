"""The fake model server through real sockets: its answers, and what it counts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from guard_middleware.testing.model_server import (
    FakeEndpoint,
    Fault,
    HostMemory,
    ModelServer,
    ModelServerError,
    Step,
    use_of_ceiling,
)
from tests.integration.model_server_clients import CHAT, HOUR_MS, chat, open_calls, stream


@pytest.fixture(scope="module")
def shared():
    """A server without limits, for tests that only script it; each begins with a reset."""
    with ModelServer([FakeEndpoint(name="chat", base_ms=5), FakeEndpoint(name="embed", base_ms=5)]) as server:
        yield server


@pytest.fixture
def server(shared):
    """The shared server, as new."""
    shared.wait_until(lambda stats: stats.host.in_flight == 0)
    shared.reset()
    return shared


@pytest.fixture
def client():
    """A client without retries or surprises from the environment."""
    with httpx.Client(trust_env=False, timeout=5) as one:
        yield one


def test_an_openai_client_gets_completions_streams_and_embeddings(server):
    """The common client understands all three kinds of answer."""
    with (
        openai.OpenAI(base_url=server.url("chat"), api_key="-", max_retries=0) as chat_client,
        openai.OpenAI(base_url=server.url("embed"), api_key="-", max_retries=0) as embed_client,
    ):
        whole = chat_client.chat.completions.create(model="chat", **CHAT)
        pieces = list(
            chat_client.chat.completions.create(
                model="chat", **CHAT, stream=True, stream_options={"include_usage": True}
            )
        )
        packed = embed_client.embeddings.create(model="embed", input=["a", "b"])
        plain = embed_client.embeddings.create(model="embed", input="b", encoding_format="float")

    text = whole.choices[0].message.content
    assert text
    assert whole.usage.prompt_tokens == 2
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == text
    assert pieces[-1].usage.completion_tokens == 4
    assert [len(entry.embedding) for entry in packed.data] == [8, 8]
    assert packed.data[1].embedding == pytest.approx(plain.data[0].embedding, abs=1e-6)
    assert server.stats()["chat"].statuses == {"200": 2}


def test_a_stream_ends_with_done(server, client):
    """The last event of a whole stream is the one that clients wait for."""
    chunks: list[str] = []
    stream(client, server, chunks)

    assert chunks[-1] == "data: [DONE]"
    assert len(chunks) == 4 + 2


def test_what_a_server_would_refuse_is_refused(server, client):
    """Another model is not found, a broken body is a bad request, and neither is served."""
    url = f"{server.url('embed')}/embeddings"
    assert client.post(url, json={"model": "chat", "input": "x"}).status_code == 404
    assert client.post(url, content=b"{").status_code == 400
    assert client.post(url, json={"input": "x", "dimensions": "many"}).status_code == 400
    assert client.post(url, json={"messages": [{}]}).status_code == 400
    assert client.post(url, json=["x"]).status_code == 400
    assert client.post(url, json={"input": "x"}, headers={"x-fake-ms": "nan"}).status_code == 400
    assert client.get(f"{server.root_url('embed')}/nothing").status_code == 404
    assert client.get(url).status_code == 404
    assert server.stats()["embed"].most_running == 0


def test_only_completions_are_streamed(server, client):
    """Embeddings come in one piece, whatever else the request says."""
    response = client.post(f"{server.url('embed')}/embeddings", json={"input": "x", "stream": True})

    assert len(response.json()["data"]) == 1


def test_health_models_and_metrics_are_no_calls(server, client):
    """Probes are answered and logged, and count neither as calls nor as in flight."""
    assert client.get(f"{server.root_url('chat')}/health").status_code == 200
    assert client.get(f"{server.url('chat')}/models").json()["data"][0]["id"] == "chat"
    assert client.get(f"{server.root_url('chat')}/metrics").status_code == 200

    assert server.stats()["chat"].calls == 0
    assert [(one.path, one.status, one.number) for one in server.log()] == [
        ("/health", 200, 0),
        ("/v1/models", 200, 0),
        ("/metrics", 200, 0),
    ]


def test_metrics_tell_running_and_waiting(client):
    """The gauges are true while calls run and wait, and a Prometheus client can read them."""
    with (
        ModelServer([FakeEndpoint(name="a", base_ms=HOUR_MS, max_num_seqs=2)], HostMemory(edge=4)) as server,
        open_calls(server, "a", 3),
    ):
        server.wait_until(lambda stats: stats["a"].in_flight == 3)
        text = client.get(f"{server.root_url()}/metrics").text
        gauges = {
            (sample.name, sample.labels.get("reason")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    assert gauges == {
        ("vllm:num_requests_running", None): 2.0,
        ("vllm:num_requests_waiting", None): 1.0,
        ("vllm:num_requests_waiting_by_reason", "capacity"): 1.0,
        ("vllm:num_requests_waiting_by_reason", "deferred"): 0.0,
        ("vllm:kv_cache_usage_perc", None): 0.5,
    }


def test_64_threads_at_once_are_64_in_flight():
    """The count is exact: as many as are open, no more for those that follow them, and none at the end."""
    with ModelServer([FakeEndpoint(name="a", base_ms=HOUR_MS)]) as server, open_calls(server, "a", 64) as calls:
        full = server.wait_until(lambda stats: stats["a"].in_flight >= 64)
        assert (full["a"].in_flight, full["a"].running, full.host.in_flight) == (64, 64, 64)
        for call in calls[:10]:
            call.close()
        server.wait_until(lambda stats: stats["a"].in_flight == 54)
        with open_calls(server, "a", 10):
            server.wait_until(lambda stats: stats["a"].in_flight == 64)
        for call in calls:
            call.close()
        empty = server.wait_until(lambda stats: stats["a"].in_flight == 0)

    assert (empty["a"].most_in_flight, empty["a"].calls, empty["a"].running) == (64, 74, 0)
    assert empty["a"].statuses == {"abandoned": 74}


def test_a_bounded_pool_is_never_seen_over_its_bound():
    """8 clients that ask again the instant they are answered are never seen as 9, whatever the timing."""
    with ModelServer([FakeEndpoint(name="a", base_ms=1)]) as server:

        async def ask(client: httpx.AsyncClient) -> None:
            for _ in range(50):
                response = await client.post(f"{server.url()}/embeddings", json={"input": "x"})
                response.raise_for_status()

        async def ask_all() -> None:
            async with httpx.AsyncClient(trust_env=False, timeout=30) as client:
                await asyncio.gather(*(ask(client) for _ in range(8)))

        asyncio.run(ask_all())
        stats = server.stats()

    assert stats["a"].statuses == {"200": 400}
    assert 2 <= stats["a"].most_in_flight <= 8


def test_a_client_that_left_before_the_server_looked_is_out_before_the_next_is_in():
    """Its request and its end stand in one socket, the later request in another: never two at once."""
    with ModelServer([FakeEndpoint(name="a", base_ms=HOUR_MS)]) as server:
        address = ("127.0.0.1", server.port())
        whole = b'POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: 13\r\n\r\n{"input":"x"}'
        with socket.create_connection(address) as old, socket.create_connection(address) as new:
            for one in (old, new):  # both are let in
                one.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
                assert one.recv(4096).startswith(b"HTTP/1.1 200")
            os.kill(server.pid, signal.SIGSTOP)
            old.sendall(whole)
            old.close()
            new.sendall(whole)
            os.kill(server.pid, signal.SIGCONT)
            stats = server.wait_until(lambda stats: stats["a"].calls == 2)

    assert (stats["a"].in_flight, stats["a"].most_in_flight) == (1, 1)
    assert stats["a"].statuses == {"abandoned": 1}


def test_a_call_that_was_given_up_counts_until_its_connection_closes(server):
    """It is the connection that is open at the server, whatever its client thinks of it."""
    with open_calls(server, "chat", 1, x_fake_ms=str(HOUR_MS)) as (call,):
        server.wait_until(lambda stats: stats["chat"].in_flight == 1)
        time.sleep(0.2)  # a client that waits no longer, but has not closed
        assert server.stats()["chat"].in_flight == 1
        call.close()
        server.wait_until(lambda stats: stats["chat"].in_flight == 0)

    (line,) = server.log()
    assert (line.ending, line.status) == ("abandoned", 0)
    assert line.seconds >= 0.2


def test_the_integral_is_that_of_a_known_load(server, client):
    """Four calls of 100 ms, two at a time, are at least 0.4 call seconds, and what their lines in the log add up to."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda _: chat(client, server, x_fake_ms="100"), range(4)))
    stats, log = server.stats(), server.log()

    assert stats["chat"].integral_s == pytest.approx(sum(line.seconds for line in log), abs=1e-4)
    assert stats["chat"].integral_s > 0.399
    assert stats["chat"].use(2) == pytest.approx(use_of_ceiling(log, 2), abs=1e-4)
    assert 0.2 < stats["chat"].use(2) <= 1.0


def test_cost_and_priority_are_counted_over_both_endpoints(server):
    """Costs add up over the host; the most in flight is known for each priority."""
    hour = {"x_fake_ms": str(HOUR_MS)}
    with (
        open_calls(server, "chat", 2, x_fake_cost="2", x_priority="interactive", **hour),
        open_calls(server, "embed", 3, x_priority="background_ingestion", **hour),
    ):
        stats = server.wait_until(lambda stats: stats.host.in_flight == 5)

    assert (stats.host.cost, stats["chat"].cost, stats["embed"].cost) == (7, 4, 3)
    assert stats.host.most_by_priority == {"interactive": 2, "background_ingestion": 3}


def test_the_log_tells_who_asked_and_how_it_ended(server, client):
    """One line per request, with what the caller said of itself."""
    began = time.time()
    chat(client, server, x_message_id="m1", x_priority="interactive", x_fake_cost="2")
    client.post(
        f"{server.url('embed')}/embeddings", json={"input": "x", "user": "u1"}, headers={"x-fake-status": "429"}
    )
    first, second = server.log()

    assert (first.endpoint, first.path, first.status, first.ending) == (
        "chat",
        "/v1/chat/completions",
        200,
        "answered",
    )
    assert (first.message_id, first.priority, first.cost, first.number) == ("m1", "interactive", 2, 1)
    assert began - 1 < first.t_start < first.t_end < second.t_end < time.time() + 1
    assert (second.user, second.status) == ("u1", 429)


def test_a_reset_begins_afresh(server, client):
    """Counts, log and script are gone; what is open stays counted."""
    server.script([Step(fault=Fault.STATUS, status=503, endpoint="chat")])
    assert chat(client, server).status_code == 503
    with open_calls(server, "embed", 1, x_fake_ms=str(HOUR_MS)):
        server.wait_until(lambda stats: stats["embed"].in_flight == 1)
        server.reset()
        stats = server.stats()
        assert (stats["chat"].calls, stats["chat"].statuses, stats["embed"].in_flight) == (0, {}, 1)
        assert [line.ending for line in server.log()] == [""]
        assert chat(client, server).status_code == 200


def test_a_call_that_left_is_out_before_one_that_came_later_is_in():
    """Also if the kernel tells of both at once, and of the later one first."""
    with ModelServer([FakeEndpoint(name="a", base_ms=HOUR_MS)]) as server, open_calls(server, "a", 1) as (old,):
        server.wait_until(lambda stats: stats["a"].in_flight == 1)
        with socket.create_connection(("127.0.0.1", server.port()), timeout=10) as new:
            new.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\n")
            time.sleep(0.1)  # the server has read that much
            os.kill(server.pid, signal.SIGSTOP)
            new.sendall(b"content-length: 13\r\n\r\n")  # the server has news of this connection first...
            old.close()
            new.sendall(b'{"input":"x"}')  # ...but its request is whole only after the other call has left
            os.kill(server.pid, signal.SIGCONT)
            stats = server.wait_until(lambda stats: stats["a"].calls == 2)

    assert (stats["a"].in_flight, stats["a"].most_in_flight) == (1, 1)


def test_an_answer_that_is_not_read_is_open_until_it_is(server):
    """A call ends when the kernel has taken the whole answer, not when the engine is done with it."""
    text = json.dumps({"input": "x", "dimensions": 400_000}).encode()
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", server.port("embed")))
        slow.sendall(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(text) + text)
        assert slow.recv(12) == b"HTTP/1.1 200"
        assert server.stats()["embed"].in_flight == 1
        slow.settimeout(10)
        while server.stats()["embed"].in_flight:
            slow.recv(1 << 20)

    assert server.stats()["embed"].statuses == {"200": 1}


def test_every_port_tells_the_same_statistics(server, client):
    """What the control port tells can be asked of each endpoint, for people with curl."""
    urls = [server.control_url, server.root_url("chat"), server.root_url("embed")]
    told = [client.get(f"{url}/_stats").json() for url in urls]

    assert told[0] == told[1] == told[2]
    assert server.stats().host.calls == 0


def test_waiting_for_what_never_comes_ends(server):
    """A wait has a deadline, and its error shows what the server saw last."""
    with pytest.raises(ModelServerError, match=r"waited 0\.05 s in vain; last: .*in_flight=0"):
        server.wait_until(lambda stats: stats.deaths == 1, timeout_s=0.05)
