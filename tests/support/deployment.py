"""One deployment under test: a real store, a real model server, real worker processes; and what became of it all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import uuid4

import redis
from dramatiq.brokers.redis import RedisBroker
from dramatiq.message import Message

from guard_middleware import Guard, GuardSettings
from guard_middleware.store.redis import RedisStore
from guard_middleware.testing.model_server import FakeEndpoint, HostMemory, ModelServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from types import TracebackType
    from typing import Self

    from guard_middleware.testing.model_server import Request

ROOT = Path(__file__).resolve().parents[2]
QUEUES = {
    "embed": "embedding",
    "enrich": "enrichment",
    "plain": "plain",
    "on_success": "callbacks",
    "on_failure": "callbacks",
    "group_done": "callbacks",
}


def wait_until(condition: Callable[[], Any], timeout_s: float, what: str = "", every_s: float = 0.02) -> Any:
    """Wait for a condition, and return what it returned.

    Raises:
        AssertionError: if it does not come true in time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            msg = f"not within {timeout_s} s: {what or condition}"
            raise AssertionError(msg)
        time.sleep(every_s)


def children_of(pid: int) -> list[int]:
    """The processes that a process has started and that live."""
    found: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


class WorkerGroup:
    """One run of Dramatiq's CLI: a master and its worker processes. It ends only what it started."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log_path = log

    @property
    def log(self) -> str:
        """Everything that master and workers have printed."""
        return self.log_path.read_text(errors="replace")

    def workers(self) -> list[int]:
        """Process ids of everything below the master."""
        found, todo = [], [self.process.pid]
        while todo:
            below = children_of(todo.pop())
            found += below
            todo += below
        return found

    def wait_ready(self, processes: int, timeout_s: float = 30) -> Self:
        """Wait until all workers are ready for messages."""
        wait_until(
            lambda: self.log.count("ready for action") >= processes,
            timeout_s,
            f"workers not ready:\n{self.log[-3000:]}",
        )
        return self

    def kill(self) -> None:
        """SIGKILL everything at once, as a lost machine would."""
        pids = [self.process.pid, *self.workers()]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def terminate(self, timeout_s: float = 40) -> int:
        """SIGTERM, as a deployment would, and wait for the end."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


