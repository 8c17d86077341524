"""URLs: one server under every spelling, joined without doubling, shown without credentials."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from guard_middleware.config import EndpointConfig, api_url, normalise_base_url, redact_url, server_url
from guard_middleware.config_url import host_of
from guard_middleware.errors import ConfigurationError

SECRET = "S3cr"
SPELLINGS = ["http://h:8000", "http://h:8000/", "http://h:8000/v1", "http://h:8000/v1/", "HTTP://H:8000/v1"]


@pytest.mark.parametrize("spelling", [*SPELLINGS, "http://h:8000//v1//", "http://h:8000/v1/v1", "http://u:p@h:8000/v1"])
def test_normalise_takes_spellings_of_one_server_for_one(spelling: str) -> None:
    """Case, slashes, /v1 and credentials do not make another server."""
    assert normalise_base_url(spelling) == "http://h:8000"


@pytest.mark.parametrize(
    ("spelling", "same"),
    [
        ("http://h:80", "http://h"),
        ("https://H:443/v1", "https://h"),
        ("http://[::1]:80/v1", "http://[::1]"),
        ("https://h/openai/v1", "https://h/openai"),
    ],
)
def test_normalise_drops_the_default_port(spelling: str, same: str) -> None:
    """A port that the scheme implies is left out; a path before /v1 stays."""
    assert normalise_base_url(spelling) == same


@pytest.mark.parametrize("other", ["https://h:8000", "http://h:8001", "http://g:8000", "http://h:8000/a", "http://h"])
def test_normalise_keeps_different_servers_apart(other: str) -> None:
    """Scheme, host, port and path each make another server."""
    assert normalise_base_url(other) != normalise_base_url("http://h:8000")


HOSTS = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,8}(\.[a-z]{2,3})?", fullmatch=True)
PATHS = st.lists(st.sampled_from(["/", "/v1", "/openai", "//"]), max_size=4).map("".join)


@given(scheme=st.sampled_from(["http", "HTTPS"]), host=HOSTS, port=st.integers(1, 65_535), path=PATHS)
def test_normalise_is_a_fixed_point(scheme: str, host: str, port: int, path: str) -> None:
    """Normalising twice is normalising once, and no double slash or /v1 is left at the end."""
    once = normalise_base_url(f"{scheme}://{host}:{port}{path}")
    assert normalise_base_url(once) == once
    assert "//" not in once.partition("://")[2]
    assert not once.endswith(("/", "/v1"))


@pytest.mark.parametrize("base_url", SPELLINGS)
@pytest.mark.parametrize(
    "path", ["chat/completions", "/chat/completions", "/v1/chat/completions", "v1/chat/completions"]
)
def test_api_url_joins_without_doubling(base_url: str, path: str) -> None:
    """Every spelling of base and path gives the one URL: no double slash, no double /v1."""
    assert api_url(base_url, path) == "http://h:8000/v1/chat/completions"


@given(host=HOSTS, base=PATHS, path=st.sampled_from(["/v1/models", "models", "//models", "/v1//models", "v1", ""]))
def test_api_url_has_one_version_and_single_slashes(host: str, base: str, path: str) -> None:
    """Whatever the path of the base, /v1 ends it once."""
    url = api_url(f"http://{host}{base}", path)
    assert "//" not in url.partition("://")[2]
    assert not urlsplit(url).path.removesuffix("/models").endswith("/v1/v1")
    assert url.endswith("/models" if "models" in path else "/v1")


def test_api_url_keeps_another_version_and_the_credentials() -> None:
    """A base that ends in /v4 is the interface of that version; a request needs the credentials."""
    assert api_url("https://u:p@h/paas/v4/", "/v1/embeddings") == "https://u:p@h/paas/v4/embeddings"
    assert api_url("http://v2", "/v1/embeddings") == "http://v2/v1/embeddings"


def test_server_url_lies_beside_the_version() -> None:
    """Metrics and health live at the server's root, not below /v1."""
    assert server_url("http://h:8000/v1/", "/metrics") == "http://h:8000/metrics"
    assert server_url("http://h:8000", "") == "http://h:8000"


@pytest.mark.parametrize(("url", "host"), [("HTTP://H.Example:8000/v1", "h.example"), ("http://u:p@[::1]:8000", "::1")])
def test_host_is_lower_case_and_bare(url: str, host: str) -> None:
    """The host carries no port, brackets or credentials."""
    assert host_of(url) == host


