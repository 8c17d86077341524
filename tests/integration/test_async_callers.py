"""Callers on event loops: the same line and ceiling, and nothing left behind wherever a cancellation strikes."""

from __future__ import annotations

import asyncio
import contextvars
import json
import random
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress

import httpx
import pytest

from guard_middleware import AsyncGuard, Guard, StoreUnavailable
from guard_middleware.store.aredis import MOST_AT_ONCE
from guard_middleware.testing.model_server import FakeEndpoint
from tests.fault.proxy import StoreProxy
from tests.support.deployment import ROOT, wait_until
from tests.support.faces import AT_ONCE_S, Truth, settings_of, until

ONE = {"chat": {"max_concurrent_requests": 1}}
FOUR = {"chat": {"max_concurrent_requests": 4}}
TWO_ENDPOINTS = {"chat": {"max_concurrent_requests": 50}, "embed": {"max_concurrent_requests": 50}}
CHAT = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def proxy(redis_url):
    """Between the guard and its store."""
    with StoreProxy(redis_url) as one:
        yield one


class Scene:
    """One guard on this event loop, another caller in this process, and what the store itself says."""

    def __init__(self, settings, direct):
        self.guard = AsyncGuard(settings)
        self.other = Guard(direct)
        self.truth = Truth(direct)


@pytest.fixture
def scene(redis_url, namespace, monkeypatch):
    """Play a scenario on an event loop of its own, and see that it leaves nothing behind at once."""
    monkeypatch.setattr("guard_middleware.threads._LISTEN_S", 0.02)  # a guard that closes waits for it

    @asynccontextmanager
    async def scene_of(models, url, direct, **fields):
        one = Scene(settings_of(url, namespace, models, **fields), settings_of(direct, namespace, models, **fields))
        try:
            yield one
            await until(one.truth.nothing_left, AT_ONCE_S, one.truth.snapshot)
        finally:
            await asyncio.gather(one.guard.close(), asyncio.to_thread(one.other.close))
            one.truth.close()

    def play(scenario, models=ONE, url="", direct="", **fields):
        async def whole():
            direct_url = direct or redis_url
            async with scene_of(models, url or direct_url, direct_url, **fields) as one:
                await scenario(one)

        asyncio.run(whole())

    return play


async def body(guard, got=None, *, model="chat", seconds=0.0, **options):
    """A call of so many seconds under a permit."""
    async with guard.permit(model, **{"timeout": 30, **options}) as permit:
        if got is not None:
            got.append(permit)
        await asyncio.sleep(seconds)