class Deployment:
    """A guard namespace, a broker namespace, a model server, and any number of worker groups.

    Args:
        redis_url: of the store and the broker.
        tmp_path: for the workers' logs.
        endpoints: of the model server.
        host: its memory.
        models: fields of each endpoint's configuration beside id and base_url; by endpoint name.
        env: further environment of the workers and of the guard in this process.
        broker_namespace: of Dramatiq's keys; its own if not given.
        namespace: of the guard's keys; its own if not given.
        server: the model server, if it is somebody else's.
        kill_at_end: end the workers by SIGKILL, for tests that are not about shutdowns: each takes seconds.
    """

    def __init__(
        self,
        redis_url: str,
        tmp_path: Path,
        *,
        endpoints: Sequence[FakeEndpoint] = (FakeEndpoint(name="chat"), FakeEndpoint(name="embed")),
        host: HostMemory | None = None,
        models: dict[str, dict[str, Any]] | None = None,
        env: dict[str, str] | None = None,
        broker_namespace: str = "",
        namespace: str = "",
        server: ModelServer | None = None,
        kill_at_end: bool = False,
    ) -> None:
        self.redis_url = redis_url
        self.tmp_path = tmp_path
        self.owns_server = server is None
        self.server = server or ModelServer(endpoints, host)
        self._models = {"chat": {}, "embed": {}} if models is None else models
        self._extra = env or {}
        self.broker_namespace = broker_namespace or f"d{uuid4().hex[:10]}"
        self.namespace = namespace or f"g{uuid4().hex[:10]}"
        self.redis = redis.Redis.from_url(redis_url)
        self.broker = RedisBroker(url=redis_url, namespace=self.broker_namespace)
        self.groups: list[WorkerGroup] = []
        self._kill_at_end = kill_at_end
        self.sent: list[str] = []
        self._guard: Guard | None = None

    def __enter__(self) -> Self:
        """Start the model server."""
        if self.owns_server:
            self.server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the workers, the guard of this process and the model server."""
        for group in self.groups:
            if self._kill_at_end and group.process.poll() is None:
                group.kill()
            group.stop()
        if self._guard is not None:
            self._guard.close()
        if self.owns_server:
            self.server.stop()
        self.redis.close()
        self.broker.client.close()
        if value is not None:
            for group in self.groups:
                sys.stdout.write(f"--- {group.log_path.name}\n{group.log[-4000:]}\n")

    # -- configuration ---------------------------------------------------------------------------------------------

    def settings_env(self) -> dict[str, str]:
        """The guard's environment."""
        models = [{"id": name, "base_url": self.server.url(name), **fields} for name, fields in self._models.items()]
        return {
            "GUARD_REDIS_URL": self.redis_url,
            "GUARD_NAMESPACE": self.namespace,
            "GUARD_MODELS": json.dumps(models),
            "GUARD_FIRST_START_HOLD_S": "0",
            **{key: value for key, value in self._extra.items() if not key.startswith(("APP_", "dramatiq_"))},
        }

    def worker_env(self, extra: dict[str, str] | None = None) -> dict[str, str]:
        """The workers' environment."""
        return {
            **os.environ,
            **self.settings_env(),
            "APP_REDIS_URL": self.redis_url,
            "APP_NAMESPACE": self.broker_namespace,
            "APP_BASE_URL": self.server.url("chat") if "chat" in self._models else "",
            "PYTHONPATH": str(ROOT),
            **self._extra,
            **(extra or {}),
        }

    @property
    def guard(self) -> Guard:
        """A guard of this process, for callers and snapshots."""
        if self._guard is None:
            with mock.patch.dict(os.environ, self.settings_env()):
                self._guard = Guard(GuardSettings())
        return self._guard

    def store(self) -> RedisStore:
        """A store of this process's own, without a heartbeat."""
        return RedisStore.from_url(self.redis_url, self.namespace, timeout_s=5)

    # -- workers ---------------------------------------------------------------------------------------------------

    def start(
        self,
        *,
        processes: int = 1,
        threads: int = 8,
        queues: Iterable[str] = (),
        env: dict[str, str] | None = None,
        wait: bool = True,
        module: str = "tests.support.app",
    ) -> WorkerGroup:
        """Start a worker group with Dramatiq's own CLI."""
        log = self.tmp_path / f"workers-{self.broker_namespace}-{len(self.groups)}.log"
        command = [sys.executable, "-m", "dramatiq", module, "--processes", str(processes), "--threads", str(threads)]
        if queues:
            command += ["--queues", *queues]
        with log.open("wb") as out:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=self.worker_env(env),
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        group = WorkerGroup(process, log)
        self.groups.append(group)
        if wait:
            group.wait_ready(processes)
        return group

    # -- messages --------------------------------------------------------------------------------------------------

    def send(
        self, actor: str, count: int = 1, *, args: tuple = (), kwargs: dict[str, Any] | None = None, **options: Any
    ) -> list[str]:
        """Enqueue messages as an application would, and return their ids."""
        ids = []
        for _ in range(count):
            message = Message(
                queue_name=QUEUES.get(actor, "orchestration"),
                actor_name=actor,
                args=args,
                kwargs=kwargs or {},
                options=dict(options),
            )
            self.broker.enqueue(message)
            ids.append(message.message_id)
        self.sent += ids
        return ids

    def done(self) -> list[dict[str, Any]]:
        """What ran to its end, in order."""
        return [json.loads(entry) for entry in self.redis.lrange(f"{self.broker_namespace}:done", 0, -1)]

    def done_ids(self) -> Counter[str]:
        """How often each message ran to its end."""
        return Counter(entry["id"] for entry in self.done())

    def wait_done(self, ids: Iterable[str], timeout_s: float = 60) -> None:
        """Wait until all these messages have run to their end."""
        wanted = set(ids)
        try:
            wait_until(
                lambda: (
                    self.redis.llen(f"{self.broker_namespace}:done") >= len(wanted) and wanted <= set(self.done_ids())
                ),
                timeout_s,
                every_s=0.05,
            )
        except AssertionError:
            missing = wanted - set(self.done_ids())
            msg = f"{len(missing)} of {len(wanted)} messages are not done after {timeout_s} s; {self.describe()}"
            raise AssertionError(msg) from None

    def arrivals(self) -> dict[str, float]:
        """When each message first reached a thread of a worker; of `tests.support.sharing_app` only."""
        found: dict[str, float] = {}
        for entry in map(json.loads, self.redis.lrange(f"{self.broker_namespace}:arrivals", 0, -1)):
            found.setdefault(entry["id"], entry["at"])
        return found

    def calls(self, endpoint: str = "chat") -> list[Request]:
        """The calls of one endpoint in the order in which the server got them."""
        found = (one for one in self.server.log() if one.number and one.endpoint == endpoint)
        return sorted(found, key=lambda one: one.t_start)

    def wait_parked(self, count: int, endpoint: str = "chat", timeout_s: float = 15) -> None:
        """Wait until at least so many stand in an endpoint's waiting lines."""
        store = self.store()
        try:
            wait_until(lambda: sum(store.snapshot().endpoints[endpoint].waiting.values()) >= count, timeout_s)
        except AssertionError:
            raise AssertionError(self.describe()) from None
        finally:
            store.close()

    def dead(self) -> dict[str, list[str]]:
        """Dead-lettered messages by queue."""
        found = {}
        for queue in ("embedding", "enrichment", "orchestration", "plain", "callbacks"):
            entries = self.redis.hvals(f"{self.broker_namespace}:{queue}.XQ.msgs")
            if entries:
                found[queue] = [json.loads(entry)["message_id"] for entry in entries]
        return found

    def queued(self) -> int:
        """Messages that the broker still has, parked ones included."""
        return sum(
            self.redis.hlen(f"{self.broker_namespace}:{queue}{kind}.msgs")
            for queue in ("embedding", "enrichment", "orchestration", "plain", "callbacks")
            for kind in ("", ".DQ")
        )

    def describe(self) -> str:
        """Where everything is, for a failed test."""
        snapshot = self.store().snapshot()
        return f"queued={self.queued()} dead={self.dead()} endpoints={snapshot.endpoints} leases={snapshot.leases}"

    # -- invariants ------------------------------------------------------------------------------------------------

    def wait_idle(self, timeout_s: float = 10) -> None:
        """Wait until nothing is queued and nothing is leased."""
        store = self.store()
        try:
            wait_until(lambda: self.queued() == 0 and not store.snapshot().leases, timeout_s)
        except AssertionError:
            raise AssertionError(self.describe()) from None
        finally:
            store.close()

    def check_everything_once(self, *, retries: int | None = 0) -> None:
        """Every message sent ran exactly once, none is dead, nothing is left over, no retry was burned by waiting.

        Args:
            retries: the most retries that any message may have; `None` for any number.
        """
        self.wait_idle()
        counts = self.done_ids()
        assert {one: counts[one] for one in self.sent if counts[one] != 1} == {}
        assert self.dead() == {}
        if retries is not None:
            assert max((entry["retries"] for entry in self.done()), default=0) <= retries
