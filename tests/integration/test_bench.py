"""The benchmarks run, and write what the design asks for. What they find is for `make bench` on a quiet machine."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import __main__ as benchmarks
from benchmarks import report
from benchmarks.plan import SCENARIOS, SYSTEMS, Plan

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHORT = ["--rounds", "1", "--scale", "0.05", "--scenarios", "50ms_x4"]


def test_short_run_writes_every_figure_and_ends_well(tmp_path, capsys, monkeypatch):
    """One short round of the bound and the guard gives the file its structure, and the guard keeps to the ceiling."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    path = tmp_path / "build" / "bench.json"
    assert benchmarks.main([*SHORT, "--systems", "bound", "guard", "--output", str(path)]) == 0
    found = json.loads(path.read_text())
    for name in ("acquire_release_vs_two_pings", "unguarded_throughput_ratio"):
        assert found[name] > 0
    bound, guard = found["scenarios"]
    for row in (bound, guard):
        assert row["name"] == "50ms_x4"
        assert 0 < row["ceiling_use"] <= 1
        assert row["of_bound"] > 0
        assert row["calls_per_message"] > 2
        assert row["retries_burned"] == 0
        assert row["server_max_in_flight"] <= 4
    assert (bound["system"], guard["system"]) == ("bound", "guard")
    assert bound["of_bound"] == 1
    printed = capsys.readouterr().out
    assert "aim 0.98" in printed
    assert "acquire + release against two PINGs" in printed


def test_interrupted_run_ends_what_it_started_and_writes_nothing(tmp_path):
    """SIGTERM in the middle of a measurement: the benchmark's workers and servers end with it."""
    path = tmp_path / "bench.json"
    command = [sys.executable, "-m", "benchmarks", "--no-micro", "--systems", "stock_limiter_100ms"]
    with subprocess.Popen([*command, "--output", str(path)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as run:
        assert "stock_limiter_100ms" in run.stderr.readline()
        started = _wait_for(lambda: found if len(found := _below(run.pid)) >= 4 else None)
        run.terminate()
        assert run.wait(20) == 128 + signal.SIGTERM
    _wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in started))
    assert not path.exists()


def test_guard_above_its_ceiling_is_told_and_stock_is_not():
    """Only a guard that lets too much through makes the run fail; what stock Dramatiq does is a figure."""
    rows = [
        {"system": "guard", "name": "50ms_x4", "ceiling": 4, "server_max_in_flight": 5},
        {"system": "guard_background", "name": "50ms_x4", "ceiling": 4, "server_max_in_flight": 4},
        {"system": "stock_limiter_20ms", "name": "50ms_x4", "ceiling": 4, "server_max_in_flight": 6},
    ]
    (sentence,) = report.exceeded({"scenarios": rows})
    assert "guard in 50ms_x4" in sentence
    assert "5 calls in flight" in sentence


def test_bound_has_as_many_threads_as_the_ceiling_and_the_others_have_eight():
    """Two processes: the bound's threads make up the ceiling exactly."""
    threads = {
        (scenario.name, system.name): 2 * system.threads(scenario) for scenario in SCENARIOS for system in SYSTEMS
    }
    assert threads["50ms_x4", "bound"] == 4
    assert threads["20ms_x8", "bound"] == 8
    assert {count for (_, system), count in threads.items() if system != "bound"} == {16}


def test_quick_asks_for_one_round(monkeypatch):
    """``QUICK=1 make bench`` is one round of half the messages; options win over it."""
    monkeypatch.setenv("QUICK", "1")
    plan, _ = benchmarks.parse([])
    assert (plan.rounds, plan.scale) == (1, 0.5)
    monkeypatch.delenv("QUICK")
    assert benchmarks.parse([])[0] == Plan()
    assert benchmarks.parse(["--rounds", "2"])[0].rounds == 2


def _below(pid):
    """Process ids of everything that a process has started."""
    found, todo = [], [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            below = [int(child) for child in task.read_text().split()]
            found += below
            todo += below
    return found


def _wait_for(condition, timeout_s=20):
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return found
