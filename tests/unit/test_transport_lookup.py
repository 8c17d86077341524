"""Which endpoint a request means, what becomes of one that means none, and the request that goes out."""

from __future__ import annotations

import json
import os

import httpx
import pytest

from guard_middleware.config import EndpointConfig, GuardSettings
from guard_middleware.errors import ConfigurationError
from guard_middleware.priority import Priority
from guard_middleware.transport import AsyncGuardTransport, GuardTransport
from guard_middleware.transport_route import Located, Routes, Unknown, asks_about_the_server, outgoing

SECRET = "S3cr"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch):
    for variable in os.environ:
        if variable.upper().startswith(("GUARD_", "MODEL_", "GPU_", "KG_")):
            monkeypatch.delenv(variable)


def endpoint(base_url="http://h:8000/v1", name="a", **fields):
    return EndpointConfig(id=name, base_url=base_url, **fields)


def post(url, body=None, **options):
    return httpx.Request("POST", url, json=body, **options)


def found(request, *endpoints, fixed=None):
    """The id of the endpoint that a request means; `None` if none."""
    where = Routes(endpoints, fixed).find(request)
    return where.endpoint.id if isinstance(where, Located) else None


def sent(request, located, chosen=None, priority=Priority.ORCHESTRATION):
    """What goes out of a request that means the first endpoint, to the one chosen."""
    where = Routes([located]).find(request)
    assert isinstance(where, Located)
    return outgoing(where, chosen or located, priority)


# ------------------------------------------------------------------------------------------------- by the URL


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        *((base, "http://h:8000/v1/chat/completions") for base in ("http://h:8000", "http://h:8000/")),
        *((base, "http://h:8000/v1/chat/completions") for base in ("http://h:8000/v1", "http://h:8000/v1/")),
        ("HTTP://H:8000//v1//", "http://h:8000/v1/chat/completions"),
        ("http://user:S3cr@h:8000/v1", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/v1", "http://user:S3cr@H:8000/v1/chat/completions?x=1"),
        ("http://h:8000/v1", "http://h:8000//v1/embeddings"),
        ("http://h:8000/v1", "http://h:8000/health"),
        ("http://h:8000/v1", "http://h:8000"),
        ("http://h", "http://h:80/v1/rerank"),
        ("HTTP://h:80/v1", "http://h/v1/rerank"),
        ("https://h/v1", "https://h:443/v1/rerank"),
        ("https://h:443", "https://h/v1/rerank"),
        ("http://h/qwen", "http://h/qwen/v1/chat/completions"),
        ("http://h/qwen/v1", "http://h/qwen/v1/chat/completions"),
        ("http://h/qwen/v1/", "http://h/qwen/chat/completions"),
        ("http://h/qwen/v1/", "http://h/qwen"),
        ("http://h/api/v4", "http://h/api/v4/chat/completions"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1/embeddings"),
        ("http://bücher.example/v1", "http://xn--bcher-kva.example/v1/embeddings"),
        ("http://h/a%20b", "http://h/a b/v1/embeddings"),
    ],
)
def test_spellings_of_one_server_mean_the_same(base_url, url):
    """Slashes, a final /v1, default ports, case, credentials and query change nothing about which server it is."""
    assert found(post(url), endpoint(base_url)) == "a"


@pytest.mark.parametrize(
    ("base_url", "url"),
    [
        ("http://h:8000/v1", "http://h:8001/v1/embeddings"),
        ("http://h:8000/v1", "http://h/v1/embeddings"),
        ("http://h/v1", "https://h/v1/embeddings"),
        ("http://h/v1", "http://other/v1/embeddings"),
        ("http://h/v1", "http://h.example/v1/embeddings"),
        ("http://h/qwen", "http://h/qwen2/v1/embeddings"),
        ("http://h/qwen", "http://h/v1/qwen"),
        ("http://h/qwen", "http://h/"),
        ("http://h/qwen", "http://h/QWEN/v1"),
        ("", "http://h/v1/embeddings"),
    ],
)
def test_other_servers_are_unknown(base_url, url):
    """Another scheme, host or port, or a path that only begins with the same letters, is another server."""
    assert found(post(url), endpoint(base_url)) is None


