"""However a delivery ends, its permit is back at once (I5): nothing here waits for a lease to run out."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from dramatiq.errors import Retry
from dramatiq.middleware import CurrentMessage, Middleware, MiddlewareError, SkipMessage, TimeLimit, TimeLimitExceeded
from dramatiq.middleware.shutdown import Shutdown
from dramatiq.threading import raise_thread_exception

from guard_middleware import AdmissionDenied
from guard_middleware.core.commands import Action, Operate
from guard_middleware.queueing.middleware import member_of
from tests.support.bench import LEASE_S, interruptible_wait, stubborn_wait
from tests.support.deployment import wait_until

AT_ONCE_S = 3.0
"""Far less than a lease; a few beats."""

DENIED = ("chat", "orchestration", "endpoint_full", 0)


class Unheard(BaseException):
    """A BaseException that nobody knows."""


class Bad(MiddlewareError):
    """A MiddlewareError that is no skip."""


def returns():
    """Ends with a value."""
    return "value"


def returns_none():
    """Ends without one."""
    return


def raises():
    """Fails."""
    msg = "a fault of its own"
    raise ValueError(msg)


def retries():
    """Asks for a retry."""
    raise Retry(delay=10)


def unheard():
    """Ends with what nobody knows."""
    raise Unheard


def leaves():
    """Ends with what would end a process."""
    raise SystemExit


def skips():
    """Skips its own message."""
    raise SkipMessage


def times_out():
    """Is over its time limit."""
    raise_thread_exception(threading.get_ident(), TimeLimitExceeded)
    interruptible_wait(threading.Event(), 5)


def shut_down():
    """Is interrupted by the worker's shutdown."""
    raise_thread_exception(threading.get_ident(), Shutdown)
    interruptible_wait(threading.Event(), 5)


EXITS = {
    "return": (returns, 1),
    "return None": (returns_none, 1),
    "exception": (raises, 2),
    "Retry": (retries, 2),
    "BaseException": (unheard, 2),
    "SystemExit": (leaves, 2),
    "skip by the body": (skips, 1),
    "time limit": (times_out, 2),
    "shutdown": (shut_down, 2),
}
"""The body, and how often it begins with one retry allowed: what unguarded Dramatiq does."""


@pytest.mark.parametrize("arrival", ["fresh", "from the line"])
@pytest.mark.parametrize("name", EXITS)
def test_body_gives_its_permit_back(make_bench, name, arrival):
    """However the body ends, the permit is free at once, the thread lives, Dramatiq goes on as without a guard."""
    body, times = EXITS[name]
    bench = make_bench(model_circuit_breaker=False)
    work = bench.actor(body, actor_name="work", max_retries=1)
    other = bench.actor(lambda: None, actor_name="other")
    bench.start(threads=1)
    # Given a message that is admitted at once, or has waited in the line
    if arrival == "fresh":
        message = work.send()
    else:
        bench.pause()
        message = work.send()
        bench.wait_parked(1)
        bench.resume()
    # When its body has ended as often as it does without a guard
    wait_until(lambda: bench.count_of(message)[0] == times, 10)
    ended_at = time.monotonic()
    # Then nothing is held any more, here or in the store
    wait_until(lambda: bench.leases() == 0, AT_ONCE_S)
    assert time.monotonic() - ended_at < AT_ONCE_S < LEASE_S
    bench.wait_ended(other.send())
    bench.wait_idle()
    assert bench.member.heartbeat.holdings.in_use() == 0
    assert bench.threads_alive()
    assert bench.count_of(message)[0] == times
    assert [one.message_id for one in bench.dead()] == ([message.message_id] if times == 2 else [])


@pytest.mark.parametrize("name", EXITS)
def test_unguarded_dramatiq_does_the_same(make_bench, name):
    """The number of runs in the table above is Dramatiq's own, measured on a broker without a guard."""
    body, times = EXITS[name]
    bench = make_bench(is_guarded=False)
    work = bench.actor(body, actor_name="work", max_retries=1)
    bench.start(threads=1)
    message = work.send()
    wait_until(lambda: not bench.stored(), 10)
    assert bench.count_of(message)[0] == times
    assert [one.message_id for one in bench.dead()] == ([message.message_id] if times == 2 else [])


class Acts(Middleware):
    """Does something to the messages of one actor before they are processed."""

    def __init__(self, act):
        self.act = act
        self.acted = 0

    def before_process_message(self, broker, message):
        if message.actor_name == "work":
            self.acted += 1
            self.act(message)


def skip(message):
    """Skip it."""
    raise SkipMessage


