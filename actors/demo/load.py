"""The load: background work all at once, and a person's question every now and then.

As a program, for Procfile.demo, it goes on until it is stopped: ``python -m actors.demo.load``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import redis

from actors import ask, broker, embed, enrich, orchestrate
from guard_middleware import Priority

if TYPE_CHECKING:
    from dramatiq import Message

    from actors.demo.plan import Plan

_BACKLOG = 200
_QUESTION_EVERY_S = 0.5


def background(plan: Plan) -> list[Message[Any]]:
    """Make the background messages, two embeddings and an enrichment in turn.

    They say their priority themselves, so that a broker without the guard sends the very same ones.
    """
    options: dict[str, Any] = {"guard_priority": Priority.BACKGROUND_INGESTION.value}
    embeddings = [
        embed.message_with_options(args=([f"sentence {number}"],), **options) for number in range(plan.embeddings)
    ]
    enrichments = [
        enrich.message_with_options(args=(f"passage {number}",), **options) for number in range(plan.enrichments)
    ]
    step = max(1, plan.embeddings // max(1, plan.enrichments))
    mixed: list[Message[Any]] = []
    for number, enrichment in enumerate(enrichments):
        mixed += embeddings[number * step : (number + 1) * step]
        mixed.append(enrichment)
    return mixed + embeddings[len(enrichments) * step :]


def question(number: int) -> Message[Any]:
    """Make a person's question."""
    return orchestrate.message_with_options(args=(f"question {number}",), guard_priority=Priority.INTERACTIVE.value)


def main() -> None:
    """Keep a backlog of background work, and ask a question twice a second, as an application does."""
    _wait_for_store()
    number = 0
    while True:
        for queue, actor, argument in (("embedding", embed, ["a sentence"]), ("enrichment", enrich, "a passage")):
            for _ in range(_BACKLOG - broker.do_qsize(queue)):
                actor.send(argument)
        for _ in range(10):
            ask(f"question {number}")
            number += 1
            time.sleep(_QUESTION_EVERY_S)
        print(f"{number} questions asked", flush=True)


def _wait_for_store() -> None:
    """Wait for what was started at the same time."""
    while True:
        try:
            broker.client.ping()
        except redis.ConnectionError:
            time.sleep(0.2)
        else:
            return


if __name__ == "__main__":
    main()
