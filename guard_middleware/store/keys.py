"""The names of the guard's keys: one function per key, with its type and what it holds.

The scripts derive the same names from the root; this is where people and tests read them. A `line` is
``endpoint US namespace US queue``, a `queue` is ``namespace US queue``, with `SEPARATOR` as US; callers stand in a
line without namespace and queue. Values that are tables are packed with MessagePack, with named fields.
"""

from __future__ import annotations

SEPARATOR = "\x1f"


def root(namespace: str) -> str:
    """What all keys of one guard begin with. The braces keep them together, should a proxy shard by tags."""
    return f"guard:{{{namespace}}}:"


def line(endpoint: str, namespace: str = "", queue: str = "") -> str:
    """The name of a waiting line."""
    return SEPARATOR.join((endpoint, namespace, queue))


def state(root: str) -> str:
    """HASH: the small facts, read together by every script and written back together.

    ``rules``, ``endpoints``, ``budgets``, ``spec:<endpoint>``: the configuration that applies. ``left``: endpoints that
    count in a GPU group that they have left. ``epoch``,
    ``epoch_until``, ``last_run``, ``places``. ``due``: never later than the first instant that the sweep has to look
    at. ``lines``: the lines in which somebody stands. ``held_at``: the first instant in `held_back`. ``deadlines``:
    queue -> never later than its first deadline. Per endpoint: ``override``, ``paused``, ``breaker``, ``mean``,
    ``background_at``, ``slot``. Per process: ``idle`` (it is known, and its idle threads), ``hold`` (a unit is held
    for it).
    """
    return f"{root}state"


def lease(root: str, lease: str) -> str:
    """STRING: the live lease of that id; from its end on its tombstone, which expires."""
    return f"{root}lease:{lease}"


def units(root: str, endpoint: str) -> str:
    """ZSET lease -> expires_at_ms: what is in flight. At cost n there are n members, ``lease``, ``lease US 2``, ..."""
    return f"{root}units:{endpoint}"


def leased(root: str) -> str:
    """SET: the endpoints that may have units."""
    return f"{root}leased"


def waiting(root: str, line: str) -> str:
    """ZSET message or lease id -> ``rank * 2^50 + place``: who stands in a line. Without expiry."""
    return f"{root}line:{line}"


def parked(root: str, line: str) -> str:
    """HASH message or lease id -> what is remembered of it until it is done. Without expiry."""
    return f"{root}parked:{line}"


def held_back(root: str) -> str:
    """ZSET ``line US id`` -> not_before_ms: who stands beside a line for a while. Without expiry."""
    return f"{root}held_back"


def deadlines(root: str, queue: str) -> str:
    """ZSET ``line US id`` -> deadline_ms: when waiting messages of a queue are too old. Without expiry."""
    return f"{root}deadlines:{queue}"


def alive(root: str) -> str:
    """ZSET process -> alive_until_ms."""
    return f"{root}alive"


def processes(root: str) -> str:
    """HASH process -> its worker and the queues that it consumes."""
    return f"{root}processes"


def consumers(root: str, queue: str) -> str:
    """SET: the processes that consume a queue."""
    return f"{root}consumers:{queue}"


def published(root: str) -> str:
    """HASH process -> the configuration that it published."""
    return f"{root}published"


def wake(root: str, process: str) -> str:
    """CHANNEL: tells a process that a caller of its own has got a permit (its lease id), or that it can take ("")."""
    return f"{root}wake:{process}"


def nonce(root: str, nonce: str) -> str:
    """STRING that expires: left through one client and read through another, to prove that they share a database."""
    return f"{root}nonce:{nonce}"