def test_longest_prefix_wins():
    """A server behind a path of another one's host is its own, in whatever order they are configured."""
    whole, part, deeper = (
        endpoint("http://h/v1", "whole"),
        endpoint("http://h/a/v1", "part"),
        endpoint("http://h/a/b", "deeper"),
    )
    for configured in ((whole, part, deeper), (deeper, part, whole)):
        assert found(post("http://h/a/b/v1/x"), *configured) == "deeper"
        assert found(post("http://h/a/bc/v1/x"), *configured) == "part"
        assert found(post("http://h/ab/v1/x"), *configured) == "whole"


# ------------------------------------------------------------------------------------------------- by the model


TWO = (
    endpoint("http://h/v1", "chat", model="qwen"),
    endpoint("http://h", "embed", model="bge-m3"),
    endpoint("http://h", "qwen", model="other"),
)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"model": "qwen"}, "chat"),  # a model's name before an id
        ({"model": "bge-m3"}, "embed"),
        ({"model": "other"}, "qwen"),
        ({"model": "chat"}, "chat"),
        ({"model": "embed"}, "embed"),
        ({"model": "Qwen"}, None),
        ({"model": ""}, None),
        ({"model": 5}, None),
        ({"model": ["qwen"]}, None),
        ({}, None),
        (["qwen"], None),
        ("qwen", None),
    ],
)
def test_several_models_of_one_server_are_told_apart_by_the_body(body, expected):
    """By the model that each serves, else by its id; a body that names none of them means none of them."""
    assert found(post("http://h/v1/chat/completions", body), *TWO) == expected


def test_body_that_is_not_json_in_memory_names_no_model():
    """A streamed body is not read, and broken, deep or compressed JSON is no trouble."""
    url = "http://h/v1/x"
    json_type = {"content-type": "application/json"}
    assert found(httpx.Request("POST", url, content=iter([b'{"model": "qwen"}']), headers=json_type), *TWO) is None
    assert found(httpx.Request("POST", url, files={"file": b'{"model": "qwen"}'}), *TWO) is None
    for content in (b"", b"{", b'{"model": "qwen"', b"\x1f\x8b{", b"\xff{}", b'{"a":' * 100_000, b'{"model": "\xff"}'):
        assert found(httpx.Request("POST", url, content=content, headers=json_type), *TWO) is None
    assert found(httpx.Request("POST", url, content=b' \n{"model": "qwen"}'), *TWO) == "chat"
    assert found(httpx.Request("GET", url), *TWO) is None
    # And the only model of a server needs not be named
    assert found(httpx.Request("GET", url), TWO[0]) == "chat"


def test_fixed_model_means_its_endpoint_whatever_the_url():
    """`model=` in the constructor goes over URL and body."""
    assert found(post("http://elsewhere/x", {"model": "bge-m3"}), *TWO, fixed=TWO[0]) == "chat"


# ------------------------------------------------------------------------------------------------- unknown servers


def advice(url, *endpoints, body=None):
    where = Routes(endpoints).find(post(url, body))
    assert isinstance(where, Unknown)
    assert where.server == "http://h:80"
    return where.advice


def test_unknown_server_is_told_with_the_nearest_thing_to_do():
    """The nearest server, another path of the same one, the models to choose from, or that there is nothing yet."""
    url = f"http://u:{SECRET}@h/{SECRET}?key={SECRET}"
    near = advice(url, endpoint("http://far.example:9/v1"), endpoint(f"http://u:{SECRET}@i/v1", "b"))
    path = advice(url, endpoint("http://h/qwen"))
    model = advice(url, *TWO, body={"model": SECRET})
    none = advice(url, endpoint(""))
    assert near.startswith('the nearest is http://i:80 of "b": correct the client\'s base_url')
    assert path.startswith("none of its models' base_urls holds the path")
    assert model.startswith('it serves several models ("qwen", "bge-m3", "other")')
    assert none.startswith("no model with a base_url is configured")
    assert SECRET not in near + path + model + none


class NoGuard:
    """A guard that is asked for no permit."""

    def __init__(self, **settings):
        self.settings = GuardSettings(**settings)


def answer(request):
    return httpx.Response(200, text="passed")


