"""`GuardMiddleware`: Dramatiq's hooks, and which member of the guard each belongs to."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, NoReturn

from dramatiq.middleware import Interrupt, Middleware, MiddlewareError

from guard_middleware.errors import ConfigurationError, StoreError
from guard_middleware.guard import Guard
from guard_middleware.observe import events
from guard_middleware.queueing import options, private
from guard_middleware.queueing.decorator import wrap
from guard_middleware.queueing.member import Member

if TYPE_CHECKING:
    from dramatiq import Actor, Broker, Worker
    from dramatiq.broker import MessageProxy
    from dramatiq.message import Message

_members: dict[Broker, Member] = {}
os.register_at_fork(after_in_child=_members.clear)  # a member belongs to its process
_BEFORE = frozenset(
    {"AgeLimit", "TimeLimit", "ShutdownNotifications", "Retries", "Prometheus", "Callbacks", "Pipelines"}
)
_AFTER = frozenset({"CurrentMessage"})


class RefusedAtBoot(ConfigurationError, MiddlewareError):
    """A worker may not start like this. Dramatiq lets this one through, so that the process ends."""


def member_of(broker: Broker) -> Member | None:
    """This process's member for a broker, `None` before a worker has booted."""
    return _members.get(broker)


def _refuse(broker: Broker, worker: Worker, why: str) -> NoReturn:
    """End the boot of a worker. What other middleware has begun is ended first: its threads would keep the process."""
    broker.emit_after("worker_shutdown", worker)
    raise RefusedAtBoot(why)


class GuardMiddleware(Middleware):
    """Admits, parks or postpones each message of a guarded actor.

    Add it after the default middleware (and Prometheus) and before CurrentMessage. It opens no connection before a
    worker boots.

    Args:
        guard: the deployment's guard; made from the environment if not given.
    """

    def __init__(self, guard: Guard | None = None) -> None:
        self.guard = Guard.from_settings() if guard is None else guard

    @property
    def actor_options(self) -> set[str]:
        """``guard_model``, ``guard_priority`` and ``guard_cost``."""
        return set(options.NAMES)

    def after_declare_actor(self, broker: Broker, actor: Actor[..., Any]) -> None:
        """Guard an actor that was declared with ``guard_model`` among its options."""
        if actor.options.get(options.MODEL) is not None:
            wrap(actor)

    def before_enqueue(self, broker: Broker, message: Message[Any], delay: int | None) -> None:
        """Stamp the priority, once. Of a message that is somewhere else already, no copy is stored."""
        if private.is_elsewhere(message):
            msg = "the message waits for its permit already: no copy of it is stored"
            raise private.Elsewhere(msg)
        try:
            options.stamp(broker, message, self.guard)
        except options.InvalidOptions as exc:
            member = _members.get(broker)
            if member is None or not member.turns.is_over():
                raise
            # The next of a pipeline, say: an error here would be swallowed, and the message would be nowhere. It is
            # stored, and ends among the dead letters where it is delivered.
            events.error("guard.refused", actor=message.actor_name, why=str(exc))

    def before_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Check what is guarded here, refuse to start if something cannot be, and join."""
        wrong = []
        for actor in broker.actors.values():
            model = actor.options.get(options.MODEL)
            if model is None:
                continue
            try:
                options.check_model(model)
                self.guard.know(model)
            except ConfigurationError as exc:
                wrong.append(f"actor {actor.actor_name!r}: {exc}")
            if private.lacks_event_loop(broker, actor.fn):
                wrong.append(
                    f"actor {actor.actor_name!r} is a coroutine and the broker has no event loop for it: "
                    "add AsyncIO() of dramatiq.middleware to the broker, before GuardMiddleware()"
                )
        if wrong:
            _refuse(broker, worker, "; ".join(wrong))
        if sum(isinstance(one, GuardMiddleware) for one in broker.middleware) > 1:
            _refuse(broker, worker, "GuardMiddleware was added to the broker more than once: add it once")
        if broker in _members:
            # Nothing is ended here: what the first worker's middleware has begun is its own.
            msg = "a worker of this broker runs in this process already: give each its own broker"
            raise RefusedAtBoot(msg)
        names = [type(one).__name__ for one in broker.middleware]
        here = names.index(type(self).__name__)
        misplaced = sorted(_BEFORE.intersection(names[here:]) | _AFTER.intersection(names[:here]))
        if misplaced:
            events.warning(
                "guard.check",
                warning="GuardMiddleware belongs after the default middleware and before CurrentMessage; "
                f"on the wrong side of it: {', '.join(misplaced)}",
            )

        # Joined before any thread of the worker runs: connections and threads are made in its own process.
        try:
            member = Member(self.guard, broker, worker)
            _members[broker] = member
            member.boot()
        except Exception as exc:  # noqa: BLE001  # Dramatiq would swallow it and run the worker without a life line
            events.error("guard.not_started", error=type(exc).__name__)
            why = str(exc) if isinstance(exc, ConfigurationError) else type(exc).__name__
            if isinstance(exc, StoreError):
                why += f"; GUARD_REDIS_URL is {self.guard.settings.redis_url}"
            _refuse(broker, worker, f"the guard could not start ({why}), so this worker does not")

    def after_worker_boot(self, broker: Broker, worker: Worker) -> None:
        """Report the queues, whose consumers exist now."""
        member = member_of(broker)
        if member is not None:
            member.heartbeat.poke()

    def before_process_message(self, broker: Broker, message: MessageProxy) -> None:
        """Ask for the permit, or take the message out of the thread's hands."""
        member = _members.get(broker)
        if member is not None:
            member.turns.before(message)

    def after_process_message(
        self,
        broker: Broker,
        message: MessageProxy,
        *,
        result: Any = None,
        exception: BaseException | None = None,
        skipped: bool = False,
    ) -> None:
        """End what the wrapper never began.

        An interrupt ends here: the body has ended, and out of this hook it would let all hooks run a second time.
        """
        member = _members.get(broker)
        if member is None:
            return
        try:
            member.turns.after(message, exception, skipped=skipped)
        except Interrupt:
            member.turns.after(message, exception, skipped=skipped)

    def after_skip_message(self, broker: Broker, message: MessageProxy) -> None:
        """End what the wrapper never began."""
        self.after_process_message(broker, message, skipped=True)

    def after_ack(self, broker: Broker, message: MessageProxy) -> None:
        """The thread is done with its message."""
        member = _members.get(broker)
        if member is not None:
            member.turns.acked()

    def after_nack(self, broker: Broker, message: MessageProxy) -> None:
        """The thread is done with its message."""
        self.after_ack(broker, message)

    def before_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Take nothing more, and give back what has not begun."""
        member = member_of(broker)
        if member is not None:
            member.leave()

    def after_worker_shutdown(self, broker: Broker, worker: Worker) -> None:
        """Say goodbye."""
        member = _members.pop(broker, None)
        if member is not None:
            member.stop()
