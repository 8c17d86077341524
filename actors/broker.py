"""The broker of this application: Dramatiq's own middleware, then the guard, then CurrentMessage."""

from __future__ import annotations

import dramatiq
import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.middleware import AsyncIO, CurrentMessage
from dramatiq.results import Results
from dramatiq.results.backends import RedisBackend

from guard_middleware import Guard, GuardMiddleware
from settings import deployment

_settings = deployment()
_redis_url = _settings.redis_url.get_secret_value()

# Some callers block until there is a result. The client must wait longer for a reply than any of them does for that;
# its own default is as short as 5 s.
_results = RedisBackend(client=redis.Redis.from_url(_redis_url, socket_timeout=60))

# On the guard's own server and database: there a message that has to wait is parked, in one step with the decision.
broker = RedisBroker(url=_redis_url)  # type: ignore[no-untyped-call]  # dramatiq's class has no annotations
broker.add_middleware(AsyncIO())
broker.add_middleware(Results(backend=_results))  # type: ignore[no-untyped-call]  # likewise
broker.add_middleware(GuardMiddleware(Guard.from_settings(_settings)))
broker.add_middleware(CurrentMessage())
dramatiq.set_broker(broker)
