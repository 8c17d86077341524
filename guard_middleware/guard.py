"""The guard for callers: permits for code that does not run in a guarded actor."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, NoReturn, Self

from guard_middleware.config import GuardSettings
from guard_middleware.core.commands import Action, Ask, Finish, Operate, Reply, Snapshot, Status
from guard_middleware.core.outcome import Classified, Outcome
from guard_middleware.core.verdict import Reason
from guard_middleware.errors import AdmissionDenied, ConfigurationError, StoreUnavailable
from guard_middleware.heartbeat import Heartbeat
from guard_middleware.holdings import new_id
from guard_middleware.observe import events
from guard_middleware.permit import Permit, current_permit
from guard_middleware.priority import Priority, current_priority
from guard_middleware.store.redis import RedisStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from guard_middleware.config import EndpointConfig
    from guard_middleware.core.values import Published
    from guard_middleware.heartbeat import Host
    from guard_middleware.holdings import Holding
    from guard_middleware.store.base import Store

_ASK_AGAIN_S = 1.0
"""How long a waiting caller relies on being notified before it asks again."""


def never_admissible(model: str, cost: int) -> str:
    """What to say of a call that no state of its endpoint could ever admit."""
    return (
        f"a call of cost {cost} can never be admitted on {model!r}: its ceiling, or the budget of its GPU group "
        "without the others' floors, is smaller; lower the cost or raise them"
    )


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

    @classmethod
    def from_settings(cls, settings: GuardSettings | None = None) -> Self:
        """A guard with the configuration of the environment, or with the given one."""
        return cls(settings)

    def __repr__(self) -> str:
        """The namespace and the ids, no URL."""
        return f"<Guard namespace={self.settings.namespace!r} models={[one.id for one in self.settings.models]!r}>"

    # -- what the faces share ----------------------------------------------------------------------------------------

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

    def _heartbeat(self) -> Heartbeat:
        """The life line of this process's callers, started by its first call."""
        with self._lock:
            if self._callers is None or self._callers[0] != os.getpid():
                heartbeat = self.new_heartbeat()
                heartbeat.start()
                self._callers = (os.getpid(), heartbeat)
            return self._callers[1]

    def close(self) -> None:
        """Give back what this process's callers hold, and end its threads."""
        with self._lock:
            callers, self._callers = self._callers, None
        if callers is not None and callers[0] == os.getpid():
            callers[1].stop()

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
        return self._permit(model, priority, cost, timeout)

    def try_permit(self, model: str, *, priority: Priority | str | None = None, cost: int = 1) -> Permit | None:
        """A permit if one is free now, else `None`. Arguments and errors as for `permit`."""
        try:
            return self._permit(model, priority, cost, 0.0)
        except AdmissionDenied:
            return None

    def snapshot(self) -> Snapshot:
        """Read the store without changing anything.

        Raises:
            StoreUnavailable: the store gave no answer.
        """
        return self._heartbeat().store.snapshot()

    def _permit(self, model: str, priority: Priority | str | None, cost: int, timeout_s: float) -> Permit:
        self.know(model)
        self.settings.check_cost(cost)
        outer = current_permit()
        lent = self._lend(outer, model, cost)
        if lent is not None:
            return lent
        wanted = self._priority(priority, outer)
        heartbeat = self._heartbeat()
        ask = Ask(
            process=heartbeat.process,
            lease=new_id(),
            endpoint=model,
            rank=wanted.rank,
            cost=cost,
            wait=timeout_s > 0 and outer is None,
        )
        deadline_s = time.monotonic() + timeout_s
        holding, reply = self._ask(heartbeat, ask, wanted, deadline_s)
        try:
            endpoint = self.settings.endpoint(holding.endpoint)
        except ConfigurationError:  # a fallback that only other processes have been told of
            self._finish(heartbeat, holding, Classified(outcome=Outcome.IGNORED, reason="unknown fallback"))
            raise
        return Permit(
            endpoint=endpoint,
            model=model,
            priority=wanted,
            cost=cost,
            probe=reply.probe,
            release=lambda ended: self._finish(heartbeat, holding, ended),
            namespace=self.settings.namespace,
        )

    @staticmethod
    def _priority(explicit: Priority | str | None, outer: Permit | None) -> Priority:
        if explicit is not None:
            return Priority.parse(explicit)
        return current_priority() or (outer.priority if outer is not None else Priority.ORCHESTRATION)

    def _lend(self, outer: Permit | None, model: str, cost: int) -> Permit | None:
        """The message's own permit, for the first nested call on the same endpoint, one at a time."""
        if outer is None or outer.lent or outer.released or outer.model != model or outer.cost < cost:
            return None
        if outer.namespace != self.settings.namespace:  # another guard's: other servers, other ceilings
            return None
        outer.lent = True

        def give_back(ended: Classified) -> None:
            outer.lent = False
            outer.add(ended)

        return Permit(
            endpoint=outer.endpoint,
            model=model,
            priority=outer.priority,
            cost=cost,
            probe=outer.probe,
            release=give_back,
            namespace=outer.namespace,
        )

    def _ask(self, heartbeat: Heartbeat, ask: Ask, priority: Priority, deadline_s: float) -> tuple[Holding, Reply]:
        """Ask until there is a lease, or until the time is over; then leave nothing behind."""
        try:
            while True:
                reply, holding = self._ask_once(heartbeat, ask, deadline_s)
                if holding is not None:
                    return holding, reply
                left_s = deadline_s - time.monotonic()
                if reply.status is not Status.WAITING or left_s <= 0 or heartbeat.leaving:
                    self._deny(ask, reply, priority)
                heartbeat.wait_granted(ask.lease, min(left_s, _ASK_AGAIN_S))
        except BaseException as exc:
            if ask.wait:
                heartbeat.operate_later(Operate(action=Action.WITHDRAW, target=ask.lease))
            if ask.wait or not isinstance(exc, AdmissionDenied | ConfigurationError):  # a refusal keeps nothing
                heartbeat.abandon(ask.lease)
            raise

    @staticmethod
    def _ask_once(heartbeat: Heartbeat, ask: Ask, deadline_s: float) -> tuple[Reply, Holding | None]:
        pause_s = 0.05
        while True:
            try:
                return heartbeat.admit(ask)
            except StoreUnavailable:
                if time.monotonic() + pause_s >= deadline_s:
                    raise
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, 1.0)

    @staticmethod
    def _deny(ask: Ask, reply: Reply, priority: Priority) -> NoReturn:
        if reply.status is Status.IMPOSSIBLE:
            raise ConfigurationError(never_admissible(ask.endpoint, ask.cost))
        reason = reply.reason or Reason.ENDPOINT_FULL
        raise AdmissionDenied(ask.endpoint, priority.value, reason, reply.retry_after_ms)

    @staticmethod
    def _finish(heartbeat: Heartbeat, holding: Holding, ended: Classified) -> None:
        finish = Finish(
            process=heartbeat.process,
            lease=holding.lease,
            outcome=ended.outcome,
            retry_after_ms=ended.retry_after_ms or 0,
            home=holding.home,
            rank=holding.rank,
        )
        if ended.outcome is Outcome.OVERLOAD:
            events.warning("guard.overload", endpoint=holding.endpoint, error=ended.reason)
        try:
            heartbeat.finish(finish)
        except BaseException as exc:
            heartbeat.finish_later(finish)
            if not isinstance(exc, StoreUnavailable):
                raise
