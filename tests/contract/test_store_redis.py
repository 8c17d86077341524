"""What only the store on Redis has: scripts, connections, and a server that can be in trouble (I12, I13)."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import replace

import pytest
import redis

from guard_middleware.core.commands import Action, Ask, Operate, Status
from guard_middleware.core.values import EndpointSpec, Rules
from guard_middleware.errors import ConfigurationError, StoreUnavailable
from guard_middleware.store import keys, scripts
from guard_middleware.store.redis import RedisStore, client_sees_nonce
from guard_middleware.testing.valkey import EmbeddedValkey
from tests.contract.store_sides import ENDPOINT, START_MS, MemorySide, RedisSide


@pytest.fixture
def side(redis_url, namespace):
    """A configured guard on the session's server."""
    with closing(RedisSide(namespace, redis_url)) as side:
        side.boot()
        yield side


@pytest.fixture
def own(own_valkey, namespace):
    """A configured guard on a server of its own, and the server."""
    with closing(RedisSide(namespace, own_valkey.url)) as side:
        side.boot()
        yield side, own_valkey


# ---------------------------------------------------------------------- scripts


@pytest.mark.parametrize("name", scripts.names())
def test_replies_in_the_header_are_the_statuses(name):
    """The header is what a reader of the script believes."""
    replies = scripts.load(name).replies
    assert replies
    assert replies == {code: Status(code).name for code in replies}


def test_scripts_together_know_every_status():
    """A status that no script answers is a mistake in one of the two."""
    answered = {code for name in scripts.names() for code in scripts.load(name).replies}
    assert answered == {int(status) for status in Status}


def test_default_rules_are_those_of_the_values(side):
    """Before anybody has published, and after all have gone."""
    side.store.operate(Operate(action=Action.FORGET, target="p"))
    field = side.client.hget(keys.state(keys.root(side.store._namespace)), "clock")
    wanted = Rules()
    side.configure(rules=wanted)
    again = side.client.hget(keys.state(keys.root(side.store._namespace)), "clock")
    assert field[56:120] == again[56:120]


def test_flushed_functions_are_loaded_again(side):
    """A restarted or failed-over server knows none."""
    for verb in (side.ask, side.beat, side.configure, side.store.snapshot, lambda: side.finish("l")):
        side.client.function_flush()
        verb()


def test_waiting_lines_and_what_belongs_to_them_have_no_expiry(side):
    """I3: only tombstones end by themselves."""
    side.ask(message=side.deliver(), idle=0)
    for rank in (1, 3):
        side.ask(message=side.deliver(), idle=0, rank=rank, deadline_ms=START_MS + 1_000)
    side.ask("l-caller", wait=True)
    side.finish("l-never")
    kinds = {}
    for key in side.client.scan_iter("*"):
        name = key.decode()
        kinds[name] = side.client.pttl(key)
        if kinds[name] != -1:
            assert ":lease:" in name, name
    for kind in ("line:", "parked:", "deadlines:"):
        assert any(f":{kind}" in name for name in kinds), kind


def test_server_that_lost_its_data_is_asked_to_be_told_again(own):
    """A new epoch: whoever remembers another one is held for one lease time."""
    side, server = own
    before = side.ask("l-held").epoch
    server.restart(keep_data=False)
    assert side.ask().status is Status.UNCONFIGURED
    after = side.configure(epoch=before, first_start_hold_ms=-1)
    assert after.epoch
    side.pass_time(14_999)
    assert side.ask().reason == "recovering"


