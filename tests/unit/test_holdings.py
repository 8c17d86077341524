"""What a process holds: begun or given back, never both; and what its beats must name."""

from __future__ import annotations

import pytest

from guard_middleware.core.commands import Ask, Finish, Message, Reply, Status, Take
from guard_middleware.core.outcome import Outcome
from guard_middleware.holdings import Holdings


@pytest.fixture
def holdings():
    """The holdings of one worker process."""
    return Holdings("process", "worker")


def take(lease="take:0", generation=0):
    """A message that comes with a lease."""
    return Take(
        lease=lease, endpoint="chat", home="chat", generation=generation, probe=False, expires_at_ms=0, rank=1, cost=1,
        queue=("dramatiq", "default"), message_id="m", payload=b"",
    )  # fmt: skip


def test_taken_message_is_begun_or_given_back_never_both(holdings):
    """Whichever comes first decides: what was given back cannot begin, what has begun is not given back."""
    first, second = holdings.taken(take("a"), 0.0), holdings.taken(take("b"), 0.0)
    assert holdings.begin(first, fresh_s=1e9) is True
    assert holdings.give_back(older_than_s=0) == ("b",)
    assert holdings.begin(second, fresh_s=1e9) is None
    assert holdings.give_back(older_than_s=0) == ()


def test_taken_message_asks_first_if_its_lease_is_old_lost_or_of_another_generation(holdings):
    """Begin without asking only on a lease that was confirmed lately, in the present generation."""
    old = holdings.taken(take("old"), 0.0)
    assert holdings.begin(old, fresh_s=0) is False
    of_before = holdings.taken(take("of before", generation=1), 0.0)
    holdings.taken(take("of now", generation=2), 0.0)
    assert holdings.begin(of_before, fresh_s=1e9) is False
    lost = holdings.taken(take("lost", generation=2), 0.0)
    holdings.renewed(("lost",), ("lost",), 0.0)
    assert holdings.begin(lost, fresh_s=1e9) is False


def test_lease_that_is_still_to_be_finished_is_named_by_the_beats(holdings):
    """A lease that nobody names goes back at once, message and all: not while its end is on its way."""
    ask = Ask(
        process="process", lease="a", endpoint="chat", rank=1,
        message=Message(namespace="dramatiq", queue="default", id="m", worker="worker"),
    )  # fmt: skip
    holdings.admitted(ask, Reply(status=Status.ADMITTED, endpoint="chat"), 0.0)
    assert holdings.has_message("default", "m")
    finish = Finish(process="process", lease="a", outcome=Outcome.IGNORED)
    holdings.send_later(finish)
    holdings.drop("a")
    assert not holdings.has_message("default", "m")
    assert holdings.named() == (("a",), ())
    holdings.sent(finish)
    assert holdings.named() == ((), ())


def test_message_of_an_answer_that_is_given_again_is_not_run_again_once_it_has_ended(holdings):
    """I11: a repeated finish names what its first answer brought, which another thread may have ended meanwhile."""
    assert holdings.is_new("a")
    holdings.taken(take("a"), 0.0)
    assert not holdings.is_new("a")
    holdings.drop("a")
    assert not holdings.is_new("a")


def test_messages_that_need_a_thread_are_those_taken_and_not_begun_and_those_that_may_come(holdings):
    """A call that runs has its thread, and so has a message whose thread asks whether it may begin."""
    holdings.expect("finish", 1)
    assert (holdings.coming(), holdings.in_hand()) == (1, 1)
    first, second = holdings.taken(take("a"), 0.0), holdings.taken(take("b"), 0.0)
    holdings.settled("finish")
    assert (holdings.coming(), holdings.in_hand()) == (0, 2)
    holdings.begin(first, fresh_s=1e9)
    assert holdings.in_hand() == 1
    holdings.begin(second, fresh_s=0)
    assert holdings.in_hand() == 0
