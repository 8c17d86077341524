"""An outage from its first failure to the last message: pauses, probes, no storm, and nothing left behind.

Counted by the server's own log. Where its port is closed it sees nothing: there the workers write down each request
before they make it.
"""

from __future__ import annotations

from contextlib import closing
from itertools import pairwise

import pytest

from guard_middleware.testing.model_server import Fault, HostMemory, Step
from tests.support.deployment import wait_until
from tests.support.outage import (
    START_S,
    attempts_of,
    calls_of,
    check_invariants,
    check_one_at_a_time,
    check_pauses,
    check_ramp,
    cooldowns,
    generation_of,
    looking_at,
    outage_in,
    series,
    serving,
    start_groups,
)

pytestmark = pytest.mark.slow

BASE_S = 0.2
MOST_S = 1.6
"""The default series, 0.5, 1, 2 ... 30 s, in small: 0.2, 0.4, 0.8, 1.6, 1.6 ..."""
CEILING = 6


def guarded_chat(deploy, *, ceiling: int = CEILING, env: dict[str, str] | None = None):
    """A deployment with one endpoint and short cooldowns."""
    return deploy(
        **serving("chat", ceiling=ceiling, base_ms=20),
        host=HostMemory(dark_s=0, loading_s=0),
        env={**cooldowns(BASE_S, MOST_S), **(env or {})},
    )


@pytest.mark.parametrize(
    "fault",
    [
        {"fault": Fault.STATUS, "status": 503},
        {"fault": Fault.STATUS, "status": 429},
        {"fault": Fault.HANG},
    ],
    ids=["503", "429", "timeout"],
)
def test_an_ill_server_gets_one_request_per_pause_and_each_pause_is_twice_as_long(deploy, measured, fault):
    """After the trip the server sees single probes after 0.2, 0.4, 0.8, 1.6, 1.6 s, and then all messages once."""
    # Given 3 worker processes, and a server that fails the last of a full burst, and 4 probes after it
    failing = CEILING + 4
    hangs = fault["fault"] is Fault.HANG
    deployment = guarded_chat(deploy, env={"APP_IMPATIENT_CALLS": str(failing)} if hangs else {})
    start_groups(deployment, 3)
    deployment.server.script([Step(calls=(1, CEILING - 1), fault=Fault.HANG), Step(calls=(CEILING, failing), **fault)])
    # When 60 messages come all at once, and the rest of the burst fails right after the one that trips the breaker
    ids = deployment.send("orchestrate", 60)
    if not hangs:
        deployment.server.wait_until(lambda stats: stats["chat"].statuses.get(str(fault["status"])))
        deployment.server.kill_host()
    deployment.wait_done(ids, 30)
    # Then the burst was one trip, every half-open period had one request, and the pauses grew to the longest allowed
    calls = calls_of(deployment.server)
    outage = outage_in(calls)
    measured("requests_during_outage", len(outage.burst) + len(outage.probes) - 1)
    measured("pauses_s", outage.pauses())
    assert len(outage.burst) == CEILING
    check_pauses(outage.pauses(), series(BASE_S, MOST_S, 5))
    check_one_at_a_time(outage.probes)
    # ...and it recovered without a wave, above no ceiling, with nobody's retries touched
    check_ramp(outage.after)
    assert len(calls) == failing + len(ids)
    check_invariants(deployment, CEILING)


def test_a_closed_port_is_tried_once_per_pause_by_all_processes_together(deploy, measured):
    """For 2.2 s connections are refused: one worker at a time tries again, after 0.2, 0.4, 0.8 and 1.6 s."""
    # Given a server that is down when the first message comes, and 60 more that follow it
    deployment = guarded_chat(deploy)
    start_groups(deployment, 3)
    deployment.server.script([Step(fault=Fault.REFUSE, to_s=2.2)])
    deployment.send("orchestrate")
    with looking_at(deployment) as look:
        wait_until(lambda: look().generation, 5, "the first attempt has failed", every_s=0.005)
    deployment.send("orchestrate", 60)
    deployment.wait_done(deployment.sent, 30)
    # Then what the server never saw was tried by one worker at a time, at the pace of the pauses
    tries = attempts_of(deployment)
    calls = calls_of(deployment.server)
    closed_by = generation_of(calls[0])
    outage = [one["at"] for one in tries if int(one["generation"]) <= closed_by]
    pauses = [round(later - earlier, 4) for earlier, later in pairwise(outage)]
    measured("requests_during_outage", len(outage) - 1)
    measured("pauses_s", pauses)
    check_pauses(pauses, series(BASE_S, MOST_S, 4))
    assert len(tries) == len(outage) - 1 + len(deployment.sent)
    assert len(calls) == len(deployment.sent)
    check_ramp(calls[1:])
    check_invariants(deployment, CEILING)


