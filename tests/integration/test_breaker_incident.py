"""One incident, many failures: it trips once, costs the server little, and what began before it changes nothing."""

from __future__ import annotations

from contextlib import closing

import pytest
from dramatiq.message import Message
from dramatiq.results.backends import RedisBackend

from guard_middleware.testing.model_server import Fault, HostMemory, Step
from guard_middleware.testing.model_server.config import BUSY_TEXT
from tests.support.deployment import wait_until
from tests.support.outage import (
    PROMPT_S,
    START_S,
    calls_of,
    check_invariants,
    check_one_at_a_time,
    check_pauses,
    check_ramp,
    cooldowns,
    looking_at,
    outage_in,
    series,
    serving,
    start_groups,
)

pytestmark = pytest.mark.slow

ONE_EACH = {"APP_MIN_BACKOFF_MS": "1000"}
"""No retry comes back before the breaker has tripped. With as many messages fetched as there are threads, and as many
sent as the ceiling allows, the calls in flight are exactly those: nothing follows the first failures below a threshold.
"""
READY_S = 5.1
ENGINE_DEAD = {"object": "error", "message": "EngineDeadError: EngineCore encountered an issue", "code": 500}


def test_a_burst_of_1319_calls_never_reaches_a_server_that_refuses_the_17th(deploy):
    """With the true ceiling the server is never over 8, refuses nobody, and nobody waits at the price of a retry."""
    deployment = deploy(**serving("chat", ceiling=8, base_ms=5, refuse_above=16))
    deployment.start(processes=4, threads=8, wait=False).wait_ready(4, START_S)
    deployment.server.script([Step(calls=(1, 8), fault=Fault.SERVE, ms=500)])
    ids = deployment.send("orchestrate", 1319)
    deployment.wait_done(ids, 60)
    stats = deployment.server.stats()["chat"]
    assert stats.most_in_flight == 8
    assert stats.statuses == {"200": 1319}
    check_invariants(deployment, 8)


@pytest.mark.parametrize("status", [503, 500])
def test_a_ceiling_set_too_high_costs_pauses_and_no_message(deploy, measured, status):
    """A ceiling of 64 before a server that refuses the 17th: the busy text trips the breaker, whatever its status."""
    deployment = deploy(
        **serving("chat", ceiling=64, base_ms=20, refuse_above=16, refuse_status=status, refuse_text=BUSY_TEXT),
        env=cooldowns(0.05, 0.1),
    )
    start_groups(deployment, 2, processes=2, threads=8)
    deployment.server.script([Step(calls=(1, 16), fault=Fault.SERVE, ms=1_500)])
    ids = deployment.send("orchestrate", 300)
    deployment.wait_done(ids, 60)
    with looking_at(deployment) as look:
        measured("generation", look().generation)
        assert look().generation >= 2, "it tripped and closed"
    statuses = deployment.server.stats()["chat"].statuses
    measured("statuses", statuses)
    assert statuses["200"] == len(ids)
    assert set(statuses) == {"200", str(status)}
    check_invariants(deployment, 64)


