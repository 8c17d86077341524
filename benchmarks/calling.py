"""One call of the model server, and the gate: what the workers and the callers under measurement have in common."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

MODEL = os.environ["BENCH_MODEL"]
BASE_URL = urlsplit(os.environ["BENCH_BASE_URL"])
GATE = Path(os.environ["BENCH_GATE"])
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
CALL_TIMEOUT_S = 30

_connections = threading.local()


def wait_at_gate() -> None:
    """Say that this process is ready, and wait for the file that opens the gate."""
    (GATE / f"ready-{os.getpid()}").touch()
    while not (GATE / "open").exists():
        time.sleep(0.002)


def call_model(user: str, message_id: str = "") -> None:
    """Make one request over this thread's own connection.

    Args:
        user: what the server's log is to keep of this call.
        message_id: of the message, if there is one.
    """
    connection = getattr(_connections, "mine", None)
    if connection is None:
        connection = http.client.HTTPConnection(str(BASE_URL.hostname), BASE_URL.port, timeout=CALL_TIMEOUT_S)
        _connections.mine = connection
    body = json.dumps(BODY | {"user": user})
    connection.request("POST", f"{BASE_URL.path}/chat/completions", body, {"x-message-id": message_id})
    response = connection.getresponse()
    response.read()
    if response.status != http.HTTPStatus.OK:
        msg = f"the model server answered {response.status}"
        raise RuntimeError(msg)
