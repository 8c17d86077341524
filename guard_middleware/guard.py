"""The guard for callers: permits for code that does not run in a guarded actor."""

from __future__ import annotations

import functools
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from guard_middleware.calls import acquire, ending, give_back_unused, release
from guard_middleware.config import GuardSettings
from guard_middleware.core.commands import Ask
from guard_middleware.errors import AdmissionDenied, ConfigurationError, StoreUnavailable
from guard_middleware.heartbeat import Heartbeat
from guard_middleware.holdings import new_id
from guard_middleware.observe import events
from guard_middleware.permit import Permit, current_permit
from guard_middleware.priority import Priority, current_priority, message_priority
from guard_middleware.steps import Hear, perform
from guard_middleware.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from guard_middleware.calls import CallOff
    from guard_middleware.config import EndpointConfig
    from guard_middleware.core.commands import Reply, Snapshot
    from guard_middleware.core.values import Published
    from guard_middleware.holdings import Holding
    from guard_middleware.host import Host
    from guard_middleware.permit import AsyncPermit
    from guard_middleware.steps import Step
    from guard_middleware.store.base import Store


_guards: WeakSet[Guard] = WeakSet()


def _after_fork() -> None:
    for guard in list(_guards):
        guard.forked()


os.register_at_fork(after_in_child=_after_fork)  # a lock that another thread held would never be free


