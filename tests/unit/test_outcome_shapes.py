"""The same status has the same outcome, reason and hint in every shape in which clients raise it."""

from __future__ import annotations

import concurrent.futures
import types
import urllib.error
from email.message import Message

import httpx
import ollama
import openai
import pytest
import requests
import urllib3

from guard_middleware.core.outcome import Classified, Outcome, classify_exception, classify_status

try:
    import httpx2  # what openai's client stands on since its third version
except ImportError:  # before, on httpx
    httpx2 = httpx

NOW_S = 1_900_000_000.0
URL = "http://model.example/v1/embeddings"
STATUSES = [400, 401, 403, 404, 408, 409, 413, 422, 425, 429, 499, 500, 501, 502, 503, 504, 520, 524, 529]
BUSY = "server busy, please try again. maximum pending requests exceeded"


class PlainError(Exception):
    """An application's own exception."""

    def __init__(self, message="", **attributes):
        super().__init__(message)
        self.__dict__.update(attributes)


def raised(error, *, cause=None, context=None):
    """Raise and catch, as an application would, so that the interpreter sets what it sets."""
    try:
        if context is not None:
            try:
                raise context
            except type(context):
                raise error  # noqa: B904 - to be raised while handling, without a cause
        if cause is not None:
            raise error from cause
        raise error
    except type(error) as caught:
        return caught


def named(root, name, *bases, **attributes):
    """Make an exception class of a client that is not installed here."""
    return type(name, bases or (Exception,), {"__module__": f"{root}.exceptions", **attributes})


def of_openai(status, body, headers):
    """Raise by the client itself, from an answer of its transport."""
    answer = httpx2.Response(status, text=body, headers=headers)
    transport = httpx2.MockTransport(lambda request: answer)
    with (
        httpx2.Client(transport=transport) as http,
        openai.OpenAI(api_key="k", base_url=URL, max_retries=0, http_client=http) as client,
    ):
        try:
            client.embeddings.create(model="m", input="x")
        except openai.APIError as error:
            return error
    message = "the client accepted an error status"
    raise AssertionError(message)


def of_httpx(status, body, headers, module=httpx):
    """Raise by `raise_for_status`."""
    response = module.Response(status, text=body, headers=headers, request=module.Request("POST", URL))
    try:
        response.raise_for_status()
    except module.HTTPStatusError as error:
        return error
    message = "the client accepted an error status"
    raise AssertionError(message)


def of_requests(status, body, headers):
    """Raise by `raise_for_status`, from a response whose body has been read."""
    response = requests.Response()
    response.status_code = status
    response.url = URL
    response._content = body.encode()
    response.headers.update(headers)
    try:
        response.raise_for_status()
    except requests.HTTPError as error:
        return error
    message = "the client accepted an error status"
    raise AssertionError(message)


def of_ollama(status, body, headers):
    """Raise by the client itself, which hides the answer of its HTTP client."""
    client = ollama.Client(host="http://model.example")
    answer = httpx.Response(status, text=body, headers=headers)
    client._client = httpx.Client(
        transport=httpx.MockTransport(lambda request: answer), base_url="http://model.example"
    )
    with client._client:
        try:
            client.embed(model="m", input="x")
        except ollama.ResponseError as error:
            return error
    message = "the client accepted an error status"
    raise AssertionError(message)


def of_urllib(status, body, headers):
    """Build what `urlopen` raises; its body would have to be read, so it counts as absent."""
    message = Message()
    for name, value in headers.items():
        message[name] = value
    return urllib.error.HTTPError(URL, status, "no", message, None)


def of_anthropic(status, body, headers):
    """Build what the anthropic client raises: as openai's, under other names."""
    root = named("anthropic", "AnthropicError")
    kind = named("anthropic", "APIStatusError", named("anthropic", "APIError", root))
    error = kind(f"Error code: {status}")
    error.response = httpx.Response(status, text=body, headers=headers)
    error.status_code, error.body = status, body
    return error


def of_aiohttp(status, body, headers):
    """Build what aiohttp raises: no response, the status and headers on the error."""
    error = named("aiohttp", "ClientResponseError", named("aiohttp", "ClientError"))("0, message=''")
    error.status, error.headers, error.message = status, headers, body
    return error


def plain(status, body, headers):
    """An exception with `status_code`, as web frameworks have."""
    return PlainError(status_code=status, detail=body, headers=headers)


