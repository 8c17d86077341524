"""The names of the guard's keys: one function per key, with its type and what it holds.

The scripts derive the same names from the root; this is where people and tests read them. A `line` is
``endpoint US namespace US queue``, a `queue` is ``namespace US queue``, with `SEPARATOR` as US; callers stand in a
line without namespace and queue. Records are numbers (as big-endian doubles) that are followed by text: their formats
stand in ``lua/include/state.lua``. Tables are packed with MessagePack.
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

    - ``clock``: the time of the last command, ``due`` (never later than the first instant that the sweep has to look
      at), the counters of places and takes, the end of the epoch's hold, for how long the store was away, the first
      instant in `held_back`; the rules in force; the epoch.
    - ``endpoint:<endpoint>``: what was measured of it, an operator's override and pause, its breaker, and the numbers
      of the configuration that applies; ``texts:<endpoint>``: its group, its fallback, and who shares its budget.
    - ``endpoints``: ids of those that are configured; ``leased``: of those that may have units; ``budgets``; ``left``:
      endpoints that count in a GPU group that they have left.
    - ``process:<process>``: its idle threads, and whether a unit is held for it; ``said:<process>``: its worker, the
      queues that it consumes, and its last two beats.
    - ``lines``: the lines in which somebody stands; ``deadlines``: queue -> never later than its first deadline.
    - ``slot:<endpoint> US <rank>``: the last slot that was reserved.
    """
    return f"{root}state"


def lease(root: str, lease: str) -> str:
    """STRING: the live lease of that id; from its end on its tombstone, which expires."""
    return f"{root}lease:{lease}"


def units(root: str, endpoint: str) -> str:
    """ZSET lease -> expires_at_ms: what is in flight. At cost n there are n members, ``lease``, ``lease US 2``, ..."""
    return f"{root}units:{endpoint}"


def nested(root: str) -> str:
    """ZSET lease -> expires_at_ms: the leases that use the units of another one, their ``parent``."""
    return f"{root}nested"


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