async def cancelled(task):
    """Cancel a task, and see that it ends so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, AT_ONCE_S)


# ---------------------------------------------------------------------- cancellations: a wait


def test_a_wait_cancelled_while_the_ask_is_on_the_wire_leaves_nothing(scene, proxy):
    """The store carries the ask out after the caller has gone: what it granted is back at once, not by expiry."""

    async def scenario(one):
        await body(one.guard)
        proxy.delay(0.3)
        executed = proxy.executed["admit"]
        task = asyncio.create_task(body(one.guard))
        await asyncio.sleep(0.1)
        await cancelled(task)
        await until(lambda: proxy.executed["admit"] == executed + 1)
        proxy.serve()
        await until(one.truth.nothing_left)
        assert await asyncio.to_thread(one.other.try_permit, "chat") is not None

    scene(scenario, url=proxy.url)


@pytest.mark.parametrize("known", [False, True], ids=["first call of the process", "later call"])
def test_a_cancellation_at_every_single_step_of_a_call_is_obeyed_and_leaves_nothing(scene, known):
    """After k turns of the event loop, for every k until the call is over: it ends cancelled, and holds nothing."""

    async def scenario(one):
        if known:
            await body(one.guard)
        over = steps = 0
        while over < 3:
            guard = one.guard if known else AsyncGuard(one.guard.settings)
            task = asyncio.create_task(body(guard))
            for _ in range(steps):
                await asyncio.sleep(0 if known else 0.0005)
            if task.done():
                over += 1
                await task
            else:
                await cancelled(task)
            if not known:
                await guard.close()
            steps += 1
            assert steps < 400
        assert steps > 6
        await until(one.truth.nothing_left)

    scene(scenario)


def test_a_wait_cancelled_in_line_leaves_it(scene):
    """The line is empty again although the permit never became free, and the next caller is not held up."""

    async def scenario(one):
        held = await asyncio.to_thread(one.other.permit, "chat")
        tasks = [asyncio.create_task(body(one.guard)) for _ in range(5)]
        await until(lambda: one.truth.waiting() == 5)
        for task in tasks[::2]:
            await cancelled(task)
        await until(lambda: one.truth.waiting() == 2)
        assert set(one.truth.leases()) == {held.lease}
        held.release()
        await asyncio.gather(tasks[1], tasks[3])

    scene(scenario)


def test_a_wait_cancelled_right_after_the_grant_passes_the_permit_on(scene):
    """The store has given it the permit, and it does not know yet: the next in line has it at once."""

    async def scenario(one):
        held = await asyncio.to_thread(one.other.permit, "chat")
        got = []
        first, second = (asyncio.create_task(body(one.guard, got)) for _ in range(2))
        await until(lambda: one.truth.waiting() == 2)
        # When the event loop is kept until the store has granted it, and the task is cancelled before it runs
        held.release()
        wait_until(lambda: one.truth.waiting() == 1 and len(one.truth.leases()) == 1, 5)
        begun_s = time.monotonic()
        await cancelled(first)
        await asyncio.wait_for(second, AT_ONCE_S)
        assert time.monotonic() - begun_s < AT_ONCE_S
        assert len(got) == 1

    scene(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_cancellations_at_random_instants_leave_nothing(scene, seed):
    """150 tasks on a ceiling of 4, most cancelled at any instant: all end at once, never 5 at a time, nothing is left."""

    async def scenario(one):
        chance, running, most = random.Random(seed), 0, 0

        async def call():
            nonlocal running, most
            async with one.guard.permit("chat", timeout=30):
                running += 1
                most = max(most, running)
                try:
                    await asyncio.sleep(chance.uniform(0, 0.03))
                finally:
                    running -= 1

        async def life(delay_s, patience_s):
            await asyncio.sleep(delay_s)
            task = asyncio.create_task(call())
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await asyncio.shield(task)
            if not task.done():
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.wait_for(task, AT_ONCE_S)
                return True
            return False

        lives = [life(chance.uniform(0, 1), chance.choice([0.001, 0.01, 0.1, 10])) for _ in range(150)]
        ends = await asyncio.gather(*lives)
        assert 0 < sum(ends) < 150
        assert most == 4
        await until(one.truth.nothing_left, 2, one.truth.snapshot)
        permits = [await one.guard.try_permit("chat") for _ in range(5)]
        assert [permit is None for permit in permits] == [False] * 4 + [True]
        for permit in permits[:4]:
            await permit.release()

    scene(scenario, FOUR)


@pytest.mark.slow
def test_a_connection_that_was_cut_off_is_never_used_again(scene, proxy):
    """Cancelled asks for one endpoint, an ask for another right behind each: every reply is its own."""

    async def scenario(one):
        await body(one.guard)
        await body(one.guard, model="embed")
        proxy.delay(0.02)
        for number in range(15):
            task = asyncio.create_task(body(one.guard, seconds=5))
            await asyncio.sleep(0.002 * number)
            await cancelled(task)
            permit = await one.guard.permit("embed", timeout=5)
            assert permit.endpoint.id == "embed"
            assert one.truth.leases().get(permit.lease) == "embed"
            await permit.release()
        proxy.serve()
        await until(lambda: set(one.truth.leases().values()) <= {"embed"})

    scene(scenario, TWO_ENDPOINTS, url=proxy.url)


# ---------------------------------------------------------------------- cancellations: a call


def test_a_cancelled_call_has_released_when_its_task_is_over(scene):
    """Cancelled, timed out from outside or from inside: no unit is in use in the next line (I5)."""

    async def scenario(one):
        got = []
        task = asyncio.create_task(body(one.guard, got, seconds=30))
        await until(lambda: got)
        await cancelled(task)
        assert one.truth.leases() == {}
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(body(one.guard, seconds=30), 0.2)
        assert one.truth.leases() == {}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await body(one.guard, seconds=30)
        assert one.truth.leases() == {}
        async with one.guard.permit("chat"):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await asyncio.sleep(30)
            assert len(one.truth.leases()) == 1
        assert one.truth.leases() == {}
        assert one.truth.of().breaker == "closed"

    scene(scenario)


def test_a_task_group_that_fails_leaves_nothing(scene):
    """One of its tasks fails while the others call and wait: all are over, and so are their permits."""

    async def scenario(one):
        async def fails():
            async with one.guard.permit("chat"):
                await until(lambda: one.truth.waiting() == 3)
                msg = "a fault of its own"
                raise ValueError(msg)

        async def family():
            async with asyncio.TaskGroup() as group:
                group.create_task(fails())
                await asyncio.sleep(0.05)
                for _ in range(3):
                    group.create_task(body(one.guard, seconds=30))

        with pytest.raises(ExceptionGroup):
            await family()
        await until(one.truth.nothing_left)

    scene(scenario)


def test_a_release_that_is_cancelled_is_done_by_a_beat(scene, proxy):
    """The task is cancelled twice, the second time while it gives its permit back."""

    async def scenario(one):
        got = []
        task = asyncio.create_task(body(one.guard, got, seconds=30))
        await until(lambda: got)
        proxy.delay(0.3)
        task.cancel()
        await asyncio.sleep(0.1)
        await cancelled(task)
        proxy.serve()
        await until(one.truth.nothing_left)

    scene(scenario, url=proxy.url)


def test_a_release_while_the_store_is_away_is_done_by_a_beat(scene, proxy):
    """The block is left without an error; the permit is free once the store is back, not by expiry."""

    async def scenario(one):
        async with one.guard.permit("chat"):
            proxy.cut()
        await asyncio.sleep(0.3)
        assert len(one.truth.leases()) == 1
        proxy.serve()
        await until(one.truth.nothing_left)

    scene(scenario, url=proxy.url, store_timeout_s=0.5)


THROWN_AWAY = """
import asyncio, gc, sys
from guard_middleware import AsyncGuard
from tests.support.deployment import wait_until
from tests.support.faces import AT_ONCE_S, Truth, settings_of, until