def plain_status(status, body, headers):
    """An exception with `status` and its text as message."""
    return PlainError(body, status=status, headers=headers)


def plain_text_status(status, body, headers):
    """An exception whose status is text."""
    return PlainError(body, status=str(status), response=types.SimpleNamespace(headers=headers))


def plain_response(status, body, headers):
    """An exception that only holds the response."""
    return PlainError(response=types.SimpleNamespace(status_code=status, text=body, headers=headers))


def plain_response_status(status, body, headers):
    """An exception that holds a response of another make."""
    return PlainError(response=types.SimpleNamespace(status=status, content=body.encode(), headers=headers))


def no_exception(status, body, headers):
    """A response handed over as it is."""
    return types.SimpleNamespace(status_code=status, text=body, headers=headers)


def cause_of_plain(status, body, headers):
    """An application's exception that names openai's as its cause."""
    return raised(RuntimeError("failed to embed"), cause=of_openai(status, body, headers))


def cause_of_cause(status, body, headers):
    """Two layers of an application around requests."""
    return raised(KeyError("x"), cause=raised(ValueError("y"), cause=of_requests(status, body, headers)))


def context_of_plain(status, body, headers):
    """An application's exception raised while httpx's was handled, without `from`."""
    return raised(RuntimeError("failed to embed"), context=of_httpx(status, body, headers))


def wrapped_in_500(status, body, headers):
    """An application translates every failure into its own 500."""
    return raised(PlainError(status_code=500), cause=of_openai(status, body, headers))


def wrapped_in_503(status, body, headers):
    """An application translates every failure into its own 503, without `from`."""
    return raised(PlainError(status_code=503), context=of_ollama(status, body, headers))


def inner_future(status, body, headers):
    """A retry library gave up: its error holds the last attempt as a future."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    future.set_exception(of_openai(status, body, headers))
    error = named("tenacity", "RetryError")(future)
    error.last_attempt = future
    return error


def argument(status, body, headers):
    """An application's exception that was given the client's as an argument, and hides the rest."""
    return PlainError(of_httpx(status, body, headers))


def group(status, body, headers):
    """A task group ended with one error."""
    return ExceptionGroup("tasks", [of_openai(status, body, headers)])


SHAPES = [
    *(of_openai, of_httpx, of_requests, of_ollama, of_urllib, of_anthropic, of_aiohttp),
    *(plain, plain_status, plain_text_status, plain_response, plain_response_status, no_exception),
    *(cause_of_plain, cause_of_cause, context_of_plain, wrapped_in_500, wrapped_in_503),
    *(inner_future, argument, group),
]
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.__name__)


def judged(exc, **options):
    """Classify at the test's own instant."""
    return classify_exception(exc, now_epoch_s=NOW_S, **options)


@by_shape
@pytest.mark.parametrize("status", STATUSES)
def test_status_has_one_outcome_in_every_shape(shape, status):
    """Whoever raises it, however deep: as the table says."""
    assert judged(shape(status, "no", {})) == classify_status(status)


@by_shape
@pytest.mark.parametrize("status", [400, 429, 500, 503])
def test_busy_text_has_one_meaning_in_every_shape(shape, status):
    """A 500 that says "busy" is an overload, a 400 that says so is not, in every shape that holds a body."""
    expected = classify_status(status, body_text=None if shape is of_urllib else BUSY)
    assert judged(shape(status, BUSY, {})) == expected


@by_shape
@pytest.mark.parametrize(
    ("headers", "expected_ms"),
    [
        ({"Retry-After": "90"}, 90_000),
        ({"retry-after-ms": "1500"}, 1_500),
        ({"Retry-After": "2", "retry-after-ms": "1500"}, 2_000),
        ({"Retry-After": "Fri, 17 May 2030 12:01:30 GMT", "Date": "Fri, 17 May 2030 12:00:00 GMT"}, 90_000),
        ({}, None),
    ],
)
def test_hint_is_found_in_every_shape(shape, headers, expected_ms):
    """The hint stands on the response, and is not lost on the way through wrappers."""
    found = judged(shape(429, "slow down", headers))
    assert (found.outcome, found.retry_after_ms) == (Outcome.OVERLOAD, expected_ms)


@by_shape
def test_status_added_by_configuration_counts_in_every_shape(shape):
    """An endpoint's additions apply to exceptions as well."""
    assert judged(shape(404, "", {"Retry-After": "1"}), extra_overload=[404]) == Classified(
        outcome=Outcome.OVERLOAD, reason="status 404", retry_after_ms=1_000, status=404
    )