def test_everything_parked_and_nothing_in_flight_drains_by_itself(deploy, measured):
    """With no call open and every worker idle, the end of the pause alone sets everything going again."""
    # Given a breaker that one refused request has opened for 1.2 s, and heartbeats that come only every 4 s
    deployment = guarded_chat(deploy, env=cooldowns(1.2, 1.2))
    start_groups(deployment, 2)
    deployment.server.script([Step(calls=(1, 1), fault=Fault.STATUS, status=503)])
    first = deployment.send("orchestrate")
    with looking_at(deployment) as look:
        wait_until(lambda: look().breaker == "open", 5, "open")
        # When 40 more messages come, until all stand in line
        deployment.send("orchestrate", 40)
        wait_until(lambda: sum(look().waiting.values()) == 41, 5, "everything parked")
        seen = look()
        assert (seen.breaker, seen.in_flight) == ("open", 0)
    # Then the pause ends on time, one goes first, and all follow
    deployment.wait_done(deployment.sent, 10)
    outage = outage_in(calls_of(deployment.server))
    measured("pauses_s", outage.pauses())
    assert [one.message_id for one in outage.burst] == first
    check_pauses(outage.pauses(), [1.2])
    assert outage.probes[0].message_id not in first, "who saw the overload is not the next probe while another waits"
    check_ramp(outage.after)
    check_invariants(deployment, CEILING)


def test_a_rate_limit_costs_the_endpoint_one_request_per_hint_and_the_messages_no_retry(deploy, measured):
    """429 with Retry-After 0.5 s for 5 s: about one request per hint instead of 200, and nobody loses a retry."""
    deployment = guarded_chat(deploy, ceiling=4, env={**cooldowns(0.05, 0.1), "APP_MAX_RETRIES": "3"})
    start_groups(deployment, 2)
    limited = {"fault": Fault.STATUS, "status": 429, "headers": {"retry-after": "0.5"}}
    deployment.server.script([Step(to_s=5.0, **limited)], starts="first_call")
    ids = deployment.send("orchestrate", 200)
    deployment.wait_done(ids, 40)
    calls = calls_of(deployment.server)
    outage = outage_in(calls)
    limited_calls = [one for one in calls if one.status == 429]
    measured("requests_during_outage", len(limited_calls))
    measured("pauses_s", outage.pauses())
    check_pauses(outage.pauses(), [0.5] * len(outage.pauses()))
    assert len(outage.burst) <= 4
    assert len(outage.probes) - 1 <= 10, "one request per half second for five seconds"
    assert len({one.message_id for one in limited_calls}) == len(limited_calls), "no message was charged twice"
    assert len(calls) == len(limited_calls) + len(ids)
    check_invariants(deployment, 4)


@pytest.mark.parametrize("ill_probes", [4, 0], ids=["ill", "healthy"])
def test_of_16_processes_one_probes_in_each_half_open_period(deploy, measured, ill_probes):
    """200 messages stand ready in 16 processes when a pause ends: one request, not a herd, until the breaker closes."""
    # Given 8 calls in flight that are cut off all at once, and a server that is ill for some probes more
    deployment = guarded_chat(deploy, ceiling=8)
    start_groups(deployment, 1, processes=16, threads=1)
    ill = [Step(calls=(9, 8 + ill_probes), fault=Fault.STATUS, status=503)] if ill_probes else []
    slow_probe = Step(calls=(9 + ill_probes, 9 + ill_probes), fault=Fault.SERVE, ms=300)
    deployment.server.script([Step(calls=(1, 8), fault=Fault.HANG), *ill, slow_probe])
    ids = deployment.send("orchestrate", 200)
    deployment.server.wait_until(lambda stats: stats["chat"].in_flight == 8, START_S)
    deployment.server.kill_host()
    # When the pauses end one after another
    deployment.wait_done(ids, 40)
    # Then each of them ended with exactly one request
    calls = calls_of(deployment.server)
    outage = outage_in(calls)
    measured("requests_during_outage", len(outage.burst) + len(outage.probes) - 1)
    measured("pauses_s", outage.pauses())
    assert len(outage.burst) == 8
    check_pauses(outage.pauses(), series(BASE_S, MOST_S, ill_probes + 1))
    check_one_at_a_time(outage.probes)
    check_ramp(outage.after)
    assert len(calls) == 8 + ill_probes + len(ids)
    check_invariants(deployment, 8)


