"""Imported by the demo's workers beside their actors: counts the retries that Dramatiq burns.

It also lets a worker end when its master process was killed. Dramatiq's do not: they are meant to run under a
supervisor.
"""

from __future__ import annotations

import ctypes
import logging
import signal
import sys
from typing import TYPE_CHECKING, Any

import dramatiq
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import Middleware

if TYPE_CHECKING:
    from dramatiq import Broker, Message

RETRIES_KEY = "demo:retries"


class RetryTally(Middleware):
    """Counts each message that comes back because its actor failed."""

    def after_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Count a retry as it is enqueued. Its way out of the delay queue has no delay, and is not another one."""
        if delay is not None and message.options.get("retries") and isinstance(broker, RedisBroker):
            broker.client.incr(RETRIES_KEY)


def _end_with_the_master() -> None:
    """Ask to be killed when the process that forked this one ends, on Linux."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, int(signal.SIGKILL), 0, 0, 0)


_end_with_the_master()
# Thousands of failures with a traceback each would be the load that is measured.
logging.getLogger("dramatiq").setLevel(logging.CRITICAL)
dramatiq.get_broker().add_middleware(RetryTally())