class Guard:
    """One deployment's endpoints, and the permits for them.

    Safe to create at import: connections and threads are made by the first call, in the process that makes it.
    """

    def __init__(self, settings: GuardSettings | None = None, *, store: Callable[[], Store] | None = None) -> None:
        """Keep the configuration.

        Args:
            settings: the configuration; read from the environment if not given.
            store: makes this process's store; Redis at the configured URL if not given.

        Raises:
            ConfigurationError: if the environment is wrong.
        """
        self.settings = GuardSettings() if settings is None else settings
        self._make_store = store or self._redis
        self._extra: set[str] = set()
        self._lock = threading.Lock()
        self._callers: tuple[int, Heartbeat] | None = None
        self._reader: Store | None = None
        _guards.add(self)

    @classmethod
    def from_settings(cls, settings: GuardSettings | None = None) -> Self:
        """A guard with the configuration of the environment, or with the given one."""
        return cls(settings)

    def __repr__(self) -> str:
        """The namespace and the ids, no URL."""
        return f"<Guard namespace={self.settings.namespace!r} models={[one.id for one in self.settings.models]!r}>"

    # -- this process ------------------------------------------------------------------------------------------------

    def _redis(self) -> Store:
        settings = self.settings
        return RedisStore.from_url(
            settings.redis_url.get_secret_value(), settings.namespace, timeout_s=settings.store_timeout_s
        )

    def make_store(self) -> Store:
        """A store of this process's own."""
        return self._make_store()

    def published(self) -> Published:
        """What this process publishes: the configured endpoints, and those that it uses."""
        return self.settings.published(tuple(sorted(self._extra)))

    def know(self, model: str) -> EndpointConfig:
        """Make sure that an endpoint is published, and return its configuration.

        Raises:
            ConfigurationError: if models are configured and this is none of them.
        """
        endpoint = self.settings.endpoint(model)
        self._extra.add(model)
        return endpoint

    def new_heartbeat(self, host: Host | None = None, store: Store | None = None) -> Heartbeat:
        """A life line for one host in this process, not yet started."""
        hold = self.settings.first_start_hold_s
        return Heartbeat(
            store or self.make_store(),
            self.published,
            host,
            first_start_hold_ms=-1 if hold is None else self.settings.first_start_hold_ms,
        )

    @property
    def makes_stores(self) -> bool:
        """Whether its stores are made by the caller's own function."""
        return self._make_store != self._redis

    def reader(self) -> Store:
        """The store to read from: this process need not take part to look on."""
        if self.started is not None:
            return self.started.store
        with self._lock:
            if self._reader is None:
                self._reader = self.make_store()
            return self._reader

    @property
    def started(self) -> Heartbeat | None:
        """The life line of this process's callers, if it is there already."""
        callers = self._callers
        return callers[1] if callers is not None and callers[0] == os.getpid() else None

    def heartbeat(self) -> Heartbeat:
        """The life line of this process's callers, started by its first call."""
        with self._lock:
            if self._callers is None or self._callers[0] != os.getpid():
                heartbeat = self.new_heartbeat()
                warn_of(self.settings, heartbeat.store)
                heartbeat.start()
                self._callers = (os.getpid(), heartbeat)
            return self._callers[1]

    def close(self) -> None:
        """Give back what this process's callers hold, and end its threads."""
        with self._lock:
            callers, self._callers = self._callers, None
            reader, self._reader = self._reader, None
        if reader is not None:
            reader.close()
        if callers is not None and callers[0] == os.getpid():
            callers[1].stop()

    def forked(self) -> None:
        """This is a child of the process that used it: what that one has begun stays with it."""
        self._lock = threading.Lock()
        self._callers = None

    # -- permits -----------------------------------------------------------------------------------------------------

    def permit(
        self,
        model: str,
        *,
        priority: Priority | str | None = None,
        cost: int = 1,
        timeout: float = 30.0,
    ) -> Permit:
        """Wait for a permit, in the same line as messages, and use it as a context manager.

        Who already holds a permit never waits for another one: inside of a guarded actor the first nested call on the
        same endpoint uses the message's own permit; any other gets an extra one at once or `AdmissionDenied`.

        Args:
            model: id of the endpoint.
            priority: of the call; else that of the scope in force, else orchestration.
            cost: units, 1 to the ceiling.
            timeout: the longest wait, in seconds.

        Returns:
            The permit. Its `endpoint` is the one to call.

        Raises:
            AdmissionDenied: none was free in time; `reason` says why.
            ConfigurationError: the model, the priority or the cost can never be.
            StoreUnavailable: the store gave no answer in time.
        """
        return self.get(model, priority, cost, timeout)

    def try_permit(self, model: str, *, priority: Priority | str | None = None, cost: int = 1) -> Permit | None:
        """A permit if one is free now, else `None`. Arguments and errors as for `permit`."""
        try:
            return self.get(model, priority, cost, 0.0)
        except AdmissionDenied:
            return None

    def snapshot(self) -> Snapshot:
        """Read the store without changing anything.

        Raises:
            StoreUnavailable: the store gave no answer.
        """
        return self.reader().snapshot()

    def get(
        self,
        model: str,
        priority: Priority | str | None,
        cost: int,
        timeout_s: float,
        call_off: CallOff | None = None,
    ) -> Permit:
        """A permit, as `permit` and `try_permit` give it.

        Args:
            model: id of the endpoint.
            priority: of the call, `None` for the ambient one.
            cost: units.
            timeout_s: the longest wait, 0 for none.
            call_off: can end the wait before.
        """
        wanted = self.wanted(model, priority, cost, timeout_s)
        if wanted.lender is not None:
            return Permit(**wanted.lent(), release=wanted.lender.take_back, give_up=wanted.lender.take_back)
        heartbeat = self.heartbeat()
        ask = wanted.ask(heartbeat.process)
        granted = threading.Event()

        def do(step: Step) -> Any:
            if isinstance(step, Hear):
                granted.wait(step.seconds)
                return granted.clear()
            return heartbeat.carry_out(step)

        ears = [one for one in (heartbeat, call_off) if ask.wait and one is not None]
        for one in ears:
            one.hear(ask.lease, granted.set)
        try:
            holding, reply = perform(acquire(heartbeat, ask, wanted.priority, wanted.deadline_s, call_off), do)
            return Permit(
                **self.given(wanted, holding, reply),
                release=lambda ended: perform(release(heartbeat, holding, ended), do),
                give_up=lambda ended: heartbeat.give_up(ending(heartbeat, holding, ended)),
            )
        except GeneratorExit:  # thrown away while it asked: what it asked for is withdrawn already
            raise
        except BaseException:
            give_back_unused(heartbeat, ask.lease)
            raise
        finally:
            for one in ears:
                one.deafen(ask.lease)

    # -- what the faces share ----------------------------------------------------------------------------------------

    def wanted(self, model: str, priority: Priority | str | None, cost: int, timeout_s: float) -> Wanted:
        """What a caller wants, checked, and whether the permit that it holds already is lent for it.

        Raises:
            ConfigurationError: the model, the priority, the cost or the timeout can never be.
        """
        self.know(model)
        self.settings.check_cost(cost)
        asked: object = timeout_s
        if isinstance(asked, bool) or not isinstance(asked, int | float) or not asked >= 0:  # nor NaN
            msg = "timeout must be a number of seconds, at least 0 (try_permit does not wait at all)"
            raise ConfigurationError(msg)
        outer = current_permit()
        namespace = self.settings.namespace
        own = outer is not None and outer.namespace == namespace
        parsed = None if priority is None else Priority.parse(priority)
        lender = outer if outer is not None and outer.lend(model, cost, namespace) else None
        ambient = current_priority() or (outer.priority if outer is not None else message_priority())
        return Wanted(
            model=model,
            priority=parsed or ambient or Priority.ORCHESTRATION,
            cost=cost,
            wait=timeout_s > 0 and outer is None,
            deadline_s=time.monotonic() + timeout_s,
            parent=outer.lease if outer is not None and own else "",
            lender=lender,
        )

    def given(self, wanted: Wanted, holding: Holding, reply: Reply) -> dict[str, Any]:
        """What a permit says of itself.

        Raises:
            ConfigurationError: the endpoint chosen is a fallback that only other processes have been told of.
        """
        return {
            "endpoint": self.settings.endpoint(holding.endpoint),
            "model": wanted.model,
            "priority": wanted.priority,
            "cost": wanted.cost,
            "probe": reply.probe,
            "namespace": self.settings.namespace,
            "lease": holding.lease,
        }