def skip_and_fail(message):
    """Dead-letter it."""
    message.fail()
    raise SkipMessage


def only_fail(message):
    """Fail it, and let it go on."""
    message.fail()


def error(message):
    """End it with an error that Dramatiq lets through."""
    raise Bad


def interrupt(message):
    """End it as a time limit would."""
    raise TimeLimitExceeded


@pytest.mark.parametrize("arrival", ["fresh", "from the line"])
@pytest.mark.parametrize("side", ["before", "after"])
@pytest.mark.parametrize("act", [skip, skip_and_fail, only_fail, error, interrupt], ids=lambda act: act.__name__)
def test_another_middleware_that_ends_the_message_leaves_no_permit_behind(make_bench, act, side, arrival):
    """Before the guard or after it, skip, fail, error or interrupt: no body begins, the permit is free at once."""
    acts = Acts(act)
    bench = make_bench(**{side: [acts]})
    work = bench.actor(lambda: None, actor_name="work", max_retries=0)
    other = bench.actor(lambda: None, actor_name="other")
    bench.start(threads=1)
    if arrival == "from the line":  # parked while the other middleware let it through
        acts.act = lambda message: None
        bench.pause()
        message = work.send()
        bench.wait_parked(1)
        wait_until(lambda: bench.member.idle() == 1, 5)
        acts.act = act
        bench.resume()
    else:
        message = work.send()
    wait_until(lambda: not bench.stored(), AT_ONCE_S)
    wait_until(lambda: bench.leases() == 0, AT_ONCE_S)
    bench.wait_ended(other.send())
    bench.wait_idle()
    assert bench.count_of(message) == (0, 0)
    assert bench.threads_alive()
    assert bench.member.heartbeat.holdings.in_use() == 0
    assert not bench.store.client.hgetall(f"guard:{{{bench.namespace}}}:parked:chat\x1f{bench.namespace}\x1fdefault")


def test_a_coroutine_that_outlives_its_interrupt_keeps_the_permit_until_it_ends(make_bench):
    """Dramatiq waits one second for a cancelled coroutine and goes on; the server still has the call."""
    bench = make_bench(coroutines=True, model_circuit_breaker=False)
    gate, threads = bench.gate(), []

    async def body():
        await stubborn_wait(gate)

    work = bench.actor(body, actor_name="work", max_retries=0)
    worker = bench.start(threads=1)
    message = work.send()
    wait_until(lambda: bench.count_of(message)[0] == 1, 5)
    threads.append(worker.workers[0].ident)
    # When the actor is interrupted and given up
    raise_thread_exception(threads[0], TimeLimitExceeded)
    wait_until(lambda: [one.message_id for one in bench.dead()] == [message.message_id], 5)
    wait_until(lambda: worker.work_queue.unfinished_tasks == 0, 5)
    # Then the permit stays for as long as the coroutine does, over several beats and further messages...
    other = bench.actor(lambda: None, actor_name="other")
    waiting = other.send()
    bench.wait_parked(1)
    beats = []
    sound = bench.member.beaten
    bench.member.beaten = lambda: (beats.append(1), sound())
    wait_until(lambda: len(beats) >= 3, 5)
    assert bench.leases() == 1
    assert bench.count_of(waiting) == (0, 0)
    # ...and is free when it ends
    gate.set()
    bench.wait_ended(waiting, timeout_s=AT_ONCE_S)
    bench.wait_idle()
    assert bench.threads_alive()


def test_a_coroutine_whose_actor_has_ended_does_not_start_any_more(make_bench):
    """A busy event loop may come to a coroutine only after its actor was interrupted: its body has no permit (I2)."""
    bench = make_bench(coroutines=True, model_circuit_breaker=False)
    bodies = []

    async def body():
        bodies.append(1)
        await asyncio.sleep(0)

    async def block():
        gate.wait(10)

    gate, blocked = bench.gate(), bench.actor(block, actor_name="block", model=None, queue_name="plain")
    work = bench.actor(body, actor_name="work", max_retries=0)
    worker = bench.start(threads=2)
    blocked.send()
    wait_until(lambda: len(bench.begun) == 1, 5)  # the event loop is blocked
    message = work.send()
    wait_until(lambda: bench.leases() == 1, 5)
    (ident,) = bench.member.turns._turns
    raise_thread_exception(ident, TimeLimitExceeded)
    wait_until(bench.dead, 5)
    wait_until(lambda: bench.leases() == 0, AT_ONCE_S)
    gate.set()
    wait_until(lambda: worker.work_queue.unfinished_tasks == 0, 5)
    bench.wait_idle()
    assert bodies == []
    assert bench.count_of(message) == (0, 0)


