"""The scripts do what the executable rule says: any play gives the same replies and the same state on both."""

from __future__ import annotations

import random

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from guard_middleware.testing.valkey import EmbeddedValkey
from tests.property.play import Play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def client():
    """A server that these tests may flush."""
    with EmbeddedValkey() as server, redis.Redis.from_url(server.url) as client:
        yield client


def perform(client, steps):
    """Play one game on an empty server; what was said is shown if it ends badly."""
    client.flushdb()
    play = Play(client, "agree")
    try:
        for eight in steps:
            play.step(eight)
    except Exception as exc:
        for said in play.log[-40:]:
            exc.add_note(str(said))
        raise
    finally:
        play.twin.close()


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(steps=st.lists(st.binary(min_size=8, max_size=8), max_size=60))
def test_scripts_agree_with_the_rule_in_any_play(client, steps):
    """Replies, leases, lines, records, breakers, and the broker's own keys are the same after every command."""
    perform(client, steps)


@pytest.mark.parametrize("seed", range(8))
def test_scripts_agree_with_the_rule_in_long_plays(client, seed):
    """What only comes of a long history: escalation, ageing, tombstones that ended, a rising revision."""
    chance = random.Random(seed)
    perform(client, (chance.randbytes(8) for _ in range(400)))