@pytest.mark.parametrize("status", STATUSES)
def test_status_of_httpx2_is_that_of_httpx(status):
    """The successor of httpx, which newer openai clients use, has the same rows."""
    assert judged(of_httpx(status, "", {}, httpx2)) == judged(of_httpx(status, "", {}))


@pytest.mark.parametrize("shape", [of_openai, of_httpx], ids=lambda shape: shape.__name__)
def test_redirect_is_an_answer(shape):
    """A client that raises on 302 did get an answer, which says nothing about capacity."""
    assert judged(shape(302, "", {})).outcome is Outcome.BENIGN


def test_unread_body_is_not_read():
    """The text of a streamed answer is not fetched to find a word in it; a property is not asked either."""

    def stream():
        yield b""
        message = "the body was read"
        raise AssertionError(message)

    response = httpx.Response(500, content=stream(), request=httpx.Request("POST", URL))
    error = httpx.HTTPStatusError("500", request=response.request, response=response)
    assert judged(error).outcome is Outcome.NEUTRAL
    assert not response.is_stream_consumed

    unread = requests.Response()
    unread.status_code = 500
    unread.raw = urllib3.HTTPResponse(body=stream(), preload_content=False)
    assert judged(requests.HTTPError("500", response=unread)).outcome is Outcome.NEUTRAL
    assert unread._content is False

    class Lazy:
        status_code = 500

        @property
        def text(self):
            message = "the body was read"
            raise AssertionError(message)

        content = body = text

    assert judged(PlainError(response=Lazy())).outcome is Outcome.NEUTRAL


def test_url_is_no_text_of_the_server():
    """A host or path with one of the words in its name does not make each of its faults an overload."""
    url = "http://busy.example/oom"
    response = httpx.Response(500, request=httpx.Request("POST", url), text="no")
    with pytest.raises(httpx.HTTPStatusError, match="busy") as caught:
        response.raise_for_status()
    assert judged(caught.value).outcome is Outcome.NEUTRAL


def test_status_of_urllib3_s_own_retries_is_found():
    """A session that retries 503 by itself gives up with the status in words only."""
    for status in (500, 503):
        inner = urllib3.exceptions.MaxRetryError(
            None, "/", urllib3.exceptions.ResponseError(f"too many {status} error responses")
        )
        assert judged(requests.exceptions.RetryError(inner)) == classify_status(status)
    inner = urllib3.exceptions.MaxRetryError(None, "/", urllib3.exceptions.ResponseError("too many error responses"))
    assert judged(requests.exceptions.RetryError(inner)).outcome is Outcome.OVERLOAD


@pytest.mark.parametrize("status", [100, 200, 204])
def test_good_status_on_an_unknown_exception_is_no_evidence(status):
    """The trouble came after the answer, in code of nobody we know."""
    assert judged(PlainError(status_code=status)) == Classified(outcome=Outcome.IGNORED, reason="PlainError")
    assert judged(types.SimpleNamespace(status_code=200)).outcome is Outcome.SUCCESS


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (None, Outcome.OVERLOAD),
        ({"message": "overloaded", "type": "overloaded_error"}, Outcome.OVERLOAD),
        ({"message": "EngineCore died", "code": 500}, Outcome.OVERLOAD),
        ({"message": "slow down", "code": "429"}, Outcome.OVERLOAD),
        ({"message": "too long", "code": 400}, Outcome.BENIGN),
        ({"error": {"message": "too long", "code": 400}}, Outcome.BENIGN),
        ({"message": "too long", "code": "context_length_exceeded"}, Outcome.OVERLOAD),
    ],
)
def test_error_event_in_a_stream_is_overload_unless_it_names_a_4xx(body, expected):
    """The stream began with 200; how it ended is opaque, except where the event says that the request was wrong."""
    error = openai.APIError("An error occurred during streaming", httpx2.Request("POST", URL), body=body)
    assert judged(error).outcome is expected
    late = of_anthropic(200, "", {})
    late.body = body
    assert judged(late).outcome is expected


def test_error_event_in_an_ollama_stream_is_overload():
    """Ollama's client raises it without a status, as -1."""
    assert judged(ollama.ResponseError("unexpected EOF")) == Classified(
        outcome=Outcome.OVERLOAD, reason="ResponseError"
    )
