"""Run a fake model server: ``python -m guard_middleware.testing.model_server --config server.json``."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path

from pydantic import ValidationError

from guard_middleware.testing.model_server.config import ServerConfig
from guard_middleware.testing.model_server.server import FakeServer

_LOOK_AT_PARENT_EVERY_S = 0.5
_CONNECTIONS = 65_536


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop; say on stdout, in one line of JSON, where.

    Args:
        arguments: of the command line, without the program's name.

    Returns:
        The exit code: 0 after an orderly end, 2 if the configuration cannot work or a port is taken.
    """
    parser = argparse.ArgumentParser(prog="model_server", description=__doc__)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--config", type=Path, help="file with the server's configuration in JSON")
    source.add_argument("--config-json", help="the same as text")
    parser.add_argument("--until-stdin-ends", action="store_true", help="end when stdin does")
    parser.add_argument("--detached", action="store_true", help="go on when the process that started this one ends")
    parser.add_argument("--max-seconds", type=float, help="end after so long (wins over the configuration)")
    options = parser.parse_args(arguments)
    try:
        given = options.config.read_text() if options.config else options.config_json
    except (OSError, UnicodeDecodeError) as exc:
        parser.error(f"--config {options.config} cannot be read: {exc.strerror if isinstance(exc, OSError) else exc}")
    text = given or '{"endpoints": [{"name": "model"}]}'
    try:
        config = ServerConfig.model_validate_json(text)
    except ValidationError as exc:
        sys.stderr.write(f"the configuration cannot work: {exc}\n")
        return 2
    if options.max_seconds is not None:
        config = config.model_copy(update={"max_seconds": options.max_seconds})
    _allow_connections()
    try:
        asyncio.run(_serve(config, until_stdin_ends=options.until_stdin_ends, detached=options.detached))
    except OSError as exc:
        sys.stderr.write(f"cannot serve: {exc.strerror}\n")
        return 2
    return 0


def _allow_connections() -> None:
    """Allow as many connections as a crowd may bring, as far as the system lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _CONNECTIONS if hard == resource.RLIM_INFINITY else min(hard, _CONNECTIONS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def _serve(config: ServerConfig, *, until_stdin_ends: bool, detached: bool) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if until_stdin_ends:
        loop.add_reader(sys.stdin, _stop_at_end, sys.stdin.fileno(), stop)
    if not detached:
        _follow_parent(loop, stop, os.getppid())
    if config.max_seconds is not None:
        loop.call_later(config.max_seconds, stop.set)
    server = FakeServer(config)
    server.start()
    # Hardly anything here is cyclic, but the log is long: looking through it often would stop the server now and then.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    where = {"pid": os.getpid(), "control": server.control_port, "endpoints": server.ports}
    sys.stdout.write(json.dumps(where) + "\n")
    sys.stdout.flush()
    await stop.wait()
    server.stop()


def _stop_at_end(descriptor: int, stop: asyncio.Event) -> None:
    if not os.read(descriptor, 4096):
        stop.set()


def _follow_parent(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, parent: int) -> None:
    """End when the process that started this one has ended, and left it to another."""
    if os.getppid() == parent:
        loop.call_later(_LOOK_AT_PARENT_EVERY_S, _follow_parent, loop, stop, parent)
    else:
        stop.set()


if __name__ == "__main__":
    sys.exit(main())
