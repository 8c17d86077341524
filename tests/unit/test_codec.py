"""Verbs become the arguments that the scripts' headers name, and replies become values or one error."""

from __future__ import annotations

import pytest

from guard_middleware.core.commands import (
    Action,
    Ask,
    Beat,
    Configure,
    Finish,
    Held,
    Message,
    Operate,
    ParkAs,
    Status,
)
from guard_middleware.core.outcome import Outcome
from guard_middleware.core.values import EndpointSpec, Published, Rules
from guard_middleware.errors import StoreUnavailable
from guard_middleware.store import codec, scripts

MESSAGE = Message(namespace="dramatiq", queue="q", id="m", worker="w")
FIXED = [Status.ADMITTED, b"epoch", 7, 1, 9_000, 3, b"bge-m3", 1, b"", 0, 2]


def named(call):
    """The arguments of a call by the names in its script's header, those of the last name in a list."""
    names = scripts.load(call.script).args[1:]
    assert names, "the first one is the clock, which the store adds"
    fixed = [name for name in names if not name.endswith("...")]
    return dict(zip(fixed, call.args, strict=False)) | {"...": call.args[len(fixed) :]}


def test_admit_goes_out_in_the_order_of_its_header():
    """Every field of an ask has its place."""
    ask = Ask(
        process="p", lease="l", endpoint="e", rank=3, cost=2, message=MESSAGE, take=1, idle=4, deadline_ms=99,
        confirm=True, wait=True, slot=True,
    )  # fmt: skip
    call = codec.encode_admit(ask)
    assert (call.script, call.keys) == ("admit", ("dramatiq",))
    assert named(call) == {
        "process": "p", "lease": "l", "endpoint": "e", "rank": 3, "cost": 2, "take": 1, "idle": 4, "deadline_ms": 99,
        "flags": "csw", "queue": "q", "message": "m", "worker": "w", "...": [],
    }  # fmt: skip


def test_admit_of_a_caller_names_no_message():
    """The script tells callers by what is missing."""
    call = codec.encode_admit(Ask(process="p", lease="l", endpoint="e", rank=1, parent="outer"))
    assert call.keys == ()
    assert {"message", "worker"}.isdisjoint(named(call))
    assert call.args[-1] == "outer"


def test_finish_goes_out_in_the_order_of_its_header():
    """Every field of a finish has its place."""
    finish = Finish(
        process="p", lease="l", outcome=Outcome.OVERLOAD, retry_after_ms=5, home="e", message=MESSAGE,
        park=ParkAs.OVERLOADED, take=1, idle=2,
    )  # fmt: skip
    call = codec.encode_finish(finish)
    assert (call.script, call.keys) == ("finish", ("dramatiq",))
    assert named(call) == {
        "process": "p", "lease": "l", "outcome": "overload", "retry_after_ms": 5, "home": "e", "park": "overloaded",
        "take": 1, "idle": 2, "queue": "q", "message": "m", "worker": "w", "...": [],
    }  # fmt: skip


def test_beat_goes_out_as_lists_with_their_lengths():
    """Nothing in it is bounded, so nothing has a number of its own."""
    held = Held(lease="h", endpoint="e", home="f", rank=1, cost=2, generation=3, message=MESSAGE)
    beat = Beat(
        process="p", id="b", number=7, take=1, idle=2, worker="w", leaving=True, queues=(("ns", "q"),), leases=("l1", "l2"),
        outstanding=("c",), give_back=(), asserts=(held,),
    )  # fmt: skip
    found = named(codec.encode_beat(beat))
    assert found.pop("...") == [
        1, "ns", "q", 2, "l1", "l2", 1, "c", 0, 1, "h", "e", "f", 1, 2, 3, "dramatiq", "q", "m", "w",
    ]  # fmt: skip
    assert found == {"process": "p", "id": "b", "number": 7, "take": 1, "idle": 2, "worker": "w", "leaving": 1}


def test_configure_keeps_fractions_exact():
    """They go out as the shortest text that is read back as the same number."""
    published = Published(
        endpoints=(EndpointSpec(id="e", ceiling=4, backoff_factor=1.1),),
        budgets={"gpu": 6},
        rules=Rules(reserve_fraction=0.1 + 0.2),
        revision=3,
    )
    found = named(codec.encode_configure(Configure(process="p", published=published, epoch="x")))
    assert found.pop("...") == [
        15_000, 2_000, 50, 60_000, 3, "0.30000000000000004", 30_000, 600_000,
        1, "e", 4, 0, "", "", "", 1, 1, 500, 30_000, "1.1",
        1, "gpu", 6,
    ]  # fmt: skip
    assert found == {"process": "p", "first_start_hold_ms": -1, "epoch": "x", "revision": 3}


def test_operate_goes_out_in_the_order_of_its_header():
    """Every field of an operation has its place."""
    found = named(codec.encode_operate(Operate(action=Action.DRAIN, value=5, queue=("ns", "q"), force=True)))
    assert found == {
        "action": "drain", "target": "", "value": 5, "namespace": "ns", "queue": "q", "force": 1, "...": [],
    }  # fmt: skip


def test_full_reply_is_read():
    """Ids come back as text, payloads as bytes."""
    take = [b"t:1", b"e", b"f", 4, 1, 8_000, 3, 2, b"ns", b"q", b"m", b"\xff\x00"]
    reply = codec.decode_reply([*FIXED, 1, b"gone", 0, 2, b"p", b"q", 12, *take])
    assert (reply.status, reply.epoch, reply.next_ms, reply.waiting, reply.count) == (0, "epoch", 7, 1, 2)
    assert (reply.endpoint, reply.generation, reply.probe, reply.expires_at_ms) == ("bge-m3", 3, True, 9_000)
    assert (reply.lost, reply.stolen, reply.woken) == (("gone",), (), ("p", "q"))
    (found,) = reply.takes
    assert (found.lease, found.queue, found.payload, found.probe) == ("t:1", ("ns", "q"), b"\xff\x00", True)


@pytest.mark.parametrize("length", range(1, 12))
def test_what_a_reply_leaves_out_is_zero_or_empty(length):
    """The common ones are short."""
    whole, short = codec.decode_reply(FIXED), codec.decode_reply(FIXED[:length])
    assert short.status == whole.status
    assert short.epoch == (whole.epoch if length > 1 else "")
    assert short.waiting == (1 if length > 3 else -1)
    assert short.probe == (length > 7)
    assert short.takes == short.woken == ()


@pytest.mark.parametrize(
    "raw",
    [
        None,
        1,
        b"OK",
        [],
        [99, b"", -1, 0],
        [0, None, -1, 0],
        [*FIXED, 1],
        [*FIXED, 0, 0, 0, 1, b"half a take"],
        [*FIXED, 0, 0, 0, 0, b"more"],
        [*FIXED[:1], b"\xff\xfe", *FIXED[2:]],
    ],
    ids=repr,
)
def test_reply_that_cannot_be_read_means_the_store_is_not_there(raw):
    """I12: closed on trouble."""
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        codec.decode_reply(raw)


@pytest.mark.parametrize("raw", [None, [], [9, 1, [], [], [], []], [9, 1, [[b"e"]], [], [], [], []]], ids=repr)
def test_snapshot_that_cannot_be_read_means_the_store_is_not_there(raw):
    """I12."""
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        codec.decode_snapshot(raw)
