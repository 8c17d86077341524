"""The other process of a hand-over: it stands in line for each permit, and writes down when it got it.

Run as a program with the guard's environment: ``python -m tests.support.hand_over <rounds>``. Of its lines on stdout,
the first names the process as the store knows it, and each further one the instant of a permit, in seconds since the
epoch.
"""

from __future__ import annotations

import sys
import time

from guard_middleware import Guard

HELD_S = 0.003


def main(rounds: int) -> None:
    """Wait for a permit so many times."""
    guard = Guard.from_settings()
    sys.stdout.write(f"{guard.heartbeat().process}\n")
    sys.stdout.flush()
    for _ in range(rounds):
        with guard.permit("chat", timeout=60):
            sys.stdout.write(f"{time.time():.6f}\n")
            sys.stdout.flush()
            time.sleep(HELD_S)
    guard.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