async def body():
    async with guard.permit("chat", timeout=30):
        await asyncio.sleep(30)

settings = settings_of(*sys.argv[1:], {"chat": {"max_concurrent_requests": 1}})
guard, truth, loop = AsyncGuard(settings), Truth(settings), asyncio.new_event_loop()
tasks = [loop.create_task(body()) for _ in range(3)]
loop.run_until_complete(until(lambda: truth.waiting() == 2 and truth.leases()))
loop.close()
tasks.clear()
wait_until(lambda: gc.collect() >= 0 and truth.nothing_left(), AT_ONCE_S, truth.snapshot())
print("all is given back")
"""


@pytest.mark.slow
def test_tasks_that_are_thrown_away_with_their_loop_give_everything_back(redis_url, namespace):
    """A loop is closed over one task that calls and two that wait; what is collected goes back, not by expiry."""
    command = [sys.executable, "-c", THROWN_AWAY, redis_url, namespace]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.stdout.strip() == "all is given back", done.stderr


# ---------------------------------------------------------------------- event loops


def calling(deployment, count, guard, names, priority=None):
    """So many tasks that each make one call under a permit; their names in the order of their places in the line."""

    async def call(client, name):
        async with guard.permit("chat", priority=priority, timeout=30) as permit:
            names[permit.lease] = name
            url = f"{permit.endpoint.base_url}/chat/completions"
            (await client.post(url, json=CHAT, headers={"x-message-id": permit.lease})).raise_for_status()

    async def all_of_them():
        async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=None)) as client:
            await asyncio.gather(*(call(client, number) for number in range(count)))

    return all_of_them()


def serving(deploy, ceiling, base_ms=20, **env):
    """One endpoint without a reserve."""
    return deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed")],
        models={"chat": {"max_concurrent_requests": ceiling, "reserve": 0}, "embed": {}},
        env={"GUARD_LEASE_S": "30", **env},
    )


@pytest.mark.slow
def test_two_hundred_tasks_fill_the_ceiling_in_the_order_of_their_places(deploy, measured):
    """200 tasks, ceiling 4, few connections: the server counts 4, and gets them first come first served."""
    deployment = serving(deploy, 4)
    guard, names, store = AsyncGuard(guard=deployment.guard), {}, deployment.store()
    held = deployment.guard.permit("chat", cost=4)

    async def scenario():
        task = asyncio.create_task(calling(deployment, 200, guard, names))
        await until(lambda: sum(store.snapshot().endpoints["chat"].waiting.values()) == 200, 15)
        [places] = store.snapshot().lines.values()
        await asyncio.to_thread(held.release)
        await asyncio.wait_for(task, 30)
        [(mine, _)] = guard._stores.values()
        assert len(mine._idle) <= MOST_AT_ONCE
        await guard.leave_loop()
        return places

    places = asyncio.run(scenario())
    stats = deployment.server.stats()["chat"]
    measured("use", round(stats.use(4), 3))
    assert (stats.calls, stats.most_in_flight) == (200, 4)
    # Of four that start together, any may reach the server first
    position = {lease: place for place, lease in enumerate(places)}
    started = [position[one.message_id] for one in deployment.calls()]
    assert sorted(started) == list(range(200))
    assert max(abs(place - at) for at, place in enumerate(started)) < 4
    wait_until(lambda: not store.snapshot().leases, AT_ONCE_S)
    store.close()


def test_one_guard_on_two_event_loops_one_after_the_other(deploy):
    """`asyncio.run` twice, with nothing closed by hand in between: no connection outlives its loop."""
    deployment = serving(deploy, 3)
    guard = AsyncGuard(guard=deployment.guard)
    for _ in range(2):
        asyncio.run(calling(deployment, 9, guard, {}))
        assert guard._stores == {}
    stats = deployment.server.stats()["chat"]
    assert (stats.calls, stats.most_in_flight) == (18, 3)
    wait_until(lambda: not deployment.guard.snapshot().leases, AT_ONCE_S)


def test_one_guard_on_two_event_loops_in_two_threads(deploy):
    """Both loops' tasks are one line: the server counts the ceiling, and each call is made once."""
    deployment = serving(deploy, 3)
    guard, failed = AsyncGuard(guard=deployment.guard), []

    def loop():
        try:
            asyncio.run(calling(deployment, 20, guard, {}))
        except BaseException as exc:  # noqa: BLE001  # shown by the test
            failed.append(exc)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert failed == []
    assert guard._stores == {}
    stats = deployment.server.stats()["chat"]
    assert (stats.calls, stats.most_in_flight) == (40, 3)
    wait_until(lambda: not deployment.guard.snapshot().leases, AT_ONCE_S)


