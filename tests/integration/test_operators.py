"""`python -m guard_middleware`: what operators do, on a live deployment."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from guard_middleware.testing.model_server import FakeEndpoint
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow


def run(deployment, *arguments):
    """Run the command line as an operator would."""
    return subprocess.run(
        [sys.executable, "-m", "guard_middleware", *arguments],
        env=deployment.worker_env(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_operator_pauses_lowers_forces_and_drains(deploy):
    """Pause stops admissions, an override lowers the ceiling, a breaker is forced, and drain puts everything back."""
    deployment = deploy(
        endpoints=[FakeEndpoint(name="chat", base_ms=40), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": 4}, "embed": {}},
    )
    # Given a worker, and an operator who pauses its endpoint
    group = deployment.start()
    assert run(deployment, "pause", "chat").returncode == 0
    ids = deployment.send("orchestrate", 12)
    store = deployment.store()
    wait_until(lambda: sum(store.snapshot().endpoints["chat"].waiting.values()) == 12, 10)
    assert "12 orchestration+hydration" in run(deployment, "status").stdout
    # When a guarded worker still lives, a drain would be undone at once, and is refused
    refused = run(deployment, "drain", "orchestration", "--broker-namespace", deployment.broker_namespace)
    assert refused.returncode == 1
    assert "stop it" in refused.stderr
    # Then with the ceiling overridden, everything runs at most one at a time
    assert run(deployment, "ceiling", "chat", "1").returncode == 0
    assert run(deployment, "resume", "chat").returncode == 0
    deployment.wait_done(ids, 20)
    assert deployment.server.stats()["chat"].most_in_flight == 1
    # And a forced breaker parks, and after the worker's end a drain gives Dramatiq its messages back, in order
    assert "open for" in run(deployment, "breaker", "chat", "open").stdout
    more = deployment.send("orchestrate", 5)
    wait_until(lambda: sum(store.snapshot().endpoints["chat"].waiting.values()) == 5, 10)
    group.terminate()
    drained = run(deployment, "drain", "orchestration", "--broker-namespace", deployment.broker_namespace)
    assert drained.stdout == "5 messages put back\n"
    assert deployment.redis.llen(f"{deployment.broker_namespace}:orchestration") == 5
    assert run(deployment, "breaker", "chat", "reset").returncode == 0
    deployment.start()
    deployment.wait_done(more, 20)
    store.close()


def test_wrong_model_or_value_is_refused_with_what_to_do(deploy):
    """Misspelled models name the nearest; a ceiling of 0 says to pause."""
    deployment = deploy()
    assert "the nearest is" in run(deployment, "pause", "chta").stderr
    assert "pause it" in run(deployment, "ceiling", "chat", "0").stderr


def test_reader_that_has_read_enough_is_no_trouble(deploy):
    """As with `status | head`: the pipe is closed before all is written, and nothing is said about that."""
    deployment = deploy()
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as gone:
        done = subprocess.run(
            [sys.executable, "-m", "guard_middleware", "status"],
            env=deployment.worker_env(),
            stdout=gone,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    assert done.stderr == b""
    assert done.returncode == 1
