"""The bodies of answers, in the forms that OpenAI's clients and vLLM's users know. Pure."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import JsonValue

OVERLOADED: JsonValue = {"error": {"message": "overloaded", "type": "overloaded_error", "code": 529}}


def encode(value: object) -> bytes:
    """Return a value as compact JSON."""
    return json.dumps(value, separators=(",", ":")).encode()


def error(message: str, status: int, kind: str = "") -> bytes:
    """Return an error object in OpenAI's form."""
    return encode({"error": {"message": message, "type": kind or _kind(status), "param": None, "code": status}})


def out_of_memory(prompt: str) -> bytes:
    """Return what a server says whose accelerator is full; it quotes the prompt, as some do."""
    text = f"CUDA out of memory. Tried to allocate 3.88 GiB while processing {prompt!r}"
    return error(text, 500, "InternalServerError")


def filled(body: JsonValue, prompt: str) -> bytes:
    """Return a scripted body as bytes: text with ``{prompt}`` filled in, or JSON."""
    return body.replace("{prompt}", prompt).encode() if isinstance(body, str) else encode(body)


def prompt_of(body: dict[str, Any]) -> str:
    """Return what the caller asked: the last message's text, or the first input's."""
    messages = body.get("messages")
    asked = messages[-1].get("content") if messages else body.get("input", "")
    while isinstance(asked, list) and asked:
        asked = asked[0].get("text", "") if isinstance(asked[0], dict) else asked[0]
    return asked if isinstance(asked, str) else json.dumps(asked)


def reply_to(prompt: str) -> str:
    """Return the answer to a prompt: always the same for the same one, without quoting it."""
    return "ok-" + hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()


def completion(request_id: str, model: str, prompt: str, created: int) -> bytes:
    """Return the body of a chat completion."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": reply_to(prompt)},
        "logprobs": None,
        "finish_reason": "stop",
    }
    return encode(
        {
            "id": f"chatcmpl-{request_id}",
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [choice],
            "usage": usage(prompt, 1),
        }
    )


def usage(prompt: str, completion_tokens: int) -> dict[str, int]:
    """Return token counts: a word is a token."""
    prompt_tokens = len(prompt.split())
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Stream:
    """The events of one streamed chat completion.

    Args:
        request_id: part of the completion's id.
        model: the model that answers.
        prompt: what the caller asked.
        created: seconds since the epoch.
        chunks: content chunks in all.
    """

    def __init__(self, request_id: str, model: str, prompt: str, created: int, chunks: int) -> None:
        self._head = {"id": f"chatcmpl-{request_id}", "object": "chat.completion.chunk", "created": created}
        self._model = model
        self._prompt = prompt
        self._chunks = chunks

    def chunk(self, index: int) -> bytes:
        """Return content chunk number ``index``, from 0; together they make the same text as a plain completion."""
        text = reply_to(self._prompt)
        size = max(1, math.ceil(len(text) / max(1, self._chunks)))
        delta = {"content": text[index * size : (index + 1) * size]}
        if index == 0:
            delta["role"] = "assistant"
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def end(self, *, with_usage: bool) -> bytes:
        """Return the last events: the finish reason, the usage if it was asked for, and ``[DONE]``."""
        finish = self._event([{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}])
        counts = self._event([], usage=usage(self._prompt, self._chunks)) if with_usage else b""
        return finish + counts + b"data: [DONE]\n\n"

    def _event(self, choices: list[dict[str, Any]], **more: object) -> bytes:
        return event({**self._head, "model": self._model, "choices": choices, **more})


def event(value: object) -> bytes:
    """Return a value as one server-sent event."""
    return b"data: " + encode(value) + b"\n\n"


def embeddings(model: str, body: dict[str, Any], dimensions: int) -> bytes:
    """Return the body of an embeddings answer, one vector per input, as floats or in base64 as the request wants it."""
    given = body.get("input", "")
    is_batch = isinstance(given, list) and not (given and isinstance(given[0], int))
    inputs = given if is_batch else [given]
    size = int(body.get("dimensions") or dimensions)
    vectors = [vector(model, text if isinstance(text, str) else json.dumps(text), size) for text in inputs]
    packed = body.get("encoding_format") == "base64"
    data = [
        {"object": "embedding", "index": index, "embedding": _pack(numbers) if packed else numbers}
        for index, numbers in enumerate(vectors)
    ]
    tokens = usage(" ".join(str(text) for text in inputs), 0)
    return encode({"id": "embd-0", "object": "list", "created": 0, "model": model, "data": data, "usage": tokens})


def vector(model: str, text: str, dimensions: int) -> list[float]:
    """Return the embedding of a text: always the same for the same model and text, of length 1."""
    seed = hashlib.blake2b(f"{model}\0{text}".encode()).digest()
    numbers = [seed[index % len(seed)] / 255 - 0.5 + index // len(seed) / 1000 for index in range(dimensions)]
    norm = math.sqrt(sum(number * number for number in numbers)) or 1.0
    return [number / norm for number in numbers]


def model_list(model: str) -> bytes:
    """Return the body of ``GET /v1/models``."""
    entry = {"id": model, "object": "model", "created": 0, "owned_by": "fake", "root": model, "max_model_len": 32768}
    return encode({"object": "list", "data": [entry]})


def metrics(model: str, running: int, waiting: int, cache_usage: float, *, old_names: bool) -> bytes:
    """Return vLLM's gauges in Prometheus text, under their present or their old names."""
    labels = f'model_name="{_escaped(model)}"' if old_names else f'engine="0",model_name="{_escaped(model)}"'
    cache = "vllm:gpu_cache_usage_perc" if old_names else "vllm:kv_cache_usage_perc"
    gauges = [
        ("vllm:num_requests_running", "Number of requests in model execution batches.", labels, running),
        ("vllm:num_requests_waiting", "Number of requests waiting to be processed.", labels, waiting),
        (cache, "KV-cache usage. 1 means 100 percent usage.", labels, cache_usage),
    ]
    if not old_names:
        name, text = "vllm:num_requests_waiting_by_reason", "Number of waiting requests by reason."
        gauges.append((name, text, labels + ',reason="capacity"', waiting))
        gauges.append((name, "", labels + ',reason="deferred"', 0))
    lines = []
    for name, text, of, value in gauges:
        lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"] if text else []
        lines.append(f"{name}{{{of}}} {float(value)}")
    return ("\n".join(lines) + "\n").encode()


def _kind(status: int) -> str:
    known = {400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError", 503: "ServiceUnavailableError"}
    return known.get(status, "InternalServerError")


def _pack(numbers: list[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(numbers)}f", *numbers)).decode()


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