def warn_of(settings: GuardSettings, store: Store) -> None:
    """Log what about the settings and the server works and is not safe. A server that is away is not waited for.

    Raises:
        ConfigurationError: the server cannot hold the guard's state at all.
    """
    found = list(settings.warnings())
    with suppress(StoreUnavailable):
        found += store.check_server()
    for warning in found:
        events.warning("guard.check", warning=warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a caller wants.

    Attributes:
        model: id of the endpoint asked for.
        priority: of the call.
        cost: units.
        wait: it stands in line if there is none now.
        deadline_s: when to give up, as monotonic time.
        parent: the lease that it holds already, "" for none.
        lender: the permit that it holds already, if that is lent for this call.
    """

    model: str
    priority: Priority
    cost: int
    wait: bool
    deadline_s: float
    parent: str
    lender: Permit | AsyncPermit | None

    def lent(self) -> dict[str, Any]:
        """What a permit says of itself that is lent by the one around it."""
        lender = self.lender
        assert lender is not None
        return {
            "endpoint": lender.endpoint,
            "model": self.model,
            "priority": lender.priority,
            "cost": self.cost,
            "probe": lender.probe,
            "namespace": lender.namespace,
            "lease": lender.lease,
        }

    def ask(self, process: str) -> Ask:
        """The command, with an id of its own."""
        return Ask(
            process=process,
            lease=new_id(),
            endpoint=self.model,
            rank=self.priority.rank,
            cost=self.cost,
            wait=self.wait,
            parent=self.parent,
        )


@functools.cache
def default_guard() -> Guard:
    """The process's guard where none is given: with the environment's configuration.

    Raises:
        ConfigurationError: if the environment is wrong.
    """
    return Guard.from_settings()