BAD_BASES = [
    ("h:8000/v1", "no scheme"),
    ("//h:8000", "no scheme"),
    ("ftp://h", "scheme that cannot be used"),
    ("redis://h", "scheme that cannot be used"),
    (f"http://h/v1?key={SECRET}", "query"),
    ("http://h/v1?", "query"),
    (f"http://h/v1#{SECRET}", "query"),
    (" http://h", "space"),
    ("http://h ", "space"),
    ("http://h\n/v1", "space"),
    ("http://h\\v1", "backslash"),
    ("http://", "names no host"),
    ("http:///v1", "names no host"),
    ("http://h:99999", "host or port"),
    ("http://h:0", "host or port"),
    ("http://h:", "host or port"),
    (f"http://h:{SECRET}", "host or port"),
    ("http://[::1", "host or port"),
    (f"http://u:{SECRET}/x@h/v1", "host or port"),
    (f"http://u:1/{SECRET}@h/v1", "after the host"),
    (f"http://u:{SECRET}#x@h/v1", "host or port"),
    ("http://h/v1/chat/completions", "operation"),
    ("http://h/v1/embeddings/", "operation"),
]


@pytest.mark.parametrize(("base_url", "reason"), BAD_BASES)
def test_base_url_that_cannot_work_is_refused_without_repeating_it(base_url: str, reason: str) -> None:
    """Each kind of bad URL is refused for its reason, and no part of it is printed."""
    with pytest.raises(ConfigurationError, match=reason) as caught:
        EndpointConfig(id="a", base_url=base_url)
    assert "base_url " in str(caught.value)
    assert SECRET not in str(caught.value)
    with pytest.raises(ConfigurationError, match=reason) as caught:
        normalise_base_url(base_url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("base_url", [*SPELLINGS, "http://model_server:8000", "https://[::1]/v1", "http://u:p@h/v1"])
def test_base_url_is_kept_as_written(base_url: str) -> None:
    """The attribute is what was configured: a request needs it, credentials included."""
    assert EndpointConfig(id="a", base_url=base_url).base_url == base_url


@pytest.mark.parametrize(
    ("url", "safe"),
    [
        ("http://h:8000/v1", "http://h:8000/v1"),
        ("rediss://user:S3cr%40t@h:6379/0", "rediss://***@h:6379/0"),
        ("redis://:S3cr@h", "redis://***@h"),
        ("http://S3cr@h/v1?key=S3cr", "http://***@h/v1?***"),
        ("http://h/v1#S3cr", "http://h/v1?***"),
        ("redis://u:S3cr@S3cr@h:1/0", "redis://***@h:1/0"),
        ("unix://u:S3cr@/run/redis.sock?password=S3cr", "unix://***@/run/redis.sock?***"),
        ("http://u:S3cr@[::1]:80/v1", "http://***@[::1]:80/v1"),
    ],
)
def test_redact_keeps_host_and_port(url: str, safe: str) -> None:
    """Scheme, host, port and path stay visible, everything that may be a secret does not."""
    assert redact_url(url) == safe


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:S3cr/S3cr@h:1/0",
        "redis://u:S3cr?S3cr@h:1/0",
        "redis://u:S3cr#S3cr@h:1/0",
        "redis://u:x@S3cr/S3cr@h:1",
        "http://h/v1?key=a@S3cr",
        "redis://:S3cr",
        "redis://:6379",
        "http://S3cr S3cr@h",
        "u:S3cr@h:6379",
        "S3cr",
        "",
        None,
        b"redis://u:S3cr@h",
    ],
)
def test_redact_hides_what_it_cannot_take_apart(url: object) -> None:
    """Where the password ends is not guessed: then everything after the scheme is hidden."""
    assert redact_url(url).rpartition("://")[2] == "***"


@given(st.text("S3cr:/?#@[]% \n.", max_size=40), st.sampled_from(["h", "h:1", "[::1]:2"]), st.sampled_from(["", "/0"]))
def test_redact_never_shows_a_password(junk: str, host: str, path: str) -> None:
    """Whatever stands between scheme and the last @, none of it comes out."""
    safe = redact_url(f"redis://u:{SECRET}{junk}{SECRET}@{host}{path}")
    assert safe in {f"redis://***@{host}{path}", "redis://***"}


@given(st.text())
def test_redact_takes_any_text(text: str) -> None:
    """It never raises, and what was made safe stays as it is."""
    safe = redact_url(text)
    assert redact_url(safe).replace("?***", "") == safe.replace("?***", "") or safe == "***"


@given(HOSTS, st.integers(1, 65_535))
def test_redact_leaves_plain_urls_alone(host: str, port: int) -> None:
    """A URL without secrets can be read in full."""
    url = f"http://{host}:{port}/v1"
    assert redact_url(url) == url
    assert urlsplit(url).port == port
