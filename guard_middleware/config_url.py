"""URLs of model servers and of Redis: compared, joined, checked and shown without their credentials.

Nothing here ever returns or raises a text that holds a user name, a password or a query (I13), except `api_url` and
`server_url`, whose results are for requests and not for eyes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from guard_middleware.errors import ConfigurationError

if TYPE_CHECKING:
    from urllib.parse import SplitResult

_DEFAULT_PORTS = {"http": 80, "https": 443}
_REDIS_SCHEMES = ("redis", "rediss", "unix")
_HOST = re.compile(r"[\w.-]+|\[[0-9A-Fa-f:.%\w]+\]")
_AUTHORITY = re.compile(rf"(?:(?:{_HOST.pattern})(?::[0-9]{{1,5}})?)?")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_UNSAFE = re.compile(r"[\s\x00-\x1f\x7f\\]")
_OPERATION = re.compile(r"/(chat/completions|completions|embeddings|rerank|models|responses)$")
_OTHER_VERSION = re.compile(r"/v\d+\w*$")
_LARGEST_PORT = 65_535
HIDDEN = "***"


def redact_url(url: object) -> str:
    """Show a URL's scheme, host, port and path, and nothing that may be a secret.

    User, password, query and fragment become ``***``. A text that cannot be taken apart without doubt (no scheme, an
    ``@`` outside of the authority, as an unescaped password leaves behind) is hidden as a whole after its scheme,
    since every guess at where the password ends could print a part of it.

    Args:
        url: any value; what is not a text is hidden.

    Returns:
        A text that is safe to log.
    """
    scheme = _SCHEME.match(url) if isinstance(url, str) else None
    if not isinstance(url, str) or scheme is None:
        return HIDDEN
    prefix = f"{scheme[1].lower()}://"
    rest = url[scheme.end() :]
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    beyond = rest[len(authority) :]
    credentials, at, host = authority.rpartition("@")
    if "@" in beyond or _UNSAFE.search(url) or not _AUTHORITY.fullmatch(host):
        return prefix + HIDDEN
    path = re.split(r"[?#]", beyond, maxsplit=1)[0]
    hidden_query = f"?{HIDDEN}" if path != beyond else ""
    return f"{prefix}{HIDDEN if credentials else ''}{at}{host}{path}{hidden_query}"


def base_url_problem(url: str) -> str | None:
    """What is wrong with the base URL of a model server, in words that repeat nothing of it; ``None`` if nothing.

    Accepted is ``http`` or ``https``, a host, perhaps a port, perhaps credentials, and a path with or without ``/v1``.
    """
    wrong = _split_problem(url, ("http", "https"), "http://host:8000/v1")
    if wrong:
        return wrong
    parts = urlsplit(url)
    if not parts.hostname:
        return "names no host: write it as http://host:8000/v1"
    if "?" in url or "#" in url:
        return "has a query or a fragment: leave it out, and name the key's variable in api_key_env"
    if _OPERATION.search(parts.path.rstrip("/")):
        return "ends in an operation: leave out what follows /v1, the guard and the client add it"
    return None


def redis_url_problem(url: str) -> str | None:
    """What is wrong with a Redis URL, in words that repeat nothing of it; ``None`` if nothing."""
    wrong = _split_problem(url, _REDIS_SCHEMES, "redis://host:6379/0")
    if wrong:
        return wrong
    parts = urlsplit(url)
    if parts.scheme.lower() == "unix":
        return None if parts.path.strip("/") else "names no socket: write it as unix:///path/to/redis.sock?db=0"
    if not parts.hostname:
        return "names no host: write it as redis://host:6379/0"
    # The client library takes any other path for database 0, and two programs meet in one that neither chose.
    if not re.fullmatch(r"/?|/\d{1,5}", parts.path, re.ASCII):
        return "has a path that is no database number: write it as redis://host:6379/0"
    if parts.fragment:
        return "has a '#': percent-encode the reserved characters of the password"
    return None


def normalise_base_url(url: str) -> str:
    """Bring every spelling of one server to the same text, for comparison only.

    Scheme and host in lower case, without credentials, default port, doubled or trailing slashes, and without a final
    ``/v1``: ``HTTP://H:80/v1/`` and ``http://h`` are one server.

    Args:
        url: a base URL as written in the configuration.

    Returns:
        The common spelling. It holds no credentials.

    Raises:
        ConfigurationError: if it is no base URL; the message does not repeat it.
    """
    parts = _split(url)
    return f"{parts.scheme}://{_host_and_port(parts)}{_path_without_v1(parts)}"


def host_of(url: str) -> str:
    """The host of a base URL in lower case, without port and brackets.

    Raises:
        ConfigurationError: if it is no base URL; the message does not repeat it.
    """
    return _split(url).hostname or ""


def api_url(base_url: str, path: str) -> str:
    """The URL of an operation of the OpenAI-compatible interface, which lives under ``/v1``.

    ``api_url("http://h:8000/", "/v1/chat/completions")`` and ``api_url("http://h:8000/v1", "chat/completions")`` are
    both ``http://h:8000/v1/chat/completions``. A base URL that ends in another version (``/v4``) keeps that one.

    Args:
        base_url: as configured, with or without ``/v1`` and a trailing slash.
        path: of the operation, with or without ``/v1`` and a leading slash.

    Returns:
        A URL to request. It keeps the credentials of the base URL: do not log it, or use `redact_url`.

    Raises:
        ConfigurationError: if `base_url` is no base URL; the message does not repeat it.
    """
    root = server_url(base_url, "")
    operation = path.lstrip("/")
    operation = "" if operation == "v1" else operation.removeprefix("v1/").lstrip("/")
    # Of the path alone: a host may be called v2.
    version = "" if _OTHER_VERSION.search(_path_without_v1(_split(base_url))) else "/v1"
    return f"{root}{version}/{operation}" if operation else f"{root}{version}"


def server_url(base_url: str, path: str) -> str:
    """The URL of something that a model server offers beside ``/v1``, such as ``/metrics`` or ``/health``.

    Args:
        base_url: as configured, with or without ``/v1`` and a trailing slash.
        path: below the server's root.

    Returns:
        A URL to request. It keeps the credentials of the base URL: do not log it, or use `redact_url`.

    Raises:
        ConfigurationError: if `base_url` is no base URL; the message does not repeat it.
    """
    parts = _split(base_url)
    credentials, at, _ = parts.netloc.rpartition("@")
    root = f"{parts.scheme}://{credentials}{at}{_host_and_port(parts)}{_path_without_v1(parts)}"
    below = path.lstrip("/")
    return f"{root}/{below}" if below else root


def _split_problem(url: str, schemes: tuple[str, ...], example: str) -> str | None:
    if _UNSAFE.search(url):
        return "holds a space, a line break, a backslash or a control character: remove it"
    scheme = _SCHEME.match(url)
    if scheme is None:
        return f"has no scheme: write it as {example}"
    if scheme[1].lower() not in schemes:
        return f"has a scheme that cannot be used: use {', '.join(schemes)}, as in {example}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:  # its text repeats what it could not read
        return f"has a host or port that cannot be read: write it as {example}, and percent-encode reserved characters"
    host = parts.netloc.rpartition("@")[2]
    if not _AUTHORITY.fullmatch(host) or host.endswith(":") or (port is not None and not 0 < port <= _LARGEST_PORT):
        return f"has a host or port that cannot be read: write it as {example}"
    if "@" in url[scheme.end() + len(parts.netloc) :]:
        return "has an '@' after the host: percent-encode the reserved characters of the password"
    return None


def _split(url: str) -> SplitResult:
    wrong = base_url_problem(url)
    if wrong:
        msg = f"the base_url {wrong}"
        raise ConfigurationError(msg)
    return urlsplit(url)


def _host_and_port(parts: SplitResult) -> str:
    host = parts.hostname or ""
    host = f"[{host}]" if ":" in host else host
    return host if parts.port in {None, _DEFAULT_PORTS[parts.scheme]} else f"{host}:{parts.port}"


def _path_without_v1(parts: SplitResult) -> str:
    path = re.sub(r"/{2,}", "/", parts.path).rstrip("/")
    while path.endswith("/v1"):
        path = path.removesuffix("/v1").rstrip("/")
    return path