@pytest.mark.slow
def test_a_blocked_event_loop_does_not_lose_its_leases(scene):
    """The loop stands still for two lease times while it holds a permit: nobody else gets it meanwhile."""

    async def scenario(one):
        async with one.guard.permit("chat") as permit:
            until_s = time.monotonic() + 2.4
            while time.monotonic() < until_s:
                assert set(one.truth.leases()) == {permit.lease}
                assert one.other.try_permit("chat") is None
                time.sleep(0.1)  # noqa: ASYNC251  # the loop stands still: that is what the claim is about
        assert one.truth.leases() == {}

    def apart(play):
        return contextvars.Context().run(play)

    async def outside(one):
        # The other caller asks from a context of its own, or it would borrow the permit
        original = one.other.try_permit
        one.other.try_permit = lambda model: apart(lambda: original(model))
        await scenario(one)

    scene(outside, lease_s=1.2, heartbeat_s=0.3)


@pytest.mark.slow
def test_tasks_in_line_go_on_by_themselves_when_the_store_was_away(deploy, proxy):
    """Eight tasks call and wait when the store is cut off for a second: all are served, never 3 at once, none fails."""
    deployment = serving(deploy, 2, base_ms=100, GUARD_HEARTBEAT_S="0.5", GUARD_STORE_TIMEOUT_S="0.5")
    settings = deployment.guard.settings.model_copy(
        update={"redis_url": type(deployment.guard.settings.redis_url)(proxy.url)}
    )
    guard = AsyncGuard(settings)

    async def scenario():
        task = asyncio.create_task(calling(deployment, 8, guard, {}))
        await until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
        proxy.cut()
        await asyncio.sleep(1)  # this long a time is what the claim is about
        assert not task.done()
        begun = deployment.server.stats()["chat"].calls
        proxy.serve()
        await asyncio.wait_for(task, 10)
        await guard.close()
        return begun

    assert asyncio.run(scenario()) <= 4
    stats = deployment.server.stats()["chat"]
    assert (stats.calls, stats.most_in_flight) == (8, 2)
    wait_until(lambda: not deployment.guard.snapshot().leases, AT_ONCE_S)


