"""``python -m guard_middleware``: what operators need, without further packages."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from guard_middleware.cli import texts
from guard_middleware.core.commands import Action, Operate
from guard_middleware.errors import ConfigurationError, GuardError, StoreError
from guard_middleware.guard import Guard
from guard_middleware.queueing.drain import drain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from guard_middleware.config import GuardSettings
    from guard_middleware.store.base import Store

_BREAKER = {"open": Action.OPEN, "close": Action.CLOSE, "reset": Action.RESET}
_OPEN_S = 60.0
_LONGEST_S = 7 * 86_400.0


def seconds(text: str) -> float:
    """A length of time for argparse, which tells of the `ValueError` by this name."""
    value = float(text)
    if not 0 <= value <= _LONGEST_S:
        raise ValueError
    return value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: of the command line; the process's own if not given.

    Returns:
        The exit status: 0 done, 1 refused or not possible now, 2 a wrong command line.
    """
    parsed = _parser().parse_args(arguments)
    where = ""
    try:
        guard = Guard.from_settings()
        where = f" (GUARD_REDIS_URL is {guard.settings.redis_url})"  # shown without its credentials (I13)
        store = guard.make_store()
        try:
            print(_run(parsed, store, guard.settings), flush=True)
        finally:
            store.close()
    except BrokenPipeError:  # whoever read this has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # nor is there anything to flush at the end
        return 1
    except GuardError as exc:
        print(f"error: {exc}{where if isinstance(exc, StoreError) else ''}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m guard_middleware", description="Tools of guard_middleware.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("status", help="each endpoint: in flight, limit, waiting, breaker")
    for name, told in (("pause", "admit nothing on an endpoint until resume"), ("resume", "end a pause")):
        commands.add_parser(name, help=told).add_argument("model", metavar="MODEL")
    ceiling = commands.add_parser("ceiling", help="override an endpoint's ceiling, live, until it is cleared")
    ceiling.add_argument("model", metavar="MODEL")
    ceiling.add_argument("value", metavar="N|clear", type=_ceiling)
    breaker = commands.add_parser("breaker", help="force an endpoint's breaker")
    breaker.add_argument("model", metavar="MODEL")
    breaker.add_argument("state", choices=sorted(_BREAKER))
    breaker.add_argument("--seconds", type=seconds, default=_OPEN_S, help="how long open (%(default)s)")
    draining = commands.add_parser(
        "drain", help="put parked messages back at the tail of their queues, so that the guard can be uninstalled"
    )
    draining.add_argument("queues", nargs="+", metavar="QUEUE", help="a queue of Dramatiq's")
    draining.add_argument(
        "--broker-namespace", default=texts.DRAMATIQ, help="the RedisBroker's namespace (%(default)s)"
    )
    draining.add_argument("--force", action="store_true", help="also while a guarded worker consumes the queue")
    return parser


def _ceiling(text: str) -> int:
    """Read a ceiling; 0 stands for "clear"."""
    if text == "clear":
        return 0
    if not text.isdecimal() or int(text) < 1:
        msg = "a whole number of at least 1, or clear; to stop an endpoint, pause it"
        raise argparse.ArgumentTypeError(msg)
    return int(text)


def _run(parsed: argparse.Namespace, store: Store, settings: GuardSettings) -> str:
    match parsed.command:
        case "status":
            return texts.status(store.snapshot(), settings)
        case "drain":
            return _drain(parsed, store)
        case "pause" | "resume":
            action, value = Action(parsed.command), 0
        case "ceiling":
            action, value = (Action.OVERRIDE if parsed.value else Action.CLEAR_OVERRIDE), parsed.value
            _check_ceiling(value, settings)
        case _:
            action, value = _BREAKER[parsed.state], round(parsed.seconds * 1000)
    _check_model(parsed.model, store, settings)
    store.operate(Operate(action=action, target=parsed.model, value=value))
    return texts.status(store.snapshot(), settings)


def _drain(parsed: argparse.Namespace, store: Store) -> str:
    moved = {
        queue: drain(store, [queue], namespace=parsed.broker_namespace, force=parsed.force) for queue in parsed.queues
    }
    for queue in [queue for queue, count in moved.items() if not count]:
        print(texts.nothing_waits(store.snapshot(), queue, parsed.broker_namespace), file=sys.stderr)
    return f"{sum(moved.values())} messages put back"


def _check_ceiling(value: int, settings: GuardSettings) -> None:
    most = settings.model_max_concurrency
    if value > most:
        msg = f"a ceiling of {value} is above MODEL_MAX_CONCURRENCY ({most}): lower it, or raise that"
        raise ConfigurationError(msg)


def _check_model(model: str, store: Store, settings: GuardSettings) -> None:
    """Refuse what neither a live process nor the settings know: it would be stored, and steer nothing."""
    snapshot = store.snapshot()
    if model in snapshot.endpoints:
        return
    settings.endpoint(model)
    if not settings.models:
        raise ConfigurationError(texts.unknown_model(model, snapshot))
