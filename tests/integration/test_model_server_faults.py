"""How the fake model server fails: out of memory, and by script."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time

import httpx
import pytest

from guard_middleware.testing.model_server import (
    FakeEndpoint,
    Fault,
    HostMemory,
    ModelServer,
    ModelServerError,
    Step,
)
from tests.integration.model_server_clients import CHAT, HOUR_MS, STREAM, chat, open_calls, stream, watch


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
    """Eight calls of 100 ms over a knee of 2 take 400 ms, on whichever endpoint they are."""
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
    assert whole > 0.399


def test_behind_max_num_seqs_calls_wait_inside_the_server():
    """Four calls of 100 ms, two at a time: the second pair is done after 200 ms."""
    with (
        ModelServer([FakeEndpoint(name="a", base_ms=100, max_num_seqs=2)]) as server,
        open_calls(server, "a", 4),
    ):
        stats = server.wait_until(lambda stats: stats["a"].statuses.get("200") == 4)
        ends = sorted(line.t_end for line in server.log())

    assert (stats["a"].most_running, stats["a"].most_waiting, stats["a"].most_in_flight) == (2, 2, 4)
    assert ends[2] - ends[0] > 0.099


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


def test_a_reset_revives_a_dead_host(client):
    """A test that killed the host leaves a good one to the next."""
    with ModelServer([FakeEndpoint(name="a")], HostMemory(dark_s=3600)) as server:
        server.kill_host()
        with pytest.raises(httpx.ConnectError):
            chat(client, server, "a")
        assert (server.stats().deaths, server.stats().state) == (1, "dark")
        server.reset()
        assert chat(client, server, "a").status_code == 200
        assert server.stats().deaths == 0


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


def test_a_fault_that_comes_late_finds_nobody_if_the_client_has_left(server):
    """A call that was given up meanwhile never gets into the engine."""
    server.script([Step(fault=Fault.SERVE, after_ms=150, ms=HOUR_MS)])
    with open_calls(server, "chat", 1):
        server.wait_until(lambda stats: stats["chat"].in_flight == 1)
    server.wait_until(lambda stats: stats["chat"].in_flight == 0)
    time.sleep(0.3)

    assert server.stats()["chat"].most_running == 0


def test_what_happens_on_a_connection_is_not_mixed_up_with_its_last_call(server, client):
    """A call that is dropped without a byte is just that, also if an earlier one had an answer on its connection."""
    server.script([Step(fault=Fault.DROP, calls=(2, 2))])
    assert chat(client, server).status_code == 200
    with pytest.raises(httpx.RemoteProtocolError):
        chat(client, server)

    assert server.stats()["chat"].statuses == {"200": 1, "dropped": 1}


def test_a_script_can_set_the_pace(server, client):
    """A slow answer is an answer."""
    server.script([Step(fault=Fault.SERVE, ms=150)])

    assert chat(client, server).status_code == 200
    assert server.log()[0].seconds >= 0.149


def test_a_refused_window_closes_the_port_and_idle_connections_only(server, client):
    """Connections are refused meanwhile; a call from before is answered, but its connection is not kept."""
    chat(client, server)  # leaves a connection open that a dead process would not have
    with open_calls(server, "chat", 1, x_fake_ms="300") as (call,):
        server.wait_until(lambda stats: stats["chat"].in_flight == 1)
        server.script([Step(fault=Fault.REFUSE, endpoint="chat", to_s=0.8)])
        with pytest.raises(httpx.ConnectError):
            chat(client, server)
        assert chat(client, server, "embed").status_code == 200
        answer = b"".join(iter(lambda: call.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 200")
        assert watch(client, server, "chat", until="200") == ["ConnectError", "200"]


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


def test_whatever_goes_wrong_every_call_is_counted_out_once():
    """After 480 calls that fail in every way, at both ends, nothing is open, and each has ended in one way."""
    faults = [Fault.DROP, Fault.RESET, Fault.HANG, Fault.TRUNCATE, Fault.GARBAGE, Fault.NOT_JSON]
    faults += [Fault.STREAM_RESET, Fault.STREAM_SILENCE, Fault.STREAM_NO_END, Fault.STREAM_ERROR]
    steps = [
        Step(fault=Fault.STATUS, status=503, share=0.1, after_ms=20),
        *(Step(fault=fault, share=0.03) for fault in faults),
        Step(fault=Fault.REFUSE, endpoint="a", from_s=0.5, to_s=0.6, open_calls="drop"),
        Step(fault=Fault.REFUSE, endpoint="b", from_s=0.8, to_s=0.9, open_calls="reset"),
    ]
    endpoints = [FakeEndpoint(name="a", base_ms=10, max_num_seqs=3), FakeEndpoint(name="b", base_ms=10)]

    async def ask(client: httpx.AsyncClient, url: str, body: dict, cost: str) -> None:
        for _ in range(20):
            with contextlib.suppress(httpx.TransportError):
                await client.post(f"{url}/chat/completions", json=body, headers={"x-fake-cost": cost}, timeout=0.2)

    async def ask_all(server: ModelServer) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            asks = [
                ask(client, server.url("ab"[number % 2]), STREAM if number % 3 else CHAT, str(1 + number % 4 // 3))
                for number in range(24)
            ]
            await asyncio.gather(*asks, asyncio.to_thread(kill_at, server, 100))

    def kill_at(server: ModelServer, calls: int) -> None:
        server.wait_until(lambda stats: stats.host.calls >= calls)
        server.kill_host()

    memory = HostMemory(knee=4, dark_s=0.05, loading_s=0.05)
    with ModelServer(endpoints, memory, script=steps) as server:
        asyncio.run(ask_all(server))
        stats = server.wait_until(lambda stats: stats.host.in_flight == 0)
        log = server.log()

    for tally in (stats.host, stats["a"], stats["b"]):
        assert (tally.in_flight, tally.cost, tally.running, tally.waiting) == (0, 0, 0, 0)
        assert sum(tally.statuses.values()) == tally.calls
    assert len(log) == stats.host.calls
    assert {"200", "503", "dropped", "reset", "abandoned"} <= stats.host.statuses.keys()
    assert stats["a"].most_running == 3
    assert stats.deaths == 1
    assert stats.host.integral_s == pytest.approx(sum(line.seconds for line in log), abs=0.01)
