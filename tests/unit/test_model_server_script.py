"""Which step of a script decides a call, and which scripts are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from guard_middleware.testing.model_server import FakeEndpoint, Fault, Script, ServerConfig, Step
from guard_middleware.testing.model_server.script import Arrival, ScriptRun


def run(*steps: Step, starts: str = "now") -> ScriptRun:
    """Begin to follow these steps at 100.0."""
    return ScriptRun(Script(steps=steps, starts=starts), now=100.0)


def arrival(endpoint: str = "chat", **more: object) -> Arrival:
    """Return a chat call, unless told otherwise."""
    return Arrival(endpoint=endpoint, path=more.pop("path", "/v1/chat/completions"), **more)


def struck(script: ScriptRun, count: int, *, at: float = 100.0, **more: object) -> list[bool]:
    """For each of so many calls, whether a step decided it."""
    return [script.decide(arrival(**more), at) is not None for _ in range(count)]


def test_calls_selects_by_number_per_endpoint():
    """Numbers start at 1, both ends are included, and each endpoint counts its own."""
    script = run(Step(fault=Fault.DROP, calls=(2, 3)))

    assert struck(script, 4) == [False, True, True, False]
    assert struck(script, 4, endpoint="embed") == [False, True, True, False]


def test_calls_without_an_end_goes_on():
    """None as the last number means from then on."""
    assert struck(run(Step(fault=Fault.DROP, calls=(3, None))), 5) == [False, False, True, True, True]


def test_message_calls_counts_per_message():
    """Each message's first call is struck; a call without a message id never is."""
    script = run(Step(fault=Fault.DROP, message_calls=(1, 1)))

    assert struck(script, 2, message_id="a") == [True, False]
    assert struck(script, 2, message_id="b") == [True, False]
    assert struck(script, 2) == [False, False]


def test_every_selects_each_nth():
    """Every second call is the second, the fourth, ..."""
    assert struck(run(Step(fault=Fault.DROP, every=2)), 4) == [False, True, False, True]


def test_times_bounds_how_often_a_step_strikes():
    """The next step decides once the first has struck often enough."""
    script = run(Step(fault=Fault.DROP, times=2), Step(fault=Fault.RESET))

    decisions = [script.decide(arrival(), 100.0) for _ in range(3)]
    assert [step.fault for step in decisions] == [Fault.DROP, Fault.DROP, Fault.RESET]


def test_share_strikes_that_share_and_the_same_calls_each_run():
    """Chance is seeded: a run can be repeated."""
    step = Step(fault=Fault.DROP, share=0.3)
    first, second = struck(run(step), 1000), struck(run(step), 1000)

    assert first == second
    assert 250 < sum(first) < 350


@pytest.mark.parametrize(
    ("condition", "matching", "other"),
    [
        ({"endpoint": "chat"}, {}, {"endpoint": "embed"}),
        ({"path": "/v1/embeddings"}, {"path": "/v1/embeddings"}, {}),
        ({"contains": "BAD"}, {"body": b'{"input":"BAD"}'}, {"body": b'{"input":"good"}'}),
        ({"in_flight_above": 2}, {"in_flight": 3}, {"in_flight": 2}),
        ({"cost_above": 6}, {"cost": 7}, {"cost": 6}),
    ],
)
def test_a_condition_selects(condition: dict, matching: dict, other: dict):
    """A step decides the calls that fulfil its condition, and no other."""
    script = run(Step(fault=Fault.DROP, **condition))

    assert struck(script, 1, **matching) == [True]
    assert struck(script, 1, **other) == [False]


def test_all_conditions_must_hold():
    """Conditions of one step are a conjunction."""
    script = run(Step(fault=Fault.DROP, endpoint="chat", contains="BAD", calls=(1, 2)))

    assert struck(script, 1, body=b"BAD") == [True]
    assert struck(script, 1) == [False]
    assert struck(script, 1, body=b"BAD") == [False]


def test_a_window_includes_its_start_and_not_its_end():
    """Windows that follow each other neither overlap nor leave a gap."""
    script = run(Step(fault=Fault.DROP, from_s=1, to_s=2))

    assert [struck(script, 1, at=at) for at in (100.9, 101.0, 101.9, 102.0)] == [[False], [True], [True], [False]]


def test_a_script_can_start_with_the_first_call():
    """The clock of the windows stands still until a call comes."""
    script = run(Step(fault=Fault.DROP, from_s=1), starts="first_call")

    assert not script.has_begun
    assert struck(script, 1, at=150.0) == [False]
    assert script.has_begun
    assert struck(script, 1, at=150.9) == [False]
    assert struck(script, 1, at=151.0) == [True]


