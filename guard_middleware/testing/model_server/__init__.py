"""A fake model server with a memory budget that really dies.

OpenAI-compatible endpoints on ports of their own share one host. Above a knee they slow down; above an edge the whole
host goes dark, comes back loading, and counts a death. What goes wrong besides is scripted, and the server counts for
itself how many calls are open. One process, loopback only::

    with ModelServer([FakeEndpoint(name="chat", base_ms=50, max_num_seqs=4)], HostMemory(edge=8)) as server:
        client = openai.OpenAI(base_url=server.url("chat"), api_key="-", max_retries=0)
        server.script([Step(fault=Fault.STATUS, status=503, calls=(1, 3))])
        ...
        assert server.stats()["chat"].most_in_flight <= 4

A single call can ask for something of its own by headers: ``x-fake-ms`` (service time), ``x-fake-cost``,
``x-fake-chunks`` (of a stream), ``x-fake-status`` (answered at once); ``x-message-id`` and ``x-priority`` are logged
and counted. Each port, and the control port that no fault touches, answers ``GET /_stats``, ``GET /_log``,
``POST /_reset``, ``POST /_script`` and ``POST /_die``.
"""

from __future__ import annotations

from guard_middleware.testing.model_server.config import FakeEndpoint, HostMemory, ServerConfig
from guard_middleware.testing.model_server.launcher import ModelServer, ModelServerError
from guard_middleware.testing.model_server.script import Fault, Script, Step
from guard_middleware.testing.model_server.stats import Request, ServerStats, TallyStats, use_of_ceiling

__all__ = [
    "FakeEndpoint",
    "Fault",
    "HostMemory",
    "ModelServer",
    "ModelServerError",
    "Request",
    "Script",
    "ServerConfig",
    "ServerStats",
    "Step",
    "TallyStats",
    "use_of_ceiling",
]
