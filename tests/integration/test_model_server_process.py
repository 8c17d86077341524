"""The fake model server as a process: how it starts, and that it always ends."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest

from guard_middleware.testing.model_server import (
    FakeEndpoint,
    Fault,
    ModelServer,
    ModelServerError,
    Step,
)
from tests.integration.model_server_clients import ends


def test_the_process_ends_with_its_block():
    """Nothing is left running or listening."""
    with ModelServer() as server:
        pid, port = server.pid, server.port()
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


def test_the_process_ends_when_its_parent_is_killed():
    """A test run that is killed leaves no server behind."""
    code = (
        "import time; from guard_middleware.testing.model_server import ModelServer\n"
        "server = ModelServer(); server.start(); print(server.pid, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        os.kill(pid, 0)
        parent.kill()
    assert ends(pid)


def test_a_server_of_the_command_line_ends_with_its_parent_or_its_time(tmp_path):
    """Neither a shell that is gone nor a forgotten demo keeps it running."""
    config = tmp_path / "server.json"
    config.write_text('{"endpoints": [{"name": "a"}]}')
    command = [sys.executable, "-m", "guard_middleware.testing.model_server", "--config", str(config)]
    shell = ["sh", "-c", '"$@" < /dev/null & read line', "sh", *command]
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        orphan = json.loads(parent.stdout.readline())["pid"]
        parent.kill()
        assert ends(orphan)

    done = subprocess.run([*command, "--max-seconds", "0.1"], stdout=subprocess.PIPE, timeout=20, check=True)
    assert list(json.loads(done.stdout)["endpoints"]) == ["a"]


def test_a_configuration_that_cannot_work_is_told(capfd):
    """The message names the field, on stderr, and nothing starts."""
    command = [sys.executable, "-m", "guard_middleware.testing.model_server", "--config-json"]
    done = subprocess.run([*command, '{"endpoints": [{"name": "a", "bose_ms": 1}]}'], timeout=20, check=False)

    assert done.returncode == 2
    assert "bose_ms" in capfd.readouterr().err


def test_a_configuration_file_that_is_not_there_is_told(tmp_path, capfd):
    """One line that names the file, not a traceback."""
    command = [sys.executable, "-m", "guard_middleware.testing.model_server", "--config", str(tmp_path / "none.json")]
    done = subprocess.run(command, timeout=20, check=False)
    told = capfd.readouterr().err

    assert done.returncode == 2
    assert "none.json cannot be read: No such file" in told
    assert "Traceback" not in told


def test_a_port_that_is_taken_is_told(capfd):
    """Two servers on one port would share its calls; the second one does not start."""
    with ModelServer([FakeEndpoint(name="a")]) as first:
        with pytest.raises(ModelServerError, match="did not start"):
            ModelServer([FakeEndpoint(name="b", port=first.port())]).start()
        assert f"port {first.port()}: Address already in use" in capfd.readouterr().err


def test_a_closed_port_is_not_given_to_anybody_else():
    """While an endpoint refuses connections its port is kept: nobody can listen there meanwhile."""
    with ModelServer(script=[Step(fault=Fault.REFUSE)]) as server, socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        with pytest.raises(OSError, match="Address already in use"):
            other.bind(("127.0.0.1", server.port()))
