"""One process of callers: ``python -m benchmarks.caller THREADS CALLS``. Everything else comes from the environment.

How long each call waited for its permit goes to the model server, in ms, in the body's field ``user``.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time

from benchmarks.calling import MODEL, call_model, wait_at_gate
from benchmarks.limiters import LIMITERS


def main(threads: int, calls: int) -> int:
    """Make the calls; the exit code is 1 if one of them failed."""
    environment = os.environ
    limiter = LIMITERS[environment["BENCH_KIND"]](
        environment["BENCH_REDIS_URL"],
        MODEL,
        int(environment["BENCH_CEILING"]),
        int(environment["BENCH_SERVICE_MS"]),
    )
    numbers = itertools.count()
    made = []

    def work() -> None:
        while next(numbers) < calls:
            asked_at = time.perf_counter()
            with limiter():
                call_model(f"{(time.perf_counter() - asked_at) * 1000:.3f}")
            made.append(1)

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    wait_at_gate()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return 0 if len(made) == calls else 1


if __name__ == "__main__":
    code = main(int(sys.argv[1]), int(sys.argv[2]))
    sys.stderr.flush()
    os._exit(code)  # what a package leaves running is no part of the measurement
