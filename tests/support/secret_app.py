"""The application under test with prompts, and with the guard's log at its most talkative."""

from __future__ import annotations

import logging

from redis.backoff import ConstantBackoff
from redis.retry import Retry

from guard_middleware import guarded
from tests.support.app import OPTIONS, broker, chat, done, record

__all__ = ["broker"]

logging.getLogger("guard_middleware").setLevel(logging.DEBUG)
logging.getLogger("httpx").setLevel(logging.WARNING)  # the application's own client prints the URL it is given

# What was done is written down also while the server is away: had the actor failed there, Dramatiq would log its
# arguments, and the test could not tell what the guard says of them.
record.set_retry(Retry(ConstantBackoff(0.1), 200))


@guarded(model="chat", queue_name="orchestration", **OPTIONS)
def ask(prompt: str, ms: float | None = None) -> None:
    """A call with a prompt among the message's arguments."""
    assert prompt
    chat(ms)
    done("ask")


@guarded(model="chat", queue_name="orchestration", max_retries=0)
def crash() -> None:
    """A fault of the application, in the middle of a guarded actor."""
    done("crash")
    msg = "a fault of the application"
    raise RuntimeError(msg)
