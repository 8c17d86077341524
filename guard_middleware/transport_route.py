"""Which endpoint a request means, and the request that goes to the endpoint that was chosen.

Nothing here asks the guard, sends or logs: values in, values out. The caller's request is never changed.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

import httpx

from guard_middleware.config_parse import nearest, shown
from guard_middleware.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from guard_middleware.config import EndpointConfig
    from guard_middleware.priority import Priority

PRIORITY_HEADER = "x-resource-priority"

Origin: TypeAlias = tuple[str, str, int]
"""Scheme, host and port. The host is in lower case and in the form that goes over the wire."""

_DEFAULT_PORTS = {"http": 80, "https": 443}
_OTHER_VERSION = re.compile(r"/v\d+\w*$")
_CREDENTIALS = ("authorization", "proxy-authorization", "cookie", "api-key", "x-api-key")
_OF_THE_ORIGIN = ("sni_hostname", "target")
"""Extensions of httpx that tell about the server which the caller addressed, and about no other one."""


# ------------------------------------------------------------------------------------------------- one request


class Body:
    """A request's body, as far as it is JSON in memory. It is parsed once, and only if somebody asks.

    Args:
        request: whose body it is. It is neither changed nor read from a stream.
    """

    def __init__(self, request: httpx.Request) -> None:
        self._request = request
        self._fields: dict[str, object] | None = None
        self._is_parsed = False

    @property
    def fields(self) -> Mapping[str, object] | None:
        """The JSON object; `None` if the body is streamed, or is anything else."""
        if not self._is_parsed:
            self._fields = self._parse()
            self._is_parsed = True
        return self._fields

    @property
    def model(self) -> str | None:
        """The model that the body names; `None` if it names none."""
        named = self.fields.get("model") if self.fields is not None else None
        return named if isinstance(named, str) else None

    def _parse(self) -> dict[str, object] | None:
        stream = self._request.stream
        if not isinstance(stream, httpx.ByteStream):
            return None
        content = b"".join(stream)
        if content.lstrip()[:1] != b"{":
            return None
        try:
            parsed = json.loads(content)
        except (ValueError, RecursionError):  # also what was compressed, and what is in no known encoding
            return None
        return parsed if isinstance(parsed, dict) else None


@dataclass(frozen=True, slots=True)
class Unknown:
    """A request that means no endpoint.

    Attributes:
        server: ``scheme://host:port``, nothing more.
        advice: why, and the nearest thing to do.
    """

    server: str
    advice: str


@dataclass(frozen=True, slots=True)
class Located:
    """A request that means an endpoint.

    Attributes:
        request: the caller's.
        body: of it.
        endpoint: that its URL, and its body's model where one server has several, point at.
    """

    request: httpx.Request
    body: Body
    endpoint: EndpointConfig


# ------------------------------------------------------------------------------------------------- where a server is


@dataclass(frozen=True, slots=True)
class Server:
    """Where an endpoint is.

    Attributes:
        url: scheme, host and port; no credentials, no path.
        prefix: encoded path that all its operations stand under, without a final ``/v1`` or slash; "" for none.
        versioned: the prefix ends in another version (``/v4``), below which the operations stand directly.
    """

    url: httpx.URL
    prefix: str
    versioned: bool

    @property
    def origin(self) -> Origin:
        """Scheme, host and port, to compare."""
        return origin_of(self.url)

    def holds(self, path: str) -> bool:
        """Whether a path stands under the prefix, on the boundary of a segment."""
        return path == self.prefix or path.startswith(f"{self.prefix}/")


def server_of(base_url: str) -> Server | None:
    """Read a base URL: every spelling of one server gives equal origins and prefixes. `None` if httpx cannot use it."""
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        return None
    prefix = _path_of(url).rstrip("/")
    while prefix.endswith("/v1"):
        prefix = prefix.removesuffix("/v1").rstrip("/")
    return Server(
        url=httpx.URL(scheme=url.scheme.lower(), host=url.host, port=url.port, raw_path=b"/"),
        prefix=prefix,
        versioned=_OTHER_VERSION.search(prefix) is not None,
    )


def origin_of(url: httpx.URL) -> Origin:
    """The scheme, host and port that a URL addresses, a default port included."""
    scheme = url.scheme.lower()
    return scheme, url.raw_host.decode("ascii").lower(), url.port or _DEFAULT_PORTS.get(scheme, 0)


def label_of(origin: Origin) -> str:
    """``scheme://host:port``, for people."""
    scheme, host, port = origin
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _path_of(url: httpx.URL) -> str:
    """The encoded path without the query, doubled slashes made one."""
    return re.sub(r"/{2,}", "/", url.raw_path.decode("ascii").partition("?")[0])