def test_the_longest_hint_of_one_answer_binds_all_workers_and_never_shortens_a_cooldown(deploy, measured):
    """Retry-After, retry-after-ms, both in conflict, a hint below the cooldown, none: in two shapes of exception."""
    # Given five endpoints whose first call is answered 429, each with other headers, and cooldowns of 0.4 s
    hints = {
        "seconds": ({"retry-after": "1.5"}, 1.5),
        "milliseconds": ({"retry-after-ms": "750"}, 0.75),
        "conflict": ({"retry-after": "1.5", "retry-after-ms": "750"}, 1.5),
        "short": ({"retry-after-ms": "100"}, 0.4),
        "none": ({}, 0.4),
    }
    deployment = deploy(
        **serving(*hints, ceiling=4, base_ms=20),
        env=cooldowns(0.4, 0.4),
    )
    start_groups(deployment, 2)
    deployment.server.script(
        [
            Step(endpoint=name, calls=(1, 1), fault=Fault.STATUS, status=429, headers=headers)
            for name, (headers, _) in hints.items()
        ]
    )
    # When one message each has met it, and many more come that both groups could run
    for index, name in enumerate(hints):
        deployment.send("ask_with", args=(("httpx", "cause")[index % 2],), guard_model=name)
    deployment.server.wait_until(lambda stats: all(stats[name].statuses.get("429") for name in hints))
    with closing(deployment.store()) as store:
        wait_until(lambda: all(store.snapshot().endpoints[name].breaker == "open" for name in hints), 5, "all open")
    for name in hints:
        deployment.send("ask_with", 20, args=("httpx",), guard_model=name)
    deployment.wait_done(deployment.sent, 20)
    # Then no worker came earlier than the longest hint, nor earlier than the cooldown
    pauses = {name: outage_in(calls_of(deployment.server, name)).pauses() for name in hints}
    measured("pauses_s", pauses)
    for name, (_, pause_s) in hints.items():
        check_pauses(pauses[name], [pause_s])
    check_invariants(deployment, 4, *hints)


def test_a_server_that_recovers_by_halves_sees_no_wave(deploy, measured):
    """After the pause it serves only 2 at once for a while, then 20: two more pauses at most, never a full width."""
    # Given 200 messages, a first failure, and then a server that refuses the third call until 3 s have passed
    deployment = deploy(**serving("chat", ceiling=20, base_ms=50), env=cooldowns(1.0, 60))
    start_groups(deployment, 2, processes=2, threads=6)
    refusal = {"fault": Fault.STATUS, "status": 503, "headers": {"retry-after": "1"}}
    deployment.server.script(
        [
            Step(calls=(1, 1), **refusal),
            Step(in_flight_above=2, to_s=3.0, **refusal),
            Step(in_flight_above=20, **refusal),
        ],
        starts="first_call",
    )
    first = deployment.send("orchestrate")
    with looking_at(deployment) as look:
        wait_until(lambda: look().breaker == "open", 5, "open")
    ids = [*first, *deployment.send("orchestrate", 200)]
    deployment.wait_done(ids, 30)
    # Then it tripped again at most twice, and each time cost the server few refusals
    calls = calls_of(deployment.server)
    with looking_at(deployment) as look:
        generations = look().generation
    refused = [one for one in calls if one.status == 503]
    reopened = generations // 2 - 1
    measured("refused", len(refused))
    measured("reopened", reopened)
    measured("drained_after_s", round(max(one.t_end for one in calls) - calls[0].t_start, 3))
    assert reopened <= 2
    assert len(refused) <= 1 + 4 * reopened
    # ...nobody came before a pause was over, and after each of them the limit rose in steps
    for closed in range(2, generations + 1, 2):
        failed = min(one.t_end for one in refused if generation_of(one) == closed - 2)
        (probe,) = [one for one in calls if generation_of(one) == closed - 1]
        check_pauses([round(probe.t_start - failed, 4)], series(1.0, 60, closed // 2)[-1:])
        check_ramp([one for one in calls if generation_of(one) == closed])
    check_invariants(deployment, 20)