def test_the_first_matching_step_decides():
    """Order is precedence."""
    script = run(Step(fault=Fault.DROP, calls=(1, 1)), Step(fault=Fault.STATUS, status=503))

    assert script.decide(arrival(), 100.0).fault is Fault.DROP
    assert script.decide(arrival(), 100.0).fault is Fault.STATUS


def test_stream_faults_leave_plain_calls_alone():
    """A plain answer has no chunks to break after, so the next step may decide it."""
    script = run(Step(fault=Fault.STREAM_RESET, chunks=1))

    assert struck(script, 1) == [False]
    assert struck(script, 1, is_stream=True) == [True]


def test_refusal_is_a_state_of_the_port_and_decides_no_call():
    """A closed port is closed for the window, at its endpoint only, and the server knows when to come back."""
    script = run(Step(fault=Fault.REFUSE, endpoint="chat", from_s=1, to_s=3))

    assert struck(script, 1, at=101.5) == [False]
    assert [script.refusing("chat", at) is not None for at in (100.5, 101.0, 102.9, 103.0)] == [
        False,
        True,
        True,
        False,
    ]
    assert script.refusing("embed", 101.5) is None
    assert [script.next_change_at(at) for at in (100.0, 101.0, 103.0)] == [101.0, 103.0, None]


def test_probes_are_decided_only_by_steps_that_say_so():
    """Health stays green while calls fail, unless the script takes it down too."""
    assert run(Step(fault=Fault.HANG)).decide_probe("chat", "/health", 100.0) is None
    script = run(Step(fault=Fault.STATUS, status=503, probes=True, endpoint="chat", path="/health", to_s=5))

    assert script.decide_probe("chat", "/health", 104.0).status == 503
    assert script.decide_probe("chat", "/metrics", 104.0) is None
    assert script.decide_probe("embed", "/health", 104.0) is None
    assert script.decide_probe("chat", "/health", 105.0) is None


def test_probes_are_not_counted():
    """Asking for health does not use up a step's times."""
    script = run(Step(fault=Fault.STATUS, status=503, probes=True))
    script.decide_probe("chat", "/health", 100.0)

    assert struck(script, 1) == [True]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"fault": "status"}, "say which one"),
        ({"fault": "drop", "status": 503}, "drop: status would have no effect"),
        ({"fault": "hang", "after_ms": 5}, "hang: after_ms would have no effect"),
        ({"fault": "status", "status": 503, "chunks": 3}, "chunks would have no effect"),
        ({"fault": "refuse", "calls": (1, 3)}, "calls would have no effect"),
        ({"fault": "refuse", "times": 1}, "times would have no effect"),
        ({"fault": "hang", "probes": True, "every": 2}, "every would have no effect"),
        ({"fault": "garbage", "probes": True}, "probes know only"),
        ({"fault": "drop", "from_s": 2, "to_s": 2}, "is not after"),
        ({"fault": "drop", "form_s": 2}, "form_s"),
        ({"fault": "explode"}, "explode"),
        ({"fault": "drop", "share": 1.5}, "share"),
    ],
)
def test_a_step_that_says_something_in_vain_is_refused(fields: dict, complaint: str):
    """A test cannot believe in a fault that never comes."""
    with pytest.raises(ValidationError, match=complaint):
        Step(**fields)


def test_a_script_keeps_its_meaning_in_json():
    """What a step does not say stays unsaid on the way to the server."""
    script = Script(steps=(Step(fault=Fault.DROP, calls=(2, None)), Step(fault=Fault.STATUS, status=500)))

    assert Script.model_validate_json(script.model_dump_json(exclude_unset=True)) == script


def test_a_configuration_with_an_unknown_endpoint_in_its_script_is_refused():
    """A step for nobody would never strike."""
    with pytest.raises(ValidationError, match="no endpoint 'caht'"):
        ServerConfig(
            endpoints=(FakeEndpoint(name="chat"),),
            script=Script(steps=(Step(fault=Fault.DROP, endpoint="caht"),)),
        )


def test_a_configuration_with_two_endpoints_of_one_name_is_refused():
    """Statistics by name could not tell them apart."""
    with pytest.raises(ValidationError, match="same name"):
        ServerConfig(endpoints=(FakeEndpoint(name="a"), FakeEndpoint(name="a")))
