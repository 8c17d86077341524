"""Both stores with a broker beneath them, behind one face, for the suite that holds for every store."""

from __future__ import annotations

from contextlib import closing

import redis

from guard_middleware.core.commands import Ask, Beat, Configure, Finish, Message
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import EndpointSpec, Published, Rules
from guard_middleware.store.memory import MemoryStore
from guard_middleware.store.redis import RedisStore

START_MS = 1_700_000_000_000
PROCESS, WORKER = "p", "w"
ENDPOINT = "bge-m3"


class Side:
    """A store with a clock that moves only when told, and one queue of a broker."""

    def __init__(self, namespace):
        self.queue = (f"{namespace}broker", "q")
        self.now_ms = START_MS
        self.numbers = 0

    def pass_time(self, ms):
        self.now_ms += ms

    def new(self, prefix):
        self.numbers += 1
        return f"{prefix}{self.numbers}"

    # -- the broker --------------------------------------------------------------------------------------------------

    def deliver(self, payload=b"\x00payload\xff"):
        """A message stands in the worker's ack set, as after a fetch."""
        message = Message(namespace=self.queue[0], queue=self.queue[1], id=self.new("m"), worker=WORKER)
        self.put(message, payload)
        return message

    # -- commands ----------------------------------------------------------------------------------------------------

    def configure(self, *endpoints, process=PROCESS, rules=None, **more):
        published = Published(endpoints=endpoints or (EndpointSpec(id=ENDPOINT, ceiling=1),), rules=rules or Rules())
        return self.store.configure(
            Configure(process=process, published=published, **{"first_start_hold_ms": 0, **more})
        )

    def beat(self, *, process=PROCESS, beat_id=None, queues=None, **more):
        queues = (self.queue,) if queues is None else queues
        beat_id = beat_id or self.new("b")
        return self.store.beat(Beat(process=process, id=beat_id, worker=WORKER, queues=queues, **more))

    def boot(self, *endpoints, **more):
        self.configure(*endpoints, **more)
        self.beat()

    def ask(self, lease=None, **more):
        fields = {"process": PROCESS, "lease": lease or self.new("l"), "endpoint": ENDPOINT, "rank": 1, **more}
        return self.store.admit(Ask(**fields))

    def finish(self, lease, outcome=Outcome.SUCCESS, **more):
        fields = {"process": PROCESS, "lease": lease, "outcome": outcome, "home": ENDPOINT, **more}
        return self.store.finish(Finish(**fields))

    def close(self):
        self.store.close()


class MemorySide(Side):
    def __init__(self, namespace):
        super().__init__(namespace)
        self.store = MemoryStore(clock=lambda: self.now_ms / 1_000)
        self.broker = self.store.reference.broker

    def put(self, message, payload):
        self.broker.payloads.setdefault(self.queue, {})[message.id] = payload
        self.broker.ack_set(message).add(message.id)

    def has(self, message):
        return message.id in self.broker.ack_set(message)

    def queued(self):
        return list(self.broker.queues.get(self.queue, ()))


class RedisSide(Side):
    def __init__(self, namespace, url):
        super().__init__(namespace)
        self.store = RedisStore.from_url(url, namespace)
        self.store.set_clock(self.now_ms)
        self.client = redis.Redis.from_url(url)
        self.name = ":".join(self.queue)

    def pass_time(self, ms):
        super().pass_time(ms)
        self.store.set_clock(self.now_ms)

    def put(self, message, payload):
        self.client.hset(f"{self.name}.msgs", message.id, payload)
        self.client.sadd(f"{message.namespace}:__acks__.{message.worker}.{message.queue}", message.id)

    def has(self, message):
        return self.client.sismember(f"{message.namespace}:__acks__.{message.worker}.{message.queue}", message.id) == 1

    def queued(self):
        return [one.decode() for one in self.client.lrange(self.name, 0, -1)]

    def close(self):
        with closing(self.client):
            super().close()
