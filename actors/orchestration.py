"""Agents: tasks that others wait for, and questions for which a person does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from actors import client
from guard_middleware import Priority, guarded, priority_scope

if TYPE_CHECKING:
    from dramatiq import Message


@guarded(  # instead of @dramatiq.actor, with its options
    model="qwen/qwen3.6-27b",
    priority=Priority.ORCHESTRATION,
    queue_name="orchestration",
    store_results=True,
)
async def orchestrate(task: str) -> str:
    """Return the model's answer to a task."""
    return await client.chat_async(task)


def ask(question: str) -> Message[str]:
    """Send a person's question: it goes before all other work, and so does all that it sends on its way.

    Returns:
        The message; its ``get_result(block=True)`` is the answer.
    """
    with priority_scope(Priority.INTERACTIVE):
        return orchestrate.send(question)