@pytest.mark.parametrize(
    ("method", "path", "looks"),
    [
        ("GET", "/health", True),
        ("HEAD", "/v1/models", True),
        ("GET", "/v1/models/qwen", True),
        ("GET", "/api/tags", True),
        ("OPTIONS", "/v1/chat/completions", True),
        ("POST", "/v1/models", False),
        ("POST", "/v1/chat/completions", False),
        ("GET", "/v1/completions", False),
        ("GET", "/", False),
    ],
)
def test_request_that_only_looks_at_the_server_needs_no_permit(method, path, looks):
    """Health checks and lists of models get through while the breaker is open, and are no probe."""
    assert asks_about_the_server(httpx.Request(method, f"http://h:8000{path}")) is looks


def test_unknown_server_passes_with_one_warning_for_each_server_and_transport(caplog):
    """Unguarded, and told once: not once per request, and without credentials or query."""
    for _ in range(2):
        transport = GuardTransport(NoGuard(models=[endpoint()]), httpx.MockTransport(answer))
        with httpx.Client(transport=transport) as client:
            for url in ("http://u:S3cr@x/v1/a?key=S3cr", "http://x/v1/b", "http://y:81/S3cr", "http://y:81/"):
                response = client.post(url)
                assert response.text == "passed"
                assert "x-resource-priority" not in response.request.headers
    told = [record.getMessage() for record in caplog.records if "guard.unknown_server" in record.getMessage()]
    assert [("http://x:80" in one, "http://y:81" in one) for one in told] == [(True, False), (False, True)] * 2
    assert SECRET not in "".join(told)


@pytest.mark.parametrize(("setting", "argument"), [("refuse", None), ("pass", "refuse")])
def test_unknown_server_can_be_refused(setting, argument):
    """By the setting or the argument: nothing is sent, and the error says what to do, without a secret."""
    guard = NoGuard(models=[endpoint()], unknown_servers=setting)
    inner = httpx.MockTransport(lambda request: pytest.fail("it was sent"))
    with (
        httpx.Client(transport=GuardTransport(guard, inner, unknown=argument)) as client,
        pytest.raises(ConfigurationError) as caught,
    ):
        client.post(f"http://u:{SECRET}@h:8001/{SECRET}?key={SECRET}")
    assert "http://h:8001 " in str(caught.value)
    assert "http://h:8000" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_argument_passes_what_the_setting_refuses():
    """The transport's own word goes over the setting."""
    guard = NoGuard(models=[endpoint()], unknown_servers="refuse")
    transport = GuardTransport(guard, httpx.MockTransport(answer), unknown="pass")
    with httpx.Client(transport=transport) as client:
        assert client.get("http://x/").text == "passed"


@pytest.mark.parametrize("transport", [GuardTransport, AsyncGuardTransport])
def test_wrong_arguments_are_refused_when_the_transport_is_made(transport):
    """A misspelled word or model is not found out by the first request."""
    with pytest.raises(ConfigurationError, match='"pass", "refuse"'):
        transport(unknown="block")
    with pytest.raises(ConfigurationError, match='the nearest is "a"'):
        transport(NoGuard(models=[endpoint()]), model="b")


def test_request_of_another_library_is_refused_before_anything_is_taken():
    """httpx2's client would not take our response: it is told which client to use."""
    httpx2 = pytest.importorskip("httpx2")
    with (
        httpx2.Client(transport=GuardTransport(NoGuard(models=[endpoint()]))) as client,
        pytest.raises(ConfigurationError, match=r"not of httpx2: use httpx\.Client"),
    ):
        client.get("http://h:8000/v1/models")


# ------------------------------------------------------------------------------------------------- what goes out


def test_request_goes_out_as_it_came_but_for_the_priority():
    """Method, URL, headers, body and extensions are the caller's; his request is not touched."""
    request = post(
        "http://u:p@h:8000/v1/x?q=%2F&q=2",
        {"model": "a", "n": 1.50},
        headers=[("X-Two", "1"), ("x-two", "2"), ("authorization", "Bearer k"), ("X-Resource-Priority", "mine")],
        extensions={"timeout": {"read": 3}, "sni_hostname": "x"},
    )
    before = (str(request.url), list(request.headers.raw), request.content, dict(request.extensions))
    out = sent(request, endpoint(), priority=Priority.INTERACTIVE)
    assert out is not request
    assert (out.method, str(out.url), out.read(), out.extensions) == ("POST", before[0], before[2], before[3])
    assert out.headers["x-resource-priority"] == "interactive"
    assert {key: out.headers.get_list(key) for key in request.headers if key != "x-resource-priority"} == {
        key: request.headers.get_list(key) for key in request.headers if key != "x-resource-priority"
    }
    assert (str(request.url), list(request.headers.raw), request.content, dict(request.extensions)) == before


