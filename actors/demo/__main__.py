"""Run the demo: ``python -m actors.demo``. Exit status 0 if the guarded half kept every promise."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from actors.demo.half import Half
from actors.demo.plan import MIN_BACKOFF_MS, PLANS
from actors.demo.result import broken_promises
from actors.demo.screen import Screen
from actors.demo.table import comparison
from actors.demo.workers import ROOT, WorkersDiedError
from guard_middleware import StoreError
from guard_middleware.testing.valkey import EmbeddedValkey

if TYPE_CHECKING:
    from types import FrameType

    from actors.demo.plan import Plan
    from actors.demo.result import HalfResult

_NOTE = (
    "A question's wait: from its sending to the start of the call that answered it. Up to 1 s of it is Dramatiq's\n"
    "own, in both halves: so rarely does a worker look into a queue that was empty for a while."
)
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Somebody wants the demo to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def main(arguments: list[str] | None = None) -> int:
    """Run both halves, compare them, and leave no process behind.

    Args:
        arguments: of the command line, without the program's name.

    Returns:
        0 if the guarded half kept every promise, 1 if not, 128 and the signal's number if the demo was stopped.
    """
    parser = argparse.ArgumentParser(prog="python -m actors.demo", description=__doc__)
    usual = os.environ.get("DEMO_SCALE", "full")
    parser.add_argument("--scale", choices=sorted(PLANS), default=usual, help="default: DEMO_SCALE, else full")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "demo.json", help="file for the results")
    options = parser.parse_args(arguments)
    for number in _STOPPING:
        signal.signal(number, _stop)
    try:
        return _run(PLANS[options.scale], options.output)
    except Stopped as stopped:
        print("stopped", file=sys.stderr)
        return stopped.exit_code
    except (WorkersDiedError, StoreError) as exc:
        print(exc, file=sys.stderr)
        return 1


def _stop(number: int, frame: FrameType | None) -> None:
    """Leave by an exception, once, so that every block ends what it started; patience with a second one."""
    del frame
    for each in _STOPPING:
        signal.signal(each, signal.SIG_IGN)
    raise Stopped(number)


def _run(plan: Plan, output: Path) -> int:
    output.parent.mkdir(parents=True, exist_ok=True)
    ceilings, budget = plan.ceilings(), plan.budget()
    print(_introduction(plan, ceilings, budget), flush=True)
    with EmbeddedValkey() as store:
        halves: dict[str, HalfResult] = {}
        for name, guarded in (("unguarded", False), ("guarded", True)):
            print(f"\n{name}: starting workers", flush=True)
            with Screen() as screen:
                halves[name] = Half(plan, store, output.parent / "demo", guarded=guarded).run(screen)
    broken = broken_promises(halves["guarded"], ceilings, budget)
    report = {
        "scale": plan.name,
        "ceilings": ceilings,
        "budget": budget,
        "edge": plan.host().edge,
        "halves": {name: asdict(half) for name, half in halves.items()},
        "broken_promises": broken,
    }
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{comparison(halves['unguarded'], halves['guarded'], ceilings, budget)}\n")
    print(f"{_NOTE}\n")
    print("\n".join(f"BROKEN: {one}" for one in broken) or "The guarded half kept every promise.")
    return 1 if broken else 0


def _introduction(plan: Plan, ceilings: dict[str, int], budget: int) -> str:
    limits = ", ".join(f"{name} {ceiling}" for name, ceiling in ceilings.items())
    return (
        f"{plan.embeddings} embeddings and {plan.enrichments} enrichments at once, and a question every "
        f"{plan.question_every_s * 1000:.0f} ms, {plan.questions} in all.\n"
        f"Workers for 3 queues, {plan.processes} processes x {plan.threads} threads each. A call takes "
        f"{plan.base_ms:.0f} ms.\n"
        f"Ceilings: {limits}; budget of both together: {budget}. A call that would make more than "
        f"{plan.host().edge:.0f} run takes the host down for {2 * plan.dark_s:.0f} s.\n"
        f"Without the guard, Dramatiq's Retries come back after {MIN_BACKOFF_MS} ms (its default: 15 s), and the half "
        f"is cut off after {plan.unguarded_s:.0f} s."
    )


if __name__ == "__main__":
    sys.exit(main())
