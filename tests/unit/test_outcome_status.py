"""What each HTTP status means, by itself and with its body and headers."""

from __future__ import annotations

from http import HTTPStatus

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guard_middleware.core.outcome import Classified, Outcome, classify_status
from guard_middleware.core.outcome_table import OVERLOAD_WORDS

OVERLOADS = {408, 429, 502, 503, 504, 520, 521, 522, 523, 524, 529}
NEUTRAL_4XX = {425}
IGNORED_4XX = {499}


@pytest.mark.parametrize("status", range(100, 600))
def test_status_has_the_published_outcome(status):
    """Each of the 500 statuses, against a second statement of the rule."""
    if status in OVERLOADS:
        expected = Outcome.OVERLOAD
    elif status in NEUTRAL_4XX or status >= 500:
        expected = Outcome.NEUTRAL
    elif status in IGNORED_4XX or status < 200:
        expected = Outcome.IGNORED
    else:
        expected = Outcome.SUCCESS if status < 300 else Outcome.BENIGN
    assert classify_status(status) == Classified(outcome=expected, reason=f"status {status}", status=status)


@pytest.mark.parametrize("status", [200, 400, 429, 500, 503])
def test_status_may_be_an_enum(status):
    """`http.HTTPStatus` is a number like any other, and the answer holds a plain one."""
    found = classify_status(HTTPStatus(status))
    assert found == classify_status(status)
    assert type(found.status) is int


@pytest.mark.parametrize(
    "status", [-1, 0, 1, 99, 600, 999, 10**30, True, False, None, "busy", "", "5030", 503.0, b"503"]
)
def test_status_that_is_none_is_ignored(status):
    """What is no status is no evidence, and says so."""
    assert classify_status(status) == Classified(outcome=Outcome.IGNORED, reason="no status")


def test_status_may_be_three_digits_of_text():
    """Some clients keep the status as text."""
    assert classify_status("503") == classify_status(503)


BUSY_BODIES = [
    "server busy, please try again. maximum pending requests exceeded",
    '{"error":"server busy, please try again.  maximum pending requests exceeded"}',
    "unexpected server status: llm busy - no slots available",
    "llm busy",
    "BUSY",
    "maximum pending requests exceeded",
    "no slots available",
    '{"error":{"code":500,"message":"Loading model","type":"unavailable_error"}}',
    '{"error":"Model is overloaded","error_type":"overloaded"}',
    '{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"}}',
    '{"object":"error","message":"EngineDeadError: EngineCore encountered an issue."}',
    "EngineCore encountered an issue. See stack trace (above) for the root cause.",
    "MQLLMEngine is already dead, terminating server process",
    "AsyncEngineDeadError: Background loop has errored already.",
    "the engine loop is not running",
    "CUDA out of memory. Tried to allocate 3.88 GiB",
    "torch.OutOfMemoryError",
    "out-of-memory",
    "hipErrorOutOfMemory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "ggml: failed to allocate 4096 bytes",
    "killed by OOM",
    "No available memory for the cache blocks",
    "model requires more system memory (46.7 GiB) than is available (12.1 GiB)",
    "llama runner process has terminated: signal: killed",
    'POST predict: Post "http://127.0.0.1:35943/completion": EOF',
    '{"error":"do embedding request: Post \\"http://127.0.0.1:33967/embedding\\": EOF"}',
    "upstream request timed out",
    "connect: connection refused",
    "traceback follows\\nbusy",
]


@pytest.mark.parametrize("body", BUSY_BODIES)
@pytest.mark.parametrize("status", [500, 501, 507, 530])
def test_status_5xx_with_overload_text_is_overload(status, body):
    """Servers of different versions say "busy" with different statuses; text and bytes alike."""
    expected = Classified(outcome=Outcome.OVERLOAD, reason=f"status {status}, overload text", status=status)
    assert classify_status(status, body_text=body) == expected
    assert classify_status(status, body_text=body.encode()) == expected


@pytest.mark.parametrize("status", sorted(OVERLOADS))
def test_status_of_overload_needs_no_text(status):
    """Where the status says enough, the text adds nothing, not even to the reason."""
    assert classify_status(status, body_text="busy") == classify_status(status)