def test_many_processes_that_die_at_once_cost_one_look_at_what_is_published(own_valkey, namespace):
    """The sweep finds the configuration in force once, not once for each of them, and it is the rule's."""
    # Given 64 processes, half of them with smaller ceilings and no breakers; an open breaker tells who comes first
    wide = [EndpointSpec(id=f"e{number}", ceiling=40 + number) for number in range(20)]
    narrow = [replace(spec, ceiling=spec.ceiling // 2, breaker=False) for spec in wide]
    names = [f"p{number:02}" for number in range(64)]
    silent, loud = names[1:33], [names[0], *names[33:]]
    with closing(RedisSide(namespace, own_valkey.url)) as side:
        rule = MemorySide(namespace)
        for one, name in itertools.product((side, rule), names):
            one.configure(*(narrow if name in silent else wide), process=name)
        # When all of that half fall silent
        for one in (side, rule):
            one.store.operate(Operate(action=Action.OPEN, target="e0", value=60_000))
            for _ in range(4):
                one.pass_time(3_000)
                for name in loud:
                    one.beat(process=name)
            one.pass_time(3_000)
        # Then a beat forgets 16 of them, and looks once; the last ones take the smaller ceilings with them
        for alive, ceiling in ((48, 20), (32, 40)):
            looks = side.client.info("commandstats")["cmdstat_hgetall"]["calls"]
            side.beat(process="p00")
            assert side.client.info("commandstats")["cmdstat_hgetall"]["calls"] - looks <= 1
            rule.beat(process="p00")
            snapshot = side.store.snapshot()
            assert snapshot.endpoints == rule.store.snapshot().endpoints
            assert (len(snapshot.processes), snapshot.endpoints["e0"].ceiling) == (alive, ceiling)


# ---------------------------------------------------------------------- trouble


def unavailable(side):
    """Ask, and be told why not."""
    with pytest.raises(StoreUnavailable, match="does not serve") as caught:
        side.ask()
    return str(caught.value)


def test_killed_server_is_unavailable_until_it_is_back(own):
    """By itself, with the same store object; the idle connections died with the server."""
    side, server = own
    side.ask("l-held")
    server.kill()
    for _ in range(3):
        unavailable(side)
    server.restart()
    assert side.ask().reason == "endpoint_full"


def test_restart_between_two_commands_is_not_noticed(own):
    """A connection that was kept open has died: the command is sent once more, over a new one."""
    side, server = own
    server.restart()
    assert side.ask().status is Status.ADMITTED


def test_server_that_does_not_answer_is_given_up_in_bounded_time(own_valkey, namespace):
    """No hidden retries: one time-out, not several."""
    with closing(RedisStore.from_url(own_valkey.url, namespace, timeout_s=0.3)) as store:
        assert store.snapshot().endpoints == {}
        own_valkey.pause()
        begun = time.monotonic()
        with pytest.raises(StoreUnavailable, match="TimeoutError"):
            store.snapshot()
        assert time.monotonic() - begun < 2
        own_valkey.resume()
        assert store.snapshot().endpoints == {}


def test_reply_that_came_too_late_is_nobody_elses(own_valkey, namespace):
    """The connection on which it is still to come is not used again."""
    with closing(RedisStore.from_url(own_valkey.url, namespace, timeout_s=0.3)) as store:
        store.snapshot()
        own_valkey.pause()
        with pytest.raises(StoreUnavailable):
            store.snapshot()
        own_valkey.resume()
        for _ in range(5):
            assert store.admit(Ask(process="p", lease="l", endpoint="e", rank=1)).status is Status.UNCONFIGURED


def test_replica_is_unavailable_and_asked_anew_each_time(own):
    """READONLY: a failover is found only by connecting again."""
    _, server = own
    host, port = "127.0.0.1", str(server.port)
    with EmbeddedValkey() as other:
        other.call("REPLICAOF", host, port)
        with closing(RedisStore.from_url(other.url, "elsewhere")) as store:
            with pytest.raises(StoreUnavailable, match=r"READONLY|ReadOnly|MASTERDOWN|LOADING"):
                store.admit(Ask(process="p", lease="l", endpoint="e", rank=1))
            assert store._idle == []
            other.call("REPLICAOF", "NO", "ONE")
            assert store.admit(Ask(process="p", lease="l", endpoint="e", rank=1)).status is Status.UNCONFIGURED


def test_server_out_of_memory_is_unavailable(own):
    """And nothing of the command is carried out."""
    side, server = own
    server.call("CONFIG", "SET", "maxmemory", "1")
    assert "OutOfMemory" in unavailable(side)
    server.call("CONFIG", "SET", "maxmemory", "0")
    assert side.ask().status is Status.ADMITTED


def test_server_that_cannot_save_is_unavailable(own):
    """MISCONF: with stop-writes-on-bgsave-error, and a folder that is not there to write into."""
    side, server = own
    server.call("CONFIG", "SET", "appendonly", "no")
    server.call("CONFIG", "SET", "min-replicas-to-write", "1")  # the same refusal, without breaking a disk
    assert "NOREPLICAS" in unavailable(side)
    server.call("CONFIG", "SET", "min-replicas-to-write", "0")
    assert side.ask().status is Status.ADMITTED


def test_script_that_fails_is_unavailable(side):
    """Somebody else's key where one of ours should be."""
    side.client.set(keys.state(keys.root(side.store._namespace)), "not a hash")
    assert "ResponseError" in unavailable(side)


@contextmanager
def server_that_says(answer):
    """Accepts one connection after another, and answers each command that comes with the same bytes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)

        def serve():
            try:
                while True:
                    peer, _ = listener.accept()
                    threading.Thread(target=answer_all, args=(peer,), daemon=True).start()
            except OSError:
                return

        def answer_all(peer):
            with peer, suppress(OSError):
                while data := peer.recv(65_536):
                    if b"FCALL" in data:
                        peer.sendall(answer)
                    else:  # the client's greetings
                        peer.sendall(b"+OK\r\n" * max(1, data.count(b"*")))

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"redis://:hunter2@127.0.0.1:{listener.getsockname()[1]}/0?protocol=2"
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.parametrize(
    "answer",
    [
        b"-LOADING Redis is loading the dataset in memory\r\n",
        b"-READONLY You can't write against a read only replica.\r\n",
        b"-MISCONF Redis is configured to save RDB snapshots\r\n",
        b"-OOM command not allowed when used memory > 'maxmemory'.\r\n",
        b"-NOSCRIPT No matching script.\r\n",
        b"-BUSY Redis is busy running a script.\r\n",
        b"-WHAT is this\r\n",
        b"+OK\r\n",
        b"*1\r\n:99\r\n",
        b"*0\r\n",
        b"$-1\r\n",
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
    ids=lambda answer: answer.split()[0].decode(),
)
def test_whatever_a_server_says_amiss_is_the_one_error_and_tells_no_secret(answer, namespace):
    """I12, I13."""
    with server_that_says(answer) as url, closing(RedisStore.from_url(url, namespace, timeout_s=1)) as store:
        for _ in range(2):
            with pytest.raises(StoreUnavailable) as caught:
                store.admit(Ask(process="p", lease="l", endpoint="e", rank=1))
            assert "hunter2" not in f"{caught.value} {caught.value.__cause__!r} {store!r}"


def test_wrong_password_is_unavailable_and_not_shown(namespace):
    """I13."""
    with EmbeddedValkey(options={"requirepass": "sesame"}) as server:
        url = server.url.replace("sesame", "hunter2")
        with closing(RedisStore.from_url(url, namespace)) as store:
            with pytest.raises(StoreUnavailable) as caught:
                store.snapshot()
            assert "hunter2" not in str(caught.value)


def test_url_that_cannot_be_one_is_refused_without_being_shown(namespace):
    """It may hold a password."""
    with pytest.raises(ConfigurationError, match="redis://") as caught:
        RedisStore.from_url("http://:hunter2@localhost", namespace)
    assert "hunter2" not in str(caught.value)
    assert caught.value.__cause__ is None


class Strike(BaseException):
    """What Dramatiq raises into a thread that has run for too long."""


def test_interrupt_in_the_middle_of_a_reply_costs_the_connection(side, monkeypatch):
    """Whoever uses it next would read the answer to another question."""
    side.ask()
    (connection,) = side.store._idle

    def strike(**_):
        raise Strike

    monkeypatch.setattr(connection, "read_response", strike)
    with pytest.raises(Strike):
        side.ask()
    monkeypatch.undo()
    assert side.store._idle == []
    assert connection._sock is None
    assert side.ask().reason == "endpoint_full"


# ---------------------------------------------------------------------- clients and servers


def test_client_that_decodes_gets_payloads_as_bytes(redis_url, namespace):
    """The application's client may be used."""
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        side = RedisSide(namespace, redis_url)
        side.store = RedisStore(client, namespace, now_ms=START_MS)
        side.boot()
        side.ask("l-first", message=side.deliver(), idle=0)
        side.ask(message=side.deliver(payload=b"\xff\x00"), idle=0)
        (take,) = side.finish("l-first", take=1, idle=1).takes
        assert take.payload == b"\xff\x00"
        side.close()


def test_threads_share_a_store(side):
    """Each has a connection of its own while it asks; afterwards they are kept for whoever comes."""
    side.store.operate(Operate(action=Action.OVERRIDE, target=ENDPOINT, value=8))
    replies = []
    threads = [
        threading.Thread(target=lambda lease=f"l-{number}": replies.append(side.ask(lease))) for number in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [one.status for one in replies] == [Status.ADMITTED] * len(threads)
    assert side.store.snapshot().endpoints[ENDPOINT].in_flight == len(threads)
    assert 1 <= len(side.store._idle) <= len(threads)


def test_fork_leaves_the_parents_connections_alone(side):
    """Two processes that read from one socket would get each other's replies."""
    side.ask("l-parent")
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        reply = side.ask("l-child").reason
        os.write(writes, reply.encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reads, 100) == b"endpoint_full"
    os.close(reads)
    os.close(writes)
    for _ in range(3):
        assert side.ask("l-parent").status is Status.ADMITTED


def test_closed_store_connects_anew(side):
    """Closing gives up connections, nothing else."""
    side.store.close()
    assert side.store._idle == []
    assert side.ask().status is Status.ADMITTED


def test_good_server_has_no_warnings(side):
    """The embedded one is configured as the documentation says."""
    assert side.store.check_server() == []


def test_server_that_may_evict_is_warned_of(own):
    """Leases and waiting messages could vanish."""
    side, server = own
    server.call("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    (warning,) = side.store.check_server()
    assert "noeviction" in warning


def test_cluster_is_refused(namespace):
    """Its keys would be in many places."""
    with (
        EmbeddedValkey(options={"cluster-enabled": "yes"}) as server,
        closing(RedisStore.from_url(server.url, namespace)) as store,
        pytest.raises(ConfigurationError, match="Cluster"),
    ):
        store.check_server()


def test_nonce_is_seen_in_the_same_database_only(side, valkey, redis_url, namespace):
    """The proof that parking can be one script."""
    other_database = (int(redis_url.rsplit("/", 1)[1]) + 1) % 250
    nonce = side.store.leave_nonce()
    with redis.Redis.from_url(redis_url) as same, redis.Redis.from_url(valkey.database_url(other_database)) as other:
        assert client_sees_nonce(same, namespace, nonce)
        assert side.store.shares_server(same)
        assert not client_sees_nonce(other, namespace, nonce)
        assert not side.store.shares_server(other)
    assert not side.store.shares_server(object())
    assert 0 < side.client.ttl(keys.nonce(keys.root(namespace), nonce)) <= 60


def test_broken_wakeups_say_so_and_can_be_asked_for_again(own):
    """What was sent meanwhile is lost, and costs at most one heartbeat."""
    side, server = own
    wakeups = side.store.wakeups("p")
    assert wakeups.get(0.01) is None
    server.restart()
    with pytest.raises(StoreUnavailable):
        wakeups.get(5)
    with closing(side.store.wakeups("p")) as wakeups:
        side.client.publish(keys.wake(keys.root(side.store._namespace), "p"), "l-caller")
        assert wakeups.get(5) == "l-caller"
    server.kill()
    with pytest.raises(StoreUnavailable):
        side.store.wakeups("p")
