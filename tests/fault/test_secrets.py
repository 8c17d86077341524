"""I13: whatever goes wrong, no password, key or prompt is in logs, errors, `repr` or the guard's keys (71)."""

from __future__ import annotations

import logging
import traceback
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import pytest

import guard_middleware
from guard_middleware import (
    AdmissionDenied,
    ConfigurationError,
    Guard,
    GuardMiddleware,
    GuardSettings,
    StoreUnavailable,
    current_permit,
)
from guard_middleware.store.redis import RedisStore
from guard_middleware.testing.model_server import FakeEndpoint
from guard_middleware.testing.valkey import EmbeddedValkey, free_port
from tests.support.deployment import Deployment, wait_until

pytestmark = pytest.mark.slow

PASSWORD = "S3cr@t"
WRITTEN = quote(PASSWORD, safe="")
MODEL_PASSWORD = "M0del!pw"
PROMPT = "how do I tell my mother that"
SECRETS = (
    PASSWORD,
    WRITTEN,
    quote(WRITTEN, safe=""),
    PASSWORD.encode().hex(),
    "S3cr",
    MODEL_PASSWORD,
    quote(MODEL_PASSWORD, safe=""),
    "M0del",
)


@pytest.fixture
def locked_valkey():
    """A server of the test's own, with a password."""
    with EmbeddedValkey(appendonly=True, options={"requirepass": PASSWORD}) as server:
        yield server


def url_of(server):
    """Its URL as an operator writes it."""
    return f"redis://:{WRITTEN}@127.0.0.1:{server.port}/0"


def assert_quiet(text, *also):
    """None of the secrets stands in the text, raw, decoded or encoded."""
    assert [secret for secret in (*SECRETS, *also) if secret in text] == []


def everything_under(client, pattern):
    """All keys of a pattern with all that is in them, as one text."""
    readers = {
        b"hash": client.hgetall,
        b"zset": lambda key: client.zrange(key, 0, -1, withscores=True),
        b"set": client.smembers,
        b"string": client.get,
        b"list": lambda key: client.lrange(key, 0, -1),
        b"none": lambda key: key,
    }
    return "\n".join(f"{key} {readers[client.type(key)](key)}" for key in client.scan_iter(pattern))


