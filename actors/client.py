"""A small client for OpenAI-compatible servers, which calls the endpoint that the permit names.

It never repeats a request. A failure leaves the actor as it is, so that the guard learns of it and Dramatiq decides
about the message; a client with retries of its own would go on loading a server that has just asked for less.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any

import httpx
from dramatiq.middleware import CurrentMessage

from guard_middleware import GuardError, current_permit
from guard_middleware.config import api_url

if TYPE_CHECKING:
    from guard_middleware import EndpointConfig

# A read may take as long as a generation does, but less than Dramatiq's time limit of 10 minutes.
_TIMEOUT = httpx.Timeout(300.0, connect=5.0)
# The permits are the limit. A bound on connections would be a second one, at which a call waits with its permit held.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)
_CERTIFICATES = httpx.create_ssl_context()
# Neither connects before its first call, so that processes share no connection if they fork after this.
_client = httpx.Client(timeout=_TIMEOUT, limits=_LIMITS, verify=_CERTIFICATES)
_async_client = httpx.AsyncClient(timeout=_TIMEOUT, limits=_LIMITS, verify=_CERTIFICATES)
# At INFO it logs each call's URL, with the credentials that may be in it.
logging.getLogger("httpx").setLevel(logging.WARNING)


def embeddings(texts: list[str], endpoint: EndpointConfig | None = None) -> list[list[float]]:
    """Return one vector per text.

    Args:
        texts: what to embed, in one call.
        endpoint: where to call; the permit's endpoint if not given.

    Raises:
        httpx.HTTPError: the call failed.
    """
    request = _request(_client, "embeddings", {"input": texts}, endpoint)
    return [row["embedding"] for row in _answer(_client.send(request))["data"]]


def chat(prompt: str, endpoint: EndpointConfig | None = None) -> str:
    """Return the model's answer. Arguments and errors as for `embeddings`."""
    request = _request(_client, "chat/completions", _chat_body(prompt), endpoint)
    return _text(_answer(_client.send(request)))


async def chat_async(prompt: str, endpoint: EndpointConfig | None = None) -> str:
    """Return the model's answer, for async actors. Arguments and errors as for `embeddings`."""
    request = _request(_async_client, "chat/completions", _chat_body(prompt), endpoint)
    return _text(_answer(await _async_client.send(request)))


def _request(
    client: httpx.Client | httpx.AsyncClient, operation: str, body: dict[str, Any], endpoint: EndpointConfig | None
) -> httpx.Request:
    chosen = endpoint or _permitted()
    return client.build_request(
        "POST",
        api_url(chosen.base_url, operation),
        json={"model": chosen.model, **body},
        headers={**_identity(), **_credentials(chosen)},
    )


def _permitted() -> EndpointConfig:
    """The endpoint to call: the one asked for, or the fallback that stands in for it."""
    permit = current_permit()
    if permit is None:
        msg = "no permit is held here: call this in a @guarded actor, or in a `with guard.permit(model)` block"
        raise GuardError(msg)
    return permit.endpoint


def _identity() -> dict[str, str]:
    """Which message asks, and how urgently, for the server's own log."""
    message = CurrentMessage.get_current_message()
    if message is None:
        return {}
    return {"x-message-id": message.message_id, "x-priority": message.options.get("guard_priority", "")}


def _credentials(endpoint: EndpointConfig) -> dict[str, str]:
    key = os.environ.get(endpoint.api_key_env) if endpoint.api_key_env else None
    return {"authorization": f"Bearer {key}"} if key else {}


def _chat_body(prompt: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}]}


def _answer(response: httpx.Response) -> dict[str, Any]:
    answer: dict[str, Any] = response.raise_for_status().json()
    return answer


def _text(answer: dict[str, Any]) -> str:
    text: str = answer["choices"][0]["message"]["content"]
    return text
