"""The fake model server through real sockets: what clients see, and what the server counts meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
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

HOUR_MS = 3_600_000.0
CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
STREAM = CHAT | {"stream": True}


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


def chat(client: httpx.Client, server: ModelServer, name: str = "chat", **headers: str) -> httpx.Response:
    """Ask for a completion, with underscores in header names for hyphens."""
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return client.post(f"{server.url(name)}/chat/completions", json=CHAT, headers=fields)


def stream(client: httpx.Client, server: ModelServer, chunks: list[str]) -> None:
    """Read a streamed completion to its end, chunk by chunk into the list."""
    with client.stream("POST", f"{server.url('chat')}/chat/completions", json=STREAM) as response:
        response.raise_for_status()
        chunks.extend(line for line in response.iter_lines() if line)


# --- the answers


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
    assert server.stats()["embed"].most_running == 0


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


# --- what the server counts


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


def test_a_client_that_gives_up_and_asks_again_is_one_call(server):
    """A call ends with its connection before one that came after it begins, so giving up never counts double."""
    server.script([Step(fault=Fault.HANG)])
    for _ in range(50):
        with open_calls(server, "chat", 1):
            pass
    stats = server.wait_until(lambda stats: stats["chat"].calls == 50 and stats["chat"].in_flight == 0)

    assert stats["chat"].most_in_flight == 1


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

    assert stats["chat"].integral_s == pytest.approx(sum(line.seconds for line in log), abs=1e-6)
    assert 0.4 <= stats["chat"].integral_s < 0.7
    assert stats["chat"].use(2) == pytest.approx(use_of_ceiling(log, 2), abs=1e-6)
    assert 0.6 < stats["chat"].use(2) <= 1.0


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


# --- memory


def test_above_the_edge_the_host_dies_and_comes_back(client):
    """Everything that is open is dropped without a byte, then refused, then loading, then well: one death."""
    endpoints = [FakeEndpoint(name="a", base_ms=HOUR_MS), FakeEndpoint(name="b", base_ms=HOUR_MS)]
    memory = HostMemory(edge=4, dark_s=0.4, loading_s=0.4)
    with (
        ModelServer(endpoints, memory) as server,
        open_calls(server, "a", 2) as on_a,
        open_calls(server, "b", 2) as on_b,
    ):
        server.wait_until(lambda stats: stats.host.in_flight == 4)
        ports = (server.port("a"), server.port("b"))
        with pytest.raises(httpx.RemoteProtocolError, match="disconnected without sending"):
            chat(client, server, "b")
        assert [call.recv(1) for call in (*on_a, *on_b)] == [b""] * 4

        seen = watch(client, server, "a", until="200")
        stats = server.stats()

    assert seen == ["ConnectError", "503", "200"]
    assert (stats.deaths, stats.state) == (1, "up")
    assert (stats.host.most_in_flight, stats.host.most_running) == (5, 4)
    assert (stats["a"].statuses["dropped"], stats["b"].statuses["dropped"]) == (2, 3)
    assert ports == (server.port("a"), server.port("b"))


def test_a_host_can_die_by_reset(client):
    """Some hosts reset what they had open."""
    memory = HostMemory(edge=1, dark_s=0.1, loading_s=0, death="reset")
    with (
        ModelServer([FakeEndpoint(name="a", base_ms=HOUR_MS)], memory) as server,
        open_calls(server, "a", 1) as (call,),
    ):
        server.wait_until(lambda stats: stats["a"].in_flight == 1)
        with pytest.raises(httpx.ReadError):
            chat(client, server, "a")
        with pytest.raises(ConnectionResetError):
            call.recv(1)


def test_a_host_can_die_in_silence(client):
    """Some hosts just stop: connections stay open, new ones too, and nobody answers until the dark ends."""
    memory = HostMemory(dark_s=0.6, loading_s=0, death="silent")
    with ModelServer([FakeEndpoint(name="a", base_ms=0)], memory) as server:
        server.kill_host()
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{server.url()}/embeddings", json={"input": "x"}, timeout=0.2)
        with pytest.raises(httpx.ReadTimeout):
            client.get(f"{server.root_url()}/health", timeout=0.2)
        with pytest.raises(httpx.ReadError):
            client.post(f"{server.url()}/embeddings", json={"input": "x"})
        assert client.post(f"{server.url()}/embeddings", json={"input": "x"}).status_code == 200


def test_above_the_knee_calls_slow_down_in_proportion():
    """Eight calls of 100 ms over a knee of 2 are done after 400 ms, all of them, on both endpoints."""
    endpoints = [FakeEndpoint(name="a", base_ms=100), FakeEndpoint(name="b", base_ms=100)]
    with (
        ModelServer(endpoints, HostMemory(knee=2)) as server,
        open_calls(server, "a", 4) as on_a,
        open_calls(server, "b", 4) as on_b,
    ):
        for call in (*on_a, *on_b):
            assert call.recv(12) == b"HTTP/1.1 200"
        server.wait_until(lambda stats: stats.host.in_flight == 0)
        log = server.log()

    whole = max(line.t_end for line in log) - min(line.t_start for line in log)
    assert 0.4 <= whole < 0.6


def test_behind_max_num_seqs_calls_wait_inside_the_server():
    """Four calls of 100 ms, two at a time: the second pair is done after 200 ms."""
    with (
        ModelServer([FakeEndpoint(name="a", base_ms=100, max_num_seqs=2)]) as server,
        open_calls(server, "a", 4),
    ):
        stats = server.wait_until(lambda stats: stats["a"].statuses.get("200") == 4)
        times = sorted(line.seconds for line in server.log())

    assert (stats["a"].most_running, stats["a"].most_waiting, stats["a"].most_in_flight) == (2, 2, 4)
    assert times[1] < 0.19 < times[2]


@pytest.mark.parametrize(
    ("limits", "memory", "status", "text"),
    [
        ({"refuse_above": 2}, {}, 503, "server busy, please try again"),
        ({"refuse_above": 2, "refuse_status": 500}, {}, 500, "server busy, please try again"),
        ({"oom_above": 2}, {}, 500, "CUDA out of memory"),
        ({}, {"oom_above": 2}, 500, "CUDA out of memory"),
    ],
)
def test_a_call_too_many_is_answered_at_once(client, limits, memory, status, text):
    """The third call is refused in the way of that server, and the two that run are not disturbed."""
    endpoint = FakeEndpoint(name="a", base_ms=HOUR_MS, **limits)
    with ModelServer([endpoint], HostMemory(**memory)) as server, open_calls(server, "a", 2):
        server.wait_until(lambda stats: stats["a"].in_flight == 2)
        response = chat(client, server, "a")
        stats = server.stats()

    assert (response.status_code, text in response.text) == (status, True)
    assert (stats["a"].in_flight, stats["a"].running) == (2, 2)


def test_the_memory_limit_is_over_both_endpoints_and_in_cost(client):
    """One endpoint's load fails the other's call: together they would cost 7 of 6."""
    endpoints = [FakeEndpoint(name="chat", base_ms=HOUR_MS), FakeEndpoint(name="embed", base_ms=0)]
    with (
        ModelServer(endpoints, HostMemory(oom_above=6)) as server,
        open_calls(server, "chat", 2, x_fake_cost="2"),
    ):
        server.wait_until(lambda stats: stats.host.cost == 4)
        assert chat(client, server, "embed", x_fake_cost="2").status_code == 200
        assert chat(client, server, "embed", x_fake_cost="3").status_code == 500


# --- scripts


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault.DROP, httpx.RemoteProtocolError),
        (Fault.RESET, httpx.ReadError),
        (Fault.HANG, httpx.ReadTimeout),
        (Fault.TRUNCATE, httpx.RemoteProtocolError),
        (Fault.GARBAGE, httpx.RemoteProtocolError),
    ],
)
def test_a_fault_is_the_error_that_clients_know(server, client, fault, error):
    """Each fault reaches the client as its own kind of error, strikes once, and leaves nothing open."""
    server.script([Step(fault=fault, times=1)])
    with pytest.raises(error):
        client.post(f"{server.url('chat')}/chat/completions", json=CHAT, timeout=0.2)

    assert chat(client, server).status_code == 200
    server.wait_until(lambda stats: stats["chat"].in_flight == 0)


def test_a_page_instead_of_json_is_a_200(server, client):
    """A proxy's welcome page is not what a client wanted, but its status is fine."""
    server.script([Step(fault=Fault.NOT_JSON)])
    response = chat(client, server)

    assert response.status_code == 200
    with pytest.raises(json.JSONDecodeError):
        response.json()


