"""A store for Procfile.demo: ``python -m actors.demo.valkey 6399``. It keeps nothing when it ends."""

from __future__ import annotations

import signal
import sys
import time

from guard_middleware.testing.valkey import EmbeddedValkey

_PATIENCE_S = 4.0


def main(port: int) -> None:
    """Serve on a port until told to stop, and then until the workers have left, or for a few seconds."""
    stopping = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, stopping)
    server = EmbeddedValkey()
    server.port = port
    with server:
        print(f"serving {server.url}", flush=True)
        signal.sigwait(stopping)
        deadline_s = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline_s and _others(server):
            time.sleep(0.1)


def _others(server: EmbeddedValkey) -> bool:
    """Whether anybody else is connected."""
    clients = server.call("CLIENT", "LIST")
    return isinstance(clients, bytes) and len(clients.splitlines()) > 1


if __name__ == "__main__":
    main(int(sys.argv[1]))
