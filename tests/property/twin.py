"""The executable rule and the scripts on a real server, given the same commands: replies and states are compared.

`Twin` owns both sides and the broker beneath them. `state_of` reads the rule's state, and `Stored` what the scripts
keep, into the same plain form; what only the scripts keep (lower bounds, indexes) is checked against the rest.
"""

from __future__ import annotations

import struct
from collections import defaultdict
from dataclasses import asdict, replace

from guard_middleware.core.breaker import Breaker
from guard_middleware.core.reference import Reference
from guard_middleware.store import keys
from guard_middleware.store.redis import RedisStore

US = keys.SEPARATOR

DUMP = """
local found = {}
for _, key in ipairs(redis.call("KEYS", "*")) do
  local kind = redis.call("TYPE", key).ok
  local value
  if kind == "string" then value = redis.call("GET", key)
  elseif kind == "list" then value = redis.call("LRANGE", key, 0, -1)
  elseif kind == "set" then value = redis.call("SMEMBERS", key)
  elseif kind == "hash" then value = redis.call("HGETALL", key)
  else value = redis.call("ZRANGE", key, 0, -1, "WITHSCORES") end
  found[#found + 1] = { key, kind, value, redis.call("PTTL", key) }
end
return found
"""


RULES = "lease_ms heartbeat_ms hold_ms ageing_ms max_overloads reserve_fraction probe_deadline_ms retry_after_cap_ms"
CLOCK = f"last_run due places takes epoch_until away held_at {RULES}"
SPEC = "ceiling floor reserve breaker fail_threshold base_cooldown_ms max_cooldown_ms backoff_factor"
ENDPOINT = (
    "mean background_at override paused generation open_until_ms trips fails probe_until_ms ramp "
    f"named {SPEC} budget floors"
)
LEASE = "rank cost place deadline_ms started_at_ms generation hold"
PARKED = "rank cost place overloads denials overloaded deadline_ms"


def unpack(data):
    """Read one MessagePack value, as far as the scripts write them."""
    value, end = _unpack(data, 0)
    assert end == len(data), data
    return value


_SIZED = {0xCC: ">B", 0xCD: ">H", 0xCE: ">I", 0xCF: ">Q", 0xD0: ">b", 0xD1: ">h", 0xD2: ">i", 0xD3: ">q"}
_SIZED |= {0xCA: ">f", 0xCB: ">d"}
_LENGTHS = {0xC4: (1, "s"), 0xD9: (1, "s"), 0xDA: (2, "s"), 0xDB: (4, "s"), 0xDC: (2, "a"), 0xDD: (4, "a")}
_LENGTHS |= {0xDE: (2, "m"), 0xDF: (4, "m")}


def _unpack(data, at):
    head = data[at]
    at += 1
    if head < 0x80:
        return head, at
    if head >= 0xE0:
        return head - 0x100, at
    if head in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[head], at
    if head in _SIZED:
        size = struct.calcsize(_SIZED[head])
        return struct.unpack(_SIZED[head], data[at : at + size])[0], at + size
    if head in _LENGTHS:
        size, kind = _LENGTHS[head]
        length = int.from_bytes(data[at : at + size], "big")
        at += size
    else:
        kind, length = ("m", head & 0x0F) if head < 0x90 else ("a", head & 0x0F) if head < 0xA0 else ("s", head & 0x1F)
    if kind == "s":
        return data[at : at + length].decode(), at + length
    values = []
    for _ in range(length * (2 if kind == "m" else 1)):
        value, at = _unpack(data, at)
        values.append(value)
    return (values if kind == "a" else dict(zip(values[::2], values[1::2], strict=True))), at


def numbers(names, packed):
    """Read the numbers that a record begins with, by name, and what comes after them."""
    names = names.split()
    size = 8 * len(names)
    return dict(zip(names, _whole(struct.unpack(f">{len(names)}d", packed[:size])), strict=True)), packed[size:]


