"""The reference application as users run it: Dramatiq's own command line, a real store, HTTP to a fake model server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import redis
from dramatiq import Message
from dramatiq.brokers.redis import RedisBroker
from dramatiq.results.backends import RedisBackend

from guard_middleware.testing.model_server import FakeEndpoint, Fault, ModelServer, Step

ROOT = Path(__file__).parents[2]
BGE, QWEN = "bge-m3", "qwen/qwen3.6-27b"
QUEUES = {"embed": "embedding", "enrich": "enrichment", "orchestrate": "orchestration"}


class Application:
    """Sends to the application without importing it, and asks for results."""

    def __init__(self, redis_url, environment):
        self.environment = environment
        self.broker = RedisBroker(url=redis_url, middleware=[])
        self.results = RedisBackend(client=redis.Redis.from_url(redis_url, socket_timeout=30))

    def send(self, actor, *args, **options):
        message = Message(queue_name=QUEUES[actor], actor_name=actor, args=args, kwargs={}, options=options)
        self.broker.enqueue(message)
        return message

    def result(self, message):
        return self.results.get_result(message, block=True, timeout=20_000)

    def run(self, code):
        """Run code in a process that imports the application, as a web server would."""
        return subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=self.environment,
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def close(self):
        for client in (self.broker.client, self.results.client):
            client.connection_pool.disconnect()


@contextmanager
def running(redis_url, namespace, models, *, processes=1, threads=4, log, **variables):
    """The application with workers for all its queues, until the end of the block."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GUARD_REDIS_URL": redis_url,
        "GUARD_NAMESPACE": namespace,
        "GUARD_MODELS": json.dumps(models),
        "GPU_CONCURRENCY_BUDGETS": "{}",
        **variables,
    }
    command = [sys.executable, "-m", "dramatiq", "actors", "--processes", str(processes), "--threads", str(threads)]
    application = Application(redis_url, environment)
    with log.open("wb") as stream:
        workers = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stream, stderr=stream)
    try:
        until(lambda: application.broker.client.zcard("dramatiq:__heartbeats__") >= processes, workers, log)
        yield application
    finally:
        application.close()
        workers.terminate()
        workers.wait(30)


def until(condition, workers, log, timeout_s=30):
    """Wait, as long as the workers live."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert workers.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


def answered(server):
    """The messages' calls that were answered with 200."""
    return [call for call in server.log() if call.status == 200 and call.message_id]


@pytest.fixture
def server():
    """Both models on one host, and a second server for the larger one."""
    endpoints = [FakeEndpoint(name=BGE, base_ms=50), FakeEndpoint(name=QWEN, base_ms=50)]
    with ModelServer([*endpoints, FakeEndpoint(name="spare", model=QWEN, base_ms=50)]) as running_server:
        yield running_server


@pytest.fixture
def models(server):
    """The configuration of both models."""
    return [{"id": BGE, "base_url": server.url(BGE)}, {"id": QWEN, "base_url": server.url(QWEN)}]


def test_each_actor_calls_the_server_that_its_permit_names(redis_url, namespace, server, models, tmp_path):
    """Actors know no URL: the call goes to the base_url of the permit's endpoint, and names the message it is for."""
    with running(redis_url, namespace, models, log=tmp_path / "log") as application:
        sent = {
            "embed": application.send("embed", ["a", "b"], guard_priority="background_ingestion"),
            "enrich": application.send("enrich", "a passage"),
            "orchestrate": application.send("orchestrate", "a task", guard_priority="orchestration"),
        }
        results = {actor: application.result(message) for actor, message in sent.items()}

    assert [len(vector) for vector in results["embed"]] == [8, 8]
    assert all(line.startswith("ok-") for line in results["enrich"])
    assert results["orchestrate"].startswith("ok-")
    seen = {call.message_id: (call.endpoint, call.path, call.priority) for call in answered(server)}
    assert seen == {
        sent["embed"].message_id: (BGE, "/v1/embeddings", "background_ingestion"),
        sent["enrich"].message_id: (QWEN, "/v1/chat/completions", ""),
        sent["orchestrate"].message_id: (QWEN, "/v1/chat/completions", "orchestration"),
    }


