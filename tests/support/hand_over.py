"""The other process of a hand-over: whenever it is told to, it stands in line, and writes down when it got its permit.

Run as a program with the guard's environment: ``python -m tests.support.hand_over``. Of its lines on stdout, the first
names the process as the store knows it, and each further one the instant of a permit, in seconds of the machine's
monotonic clock. Each line on stdin is one permit to wait for; it ends with stdin.
"""

from __future__ import annotations

import sys
import time

from guard_middleware import Guard


def main() -> None:
    """Wait for a permit whenever a line comes."""
    guard = Guard.from_settings()
    sys.stdout.write(f"{guard.heartbeat().process}\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        with guard.permit("chat", timeout=60):
            got_at = time.monotonic()
        sys.stdout.write(f"{got_at:.6f}\n")
        sys.stdout.flush()
    guard.close()


if __name__ == "__main__":
    main()