def _whole(values):
    return [int(value) if value == value // 1 and abs(value) < 1 << 62 else value for value in values]


def _pairs(flat):
    return zip(flat[::2], flat[1::2], strict=True)


def _rows(state, broker, now):
    """What is true of the rule's state beside its plain tables."""
    return {
        "leases": {
            lease_id: {
                **{name: value for name, value in asdict(lease).items() if name != "message"},
                "message": None if lease.message is None else asdict(lease.message),
            }
            for lease_id, lease in state.leases.items()
        },
        "tombstones": {
            lease_id: (int(one.status), one.until_ms, one.reason, one.retry_after_ms, one.takes)
            for lease_id, one in state.tombstones.items()
            if one.until_ms > now
        },
        "queues": {queue: list(ids) for queue, ids in broker.queues.items() if ids},
        "payloads": {queue: dict(found) for queue, found in broker.payloads.items() if found},
        "acks": {where: set(ids) for where, ids in broker.acks.items() if ids},
    }


def state_of(reference, now):
    """The rule's state in a plain form, without the tombstones that time has ended."""
    state = reference.state
    return {
        "rules": asdict(state.rules),
        "epoch": (state.epoch, state.epoch_until_ms if state.epoch else 0),
        "counters": (state.last_run_ms, state.places, state.takes),
        "published": set(state.published),
        "specs": {endpoint: asdict(spec) for endpoint, spec in state.specs.items()},
        "budgets": dict(state.budgets),
        "left": set(state.left),
        "overrides": dict(state.overrides),
        "paused": set(state.paused),
        "breakers": {endpoint: asdict(one) for endpoint, one in state.breakers.items() if one != Breaker()},
        "means": dict(state.means),
        "background_at": dict(state.background_at),
        "slots": dict(state.slots),
        "lines": {
            line: [(waiter, key) for waiter, key in sorted(waiters.items(), key=lambda one: (one[1], one[0]))]
            for line, waiters in state.lines.items()
        },
        "held_back": dict(state.held_back),
        "parked": {key: asdict(one) for key, one in state.parked.items()},
        "processes": {process: {**asdict(one), "queues": set(one.queues)} for process, one in state.processes.items()},
        **_rows(state, reference.broker, now),
    }


class Stored:
    """What the scripts keep, in the form of `state_of`; reading it checks what is kept twice."""

    def __init__(self, dump, root, namespaces, now):
        self.now, self.root = now, root
        self.guard, self.broker = {}, {}
        for key, _, value, ttl in dump:
            name = key.decode()
            if name.startswith(root):
                self.guard[name.removeprefix(root)] = value
                kind = name.removeprefix(root).partition(":")[0]
                assert ttl == -1 or kind == "lease", f"{name} would expire"
            else:
                self.broker[name] = value
        self.facts = {field.decode(): value for field, value in _pairs(self.guard.get("state", []))}
        self.namespaces = namespaces
        self.clock, self.epoch = numbers(CLOCK, self.facts["clock"])
        self.endpoints = {}
        for endpoint, packed in self.family("endpoint:").items():
            one, probe = numbers(ENDPOINT, packed)
            self.endpoints[endpoint] = one | {"probe": probe.decode()}

    def table(self, field):
        return unpack(self.facts[field]) if field in self.facts else None

    def family(self, prefix):
        """Facts of one kind, by the rest of their names."""
        return {field.removeprefix(prefix): value for field, value in self.facts.items() if field.startswith(prefix)}

    def kind(self, prefix):
        return {name.removeprefix(prefix): value for name, value in self.guard.items() if name.startswith(prefix)}

    def zset(self, name):
        return {member.decode(): int(float(score)) for member, score in _pairs(self.guard.get(name, []))}

    def state(self):
        lines = self.lines()
        held_back = {self.whereabouts(member): at_ms for member, at_ms in self.zset("held_back").items()}
        parked = {
            (self.line(line), waiter.decode()): self.parked(packed)
            for line, flat in self.kind("parked:").items()
            for waiter, packed in _pairs(flat)
        }
        leases, tombstones = self.leases()
        self.check_bounds(lines, held_back, parked, leases)
        return {
            "rules": {name: self.clock[name] for name in RULES.split()},
            "epoch": (self.epoch.decode(), self.clock["epoch_until"]),
            "counters": tuple(self.clock[name] for name in ("last_run", "places", "takes")),
            "published": {process.decode() for process, _ in _pairs(self.guard.get("published", []))},
            "specs": self.specs(),
            "budgets": self.table("budgets") or {},
            "left": {(one["id"], one["group"]) for one in self.table("left") or []},
            "overrides": {name: one["override"] for name, one in self.endpoints.items() if one["override"] >= 0},
            "paused": {name for name, one in self.endpoints.items() if one["paused"]},
            "breakers": self.breakers(),
            "means": {name: one["mean"] for name, one in self.endpoints.items() if one["mean"]},
            "background_at": {
                name: one["background_at"] for name, one in self.endpoints.items() if one["background_at"]
            },
            "slots": {self.slot(name): int(value) for name, value in self.family("slot:").items()},
            "lines": lines,
            "held_back": held_back,
            "parked": parked,
            "processes": self.processes(),
            "leases": leases,
            "tombstones": tombstones,
            **self.brokers(),
        }

    def breakers(self):
        names = asdict(Breaker())
        found = {endpoint: {name: one[name] for name in names} for endpoint, one in self.endpoints.items()}
        return {endpoint: one for endpoint, one in found.items() if one != names}

    def parked(self, packed):
        one, process = numbers(PARKED, packed)
        return one | {"overloaded": one["overloaded"] == 1, "process": process.decode()}

    def slot(self, name):
        endpoint, rank = name.rsplit(US, 1)
        return endpoint, int(rank)

    def line(self, name):
        return tuple(name.split(US))

    def whereabouts(self, member):
        *line, waiter = member.split(US)
        return tuple(line), waiter

    def lines(self):
        found = {}
        for name, flat in self.kind("line:").items():
            keys_of = [(member.decode(), int(float(score))) for member, score in _pairs(flat)]
            found[self.line(name)] = [(waiter, (key >> 50, key & (1 << 50) - 1)) for waiter, key in keys_of]
        registered = [self.line(name) for name in self.table("lines") or []]
        assert len(registered) == len(set(registered))
        assert set(registered) == set(found)
        return found

    def specs(self):
        found = {}
        for endpoint, one in self.endpoints.items():
            if not one["named"]:
                continue
            texts = self.table(f"texts:{endpoint}")
            assert one["budget"] == (self.table("budgets") or {}).get(texts["group"], -1)
            assert one["floors"] == sum(other["floor"] for other in texts["others"])
            spec = {name: one[name] for name in SPEC.split()}
            spec["reserve"] = None if spec["reserve"] < 0 else spec["reserve"]
            spec["breaker"] = spec["breaker"] == 1
            found[endpoint] = spec | {"id": endpoint, "group": texts["group"], "fallback": texts["fallback"]}
        assert set(found) == set(self.family("texts:"))
        assert sorted(found) == (self.table("endpoints") or [])
        return found

    def leases(self):
        expiries, units = {}, defaultdict(int)
        for endpoint in self.kind("units:"):
            for unit, at_ms in self.zset(f"units:{endpoint}").items():
                lease_id = unit.partition(US)[0]
                assert expiries.setdefault(lease_id, (endpoint, at_ms)) == (endpoint, at_ms)
                units[lease_id] += 1
        live, tombstones = {}, {}
        for lease_id, packed in self.kind("lease:").items():
            if packed.startswith(b"L"):
                one, texts = numbers(LEASE, packed[1:])
                texts = texts.decode().split(US)
                live[lease_id] = one | {"hold": one["hold"] == 1}
                live[lease_id] |= dict(zip(("endpoint", "home", "process", "via"), texts[:4], strict=True))
                names = ("namespace", "queue", "id", "worker")
                live[lease_id]["message"] = dict(zip(names, texts[4:8], strict=True)) if texts[6] else None
                live[lease_id]["parent"] = texts[8]
            else:
                one, texts = numbers("status until away retry_after", packed[1:])
                until = one["until"] + self.clock["away"] - one["away"]
                reason, *takes = texts.decode().split(US)
                if until > self.now:
                    tombstones[lease_id] = (one["status"], until, reason, one["retry_after"], tuple(takes))
        assert set(live) == set(expiries), "a lease's record and its units go together"
        assert {lease_id: one["cost"] for lease_id, one in live.items()} == dict(units)
        assert {endpoint for endpoint, _ in expiries.values()} <= set(self.table("leased") or [])
        assert set(self.zset("nested")) == {lease_id for lease_id, one in live.items() if one["parent"]}
        held = {one["process"] for one in live.values() if one["hold"]}
        assert held == {process for process, one in self.reported().items() if one["held"]}
        for lease_id, one in live.items():
            assert expiries[lease_id][0] == one["endpoint"]
            one["expires_at_ms"] = expiries[lease_id][1]
        return live, tombstones

    def reported(self):
        return {process: numbers("idle held", packed)[0] for process, packed in self.family("process:").items()}

    def processes(self):
        alive = self.zset("alive")
        said = {process: unpack(packed) for process, packed in self.family("said:").items()}
        found = {}
        for process, known in self.reported().items():
            one = said.get(
                process, {"queues": {}, "worker": "", "beat": "", "number": 0, "beaten_at_ms": 0, "before_ms": 0}
            )
            queues = {tuple(full.split(US)) for full in one["queues"]}
            found[process] = {**one, "queues": queues, "idle": known["idle"], "alive_until_ms": alive[process]}
        assert set(alive) == set(found) >= set(said)
        consumers = {
            (process.decode(), tuple(full.split(US)))
            for full, members in self.kind("consumers:").items()
            for process in members
        }
        assert consumers == {(process, queue) for process, one in found.items() for queue in one["queues"]}
        return found

    def check_bounds(self, lines, held_back, parked, leases):
        """What is kept to save a look elsewhere is never later than what is to be seen there."""
        instants = [lease["expires_at_ms"] for lease in leases.values()]
        instants += [*self.zset("alive").values(), *held_back.values()]
        assert self.clock["due"] <= min(instants, default=float("inf"))
        assert self.clock["held_at"] == min(held_back.values(), default=float("inf"))
        standing = {(line, waiter) for line, waiters in lines.items() for waiter, _ in waiters} | set(held_back)
        assert standing <= set(parked)
        due = {key: parked[key]["deadline_ms"] for key in standing if parked[key]["deadline_ms"]}
        listed = {}
        for full in self.kind("deadlines:"):
            found = {self.whereabouts(one): at_ms for one, at_ms in self.zset(f"deadlines:{full}").items()}
            assert all(US.join(line[1:]) == full for line, _ in found)
            assert (self.table("deadlines") or {}).get(full, 1 << 60) <= min(found.values())
            listed |= found
        assert listed == due

    def brokers(self):
        queues, payloads, acks = {}, {}, {}
        for name, value in self.broker.items():
            namespace, _, rest = name.partition(":")
            assert namespace in self.namespaces, f"{name} is nobody's"
            if rest.endswith(".msgs"):
                payloads[namespace, rest.removesuffix(".msgs")] = {one.decode(): two for one, two in _pairs(value)}
            elif rest.startswith("__acks__."):
                worker, queue = rest.removeprefix("__acks__.").split(".")
                acks[namespace, worker, queue] = {one.decode() for one in value}
            else:
                queues[namespace, rest] = [one.decode() for one in value]
        return {"queues": queues, "payloads": payloads, "acks": acks}


class Twin:
    """Both sides, at one instant of a clock that moves only when told."""

    def __init__(self, client, namespace, *, namespaces, now_ms=1_700_000_000_000):
        self.client, self.namespaces = client, namespaces
        self.store = RedisStore(client, namespace)
        self.root = keys.root(namespace)
        self.reference = Reference()
        self.now_ms = now_ms
        self.dump = client.register_script(DUMP)

    def close(self):
        self.store.close()

    def ask(self, command):
        """Give one command to both sides.

        Returns:
            Their reply, which is the same.
        """
        verb = type(command).__name__.lower().replace("ask", "admit")
        self.store.set_clock(self.now_ms)
        expected = getattr(self.reference, verb)(command, self.now_ms)
        reply = getattr(self.store, verb)(command)
        assert reply == expected, f"replies to {command} differ:\n the scripts {reply}\n the rule    {expected}"
        return reply

    def compare(self):
        """Hold the two states, and the two views of them, against each other. Returns the state."""
        expected, stored = state_of(self.reference, self.now_ms), self.stored().state()
        for part, value in expected.items():
            assert stored[part] == value, f"{part} differ:\n the scripts {stored[part]}\n the rule    {value}"
        self.store.set_clock(self.now_ms)
        assert self.store.snapshot() == replace(self.reference.snapshot(self.now_ms))
        return stored

    def stored(self):
        return Stored(self.dump(), self.root, self.namespaces, self.now_ms)

    # -- the broker beneath ------------------------------------------------------------------------------------------

    def enqueue(self, queue, message_id, payload):
        broker = self.reference.broker
        broker.queues.setdefault(queue, []).append(message_id)
        broker.payloads.setdefault(queue, {})[message_id] = payload
        name = ":".join(queue)
        self.client.hset(f"{name}.msgs", message_id, payload)
        self.client.rpush(name, message_id)

    def fetch(self, queue, worker):
        """Move the first message of a queue into a worker's ack set, as Dramatiq does. Returns its id."""
        waiting = self.reference.broker.queues.get(queue)
        if not waiting:
            return None
        message_id = waiting.pop(0)
        self.reference.broker.acks.setdefault((queue[0], worker, queue[1]), set()).add(message_id)
        assert self.client.lpop(":".join(queue)) == message_id.encode()
        self.client.sadd(f"{queue[0]}:__acks__.{worker}.{queue[1]}", message_id)
        return message_id

    def ack(self, message):
        """Done, if this worker still has it."""
        acks = self.reference.broker.ack_set(message)
        if message.id not in acks:
            return False
        acks.remove(message.id)
        self.client.srem(f"{message.namespace}:__acks__.{message.worker}.{message.queue}", message.id)
        self.flush((message.namespace, message.queue), message.id)
        return True

    def flush(self, queue, message_id):
        """Delete a payload, as a flush does."""
        self.reference.broker.payloads.get(queue, {}).pop(message_id, None)
        self.client.hdel(f"{':'.join(queue)}.msgs", message_id)

    def requeue(self, message):
        """Dramatiq's maintenance: what a silent worker has not acked goes back to its queue."""
        acks = self.reference.broker.ack_set(message)
        if message.id in acks:
            acks.remove(message.id)
            self.reference.broker.queues.setdefault((message.namespace, message.queue), []).append(message.id)
            self.client.srem(f"{message.namespace}:__acks__.{message.worker}.{message.queue}", message.id)
            self.client.rpush(f"{message.namespace}:{message.queue}", message.id)