@pytest.mark.parametrize(("priority", "rank"), [(Priority.INTERACTIVE, 0), (Priority.BACKGROUND_INGESTION, 3)])
def test_rank_goes_into_the_body_where_the_server_orders_by_it(priority, rank):
    """As a number beside the caller's fields, with the right length, and never over the caller's own."""
    ordering = endpoint(server_priority=True)
    for text in ("é", "\ud800"):  # the latter is half a pair of surrogates, which only JSON's escapes can hold
        request = httpx.Request("POST", "http://h:8000/v1/x", content=json.dumps({"model": "a", "text": text}))
        out = sent(request, ordering, priority=priority)
        assert json.loads(out.content) == {"model": "a", "text": text, "priority": rank}
        assert out.headers.get_list("content-length") == [str(len(out.content))]
    own = post("http://h:8000/v1/x", {"model": "a", "priority": 7})
    assert sent(own, ordering, priority=priority).content == own.content
    # A server that does not order answers 400 to the field
    plain = post("http://h:8000/v1/x", {"model": "a"})
    assert sent(plain, endpoint(), priority=priority).content == plain.content


def test_body_that_is_not_a_json_object_in_memory_is_left_alone():
    """A streamed body keeps its stream and its framing; a list or a text its bytes."""
    ordering = endpoint(server_priority=True)
    streamed = httpx.Request("POST", "http://h:8000/v1/x", content=iter([b'{"model"', b': "a"}']))
    out = sent(streamed, ordering)
    assert out.stream is streamed.stream
    assert out.headers["transfer-encoding"] == "chunked"
    assert "content-length" not in out.headers
    for content in (b"[1]", b'"x"', b"{", b""):
        whole = httpx.Request("POST", "http://h:8000/v1/x", content=content)
        out = sent(whole, ordering)
        assert out.read() == content
        assert out.headers.get_list("content-length") == [str(len(content))]


# ------------------------------------------------------------------------------------------------- to a fallback


@pytest.mark.parametrize(
    ("base_url", "url", "fallback", "expected"),
    [
        ("http://h/v1", "http://h/v1/chat?a=%2F", "http://i:81/v1", "http://i:81/v1/chat?a=%2F"),
        ("http://h", "http://h:80/v1/chat", "https://i/", "https://i/v1/chat"),
        ("http://h/v1/", "http://u:p@h/v1/chat", "http://u2:p2@i/qwen/v1", "http://i/qwen/v1/chat"),
        ("http://h/qwen/v1", "http://h/qwen/v1/chat", "http://i", "http://i/v1/chat"),
        ("http://h/qwen", "http://h/qwen/health", "http://i/other/v1", "http://i/other/health"),
        ("http://h/api/v4", "http://h/api/v4/chat", "http://i/v1", "http://i/v1/chat"),
        ("http://h/v1", "http://h/v1/chat", "http://i/api/v4", "http://i/api/v4/chat"),
        ("http://h/api/v4", "http://h/api/v4/chat", "http://i/x/v2/", "http://i/x/v2/chat"),
        ("http://h/v1", "http://h/v1/a%2Fb%20c", "http://[::1]:81/v1", "http://[::1]:81/v1/a%2Fb%20c"),
        ("http://h/v1", "http://h/v1", "http://i/v1", "http://i/v1"),
        ("http://h/v1", "http://h", "http://i/v1", "http://i/"),
        ("http://h/v1", "http://h/v1/chat", "http://h/v1", "http://h/v1/chat"),
    ],
)
def test_url_of_the_fallback_has_the_same_operation(base_url, url, fallback, expected):
    """Scheme, host, port and prefix are the fallback's, path below it and query the caller's."""
    out = sent(post(url), endpoint(base_url), endpoint(fallback, "b"))
    same_server = httpx.URL(fallback).host == "h"
    assert str(out.url) == expected
    assert out.headers["host"] == (post(url).headers["host"] if same_server else httpx.URL(expected).netloc.decode())


