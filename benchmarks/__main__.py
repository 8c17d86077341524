"""Measure, print one table, and write ``build/bench.json``. The exit code is 1 if the guard exceeded a ceiling."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import micro, report
from benchmarks.bench import Bench
from benchmarks.plan import SCENARIOS, SYSTEMS, Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

OUTPUT = Path(__file__).parents[1] / "build" / "bench.json"
QUICK_SCALE = 0.5


def parse(words: Sequence[str] | None) -> tuple[Plan, Path]:
    """What the command line and the environment ask for."""
    quick = os.environ.get("QUICK", "") not in {"", "0"}
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=1 if quick else 3, help="medians of so many (QUICK=1: one)")
    parser.add_argument("--scale", type=float, default=QUICK_SCALE if quick else 1.0, help="share of the messages")
    parser.add_argument("--scenarios", nargs="+", choices=[one.name for one in SCENARIOS], help="only these")
    parser.add_argument("--systems", nargs="+", choices=[one.name for one in SYSTEMS], help="only these")
    parser.add_argument("--no-micro", action="store_true", help="without the figures of one permit and of plain actors")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON file")
    asked = parser.parse_args(words)
    if asked.rounds < 1 or asked.scale <= 0:
        parser.error("--rounds must be at least 1, and --scale more than 0")
    plan = Plan(
        rounds=asked.rounds,
        scale=asked.scale,
        scenarios=tuple(one for one in SCENARIOS if asked.scenarios is None or one.name in asked.scenarios),
        systems=tuple(one for one in SYSTEMS if asked.systems is None or one.name in asked.systems),
        micro=not asked.no_micro,
    )
    return plan, asked.output


def measure(plan: Plan) -> tuple[report.Runs, dict[str, list[float]]]:
    """Everything, round by round, so that what disturbs the machine for a while disturbs all alike."""
    runs: report.Runs = {}
    singles: dict[str, list[float]] = {}
    began = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - began:6.1f} s  {text}", file=sys.stderr, flush=True)

    with Bench() as bench:
        for number in range(1, plan.rounds + 1):
            so_far_s = time.monotonic() - began
            if so_far_s * number > plan.longest_s * max(1, number - 1):
                tell(f"no round {number}: it would end after more than {plan.longest_s:g} s")
                break
            if plan.micro:
                tell(f"round {number}: acquire and release")
                found = micro.acquire_release(bench, block=max(50, round(micro.BLOCK * plan.scale)))
                tell(f"round {number}: unguarded actors")
                messages = max(500, round(micro.TINY_MESSAGES * plan.scale))
                ratio = micro.throughput_ratio(bench, messages, guard_first=number % 2 == 0)
                for name, value in (found | {"unguarded_throughput_ratio": ratio}).items():
                    singles.setdefault(name, []).append(value)
            for scenario in plan.scenarios:
                for system in plan.systems:
                    tell(f"round {number}: {scenario.name}, {system.name}")
                    figures = bench.measure(scenario, system, plan.messages(scenario))
                    runs.setdefault((scenario.name, system.name), []).append(figures)
        tell("done")
    return runs, singles


def main(words: Sequence[str] | None = None) -> int:
    """Run, report, and return the exit code."""
    plan, output = parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end what was started, too
    try:
        found = report.summary(plan, *measure(plan))
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been ended, and nothing is written", file=sys.stderr)
        return 128 + signal.SIGINT
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    report.show(plan, found)
    print(f"written to {output}")
    wrong = report.exceeded(found)
    for sentence in wrong:
        print(f"EXCEEDED: {sentence}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
