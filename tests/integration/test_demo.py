"""The demo reports what the server counted, its exit status is its verdict, and it leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import dramatiq
import pytest

from guard_middleware.testing.model_server import Request, ServerStats, TallyStats

ROOT = Path(__file__).parents[2]
MARK = "DEMO_TEST_MARK"


@pytest.fixture(scope="module")
def result_module():
    """`actors.demo.result`, without leaving the application's broker to other tests as the global one."""
    before = dramatiq.broker.global_broker
    from actors.demo import result  # noqa: PLC0415  # see above

    dramatiq.broker.global_broker = before
    return result


class Demo:
    """A small demo on its way, and the processes that belong to it."""

    def __init__(self, folder):
        self.output = folder / "demo.json"
        self.printed = folder / "printed"
        self._mark = f"{MARK}={uuid4().hex}".encode()
        name, value = self._mark.decode().split("=")
        with self.printed.open("wb") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "actors.demo", "--output", str(self.output)],
                cwd=ROOT,
                env={**os.environ, "DEMO_SCALE": "small", name: value},
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def text(self):
        return self.printed.read_text()

    def wait_for(self, text, timeout_s=45):
        deadline = time.monotonic() + timeout_s
        while text not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def processes(self):
        """Every process that was started by this demo, by its environment: also those whose parent is gone."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if self._mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:  # gone meanwhile, or somebody else's
                continue
        return {pid: line for pid, line in found.items() if line}

    def all_gone(self, timeout_s):
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if not self.processes():
                return True
            time.sleep(0.1)
        return False

    def end(self):
        for pid in self.processes():
            os.kill(pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def demo(tmp_path):
    """A small demo that has just been started."""
    demo = Demo(tmp_path)
    yield demo
    demo.end()


needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")


@pytest.mark.slow
@needs_proc
def test_the_guarded_half_keeps_what_the_unguarded_one_breaks(demo):
    """The same load takes the host down without the guard; with it, all is done within the limits, and exit is 0."""
    exit_code = demo.process.wait(timeout=90)

    assert exit_code == 0, demo.text()
    assert demo.all_gone(timeout_s=0.5), demo.processes()
    report = json.loads(demo.output.read_text())
    unguarded, guarded = report["halves"]["unguarded"], report["halves"]["guarded"]
    assert report["broken_promises"] == []
    assert unguarded["deaths"] >= 1
    assert unguarded["most_together"] > report["budget"]
    assert unguarded["retries"] > 0
    assert guarded["deaths"] == guarded["lost"] == guarded["retries"] == guarded["failed_calls"] == 0
    assert guarded["done"] == guarded["sent"] == guarded["calls"] == unguarded["sent"]
    assert guarded["most_together"] <= report["budget"]
    for name, ceiling in report["ceilings"].items():
        assert 0 < guarded["most_in_flight"][name] <= ceiling
    for half in (unguarded, guarded):
        assert half["done"] + half["dead_lettered"] + half["unfinished"] + half["lost"] == half["sent"]
    assert "most in flight on the host (budget 10)" in demo.text()


@pytest.mark.slow
@needs_proc
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(demo, how):
    """Workers, store and server end with the demo, and the exit status tells the signal."""
    demo.wait_for("unguarded   ")
    assert len(demo.processes()) >= 8  # the demo, three masters, three workers, the server; and the store

    demo.process.send_signal(how)

    assert demo.process.wait(timeout=30) == 128 + how, demo.text()
    assert demo.all_gone(timeout_s=2), demo.processes()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
def test_workers_end_by_themselves_if_the_demo_is_killed(demo):
    """Nobody is there to stop them: they are killed one after the other."""
    demo.wait_for("unguarded   ")

    demo.process.kill()

    assert demo.all_gone(timeout_s=10), demo.processes()


def test_messages_are_reckoned_from_the_servers_log(result_module):
    """Done is what the server answered with 200; lost is what is neither done nor anywhere."""
    log = [call("done", 200), call("retried", 0, ending="dropped"), call("retried", 200, at_s=3.0), call("dead", 503)]

    half = reckoned(result_module, sent=("done", "retried", "dead", "kept", "lost"), log=log)

    assert (half.sent, half.done, half.dead_lettered, half.unfinished, half.lost) == (5, 2, 1, 1, 1)
    assert (half.calls, half.failed_calls) == (7, 2)
    assert half.most_in_flight == {"model": 9}


def test_an_unanswered_question_counts_with_the_time_it_has_waited(result_module):
    """A wait that has not ended makes each percentile above it a lower bound, and says so."""
    log = [call("done", 200, at_s=1.5), call("retried", 200, at_s=3.0)]

    half = reckoned(result_module, sent=("done", "retried", "lost"), log=log)

    wait = result_module.Wait
    assert (half.wait_p50, half.wait_p99) == (wait(2_000, at_least=False), wait(9_000, at_least=True))
    assert str(half.wait_p99) == "> 9,000 ms"


def test_each_broken_promise_is_named(result_module):
    """The exit status rests on this list."""
    half = reckoned(result_module, sent=("lost",), log=[])

    assert result_module.broken_promises(half, {"model": 8}, budget=9) == [
        "9 calls in flight at model, whose ceiling is 8",
        "3 deaths of the host",
        "1 messages lost",
        "4 retries burned",
    ]


def call(message_id, status, at_s=2.0, ending="answered"):
    """A line of the server's log."""
    return Request(at_s, at_s + 1, "model", "/v1/embeddings", status, ending, 1, 1, message_id)


def reckoned(module, sent, log):
    """Messages made at 1 s, in a half that ended at 10 s."""
    tally = TallyStats(
        calls=7,
        in_flight=0,
        most_in_flight=9,
        integral_s=0,
        cost=0,
        most_cost=9,
        running=0,
        most_running=9,
        waiting=0,
        most_waiting=0,
        statuses={},
        most_by_priority={},
        first_at=None,
        last_at=None,
    )
    return module.reckon(
        sent=dict.fromkeys(sent, 1_000),
        questions=sent,
        log=log,
        stats=ServerStats(state="up", deaths=3, host=tally, endpoints={"model": tally}),
        kept={"kept"} & set(sent),
        dead={"dead"} & set(sent),
        retries=4,
        ended_at_s=10.0,
        wall_s=9.0,
        cut_off=True,
    )
