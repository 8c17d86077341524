"""Verbs to script calls, and replies to values. Pure: shared by the sync and the async store.

The order of the arguments is that of the scripts' headers; a test holds the two together. All values go out as text
or integers, and ids come back as text; only payloads stay bytes.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from guard_middleware.core.commands import EndpointSnapshot, Reply, Snapshot, Status, Take
from guard_middleware.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterable

    from guard_middleware.core.commands import Ask, Beat, Configure, Finish, Held, Message, Operate

Value = str | int
_NOTHING: tuple[Any, ...] = (0, b"", -1, -1, 0, 0, b"", 0, b"", 0, 0)
_NO_LISTS: tuple[list[Any], ...] = ([], [], [], [])
_BRIEF = 4
_FIXED = len(_NOTHING)
_TAKE = 12
_STATUSES = {int(status): status for status in Status}


class Call(NamedTuple):
    """One call of a script.

    Attributes:
        script: its name.
        keys: what follows the root in ``KEYS``.
        args: what follows ``now_ms`` in ``ARGV``.
    """

    script: str
    keys: tuple[str, ...]
    args: list[Value]


# ---------------------------------------------------------------------- out


def encode_admit(command: Ask) -> Call:
    """Ask for a permit."""
    flags = ("c" if command.confirm else "") + ("s" if command.slot else "") + ("w" if command.wait else "")
    args: list[Value] = [
        command.process,
        command.lease,
        command.endpoint,
        command.rank,
        command.cost,
        command.take,
        command.idle,
        command.deadline_ms,
        flags,
    ]
    message = command.message
    if message is None:
        args.append(command.parent)
        return Call("admit", (), args)
    args += (message.queue, message.id, message.worker)
    return Call("admit", (message.namespace,), args)


def encode_finish(command: Finish) -> Call:
    """Release a lease."""
    args: list[Value] = [
        command.process,
        command.lease,
        command.outcome.value,
        command.retry_after_ms,
        command.home,
        command.park.value,
        command.take,
        command.idle,
    ]
    message = command.message
    if message is None:
        return Call("finish", (), args)
    args += (message.queue, message.id, message.worker)
    return Call("finish", (message.namespace,), args)


def encode_beat(command: Beat) -> Call:
    """Renew, report, give back, assert and take."""
    args: list[Value] = [
        command.process,
        command.id,
        command.number,
        command.take,
        command.idle,
        command.worker,
        int(command.leaving),
        len(command.queues),
    ]
    for namespace, queue in command.queues:
        args += (namespace, queue)
    for ids in (command.leases, command.outstanding, command.give_back):
        args += (len(ids), *ids)
    args.append(len(command.asserts))
    for held in command.asserts:
        args += _held(held)
    return Call("beat", (), args)


def _held(held: Held) -> Iterable[Value]:
    message = held.message
    return (
        held.lease,
        held.endpoint,
        held.home,
        held.rank,
        held.cost,
        held.generation,
        *(("", "", "", "") if message is None else _whereabouts(message)),
    )


def _whereabouts(message: Message) -> tuple[str, str, str, str]:
    return (message.namespace, message.queue, message.id, message.worker)


def encode_configure(command: Configure) -> Call:
    """Publish a configuration. Fractions go out as the shortest text that is read back as the same number."""
    published = command.published
    rules = published.rules
    args: list[Value] = [
        command.process,
        command.first_start_hold_ms,
        command.epoch,
        published.revision,
        rules.lease_ms,
        rules.heartbeat_ms,
        rules.hold_ms,
        rules.ageing_ms,
        rules.max_overloads,
        repr(rules.reserve_fraction),
        rules.probe_deadline_ms,
        rules.retry_after_cap_ms,
        len(published.endpoints),
    ]
    for spec in published.endpoints:
        args += (
            spec.id,
            spec.ceiling,
            spec.floor,
            "" if spec.reserve is None else spec.reserve,
            spec.group,
            spec.fallback,
            int(spec.breaker),
            spec.fail_threshold,
            spec.base_cooldown_ms,
            spec.max_cooldown_ms,
            repr(spec.backoff_factor),
        )
    args.append(len(published.budgets))
    for group, budget in published.budgets.items():
        args += (group, budget)
    return Call("configure", (), args)


def encode_operate(command: Operate) -> Call:
    """Carry out an operation."""
    return Call(
        "operate",
        (),
        [command.action.value, command.target, command.value, *command.queue, int(command.force)],
    )


# ---------------------------------------------------------------------- in


def decode_reply(raw: list[Any]) -> Reply:
    """Read the flat reply of every script but `snapshot`. What is left out at its end is zero or empty.

    Raises:
        StoreUnavailable: if it is not such a reply.
    """
    try:
        if len(raw) == _BRIEF:
            return _brief(*raw)
        status = _STATUSES[raw[0]]
        _, epoch, next_ms, waiting, expires_at_ms, generation, endpoint, probe, reason, retry_after_ms, count = (
            *raw[:_FIXED],
            *_NOTHING[len(raw) :],
        )
        lost, stolen, woken, takes = _lists(raw) if len(raw) > _FIXED else _NO_LISTS
        return Reply(
            status=status,
            reason=reason.decode(),
            retry_after_ms=retry_after_ms,
            endpoint=endpoint.decode(),
            generation=generation,
            probe=probe == 1,
            expires_at_ms=expires_at_ms,
            takes=tuple(_take(takes[first : first + _TAKE]) for first in range(0, len(takes), _TAKE)) if takes else (),
            next_ms=next_ms,
            waiting=waiting,
            epoch=epoch.decode(),
            lost=tuple(one.decode() for one in lost) if lost else (),
            stolen=tuple(one.decode() for one in stolen) if stolen else (),
            count=count,
            woken=tuple(one.decode() for one in woken) if woken else (),
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        msg = f"the store's reply cannot be read ({type(exc).__name__}): is something else answering on its address?"
        raise StoreUnavailable(msg) from exc


@lru_cache(maxsize=256)
def _brief(status: int, epoch: bytes, next_ms: int, waiting: int) -> Reply:
    """The answer to most releases: it is nearly always the same, so it is made once."""
    return Reply(status=_STATUSES[status], epoch=epoch.decode(), next_ms=next_ms, waiting=waiting)


def _lists(raw: list[Any]) -> list[list[Any]]:
    """The four lists at the end of a reply, each with its length before it."""
    lists: list[list[Any]] = []
    at = _FIXED
    for _ in range(4):
        lists.append(raw[at + 1 : at + 1 + raw[at]])
        at += 1 + len(lists[-1])
    if at != len(raw):
        msg = f"{len(raw)} values where {at} were announced"
        raise ValueError(msg)
    return lists


def _take(values: list[Any]) -> Take:
    lease, endpoint, home, generation, probe, expires_at_ms, rank, cost, namespace, queue, message_id, payload = values
    return Take(
        lease=lease.decode(),
        endpoint=endpoint.decode(),
        home=home.decode(),
        generation=generation,
        probe=probe == 1,
        expires_at_ms=expires_at_ms,
        rank=rank,
        cost=cost,
        queue=(namespace.decode(), queue.decode()),
        message_id=message_id.decode(),
        payload=payload,
    )


_ROW = 13


def encode_snapshot() -> Call:
    """Read everything."""
    return Call("snapshot", (), [])


def decode_snapshot(raw: Any) -> Snapshot:
    """Read the reply of `snapshot`.

    Raises:
        StoreUnavailable: if it is not such a reply.
    """
    try:
        _, at_ms, endpoints, groups, leases, processes, lines = raw
        return Snapshot(
            at_ms=at_ms,
            endpoints={one.id: one for one in map(_endpoint, endpoints)},
            groups={group.decode(): (units, budget) for group, units, budget in groups},
            leases={
                lease.decode(): (endpoint.decode(), cost, process.decode()) for lease, endpoint, cost, process in leases
            },
            processes={process.decode(): idle for process, idle in processes},
            lines={
                (endpoint.decode(), namespace.decode(), queue.decode()): tuple(waiter.decode() for waiter in waiters)
                for endpoint, namespace, queue, *waiters in lines
            },
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as exc:
        msg = f"the store's snapshot cannot be read ({type(exc).__name__}): is something else answering on its address?"
        raise StoreUnavailable(msg) from exc


def _endpoint(row: list[Any]) -> EndpointSnapshot:
    (
        endpoint,
        ceiling,
        limit,
        in_flight,
        breaker,
        open_for_ms,
        generation,
        trips,
        ramp,
        probe,
        paused,
        group,
        mean_ms,
    ) = row[:_ROW]
    return EndpointSnapshot(
        id=endpoint.decode(),
        ceiling=ceiling,
        limit=limit,
        in_flight=in_flight,
        waiting=dict(zip(row[_ROW::2], row[_ROW + 1 :: 2], strict=True)),
        breaker=breaker.decode(),
        open_for_ms=open_for_ms,
        generation=generation,
        trips=trips,
        ramp=ramp,
        probe=probe.decode(),
        paused=paused == 1,
        group=group.decode(),
        mean_ms=mean_ms,
    )