def test_an_engine_that_dies_in_four_ways_at_once_is_one_incident(deploy, measured):
    """500, dropped, hanging, then refused, then loading: one first trip, six permits back, one probe, then a ramp."""
    # Given six calls in flight, of which two get 500, two are cut and two hang; then a closed port for 2 s, then
    # "loading" for 2 s
    deployment = deploy(
        **serving("chat", ceiling=6, base_ms=20),
        env={**cooldowns(0.4, 3.2), "APP_IMPATIENT_CALLS": "6", "APP_PATIENCE_S": "1.5"},
    )
    start_groups(deployment, 3)
    deployment.server.script(
        [
            Step(calls=(1, 2), fault=Fault.STATUS, status=500, body=ENGINE_DEAD, after_ms=1_000),
            Step(calls=(3, 4), fault=Fault.DROP, after_ms=1_000),
            Step(calls=(5, 6), fault=Fault.HANG),
            Step(fault=Fault.REFUSE, from_s=1.1, to_s=3.1),
            Step(fault=Fault.STATUS, status=503, body="Loading model", from_s=3.1, to_s=READY_S),
        ],
        starts="first_call",
    )
    ids = deployment.send("orchestrate", 60)
    # When all six have failed, the last two by their client's time-out
    with looking_at(deployment) as look:
        deployment.server.wait_until(lambda stats: stats["chat"].in_flight == 6)
        deployment.server.wait_until(lambda stats: stats["chat"].in_flight == 0)
        # Then they were one incident: one trip, and perhaps one or two for refused probes, not six; no permit is left out
        wait_until(lambda: look().in_flight <= 1, 5, "six permits come back")
        assert 1 <= look().trips <= 3
    deployment.wait_done(ids, 30)
    # ...the server saw single probes only, and the first success came at the end of the pause that was then running
    calls = calls_of(deployment.server)
    ready_at = min(one.t_start for one in calls) + READY_S
    loading = [one for one in calls if one.status == 503]
    served = [one for one in calls if one.status == 200]
    measured("requests_while_loading", len(loading))
    measured("first_success_after_ready_s", round(served[0].t_start - ready_at, 3))
    check_one_at_a_time([*loading, served[0]])
    assert len(loading) <= 2
    assert served[0].t_start <= ready_at + 3.2 + PROMPT_S
    check_ramp(served[1:])
    assert len(served) == len(ids)
    check_invariants(deployment, 6)


def test_32_failures_of_8_processes_within_a_moment_are_one_trip(deploy, measured):
    """Threshold 3, 32 failures at once: one pause of 0.4 s; failed probes double it; after a success it begins anew."""
    # Given 32 calls in flight from 8 processes, which are all cut off, and then two probes that fail
    deployment = deploy(
        **serving("chat", ceiling=32, base_ms=20),
        host=HostMemory(dark_s=0, loading_s=0),
        env={**cooldowns(0.4, 48), "MODEL_BREAKER_FAIL_THRESHOLD": "3", **ONE_EACH, "dramatiq_queue_prefetch": "4"},
    )
    start_groups(deployment, 1, processes=8, threads=4)
    failing = {"fault": Fault.STATUS, "status": 503}
    deployment.server.script([Step(calls=(1, 32), fault=Fault.HANG), Step(calls=(33, 34), **failing)])
    deployment.send("orchestrate", 32)
    with looking_at(deployment) as look:
        deployment.server.wait_until(lambda stats: stats["chat"].in_flight == 32)
        deployment.server.kill_host()
        wait_until(lambda: look().generation, 5, "tripped", every_s=0.005)
        deployment.send("orchestrate", 68)
        deployment.wait_done(deployment.sent, 30)
        # Then the pauses grew by trips, not by failures
        outage = outage_in(calls_of(deployment.server), threshold=3)
        measured("pauses_s", outage.pauses())
        failed_within_s = max(one.t_end for one in outage.burst) - min(one.t_end for one in outage.burst)
        measured("failed_within_s", round(failed_within_s, 3))
        assert len(outage.burst) == 32
        check_pauses(outage.pauses(), series(0.4, 48, 3))
        check_one_at_a_time(outage.probes)
        check_ramp(outage.after)
        # ...and once the full limit was reached again, the next incident begins with the first pause
        wait_until(lambda: look().trips == 0, 5, "the escalation is forgotten")
    deployment.server.reset()
    deployment.server.script([Step(calls=(1, 3), **failing)])
    deployment.wait_done(deployment.send("orchestrate", 20), 20)
    again = outage_in(calls_of(deployment.server), threshold=3)
    check_pauses(again.pauses(), [0.4])
    # Two failures before each trip were their messages' own; nothing else cost a retry
    check_invariants(deployment, 32, retries=1)
    assert sum(entry["retries"] for entry in deployment.done()) == 4