def test_fixed_endpoints_fallback_gets_the_whole_path():
    """A URL that is not the fixed endpoint's own keeps its path at the fallback."""
    where = Routes([], endpoint("http://h/qwen/v1")).find(post("http://gateway/v1/chat"))
    assert str(outgoing(where, endpoint("http://i/x", "b"), Priority.HYDRATION).url) == "http://i/x/v1/chat"


KEYS = {"authorization": "Bearer S3cr", "cookie": "S3cr", "api-key": "S3cr", "x-api-key": "S3cr", "x-other": "kept"}


def test_key_of_one_server_never_reaches_another():
    """Credentials stay behind at another origin, together with what only the first server may be told."""
    request = post(
        "http://u:S3cr@h:8000/v1/x", {"model": "a"}, headers=KEYS, extensions={"sni_hostname": "h", "timeout": {}}
    )
    for elsewhere in ("http://h:8001/v1", "https://h:8000/v1", "http://i:8000/v1"):
        out = sent(request, endpoint(), endpoint(elsewhere, "b"))
        assert SECRET not in str(out.url) + repr(out.headers.raw)
        assert out.headers["x-other"] == "kept"
        assert out.extensions == {"timeout": {}}
    same = sent(request, endpoint(), endpoint("http://h:8000/second/v1", "b"))
    assert same.headers["authorization"] == "Bearer S3cr"
    assert same.extensions == request.extensions


def test_fallback_gets_its_own_key(monkeypatch):
    """The variable's value as it is now; without one the call is refused, and no key stands in the message."""
    fallback = endpoint("http://i/v1", "b", api_key_env="B_KEY")
    request = post("http://h:8000/v1/x", {"model": "a"}, headers=KEYS)
    monkeypatch.setenv("B_KEY", " other-key\n")
    assert sent(request, endpoint(), fallback).headers.get_list("authorization") == ["Bearer other-key"]
    for wrong in ("", " ", f"{SECRET}\nx: y", f"{SECRET}é"):
        monkeypatch.setenv("B_KEY", wrong)
        with pytest.raises(ConfigurationError, match="B_KEY") as caught:
            sent(request, endpoint(), fallback)
        assert SECRET not in str(caught.value)
    # The endpoint that the caller addressed has the caller's key
    monkeypatch.setenv("B_KEY", "other-key")
    assert sent(request, endpoint(api_key_env="B_KEY")).headers["authorization"] == "Bearer S3cr"


def test_fallback_without_a_base_url_cannot_be_called():
    """The call would reach the primary under the fallback's permit."""
    with pytest.raises(ConfigurationError, match='"b" stands in for "a", but has no base_url'):
        sent(post("http://h:8000/v1/x"), endpoint(), endpoint("", "b"))


@pytest.mark.parametrize(
    ("named", "expected"),
    [("qwen", "qwen-small"), ("a", "qwen-small"), ("a-lora", "a-lora"), ("qwen-small", "qwen-small")],
)
def test_model_in_the_body_is_the_fallbacks(named, expected):
    """What named the primary's model names the fallback's; any other name is the caller's affair."""
    primary = endpoint(model="qwen", fallback="b", fallback_other_model=True)
    request = post("http://h:8000/v1/x", {"messages": ["é"], "model": named})
    out = sent(request, primary, endpoint("http://i/v1", "b", model="qwen-small"))
    assert json.loads(out.read()) == {"messages": ["é"], "model": expected}
    assert out.headers.get_list("content-length") == [str(len(out.content))]
    assert json.loads(request.content)["model"] == named


def test_fallback_that_orders_gets_model_and_rank():
    """Both changes at once, and neither on the way to the primary."""
    primary, fallback = endpoint(model="m"), endpoint("http://i/v1", "b", model="n", server_priority=True)
    request = post("http://h:8000/v1/x", {"model": "m"})
    assert json.loads(sent(request, primary, fallback).content) == {"model": "n", "priority": 1}
    assert sent(request, primary).read() == request.content
