"""One half of the demo: a new server, workers with or without the guard, the load, and what came of it."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from dramatiq.brokers.redis import RedisBroker

from actors.demo import load
from actors.demo.queues import Queues
from actors.demo.result import reckon
from actors.demo.screen import EndpointRow, Sample, Screen
from actors.demo.workers import Workers, WorkersDiedError
from guard_middleware import Guard, StoreUnavailable
from guard_middleware.testing.model_server import ModelServer

if TYPE_CHECKING:
    from pathlib import Path

    from dramatiq import Message

    from actors.demo.plan import Plan
    from actors.demo.result import HalfResult
    from guard_middleware import GuardSettings
    from guard_middleware.store.base import Store
    from guard_middleware.testing.model_server import ServerStats
    from guard_middleware.testing.valkey import EmbeddedValkey

_START_S = 45.0
_TICK_S = 0.02
_SAMPLE_EVERY_S = 0.25


class Half:
    """One half, from the start of its processes to their end.

    Args:
        plan: what to run.
        store: the server that holds the messages and the guard's state.
        logs: folder for the workers' logs.
        guarded: with the guard, or without.
    """

    def __init__(self, plan: Plan, store: EmbeddedValkey, logs: Path, *, guarded: bool) -> None:
        self._plan = plan
        self._name = "guarded" if guarded else "unguarded"
        self._guarded = guarded
        database = 1 if guarded else 0
        self._redis_url = store.database_url(database)
        self._queues = Queues(store, database)
        self._logs = logs / self._name
        self._sent: dict[str, int] = {}
        self._questions: list[str] = []
        self._broker = RedisBroker(url=self._redis_url, middleware=[])  # type: ignore[no-untyped-call]  # dramatiq's class has no annotations

    def run(self, screen: Screen) -> HalfResult:
        """Run it, show it, and tell what came of it.

        Raises:
            WorkersDiedError: if workers did not start, or ended by themselves.
        """
        with ExitStack() as stack:
            server = stack.enter_context(ModelServer(self._plan.endpoints(), self._plan.host()))
            urls = {name: server.url(name) for name in self._plan.ceilings()}
            settings = self._plan.settings(self._redis_url, urls)
            application = "actors:broker" if self._guarded else "actors.demo.unguarded:broker"
            workers = stack.enter_context(Workers(application, self._plan, _environment(settings), self._logs))
            self._wait_for(workers)
            view = None
            if self._guarded:
                view = Guard(settings).make_store()
                stack.callback(view.close)
                time.sleep(settings.first_start_hold_ms / 1000)  # a store that never saw a guard admits nothing yet
            server.reset()
            began_s = time.monotonic()
            finished = self._load(workers, server, view, screen)
            wall_s, ended_at_s = time.monotonic() - began_s, time.time()
            screen.show(self._sample(server.stats(), view, wall_s), last=True)
            workers.stop()  # what they still hold goes back to the queues, and is counted there
            return reckon(
                sent=self._sent,
                questions=self._questions,
                log=server.log(),
                stats=server.stats(),
                kept=self._queues.kept(),
                dead=self._queues.dead(),
                retries=self._queues.retries(),
                ended_at_s=ended_at_s,
                wall_s=wall_s,
                cut_off=not finished,
            )

    def _wait_for(self, workers: Workers) -> None:
        deadline_s = time.monotonic() + _START_S
        while self._queues.workers() < workers.expected:
            workers.check()
            if time.monotonic() > deadline_s:
                msg = f"only {self._queues.workers()} of {workers.expected} workers came up: see {self._logs}"
                raise WorkersDiedError(msg)
            time.sleep(0.1)

    def _load(self, workers: Workers, server: ModelServer, view: Store | None, screen: Screen) -> bool:
        """Send everything, and wait until Dramatiq has nothing left; tell whether that came in time."""
        plan = self._plan
        began_s = time.monotonic()
        for message in load.background(plan):
            self._send(message)
        next_sample_s = 0.0
        while (at_s := time.monotonic() - began_s) < (plan.guarded_s if self._guarded else plan.unguarded_s):
            while len(self._questions) < min(plan.questions, at_s // plan.question_every_s + 1):
                self._questions.append(self._send(load.question(len(self._questions))))
            if at_s >= next_sample_s:
                next_sample_s = at_s + _SAMPLE_EVERY_S
                workers.check()
                sample = self._sample(server.stats(), view, at_s)
                screen.show(sample)
                if len(self._questions) == plan.questions and not sample.remaining:
                    return True
            time.sleep(_TICK_S)
        return False

    def _send(self, message: Message[Any]) -> str:
        self._sent[message.message_id] = message.message_timestamp
        self._broker.enqueue(message)
        return message.message_id

    def _sample(self, stats: ServerStats, view: Store | None, at_s: float) -> Sample:
        known = {}
        if view is not None:
            with suppress(StoreUnavailable):  # on a machine that is busy enough, once; the next sample has it again
                known = view.snapshot().endpoints
        rows = []
        for name, tally in stats.endpoints.items():
            guard = known.get(name)
            rows.append(
                EndpointRow(
                    name=name,
                    in_flight=tally.in_flight,
                    most=tally.most_in_flight,
                    limit=guard.limit if guard else None,
                    waiting=guard.waiting if guard else {},
                    breaker=guard.breaker if guard else "",
                )
            )
        return Sample(
            half=self._name,
            at_s=at_s,
            remaining=self._queues.remaining(),
            sent=len(self._sent),
            together=stats.host.in_flight,
            host=stats.state,
            deaths=stats.deaths,
            retries=self._queues.retries(),
            rows=tuple(rows),
        )


def _environment(settings: GuardSettings) -> dict[str, str]:
    """The settings as variables, as a Procfile's runner would set them."""
    models = [{**one.model_dump(), "base_url": one.base_url} for one in settings.models]
    return {
        "GUARD_REDIS_URL": settings.redis_url.get_secret_value(),
        "GUARD_NAMESPACE": settings.namespace,
        "GUARD_MODELS": json.dumps(models),
        "GPU_CONCURRENCY_BUDGETS": json.dumps(settings.gpu_concurrency_budgets),
    }
