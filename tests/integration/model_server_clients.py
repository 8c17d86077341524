"""Clients of the fake model server, polite and not."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import threading
import time
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from guard_middleware.testing.model_server import ModelServer

HOUR_MS = 3_600_000.0
CHAT = {"messages": [{"role": "user", "content": "hello there"}]}
STREAM = CHAT | {"stream": True}


def chat(client: httpx.Client, server: ModelServer, name: str = "chat", **headers: str) -> httpx.Response:
    """Ask for a completion, with underscores in header names for hyphens."""
    fields = {key.replace("_", "-"): value for key, value in headers.items()}
    return client.post(f"{server.url(name)}/chat/completions", json=CHAT, headers=fields)


def stream(client: httpx.Client, server: ModelServer, chunks: list[str]) -> None:
    """Read a streamed completion to its end, chunk by chunk into the list."""
    with client.stream("POST", f"{server.url('chat')}/chat/completions", json=STREAM) as response:
        response.raise_for_status()
        chunks.extend(line for line in response.iter_lines() if line)


@contextlib.contextmanager
def open_calls(server: ModelServer, name: str, count: int, body: dict | None = None, **headers: str):
    """Hold so many calls open at an endpoint, each on a bare socket of its own, asked from a thread of its own."""
    text = json.dumps(body or CHAT).encode()
    fields = "".join(f"{key.replace('_', '-')}: {value}\r\n" for key, value in headers.items())
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\n{fields}content-length: {len(text)}\r\n\r\n".encode()
    calls = [socket.create_connection(("127.0.0.1", server.port(name)), timeout=10) for _ in range(count)]
    threads = [threading.Thread(target=call.sendall, args=(head + text,)) for call in calls]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        yield calls
    finally:
        for call in calls:
            call.close()


def watch(client: httpx.Client, server: ModelServer, name: str, until: str) -> list[str]:
    """Ask again and again until something is seen; return what was seen on the way, without repetitions."""
    seen: list[str] = []
    deadline = time.monotonic() + 10
    while until not in seen:
        assert time.monotonic() < deadline, seen
        try:
            now = str(chat(client, server, name, x_fake_ms="0").status_code)
        except httpx.TransportError as exc:
            now = type(exc).__name__
        if seen[-1:] != [now]:
            seen.append(now)
        time.sleep(0.01)
    return seen


def ends(pid: int) -> bool:
    """Tell whether a process that is not our child ends soon; kill it if it does not."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        state = subprocess.run(
            ["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False
        ).stdout
        if not state or state.startswith("Z"):  # a zombie has ended, whether or not anybody asked how
            return True
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    return False
