"""Measure, print the tables, and write ``build/bench.json``.

The exit code is 1 if the guard exceeded a ceiling, or if something came to no end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import backlog, callers, micro, report, waits
from benchmarks.bench import Bench, UnfinishedError
from benchmarks.plan import (
    BACKGROUND,
    BACKLOGS,
    BOUND,
    CALLED,
    DEEP,
    GUARD,
    PARTS,
    PROCESS_COUNTS,
    QUICK,
    SCENARIOS,
    SYSTEMS,
    WIDE,
    Plan,
)
from benchmarks.workers import WorkersError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

OUTPUT = Path(__file__).parents[1] / "build" / "bench.json"
WAITS = 200


def parse(words: Sequence[str] | None) -> tuple[Plan, Path]:
    """What the command line and the environment ask for."""
    usual = QUICK if os.environ.get("QUICK", "") not in {"", "0"} else Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=usual.rounds, help="medians of so many (QUICK=1: one)")
    parser.add_argument("--scale", type=float, default=usual.scale, help="share of the messages")
    parser.add_argument("--scenarios", nargs="+", choices=[one.name for one in SCENARIOS], help="only these, and micro")
    parser.add_argument("--systems", nargs="+", choices=[one.name for one in SYSTEMS], help="only these")
    parser.add_argument("--backlogs", nargs="+", type=int, metavar="MESSAGES", help=f"instead of {BACKLOGS}")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="only these parts")
    parser.add_argument("--no-micro", action="store_true", help="without the figures of one permit and of plain actors")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="the JSON file")
    asked = parser.parse_args(words)
    if asked.rounds < 1 or asked.scale <= 0 or min(asked.backlogs or [1]) < 1:
        parser.error("--rounds and --backlogs must be at least 1, and --scale more than 0")
    parts = asked.only or (("micro", "scenarios") if asked.scenarios else usual.parts)
    return replace(
        usual,
        rounds=asked.rounds,
        scale=asked.scale,
        scenarios=tuple(one for one in SCENARIOS if one.name in asked.scenarios)
        if asked.scenarios
        else usual.scenarios,
        systems=tuple(one for one in SYSTEMS if one.name in asked.systems) if asked.systems else usual.systems,
        parts=tuple(part for part in PARTS if part in parts and not (asked.no_micro and part == "micro")),
        backlogs=tuple(asked.backlogs or usual.backlogs),
    ), asked.output


class Run:
    """One run of a plan: it says what it does, and begins nothing that the time does not allow for."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.found = report.Found()
        self._began = time.monotonic()

    def measure(self) -> report.Found:
        """Everything, round by round, so that what disturbs the machine for a while disturbs all alike."""
        with Bench() as bench:
            for number in range(1, self.plan.rounds + 1):
                so_far_s = time.monotonic() - self._began
                if so_far_s * number > self.plan.round_s * max(1, number - 1):
                    self._tell(f"no round {number}: it would end after more than {self.plan.round_s:g} s")
                    break
                self._round(bench, f"round {number}: ")
            self._once(bench)
        self._tell("done")
        return self.found

    def _tell(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:6.1f} s  {text}", file=sys.stderr, flush=True)

    def _do(self, what: str, action: Callable[[], Any]) -> Any:
        """Say what is done, and do it; `None` if it is too late for that, or if it comes to no end."""
        if time.monotonic() - self._began > self.plan.longest_s:
            self._tell(f"not any more, after {self.plan.longest_s:g} s: {what}")
            return None
        self._tell(what)
        try:
            return action()
        except (UnfinishedError, WorkersError) as exc:
            self._tell(str(exc))
            self.found.unfinished.append(str(exc))
            return None

    def _round(self, bench: Bench, which: str) -> None:
        plan, found = self.plan, self.found
        if "micro" in plan.parts:
            block, messages = max(50, round(micro.BLOCK * plan.scale)), max(500, round(micro.MESSAGES * plan.scale))
            found.add_singles(self._do(f"{which}acquire and release", lambda: micro.acquire_release(bench, block)))
            found.add_singles(self._do(f"{which}unguarded actors", lambda: micro.unguarded(bench, messages)))
        for scenario in plan.scenarios if "scenarios" in plan.parts else ():
            for system in plan.systems:
                figures = self._do(
                    f"{which}{scenario.name}, {system.name}",
                    lambda: bench.measure(scenario, system, plan.messages(scenario)),  # noqa: B023  # called at once
                )
                found.add_run((scenario.name, system.name), figures)
        for scenario in CALLED if "callers" in plan.parts else ():
            for system in callers.SYSTEMS:
                if why := callers.missing(system):
                    self._tell(f"{which}callers, without {system.name}: {why}")
                    continue
                figures = self._do(
                    f"{which}callers, {scenario.name}, {system.name}",
                    lambda: callers.measure(bench, scenario, system, plan.messages(scenario)),  # noqa: B023
                )
                found.add_callers((scenario, system), figures)

    def _once(self, bench: Bench) -> None:
        plan, found = self.plan, self.found
        if "waits" in plan.parts:
            times = max(20, round(WAITS * plan.scale))
            found.interactive_wait_ms = self._do("interactive waits", lambda: waits.interactive(bench, times))
            found.release_to_start_ms = self._do("release to start", lambda: waits.release_to_start(bench, times))
        for count in PROCESS_COUNTS if "processes" in plan.parts else ():
            for system in (BOUND, GUARD):
                figures = self._do(
                    f"{count} processes, {system.name}",
                    lambda: bench.measure(WIDE, system, plan.messages(WIDE), count),  # noqa: B023  # called at once
                )
                if figures:
                    found.processes.append({"processes": count, "system": system.name, **asdict(figures)})
        for waiting in plan.backlogs if "backlogs" in plan.parts else ():
            for system in (one for one in plan.systems if one is not BACKGROUND):
                row = self._do(
                    f"backlog of {waiting}, {system.name}",
                    lambda: backlog.measure(bench, system, waiting, plan.messages(DEEP)),  # noqa: B023
                )
                if row:
                    found.backlogs.append(row)


def main(words: Sequence[str] | None = None) -> int:
    """Run, report, and return the exit code."""
    plan, output = parse(words)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # end what was started, too
    try:
        found = report.summary(plan, Run(plan).measure())
    except KeyboardInterrupt:
        print("interrupted: everything that was started has been ended, and nothing is written", file=sys.stderr)
        return 128 + signal.SIGINT
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(found, indent=2) + "\n")
    report.show(plan, found)
    print(f"written to {output}")
    wrong = [f"EXCEEDED: {one}" for one in report.exceeded(found)] + [
        f"UNFINISHED: {one}" for one in found["unfinished"]
    ]
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
