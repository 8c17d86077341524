"""Where Dramatiq's messages are, read from its keys, so that nothing has to be believed of the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dramatiq import Message

from actors.demo.plan import QUEUES
from actors.demo.tally import RETRIES_KEY

if TYPE_CHECKING:
    from guard_middleware.testing.valkey import EmbeddedValkey

_KEPT = tuple(f"dramatiq:{queue}{delay}.msgs" for queue in QUEUES for delay in ("", ".DQ"))
_DEAD = tuple(f"dramatiq:{queue}.XQ.msgs" for queue in QUEUES)
_COUNT = """
local total = 0
for _, key in ipairs(KEYS) do total = total + redis.call("HLEN", key) end
return total
"""


class Queues:
    """The messages of one half, each in a database of its own.

    Args:
        server: the server.
        database: the half's database.
    """

    def __init__(self, server: EmbeddedValkey, database: int) -> None:
        self._server = server
        self._database = database

    def workers(self) -> int:
        """How many brokers have asked for messages."""
        return self._number(self._server.call("ZCARD", "dramatiq:__heartbeats__", database=self._database))

    def remaining(self) -> int:
        """How many messages Dramatiq still has: waiting, parked, in a worker's hands, or to be retried."""
        return self._number(self._server.call("EVAL", _COUNT, len(_KEPT), *_KEPT, database=self._database))

    def retries(self) -> int:
        """How many retries were burned until now."""
        reply = self._server.call("GET", RETRIES_KEY, database=self._database)
        return int(reply) if isinstance(reply, bytes) else 0

    def kept(self) -> set[str]:
        """Ids of the messages that Dramatiq still has."""
        return self._ids(_KEPT)

    def dead(self) -> set[str]:
        """Ids of the messages in the dead-letter queues."""
        return self._ids(_DEAD)

    def _ids(self, keys: tuple[str, ...]) -> set[str]:
        found: set[str] = set()
        for key in keys:
            reply = self._server.call("HVALS", key, database=self._database)
            rows = reply if isinstance(reply, list) else []
            found |= {Message.decode(row).message_id for row in rows if isinstance(row, bytes)}
        return found

    @staticmethod
    def _number(reply: object) -> int:
        return reply if isinstance(reply, int) else 0
