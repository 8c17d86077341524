"""`python -m guard_middleware`: what it says, without a server."""

from __future__ import annotations

import pytest

from guard_middleware.cli import texts
from guard_middleware.cli.main import main
from guard_middleware.config import GuardSettings
from guard_middleware.core.commands import Action, EndpointSnapshot, Reply, Snapshot, Status
from guard_middleware.errors import StoreUnavailable
from guard_middleware.guard import Guard

CHAT = {"id": "chat", "max_concurrent_requests": 4}


class CannedStore:
    """A store that shows one snapshot and writes down what is done to it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.shown = snapshot
        self.done: list[tuple[Action, str, int]] = []

    def snapshot(self) -> Snapshot:
        """The one given."""
        return self.shown

    def operate(self, command) -> Reply:
        """Note the command; nothing is ever moved."""
        self.done.append((command.action, command.target, command.value))
        return Reply(status=Status.DONE)

    def close(self) -> None:
        """Nothing is open."""


def endpoint(**fields: object) -> EndpointSnapshot:
    """An endpoint of four, idle where nothing is said."""
    return EndpointSnapshot(**{"id": "chat", "ceiling": 4, "limit": 4, "in_flight": 0, "breaker": "closed", **fields})


def seen(*endpoints: EndpointSnapshot, **fields: object) -> Snapshot:
    """A snapshot of these endpoints."""
    return Snapshot(at_ms=0, endpoints={one.id: one for one in endpoints}, **fields)


@pytest.fixture
def run(monkeypatch, capsys):
    """Run one command line against a snapshot: exit status, stdout, stderr, and what was done."""

    def call(snapshot: Snapshot, *arguments: str, **settings: object) -> tuple[int, str, str, list]:
        store = CannedStore(snapshot)
        guard = Guard(GuardSettings(**settings), store=lambda: store)
        monkeypatch.setattr(Guard, "from_settings", lambda: guard)
        code = main(arguments)
        out, err = capsys.readouterr()
        return code, out, err, store.done

    return call


def test_status_names_priorities_and_what_is_kept_from_background() -> None:
    """Operators know priorities by their names, and see why background stands although there is room."""
    one = endpoint(in_flight=3, waiting={0: 1, 1: 12, 3: 7})
    text = texts.status(seen(one), GuardSettings(models=[CHAT]))
    assert text == (
        "chat: 3 in flight of 4 (1 kept from background), breaker closed, "
        "waiting: 1 interactive, 12 orchestration+hydration, 7 background_ingestion"
    )


@pytest.mark.parametrize("settings", [{"models": [{**CHAT, "reserve": 0}]}, {"models": [{"id": "other"}]}, {}])
def test_status_tells_of_no_reserve_where_none_is_or_none_is_known(settings) -> None:
    """A reserve of 0 is none, and of a model that these settings do not name nothing is claimed."""
    assert "chat: 0 in flight of 4, breaker" in texts.status(seen(endpoint()), GuardSettings(**settings))


def test_status_of_an_empty_store_asks_for_the_two_settings_that_choose_it() -> None:
    """Looking at another store than the workers' is the usual reason."""
    assert "are GUARD_REDIS_URL and GUARD_NAMESPACE those of the workers?" in texts.status(seen(), GuardSettings())


def test_status_without_workers_tells_what_is_parked_and_what_moves_it() -> None:
    """Messages that wait while nobody lives are not lost, and not silent."""
    lines = {
        ("chat", "dramatiq", "answers"): ("m1", "m2"),
        ("embed", "apps", "vectors"): tuple(f"m{n}" for n in range(200)),
        ("chat", "", ""): ("caller",),
    }
    first, *left = texts.status(seen(lines=lines), GuardSettings()).splitlines()
    assert first == "no live process has published an endpoint"
    told = "and no live worker: start one, or `python -m guard_middleware drain"
    assert left == [
        f"chat: 2 parked in queue 'answers', {told} answers`",
        f"embed: 200 or more parked in queue 'vectors', {told} vectors --broker-namespace apps`",
    ]


@pytest.mark.parametrize("command", [("pause",), ("resume",), ("ceiling", "2"), ("breaker", "open")])
@pytest.mark.parametrize("settings", [{}, {"models": [CHAT]}])
def test_unknown_model_is_refused_with_the_nearest(run, command, settings) -> None:
    """What is stored for a misspelled id would steer nothing, without a word."""
    name, *rest = command
    code, _, err, done = run(seen(endpoint()), name, "chatt", *rest, **settings)
    assert (code, done) == (1, [])
    assert 'the nearest is "chat"' in err


def test_model_of_the_settings_or_of_a_live_process_is_enough(run) -> None:
    """An endpoint may be paused before its workers start, and one that only the workers know, too."""
    assert run(seen(), "pause", "chat", models=[CHAT])[0] == 0
    assert run(seen(endpoint(id="embed")), "pause", "embed", models=[CHAT])[3] == [(Action.PAUSE, "embed", 0)]
    code, _, err, _ = run(seen(), "pause", "chat")
    assert code == 1
    assert "set GUARD_MODELS" in err


def test_ceiling_above_the_most_is_refused_with_the_number(run) -> None:
    """What the settings forbid in a file, the command line does not allow either."""
    code, _, err, done = run(seen(endpoint()), "ceiling", "chat", "65", models=[CHAT], model_max_concurrency=64)
    assert (code, done) == (1, [])
    assert "MODEL_MAX_CONCURRENCY (64)" in err
    assert run(seen(endpoint()), "ceiling", "chat", "64", models=[CHAT], model_max_concurrency=64)[0] == 0


def test_drain_of_a_queue_without_messages_names_those_that_have_some(run) -> None:
    """A misspelled queue would look like success."""
    lines = {("chat", "dramatiq", "answers"): ("m1",), ("chat", "apps", "vectors"): ("m2",), ("chat", "", ""): ("c",)}
    code, out, err, _ = run(seen(lines=lines), "drain", "anwsers")
    assert (code, out) == (0, "0 messages put back\n")
    assert err == (
        "no message waits for queue 'anwsers'; the queues with parked messages are: "
        "answers, vectors (--broker-namespace apps)\n"
    )
    assert "nor for any other queue" in run(seen(), "drain", "anwsers")[2]


def test_store_that_is_away_is_named_without_its_credentials(monkeypatch, capsys) -> None:
    """Host and port are what one looks at first; the password is nobody's."""
    settings = GuardSettings(redis_url="redis://user:S3cr3t@localhost:1/3", store_timeout_s=0.2)
    monkeypatch.setattr(Guard, "from_settings", lambda: Guard(settings))
    assert main(["status"]) == 1
    err = capsys.readouterr().err
    assert "(GUARD_REDIS_URL is redis://***@localhost:1/3)" in err
    assert "S3cr3t" not in err


def test_store_error_of_a_verb_is_told(run, monkeypatch) -> None:
    """Any verb may find the store away."""

    def away(_: object) -> None:
        msg = "the store does not answer"
        raise StoreUnavailable(msg)

    monkeypatch.setattr(CannedStore, "operate", lambda self, _: away(self))
    code, _, err, _ = run(seen(endpoint()), "pause", "chat")
    assert code == 1
    assert err == "error: the store does not answer (GUARD_REDIS_URL is redis://127.0.0.1:6379/0)\n"