_ABOUT_THE_SERVER = frozenset(
    ("health", "healthz", "info", "live", "metrics", "models", "ping", "props", "ps", "ready", "tags", "version")
)


def asks_about_the_server(request: httpx.Request) -> bool:
    """Whether a request only looks at a server, such as ``GET /health``: it gets through while the breaker is open."""
    if request.method not in {"GET", "HEAD"}:
        return request.method == "OPTIONS"
    *_, before, last = ("", "", *_path_of(request.url).strip("/").split("/"))
    return last in _ABOUT_THE_SERVER or before == "models"


# ------------------------------------------------------------------------------------------------- the lookup


@dataclass(slots=True)
class _Place:
    """One prefix of one origin, and the endpoints there."""

    server: Server
    endpoints: list[EndpointConfig] = field(default_factory=list)


class Routes:
    """The endpoints by where they are. Made once for each transport.

    Args:
        endpoints: all that are configured; those without a base URL are found by nobody.
        fixed: the endpoint that every request means, whatever its URL; `None` to go by URLs.
    """

    def __init__(self, endpoints: Iterable[EndpointConfig], fixed: EndpointConfig | None = None) -> None:
        self._fixed = fixed
        places: defaultdict[Origin, dict[str, _Place]] = defaultdict(dict)
        for endpoint in endpoints:
            server = server_of(endpoint.base_url) if endpoint.base_url else None
            if server is not None:
                place = places[server.origin].setdefault(server.prefix, _Place(server))
                place.endpoints.append(endpoint)
        self._places = {
            origin: sorted(found.values(), key=lambda place: len(place.server.prefix), reverse=True)
            for origin, found in places.items()
        }

    def find(self, request: httpx.Request) -> Located | Unknown:
        """Find the endpoint that a request means; of several prefixes that hold its path, the longest decides."""
        body = Body(request)
        if self._fixed is not None:
            return Located(request, body, self._fixed)
        origin = origin_of(request.url)
        path = _path_of(request.url)
        place = next((place for place in self._places.get(origin, ()) if place.server.holds(path)), None)
        if place is None:
            return Unknown(label_of(origin), self._nearest(origin))
        endpoint = _choose(place.endpoints, body)
        if endpoint is not None:
            return Located(request, body, endpoint)
        names = ", ".join(shown(one.model) for one in place.endpoints)
        advice = f"it serves several models ({names}), and the request names none of them in a JSON body: name one"
        return Unknown(label_of(origin), f"{advice}, or fix one with GuardTransport(model=...)")

    def _nearest(self, origin: Origin) -> str:
        """What to do about a server that nobody configured."""
        label = label_of(origin)
        ids = {label_of(known): places[0].endpoints[0].id for known, places in self._places.items()}
        if label in ids:
            return f"none of its models' base_urls holds the path that was asked for: correct it, or {_ADD}"
        close = nearest(label, ids)
        if close is None:
            return f"no model with a base_url is configured: {_ADD}"
        return f"the nearest is {close} of {shown(ids[close])}: correct the client's base_url, or {_ADD}"


_ADD = "add a model with this base_url to GUARD_MODELS"


def _choose(endpoints: list[EndpointConfig], body: Body) -> EndpointConfig | None:
    """The only endpoint of a server, else the one that the body names by its model, else by its id."""
    if len(endpoints) == 1:
        return endpoints[0]
    named = body.model
    by_model = (one for one in endpoints if one.model == named)
    return next(by_model, None) or next((one for one in endpoints if one.id == named), None)


# ------------------------------------------------------------------------------------------------- what goes out