def test_a_store_that_is_silent_is_given_up_in_time_and_its_late_replies_are_nobodys(scene, own_valkey):
    """It stands still for longer than the time-out: `StoreUnavailable`, then everything as ever, nothing left over."""

    async def scenario(one):
        await body(one.guard)
        own_valkey.pause()
        begun_s = time.monotonic()
        try:
            with pytest.raises(StoreUnavailable):
                await one.guard.permit("chat", timeout=0.6)
            assert time.monotonic() - begun_s < 2
        finally:
            own_valkey.resume()
        async with one.guard.permit("chat", timeout=5) as permit:
            await until(lambda: set(one.truth.leases()) == {permit.lease})

    scene(scenario, direct=own_valkey.url, store_timeout_s=0.4)


# ---------------------------------------------------------------------- four processes


class CallerProcess:
    """A process of `tests.support.callers`: it makes a call for each line that it is given."""

    def __init__(self, deployment, face):
        env = deployment.worker_env({"GUARD_HOLD_MS": "3000"})
        command = [sys.executable, "-m", "tests.support.callers", face]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout.readline() == "ready\n"

    def call(self, name, priority):
        print(json.dumps({"name": name, "priority": priority}), file=self.process.stdin, flush=True)

    def end(self):
        """Wait for all of its calls, and return what went wrong."""
        out, _ = self.process.communicate(timeout=30)
        return out


@contextmanager
def callers(deployment, *faces):
    """Processes of callers, ended with the block."""
    found = {face: CallerProcess(deployment, face) for face in faces}
    try:
        yield found
    finally:
        for one in found.values():
            if one.process.poll() is None:
                one.process.kill()
            one.process.communicate()


PRIORITIES = ["orchestration", "background_ingestion", "orchestration", "interactive", "hydration"]
RANKS = {"interactive": 0, "orchestration": 1, "hydration": 1, "background_ingestion": 3}


@pytest.mark.slow
def test_messages_and_callers_of_both_faces_in_four_processes_are_one_line(deploy, measured):
    """Two workers, a process of threads and one of tasks: lower rank first, then first come first served; then full."""
    deployment = serving(deploy, 1, base_ms=20, GUARD_HOLD_MS="3000")
    for _ in range(2):
        deployment.start(processes=1, threads=4, wait=False)
    with callers(deployment, "sync", "async") as calling_processes:
        for group in deployment.groups:
            group.wait_ready(1)
        # Given the only permit in this process's hand, and 15 of all kinds and priorities that line up by turns
        store, asked = deployment.store(), []
        held = deployment.guard.permit("chat")
        for number in range(15):
            priority = PRIORITIES[number % len(PRIORITIES)]
            kind = ("message", "sync", "async")[number % 3]
            if kind == "message":
                [name] = deployment.send("orchestrate", 1, guard_priority=priority)
            else:
                name = f"{kind} {number}"
                calling_processes[kind].call(name, priority)
            asked.append((RANKS[priority], number, name))
            wait_until(lambda count=number + 1: sum(store.snapshot().endpoints["chat"].waiting.values()) == count, 5)
        # When it is given back
        held.release()
        wait_until(lambda: deployment.server.stats()["chat"].calls == 15, 15)
        # Then the server gets them in that order
        assert [one.message_id for one in deployment.calls()] == [name for _, _, name in sorted(asked)]
        # And a crowd of all kinds fills a ceiling of 3 without exceeding it
        wait_until(lambda: not store.snapshot().leases, 5)
        assert deployment.server.stats()["chat"].most_in_flight == 1
        store.close()
        for one in calling_processes.values():
            assert one.end() == ""
        deployment.check_everything_once()


@pytest.mark.slow
def test_messages_and_callers_of_both_faces_in_four_processes_share_the_ceiling(deploy, measured):
    """A crowd of all three kinds on a ceiling of 3: the server counts 3, each call is made once, nothing is left."""
    deployment = serving(deploy, 3, base_ms=30)
    for _ in range(2):
        deployment.start(processes=1, threads=4, wait=False)
    with callers(deployment, "sync", "async") as calling_processes:
        for group in deployment.groups:
            group.wait_ready(1)
        for number in range(25):
            deployment.send("orchestrate", 1)
            for face, one in calling_processes.items():
                one.call(f"{face} {number}", "orchestration")
        for one in calling_processes.values():
            assert one.end() == ""
        deployment.wait_done(deployment.sent, 20)
    stats = deployment.server.stats()["chat"]
    measured("use", round(stats.use(3), 3))
    assert (stats.calls, stats.most_in_flight) == (75, 3)
    deployment.check_everything_once()