def test_a_time_limit_counts_as_one_time_out_and_the_message_waits_for_the_server(make_bench):
    """The server may hang: the breaker trips once, and the message parks instead of burning a retry."""
    bench = make_bench(model_breaker_base_cooldown_s=0.3)
    first = []

    def body():
        if not first:
            first.append(1)
            times_out()

    work = bench.actor(body, actor_name="work", max_retries=0)
    bench.start(threads=1)
    message = work.send()
    bench.wait_parked(1)
    endpoint = bench.snapshot().endpoints["chat"]
    assert (endpoint.breaker, endpoint.trips, endpoint.in_flight) == ("open", 1, 0)
    bench.wait_ended(message)
    bench.wait_idle()
    assert bench.count_of(message) == (2, 1)
    assert bench.threads_alive()


class OverloadedError(Exception):
    """What a client raises for a server that sheds load."""

    status_code = 503


def test_three_overloads_of_an_undecorated_actor_trip_the_breaker(make_bench):
    """A message with `guard_model` among its options: nothing stands around its body, and still its end counts."""
    bench = make_bench(model_breaker_fail_threshold=3, model_breaker_base_cooldown_s=20)

    def body():
        raise OverloadedError

    work = bench.actor(body, actor_name="work", model=None, max_retries=0)
    bench.start(threads=1)
    for count in range(3):
        assert bench.snapshot().endpoints["chat"].breaker == "closed"
        work.send_with_options(guard_model="chat")
        wait_until(lambda wanted=count + 1: len(bench.dead()) == wanted, 5)  # the guard lets Dramatiq have its way
    endpoint = bench.snapshot().endpoints["chat"]
    assert (endpoint.breaker, endpoint.trips, endpoint.in_flight) == ("open", 1, 0)


@pytest.mark.parametrize(
    ("ending", "breaker"), [("returns", "closed"), ("is overloaded", "open"), ("is skipped", "half_open")]
)
def test_a_probe_of_an_undecorated_actor_tells_how_it_has_ended(make_bench, ending, breaker):
    """A body that returned closes the breaker, an overload opens it again, one that never began says nothing."""
    acts = Acts(lambda message: skip(message) if ending == "is skipped" else None)
    bench = make_bench(after=[acts], model_breaker_base_cooldown_s=20)

    def body():
        if ending == "is overloaded":
            raise OverloadedError

    work = bench.actor(body, actor_name="work", model=None, max_retries=0)
    bench.start(threads=1)
    bench.store.operate(Operate(action=Action.OPEN, target="chat", value=100))
    wait_until(lambda: bench.snapshot().endpoints["chat"].breaker == "half_open", 5)
    work.send_with_options(guard_model="chat")
    wait_until(lambda: acts.acted == 1, 5)
    bench.wait_idle()
    assert bench.snapshot().endpoints["chat"].breaker == breaker


@pytest.mark.parametrize("wrapped", [False, True], ids=["as it is", "in a client's own error"])
def test_a_body_that_was_denied_a_further_permit_gives_its_own_back_and_waits(make_bench, wrapped):
    """AdmissionDenied is somebody else's capacity: the message parks, burns no retry, and holds nothing meanwhile."""
    bench = make_bench()
    seen = []

    def body():
        seen.append(CurrentMessage.get_current_message().options.get("retries", 0))
        if len(seen) == 1 and wrapped:
            raise ConnectionError from AdmissionDenied(*DENIED)
        if len(seen) == 1:
            raise AdmissionDenied(*DENIED)

    work = bench.actor(body, actor_name="work", max_retries=0)
    other = bench.actor(lambda: None, actor_name="other")
    bench.start(threads=1)
    message = work.send()
    wait_until(lambda: seen, 5)
    bench.wait_ended(other.send(), timeout_s=AT_ONCE_S)  # it has the one permit
    assert bench.count_of(message) == (1, 0)
    bench.wait_ended(message)
    bench.wait_idle()
    assert seen == [0, 0]
    assert bench.dead() == []


@pytest.mark.slow
def test_dramatiqs_own_time_limit_frees_the_permit_of_a_blocked_call_when_it_comes_back(make_bench):
    """The exception is raised only when Python code runs again: the lease is held while the thread is blocked."""
    limit = TimeLimit(time_limit=150, interval=20)
    bench = make_bench(model_circuit_breaker=False, before=[limit])
    limit.after_process_boot(bench.broker)
    blocked = bench.actor(lambda: time.sleep(1.2), actor_name="blocked", max_retries=0)
    bench.start(threads=1)
    message = blocked.send()
    wait_until(lambda: bench.count_of(message)[0] == 1, 5)
    begun_at = time.monotonic()
    wait_until(lambda: bench.leases() == 0, 5)
    assert time.monotonic() - begun_at > 0.8
    wait_until(bench.dead, 5)
    assert bench.threads_alive()


