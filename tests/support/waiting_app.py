"""The application under test for long waits: `tests.support.sharing_app`, with a client that retries by itself.

With ``APP_PROMOTE_TWICE`` each delayed message is promoted twice, as it is if the connection breaks between the copy's
enqueueing and the original's ack, and Dramatiq's maintenance finds the original.
"""

from __future__ import annotations

import os

from dramatiq.brokers.redis import _RedisConsumer
from dramatiq.common import dq_name, q_name
from dramatiq.middleware import CurrentMessage

from guard_middleware import current_permit, guarded
from tests.support import app, sharing_app

SDK_TIMEOUT_S = 0.5
SDK_RETRIES = 2

_ack = _RedisConsumer.ack


def ack(self, message):
    """Ack, but put the original of a delayed message back for the first time."""
    is_delayed = self.queue_name == dq_name(q_name(self.queue_name))
    if not is_delayed or not app.record.sadd(f"{app.NAMESPACE}:promoted", message.message_id):
        return _ack(self, message)
    self.queued_message_ids.discard(message.message_id)
    return self.requeue([message])


if os.environ.get("APP_PROMOTE_TWICE") == "1":
    _RedisConsumer.ack = ack


@guarded(model="chat", queue_name="orchestration", **app.OPTIONS)
def with_sdk() -> None:
    """One completion by a client that tries three times before it raises, as most do by default."""
    import openai  # noqa: PLC0415  # slow, and needed by one test

    permit = current_permit()
    headers = {"x-message-id": CurrentMessage.get_current_message().message_id}
    with openai.OpenAI(
        base_url=permit.endpoint.base_url, api_key="-", max_retries=SDK_RETRIES, timeout=SDK_TIMEOUT_S
    ) as client:
        client.chat.completions.create(model=permit.endpoint.model, extra_headers=headers, **sharing_app.CHAT)
    app.done("with_sdk")
