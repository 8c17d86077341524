"""``python -m guard_middleware``: what needs no further packages."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from guard_middleware.errors import GuardError
from guard_middleware.guard import Guard
from guard_middleware.queueing.drain import drain

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; the process's own if not given.

    Returns:
        The exit status: 0 done, 1 refused or not possible now.
    """
    parser = argparse.ArgumentParser(prog="python -m guard_middleware", description="Tools of guard_middleware.")
    commands = parser.add_subparsers(dest="command", required=True)
    draining = commands.add_parser(
        "drain", help="put parked messages back at the tail of their queues, so that the guard can be uninstalled"
    )
    draining.add_argument("queues", nargs="+", metavar="QUEUE", help="a queue of Dramatiq's")
    draining.add_argument("--broker-namespace", default="dramatiq", help="the RedisBroker's namespace (%(default)s)")
    draining.add_argument("--force", action="store_true", help="also while a guarded worker consumes the queue")
    parsed = parser.parse_args(arguments)
    try:
        store = Guard.from_settings().make_store()
        try:
            moved = drain(store, parsed.queues, namespace=parsed.broker_namespace, force=parsed.force)
        finally:
            store.close()
    except GuardError as exc:
        print(f"error: {exc}", file=sys.stderr)
        return 1
    print(f"{moved} messages put back")
    return 0