def test_what_was_taken_and_not_begun_goes_back_when_the_shutdown_begins_not_when_it_ends(make_bench, monkeypatch):
    """A drain may take as long as the longest call: others run meanwhile what this worker had taken."""
    # Given a worker that has taken a message, but whose only thread is busy
    bench, other = make_bench(), make_bench()
    gate = bench.gate()
    busy = bench.actor(lambda: gate.wait(20), actor_name="busy", model=None)
    work = bench.actor(lambda: None, actor_name="work")
    other.actor(lambda: None, actor_name="work")
    worker = bench.start(threads=1)
    bench.pause()
    message = work.send()
    bench.wait_parked(1)
    busy.send()
    wait_until(lambda: bench.begun, 5)
    monkeypatch.setattr(bench.member, "idle", lambda **_: 1)
    bench.resume()
    wait_until(lambda: worker.work_queue.qsize() == 1, 5)
    # When it is told to stop, and is not done
    stop = threading.Thread(target=worker.stop)
    stop.start()
    # Then another worker runs the message
    other.start(threads=1)
    other.wait_ended(message, timeout_s=AT_ONCE_S)
    assert stop.is_alive()
    gate.set()
    stop.join(10)
    bench.workers.remove(worker)
    bench.wait_idle()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_is_not_waited_for(make_bench):
    """An interrupt in its own code can cost Dramatiq a thread: what waits in line is taken for those that are left."""

    class Deadly(Middleware):
        def before_ack(self, broker, message):
            if message.actor_name == "deadly":
                raise TimeLimitExceeded

    bench = make_bench(before=[Deadly()])
    deadly = bench.actor(lambda: None, actor_name="deadly", max_retries=0)
    work = bench.actor(lambda: None, actor_name="work")
    bench.start(threads=2)
    deadly.send()
    wait_until(lambda: not bench.threads_alive(), 5)
    bench.pause()
    message = work.send()
    bench.wait_parked(1)
    wait_until(lambda: bench.member.idle() == 1, 5)
    # When time alone frees the permit, Then the other thread runs the message
    bench.resume()
    bench.wait_ended(message)
    wait_until(lambda: bench.leases() == 0, AT_ONCE_S)


def test_a_worker_that_is_about_to_stop_begins_nothing_more(make_bench):
    """A message that it had fetched already goes back, and runs once, elsewhere."""
    bench = make_bench(models={"chat": {"max_concurrent_requests": 2}})
    gate = bench.gate()
    work = bench.actor(lambda: gate.wait(10), actor_name="work")
    worker = bench.start(threads=1)
    first, second = work.send(), work.send()
    wait_until(lambda: len(bench.begun) == 1 and worker.work_queue.qsize() == 1, 5)
    begun = next(one for one in (first, second) if one.message_id in bench.begun)
    fetched = second if begun is first else first
    member_of(bench.broker).leave()
    gate.set()
    bench.wait_ended(begun)
    worker.stop()
    bench.workers.remove(worker)
    assert bench.count_of(fetched) == (0, 0)
    bench.start(threads=1)
    bench.wait_ended(fetched)
    bench.wait_idle()
    assert bench.count_of(fetched) == (1, 1)


@pytest.mark.parametrize("polite", [True, False])
def test_a_worker_that_shuts_down_leaves_no_permit_behind(make_bench, polite):
    """With one message running, one taken and not begun, and some parked: after the stop nothing is leased."""
    bench = make_bench(models={"chat": {"max_concurrent_requests": 2}})
    gate = bench.gate()

    def body():
        if polite:
            gate.wait(10)
        else:
            interruptible_wait(gate)

    work = bench.actor(body, actor_name="work", notify_shutdown=not polite, max_retries=1)
    worker = bench.start(threads=1)
    messages = [work.send() for _ in range(4)]
    wait_until(lambda: bench.leases() >= 1, 5)
    if polite:
        threading.Timer(0.2, gate.set).start()
    worker.stop(timeout=10_000)
    bench.workers.remove(worker)
    assert bench.leases() == 0
    assert bench.member_is_gone()
    # What has not run is all there, for the next worker
    gate.set()
    bench.start(threads=2)
    bench.wait_ended(*messages)
    bench.wait_idle()
    assert all(bench.count_of(one)[1] == 1 for one in messages)