def outgoing(located: Located, chosen: EndpointConfig, priority: Priority) -> httpx.Request:
    """Make the request that goes to the endpoint chosen.

    The same as the caller's but for: the header ``x-resource-priority``; the body's ``priority`` where the server
    orders by it and the caller has not set one; and, for a fallback, URL, ``Host``, credentials and the body's model.

    Args:
        located: the caller's request, and the endpoint that it means.
        chosen: by the guard: that endpoint, or another one (its fallback).
        priority: of the call.

    Raises:
        ConfigurationError: the fallback has no base_url that could be called, or its key is not there.
    """
    request = located.request
    url, headers, extensions = request.url, httpx.Headers(request.headers), dict(request.extensions)
    headers[PRIORITY_HEADER] = priority.value
    if chosen.id != located.endpoint.id:
        url = _url_at(chosen, located)
        elsewhere = origin_of(url) != origin_of(request.url)
        if elsewhere:
            headers["host"] = url.netloc.decode("ascii")
            for name in _OF_THE_ORIGIN:
                extensions.pop(name, None)
        _set_credentials(headers, chosen, elsewhere=elsewhere)
    changes = dict(_changes(located, chosen, priority))
    if not changes:
        out = httpx.Request(request.method, url, headers=headers, stream=request.stream, extensions=extensions)
        if isinstance(out.stream, httpx.ByteStream):
            out.read()  # nothing is read but memory: whoever looks at the content finds it there, as in the caller's
        return out
    content = _encode({**(located.body.fields or {}), **changes})
    headers.pop("transfer-encoding", None)
    headers["content-length"] = str(len(content))
    return httpx.Request(request.method, url, headers=headers, content=content, extensions=extensions)


def _url_at(chosen: EndpointConfig, located: Located) -> httpx.URL:
    """The URL of the same operation at another endpoint: its scheme, host, port and prefix, our path and query."""
    there = server_of(chosen.base_url) if chosen.base_url else None
    if there is None:
        msg = f"{shown(chosen.id)} stands in for {shown(located.endpoint.id)}, but has no base_url to call: give it one"
        raise ConfigurationError(msg)
    url = located.request.url
    here = server_of(located.endpoint.base_url) if located.endpoint.base_url else None
    rest, in_api = _path_of(url), False
    if here is not None and here.origin == origin_of(url) and here.holds(rest):
        rest, in_api = rest.removeprefix(here.prefix), here.versioned
    if not in_api and (rest == "/v1" or rest.startswith("/v1/")):
        rest, in_api = rest.removeprefix("/v1"), True
    version = "/v1" if in_api and not there.versioned else ""
    _, mark, query = url.raw_path.partition(b"?")
    path = f"{there.prefix}{version}{rest}" or "/"
    return there.url.copy_with(raw_path=path.encode("ascii") + mark + query)


def _set_credentials(headers: httpx.Headers, chosen: EndpointConfig, *, elsewhere: bool) -> None:
    """Let no key of one server reach another one, and give the other one its own."""
    if elsewhere:
        for name in _CREDENTIALS:
            headers.pop(name, None)
    if chosen.api_key_env:
        key = os.environ.get(chosen.api_key_env, "").strip()
        if not key or not key.isascii() or not key.isprintable():
            msg = f"the key of {shown(chosen.id)} cannot be used: put it into {chosen.api_key_env}, its api_key_env"
            raise ConfigurationError(msg)
        headers["authorization"] = f"Bearer {key}"


def _changes(located: Located, chosen: EndpointConfig, priority: Priority) -> Iterator[tuple[str, object]]:
    """The fields of the body that the endpoint chosen wants otherwise. Of a body that is not JSON in memory, none."""
    moved = chosen.id != located.endpoint.id
    if not moved and not chosen.server_priority:
        return
    fields, named = located.body.fields, located.body.model
    if fields is None:
        return
    if moved and named in {located.endpoint.model, located.endpoint.id} and named != chosen.model:
        yield "model", chosen.model
    if chosen.server_priority and fields.get("priority") is None:
        yield "priority", priority.rank


def _encode(fields: Mapping[str, object]) -> bytes:
    try:
        return json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can hold and UTF-8 cannot
        return json.dumps(fields, separators=(",", ":")).encode("ascii")