def test_late_successes_do_not_end_a_pause(deploy, measured):
    """Six of ten calls fail, four succeed later: their results are delivered, and the pause of 3 s is kept."""
    # Given threshold 4 and ten calls in flight: four that succeed after 2 s, six that fail after 0.5 s; then 50 more
    deployment = deploy(
        **serving("chat", ceiling=10, base_ms=20),
        env={**cooldowns(3.0, 3.0), "MODEL_BREAKER_FAIL_THRESHOLD": "4", **ONE_EACH, "dramatiq_queue_prefetch": "6"},
    )
    start_groups(deployment, 2, threads=6)
    deployment.server.script(
        [
            Step(calls=(1, 4), fault=Fault.SERVE, ms=2_000),
            Step(calls=(5, 10), fault=Fault.STATUS, status=503, after_ms=500),
        ]
    )
    ids = deployment.send("answer", 4, args=(1,))
    deployment.server.wait_until(lambda stats: stats["chat"].in_flight == 4)
    ids += deployment.send("answer", 6, args=(1,))
    with looking_at(deployment) as look:
        wait_until(lambda: look().breaker == "open", 10, "tripped")
    ids += deployment.send("answer", 50, args=(1,))
    deployment.wait_done(ids, 20)
    # Then nobody was let in for 3 s after the fourth failure, although four successes came meanwhile
    calls = calls_of(deployment.server)
    outage = outage_in(calls, threshold=4)
    measured("pauses_s", outage.pauses())
    late = [one for one in outage.burst if one.status == 200]
    assert (len(outage.burst), len(late)) == (10, 4)
    assert all(outage.tripped_at < one.t_end < outage.probes[0].t_start for one in late)
    check_pauses(outage.pauses(), [3.0])
    check_ramp(outage.after)
    # ...and every result is there, also those of the four
    check_invariants(deployment, 10, retries=1)
    assert sum(entry["retries"] for entry in deployment.done()) == 3, "the failures before the breaker was open"
    backend = RedisBackend(url=deployment.redis_url, namespace=f"{deployment.broker_namespace}-results")
    with closing(backend.client):
        for one in ids:
            message = Message(
                queue_name="orchestration", actor_name="answer", args=(), kwargs={}, options={}, message_id=one
            )
            assert backend.get_result(message) == 2


def test_late_failures_neither_open_again_nor_disturb_the_probe(deploy, measured):
    """Failures of before the trip arrive while the probe runs, or after the close: not one more pause."""
    # Given two endpoints whose first call fails at once and trips the breaker for 0.3 s, while four others hang on
    deployment = deploy(**serving("half", "closed", ceiling=5, base_ms=20), env=cooldowns(0.3, 10))
    start_groups(deployment, 3, threads=6)
    # ...on the one they fail while the probe runs, on the other long after it has closed the breaker
    deployment.server.script(
        [
            Step(calls=(1, 4), fault=Fault.STATUS, status=503, after_ms=2_000),
            Step(calls=(5, 5), fault=Fault.STATUS, status=503),
            Step(endpoint="half", calls=(6, 6), fault=Fault.SERVE, ms=3_000),
        ]
    )
    half = deployment.send("orchestrate", 40, guard_model="half")
    closed = deployment.send("orchestrate", 40, guard_model="closed")
    with looking_at(deployment, "closed") as look:
        deployment.server.wait_until(lambda stats: stats["closed"].statuses.get("503", 0) == 5)
        wait_until(lambda: look().breaker == "closed", 5, "no second trip")
    deployment.wait_done([*half, *closed], 20)
    # Then each endpoint had one pause, and the probe's end alone decided
    for name in ("half", "closed"):
        outage = outage_in(calls_of(deployment.server, name))
        measured(f"pauses_s_{name}", outage.pauses())
        assert len(outage.burst) == 5
        check_pauses(outage.pauses(), [0.3])
        check_ramp(outage.after)
        with looking_at(deployment, name) as look:
            assert (look().generation, look().breaker) == (2, "closed"), "one trip, one close"
    half_calls = calls_of(deployment.server, "half")
    late = max((one for one in half_calls if one.status == 503), key=lambda one: one.t_end)
    probe = next(one for one in half_calls if one.number == 6)
    assert probe.t_start < late.t_end < probe.t_end, "failures did come while the probe ran"
    # What failed while the breaker was not closed cost nothing; four messages met a closed one, and were retried
    check_invariants(deployment, 5, "half", "closed", retries=1)
    retried = {entry["id"] for entry in deployment.done() if entry["retries"]}
    assert len(retried) == 4
    assert retried <= set(closed)