def test_a_persons_question_is_interactive(redis_url, namespace, server, models, tmp_path):
    """`ask` stamps the priority at send, wherever that is; `orchestrate.send` has the actor's own."""
    code = "from actors import ask, orchestrate; print(ask('who?').message_id, orchestrate.send('do').message_id)"
    with running(redis_url, namespace, models, log=tmp_path / "log") as application:
        question, task = application.run(code).stdout.split()
        server.wait_until(lambda _: len(answered(server)) == 2)

    assert {call.message_id: call.priority for call in answered(server)} == {
        question: "interactive",
        task: "orchestration",
    }


def test_the_call_goes_to_the_fallback_while_the_server_is_in_trouble(redis_url, namespace, server, models, tmp_path):
    """One actor, two servers: which one it calls is decided by the guard, and no retry is burned on the way."""
    spare = {"id": "spare", "model": QWEN, "base_url": server.url("spare")}
    server.script([Step(fault=Fault.STATUS, endpoint=QWEN, status=503)])
    models = [models[0], {**models[1], "fallback": "spare"}, spare]
    with running(redis_url, namespace, models, log=tmp_path / "log") as application:
        message = application.send("orchestrate", "a task")
        assert application.result(message).startswith("ok-")

    calls = [(call.endpoint, call.status) for call in server.log() if call.message_id == message.message_id]
    assert calls[0] == (QWEN, 503)
    assert calls[-1] == ("spare", 200)


def test_workers_of_two_processes_obey_one_ceiling(redis_url, namespace, server, models, tmp_path):
    """16 threads, a ceiling of 4: the server never sees a fifth call, and sees four."""
    models = [{**models[0], "max_concurrent_requests": 4, "reserve": 0}, models[1]]
    with running(redis_url, namespace, models, processes=2, threads=8, log=tmp_path / "log") as application:
        sent = {application.send("embed", [f"sentence {number}"]).message_id for number in range(60)}
        stats = server.wait_until(lambda stats: stats[BGE].statuses.get("200", 0) >= 60, timeout_s=30)

    assert stats[BGE].most_in_flight == 4
    assert sorted(call.message_id for call in answered(server)) == sorted(sent)


def test_the_key_is_that_of_the_named_variable(redis_url, namespace, models, tmp_path):
    """The configuration names a variable; only the request's header holds what is in it."""
    with listening() as (base_url, requests):
        models = [{**models[0], "base_url": base_url, "model": "bge", "api_key_env": "BGE_M3_KEY"}, models[1]]
        log = tmp_path / "log"
        with running(redis_url, namespace, models, log=log, BGE_M3_KEY="hush-hush") as application:
            application.result(application.send("embed", ["a"]))

    (request,) = requests
    assert request["authorization"] == "Bearer hush-hush"
    assert request["body"] == {"model": "bge", "input": ["a"]}
    assert "hush-hush" not in log.read_text()


def test_the_client_refuses_to_call_without_a_permit(redis_url, namespace, models, tmp_path):
    """A call that no permit stands for would load a server behind the guard's back."""
    environment = {"GUARD_REDIS_URL": redis_url, "GUARD_NAMESPACE": namespace, "GUARD_MODELS": json.dumps(models)}
    application = Application(redis_url, {**os.environ, **environment, "GPU_CONCURRENCY_BUDGETS": "{}"})
    done = application.run("from actors import client; client.chat('hello')")
    application.close()

    assert done.returncode != 0
    assert "GuardError: no permit is held here" in done.stderr


@pytest.mark.parametrize("name", ["Procfile", "Procfile.dev", "Procfile.demo"])
def test_each_queue_has_its_line(name):
    """No queue of the application is left without a worker, and none is made up."""
    lines = re.findall(r"^(\w+):.* dramatiq actors --queues (\w+) ", (ROOT / name).read_text(), re.MULTILINE)
    assert sorted(lines) == sorted((queue, queue) for queue in QUEUES.values())
    assert ("--watch" in (ROOT / name).read_text()) == (name == "Procfile.dev")


@contextmanager
def listening():
    """A server that answers every embedding, and keeps what it was asked."""
    requests = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            requests.append({"authorization": self.headers["authorization"], "body": body})
            answer = b'{"data": [{"embedding": [1.0]}]}'
            self.send_response(200)
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        thread = threading.Thread(target=http_server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http_server.server_port}/v1", requests
        finally:
            http_server.shutdown()
            thread.join()