def test_a_status_comes_with_its_headers_and_body(server, client):
    """The first calls get what the script says, the others are served."""
    step = Step(fault=Fault.STATUS, calls=(1, 2), status=429, headers={"Retry-After": "1"}, body="slow down, {prompt}")
    server.script([step])
    answers = [chat(client, server) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [429, 429, 200]
    assert (answers[0].headers["retry-after"], answers[0].text) == ("1", "slow down, hello there")


def test_each_message_fails_its_first_call(server, client):
    """Occurrences are counted by message, not by call."""
    server.script([Step(fault=Fault.STATUS, status=503, message_calls=(1, 1))])

    seen = [chat(client, server, x_message_id=name).status_code for name in ("a", "b", "a", "b")]
    assert seen == [503, 503, 200, 200]


def test_a_fault_can_come_late(server, client):
    """A call that fails after a while is open for that while."""
    server.script([Step(fault=Fault.STATUS, status=500, after_ms=150)])

    assert chat(client, server).status_code == 500
    assert server.log()[0].seconds >= 0.149


def test_a_script_can_set_the_pace(server, client):
    """A slow answer is an answer."""
    server.script([Step(fault=Fault.SERVE, ms=150)])

    assert chat(client, server).status_code == 200
    assert server.log()[0].seconds >= 0.149


def test_a_refused_window_closes_the_port_and_idle_connections_only(server, client):
    """While the window is open connections are refused; calls that were open before it are answered."""
    chat(client, server)  # leaves a connection open that a dead process would not have
    with open_calls(server, "chat", 1, x_fake_ms="400") as (call,):
        server.wait_until(lambda stats: stats["chat"].in_flight == 1)
        server.script([Step(fault=Fault.REFUSE, endpoint="chat", to_s=0.3)])
        with pytest.raises(httpx.ConnectError):
            chat(client, server)
        assert chat(client, server, "embed").status_code == 200
        assert watch(client, server, "chat", until="200") == ["ConnectError", "200"]
        assert call.recv(12) == b"HTTP/1.1 200"


@pytest.mark.parametrize(("open_calls_are", "expected"), [("drop", b""), ("reset", ConnectionResetError)])
def test_a_refused_window_can_take_open_calls_with_it(server, open_calls_are, expected):
    """A process that dies takes its calls along."""
    with open_calls(server, "chat", 1, x_fake_ms=str(HOUR_MS)) as (call,):
        server.wait_until(lambda stats: stats["chat"].in_flight == 1)
        server.script([Step(fault=Fault.REFUSE, to_s=0.1, open_calls=open_calls_are)])
        if expected == b"":
            assert call.recv(1) == b""
        else:
            with pytest.raises(expected):
                call.recv(1)
    server.wait_until(lambda stats: stats["chat"].in_flight == 0)


def test_a_window_can_start_with_the_first_call(server, client):
    """Workers may take their time to start: the clock waits for them."""
    server.script([Step(fault=Fault.REFUSE, endpoint="chat", from_s=0.2, to_s=0.4)], starts="first_call")
    time.sleep(0.3)  # the window would be open now if the clock had started with the script

    assert watch(client, server, "chat", until="ConnectError") == ["200", "ConnectError"]
    assert watch(client, server, "chat", until="200") == ["ConnectError", "200"]


def test_health_stays_green_while_calls_hang_unless_told_otherwise(server, client):
    """The web layer outlives the engine; a loading server fails on all routes."""
    health = f"{server.root_url('chat')}/health"
    server.script([Step(fault=Fault.HANG)])
    with pytest.raises(httpx.ReadTimeout):
        client.post(f"{server.url('chat')}/chat/completions", json=CHAT, timeout=0.2)
    assert client.get(health).status_code == 200

    server.script([Step(fault=Fault.STATUS, status=503, probes=True)])
    assert (client.get(health).status_code, chat(client, server).status_code) == (503, 503)


@pytest.mark.parametrize(
    ("fault", "chunks", "error", "last"),
    [
        (Fault.STREAM_RESET, 3, httpx.ReadError, "ok-"),
        (Fault.STREAM_SILENCE, 3, httpx.ReadTimeout, "ok-"),
        (Fault.STREAM_NO_END, 3, None, "ok-"),
        (Fault.STREAM_NO_END, 0, None, ""),
        (Fault.STREAM_ERROR, 2, None, "overloaded"),
        (Fault.STREAM_ERROR, 9, None, "overloaded"),
    ],
)
def test_a_stream_breaks_where_the_script_says(server, fault, chunks, error, last):
    """After so many chunks, in its own way, and never with the event that ends a whole stream."""
    server.script([Step(fault=fault, chunks=chunks, times=1)])
    seen: list[str] = []
    with (
        httpx.Client(trust_env=False, timeout=0.3) as client,
        pytest.raises(error) if error else contextlib.nullcontext(),
    ):
        stream(client, server, seen)

    assert sum("chat.completion.chunk" in line for line in seen) == chunks
    assert "data: [DONE]" not in seen
    assert last in "".join(seen)
    server.wait_until(lambda stats: stats["chat"].in_flight == 0)
    assert server.log()[0].status == 200


def test_a_broken_stream_is_open_until_it_ends(server):
    """A silent stream is in flight as long as its client waits for more."""
    server.script([Step(fault=Fault.STREAM_SILENCE, chunks=1)])
    with open_calls(server, "chat", 1, body=STREAM) as (call,):
        while b"chat.completion.chunk" not in call.recv(4096):
            pass
        time.sleep(0.1)
        assert server.stats()["chat"].in_flight == 1


def test_a_script_for_nobody_is_refused(server):
    """A misspelled endpoint is told at once."""
    with pytest.raises(ModelServerError, match="no endpoint 'caht'"):
        server.script([Step(fault=Fault.DROP, endpoint="caht")])


# --- the process


def test_the_process_ends_with_its_block():
    """Nothing is left running or listening."""
    with ModelServer() as server:
        pid, port = server.pid, server.port()
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_the_process_ends_when_its_parent_is_killed():
    """A test run that is killed leaves no server behind."""
    code = (
        "import time; from guard_middleware.testing.model_server import ModelServer\n"
        "server = ModelServer(); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    assert ends(pid)


def test_a_server_of_the_command_line_ends_with_its_parent_or_its_time(tmp_path):
    """Neither a shell that is gone nor a forgotten demo keeps it running."""
    config = tmp_path / "server.json"
    config.write_text('{"endpoints": [{"name": "a"}]}')
    command = [sys.executable, "-m", "guard_middleware.testing.model_server", "--config", str(config)]
    shell = ["sh", "-c", '"$@" < /dev/null & read line', "sh", *command]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        orphan = json.loads(parent.stdout.readline())["pid"]
        parent.kill()
        assert ends(orphan)

    done = subprocess.run([*command, "--max-seconds", "0.1"], stdout=subprocess.PIPE, timeout=20, check=True)
    assert list(json.loads(done.stdout)["endpoints"]) == ["a"]


def test_a_configuration_that_cannot_work_is_told(capfd):
    """The message names the field, on stderr, and nothing starts."""
    command = [sys.executable, "-m", "guard_middleware.testing.model_server", "--config-json"]
    done = subprocess.run([*command, '{"endpoints": [{"name": "a", "bose_ms": 1}]}'], timeout=20, check=False)

    assert done.returncode == 2
    assert "bose_ms" in capfd.readouterr().err


def test_a_port_that_is_taken_is_told(capfd):
    """Two servers on one port would share its calls; the second one does not start."""
    with ModelServer([FakeEndpoint(name="a")]) as first, pytest.raises(ModelServerError, match="did not start"):
        ModelServer([FakeEndpoint(name="b", port=first.port())]).start()

    assert str(first.config.endpoints[0].port) in capfd.readouterr().err


def test_waiting_for_what_never_comes_ends(server):
    """A wait has a deadline, and its error shows what the server saw last."""
    with pytest.raises(ModelServerError, match=r"waited 0\.05 s in vain; last: .*in_flight=0"):
        server.wait_until(lambda stats: stats.deaths == 1, timeout_s=0.05)


# --- helpers


@contextlib.contextmanager
def open_calls(server: ModelServer, name: str, count: int, body: dict | None = None, **headers: str):
    """Hold so many calls open at an endpoint, each on a bare socket of its own, asked from a thread of its own."""
    text = json.dumps(body or CHAT).encode()
    fields = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{fields}content-length: {len(text)}\r\n\r\n".encode()
    calls = [socket.create_connection(("127.0.0.1", server.port(name)), timeout=10) for _ in range(count)]
    threads = [threading.Thread(target=call.sendall, args=(head + text,)) for call in calls]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield calls
    finally:
        for call in calls:
            call.close()


def watch(client: httpx.Client, server: ModelServer, name: str, until: str) -> list[str]:
    """Ask again and again until something is seen; return what was seen on the way, without repetitions."""
    seen: list[str] = []
    deadline = time.monotonic() + 10
    while until not in seen:
        assert time.monotonic() < deadline, seen
        try:
            now = str(chat(client, server, name, x_fake_ms="0").status_code)
        except httpx.TransportError as exc:
            now = type(exc).__name__
        if seen[-1:] != [now]:
            seen.append(now)
        time.sleep(0.01)
    return seen


def ends(pid: int) -> bool:
    """Tell whether a process that is not ours ends soon; kill it if it does not."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False