@pytest.mark.parametrize("words", OVERLOAD_WORDS)
def test_each_overload_text_is_found_in_every_spelling(words):
    """Each entry of the list works, in any case and with any usual separator."""
    for spelled in (words, words.upper(), words.replace(" ", "_"), words.replace(" ", "-"), f"{{'e': '{words}.'}}"):
        assert classify_status(500, body_text=spelled).outcome is Outcome.OVERLOAD


@pytest.mark.parametrize(
    "body", ["", "Internal Server Error", "a busybody in bloom", "roomy", "dead engineer", None, 5]
)
def test_status_500_without_overload_text_is_neutral(body):
    """A plain 500 says nothing about capacity, and a word inside a word is not that word."""
    assert classify_status(500, body_text=body).outcome is Outcome.NEUTRAL


@pytest.mark.parametrize("status", sorted(set(range(100, 500)) - OVERLOADS))
def test_status_below_500_is_never_overload_by_text(status):
    """A 400 that quotes a prompt about busy servers is about the prompt."""
    assert classify_status(status, body_text=BUSY_BODIES[0]) == classify_status(status)


def test_overload_text_is_looked_for_in_the_first_characters_only():
    """A body of any size costs the same; the first 4096 characters count."""
    assert classify_status(500, body_text=" " * 4_092 + "busy").outcome is Outcome.OVERLOAD
    assert classify_status(500, body_text=" " * 4_093 + "busy").outcome is Outcome.NEUTRAL
    assert classify_status(500, body_text=b" " * 4_092 + b"busy").outcome is Outcome.OVERLOAD
    assert classify_status(500, body_text=b" " * 4_093 + b"busy").outcome is Outcome.NEUTRAL


def test_overload_text_is_found_in_bytes_that_are_no_text():
    """A body in an unknown encoding is read as far as it goes."""
    assert classify_status(500, body_text=b"\xff\xfe llm busy \xff").outcome is Outcome.OVERLOAD


@pytest.mark.parametrize("status", sorted(OVERLOADS))
def test_status_of_overload_carries_the_hint(status):
    """The server's own wish comes along with each overload."""
    found = classify_status(status, headers={"Retry-After": "90"}, now_epoch_s=0.0)
    assert (found.outcome, found.retry_after_ms) == (Outcome.OVERLOAD, 90_000)


def test_status_500_with_overload_text_carries_the_hint():
    """An overload told by text is an overload like any other."""
    assert classify_status(500, body_text="busy", headers={"retry-after-ms": "1500"}).retry_after_ms == 1_500


@pytest.mark.parametrize("status", [200, 302, 400, 404, 425, 499, 500, 501])
def test_status_that_is_no_overload_carries_no_hint(status):
    """Nobody can lengthen a cooldown with a 404."""
    assert classify_status(status, headers={"Retry-After": "90"}, now_epoch_s=0.0).retry_after_ms is None


@pytest.mark.parametrize("status", [400, 404, 425, 499, 500, 501])
def test_status_can_be_made_overload_by_configuration(status):
    """An endpoint's own additions to the table, with their hints."""
    found = classify_status(status, headers={"Retry-After": "1"}, extra_overload={status})
    assert found == Classified(outcome=Outcome.OVERLOAD, reason=f"status {status}", retry_after_ms=1_000, status=status)


@pytest.mark.parametrize("status", [200, 204, 302])
def test_status_of_a_good_answer_cannot_be_made_overload(status):
    """A configuration that calls success an overload is not followed."""
    assert classify_status(status, extra_overload={status}).outcome is not Outcome.OVERLOAD


@settings(deadline=None)
@given(
    status=st.one_of(st.integers(-1_000, 1_000), st.text(max_size=4), st.booleans(), st.none(), st.floats()),
    body=st.one_of(st.none(), st.text(), st.binary(), st.integers()),
    headers=st.one_of(st.none(), st.dictionaries(st.text(), st.text()), st.lists(st.text()), st.integers()),
    extra=st.one_of(st.sets(st.integers(100, 599)), st.none()),
)
def test_status_never_raises_and_never_quotes(status, body, headers, extra):
    """Whatever comes: an outcome and a reason from a fixed vocabulary, in which no body appears."""
    found = classify_status(status, body_text=body, headers=headers, extra_overload=extra)
    assert found.status == classify_status(status).status
    assert found.reason in {"no status", f"status {found.status}", f"status {found.status}, overload text"}