def test_workers_in_every_trouble_tell_no_secrets(locked_valkey, tmp_path):
    """Debug logging, overload, a crash, a wrong password, a store that is down: log and keys hold no secret."""
    with Deployment(
        url_of(locked_valkey),
        tmp_path,
        endpoints=[FakeEndpoint(name="chat", base_ms=20), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": 2, "reserve": 0, "api_key_env": "A_KEY"}, "embed": {}},
        env={
            "GUARD_LEASE_S": "3",
            "GUARD_HEARTBEAT_S": "0.5",
            "MODEL_BREAKER_BASE_COOLDOWN_S": "0.3",
            "A_KEY": "S3cr-k",
        },
    ) as deployment:
        plain = deployment.server.url("chat")
        deployment._models["chat"]["base_url"] = plain.replace("http://", f"http://user:{quote(MODEL_PASSWORD)}@")
        group = deployment.start(processes=1, threads=4, module="tests.support.secret_app")
        # Given calls with prompts, some of which are parked, some overloaded, and one that crashes
        deployment.server.script([{"fault": "status", "status": 503, "times": 1}])
        ids = deployment.send("ask", 30, args=(PROMPT,), kwargs={"ms": 60})
        deployment.send("crash")
        store = deployment.store()
        wait_until(lambda: sum(store.snapshot().endpoints["chat"].waiting.values()) >= 10, 10)
        keys = everything_under(deployment.redis, "guard:*")
        assert "chat" in keys
        # When the password is changed under the workers, then the server ends and comes back
        deployment.redis.config_set("requirepass", "another")
        deployment.redis.client_kill_filter(_type="normal")
        deployment.redis.client_kill_filter(_type="pubsub")
        wait_until(lambda: "AuthenticationError" in guard_lines(group), 10)
        deployment.redis.config_set("requirepass", PASSWORD)
        wait_until(lambda: "guard.store_back" in guard_lines(group), 10)
        locked_valkey.stop()
        wait_until(lambda: "ConnectionError" in guard_lines(group), 10)
        locked_valkey.restart()
        deployment.wait_done(ids, 30)
        keys += everything_under(deployment.redis, "guard:*")
        store.close()
    # Then neither the keys nor the log tell anything, but where it happened stays visible
    assert_quiet(keys, PROMPT)
    assert_quiet(group.log)
    assert PROMPT not in guard_lines(group)
    assert PROMPT not in group.log
    for event in ("guard.deferred", "guard.overload", "guard.store_unavailable", "guard.store_back"):
        assert event in group.log
    assert "a fault of the application" in group.log


def guard_lines(group):
    """What the guard itself has logged."""
    return "\n".join(line for line in group.log.splitlines() if "guard." in line)


def told_by(exc):
    """All that can be seen of an exception: message, repr, chain, traceback."""
    return f"{exc} {exc!r} {exc.args!r} {vars(exc)!r}" + "".join(traceback.format_exception(exc))


def test_every_public_object_and_error_is_quiet(locked_valkey, caplog, namespace):
    """`repr` of every public object, and every error of a wrong password, a store that is away, a full endpoint."""
    caplog.set_level(logging.DEBUG)
    models = [
        {"id": "chat", "base_url": f"http://user:{quote(MODEL_PASSWORD)}@localhost:1/v1", "max_concurrent_requests": 1}
    ]

    def guard_at(url):
        return Guard(GuardSettings(redis_url=url, namespace=namespace, models=models, first_start_hold_s=0))

    said = []
    guard = guard_at(url_of(locked_valkey))
    with guard.permit("chat", timeout=5) as permit:
        assert guard.try_permit("chat") is not None  # lent by the outer one
        heartbeat = guard.heartbeat()
        said += [guard, guard.settings, permit, permit.endpoint, current_permit(), guard.snapshot(), heartbeat]
        said += [heartbeat.holdings, heartbeat.store, heartbeat.store.client.connection_pool.__class__]
        said += [GuardMiddleware(guard), guard.published(), guard.settings.warnings(), vars(permit)]
        other = guard_at(url_of(locked_valkey))
        with (
            ThreadPoolExecutor(1) as elsewhere,
            pytest.raises(AdmissionDenied) as denied,
        ):  # a thread that holds nothing
            elsewhere.submit(other.permit, "chat", timeout=0.1).result()
        said.append(told_by(denied.value))
        other.close()
    guard.close()
    # A wrong password, nobody there, and no Redis at all
    for url in (
        f"redis://:{WRITTEN}x@127.0.0.1:{locked_valkey.port}/0",
        f"redis://:{WRITTEN}@127.0.0.1:{free_port()}/0",
        f"rediss://:{WRITTEN}@127.0.0.1:{locked_valkey.port}/0",
    ):
        lost = guard_at(url)
        with pytest.raises(StoreUnavailable) as unavailable:
            lost.permit("chat", timeout=0.1)
        said += [lost, lost.settings, told_by(unavailable.value)]
        lost.close()
        with pytest.raises(StoreUnavailable) as unavailable:
            RedisStore.from_url(url, namespace, timeout_s=0.5).wakeups("p")
        said.append(told_by(unavailable.value))
    # And configurations that are refused
    wrong = [
        {"redis_url": f"http://:{WRITTEN}@host/0"},
        {"redis_url": f"redis://:{WRITTEN}@host:port/0"},
        {"models": [{"id": "chat", "base_url": f"ftp://user:{quote(MODEL_PASSWORD)}@host/v1"}]},
        {"models": [{"id": "chat", "base_url": f"http://host/v1?key={MODEL_PASSWORD}"}]},
    ]
    for fields in wrong:
        with pytest.raises(ConfigurationError) as refused:
            GuardSettings(**fields)
        said.append(told_by(refused.value))
    for url in (f"http://:{WRITTEN}@host/0", f"redis://:{WRITTEN}@host:port/0"):
        with pytest.raises(ConfigurationError) as refused:
            RedisStore.from_url(url, namespace)
        said.append(told_by(refused.value))
    said += [getattr(guard_middleware, name) for name in guard_middleware.__all__]
    assert_quiet("\n".join(f"{one!r} {one}" for one in said))
    assert "guard.store_unavailable" in caplog.text
    assert_quiet(caplog.text)
    # Where it happened is still told
    assert f"127.0.0.1:{locked_valkey.port}" in repr(guard.settings)


def test_worker_that_may_not_start_says_why_without_the_secret(tmp_path, locked_valkey):
    """A worker with a wrong configuration ends at once, and its log names the field, not the value."""
    with Deployment(url_of(locked_valkey), tmp_path) as deployment:
        wrong = {"GUARD_REDIS_URL": f"http://:{WRITTEN}@127.0.0.1:1/0"}
        group = deployment.start(wait=False, env=wrong, module="tests.support.secret_app")
        group.process.wait(30)
        assert group.process.returncode != 0
        assert "GUARD_REDIS_URL" in group.log
        assert_quiet(group.log)
