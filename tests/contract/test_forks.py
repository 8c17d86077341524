"""A process that is forked while the guard is in use: it has none of its parent's permits, and none of its locks."""

from __future__ import annotations

import asyncio
import contextvars
import multiprocessing
import os
import signal
import threading
from contextlib import closing

import pytest

from guard_middleware import AsyncGuard, Guard, current_permit
from guard_middleware import permit as permits
from tests.support.deployment import wait_until
from tests.support.faces import Truth, settings_of

# Python 3.12 warns of any fork of a process with threads; to survive one is what is tested.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

ONE = {"chat": {"max_concurrent_requests": 1}}
HUNG_S = 8.0
"""How long a child may take that does what takes a moment."""
AT_MOST_S = 4
"""Far less than that: what a child may wait for a permit."""


@pytest.fixture
def settings(redis_url, namespace):
    """One endpoint with one unit."""
    return settings_of(redis_url, namespace, ONE)


@pytest.fixture
def guard(settings):
    """The parent's guard."""
    with closing(Guard(settings)) as guard:
        yield guard


@pytest.fixture
def truth(settings):
    """The store itself."""
    with closing(Truth(settings)) as truth:
        yield truth


def fork(body):
    """Run a function in a child, which ends without any clean-up of the parent's. Returns the child's id."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            body()
            status = 0
        except BaseException as exc:  # noqa: BLE001  # the child must not go on as a second test run
            os.write(2, f"in the child: {exc!r}\n".encode())
        finally:
            os._exit(status)
    return child


def status_of(child, timeout_s=HUNG_S):
    """Wait for a child, and return how it ended: 0 if its function returned. One that hangs is killed."""
    ended = []

    def has_ended():
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.append(status)
        return pid == child

    try:
        wait_until(has_ended, timeout_s, "the child hangs")
    except AssertionError:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    return ended[-1]


def fork_with_multiprocessing(body):
    """The same by `multiprocessing`, whose children run clean-ups of their own. Returns the child's id."""
    process = multiprocessing.get_context("fork").Process(target=body)
    process.start()
    multiprocessing.process._children.discard(process)  # it is waited for here, by its id
    return process.pid


def has_nothing(permit):
    """Assert, in a child, that it has nothing of the parent's permit."""
    assert current_permit() is None
    assert permit.released
    assert not permit.lend("chat", 1, permit.namespace)


# ---------------------------------------------------------------------- what is the parent's


@pytest.mark.parametrize("forked", [fork, fork_with_multiprocessing])
def test_a_child_forked_inside_of_a_block_has_no_permit_and_is_lent_none(guard, truth, forked):
    """I1: the one permit of the ceiling is the parent's; what the child asks for, it is refused."""

    def child():
        has_nothing(permit)
        context.run(has_nothing, permit)
        assert guard.try_permit("chat") is None
        guard.close()

    with guard.permit("chat") as permit:
        context = contextvars.copy_context()  # as a thread or a task of the parent's would have it
        assert status_of(forked(child)) == 0
        assert set(truth.leases()) == {permit.lease}
        assert current_permit() is permit
    assert truth.nothing_left()


def test_a_child_stands_in_line_until_its_parent_gives_the_permit_back(guard, truth):
    """It waits as any other process does, and its call has a lease of its own."""

    def child():
        with guard.permit("chat", timeout=AT_MOST_S) as own:
            assert own.lease != permit.lease
            assert current_permit() is own
            assert guard.permit("chat").lease == own.lease  # which is the child's to lend
        guard.close()

    with guard.permit("chat") as permit:
        waiting = fork(child)
        wait_until(lambda: truth.waiting() == 1, AT_MOST_S)
        assert set(truth.leases()) == {permit.lease}
    assert status_of(waiting) == 0
    assert truth.nothing_left()


@pytest.mark.parametrize("forked", [fork, fork_with_multiprocessing])
@pytest.mark.parametrize("leave", ["exit", "release", "abandon"])
def test_a_child_that_leaves_its_parents_block_gives_nothing_back(guard, truth, forked, leave):
    """By the end of the block, by hand, or by a finalizer: the parent still calls."""

    def child():
        if leave == "exit":
            permit.__exit__(None, None, None)
        else:
            getattr(permit, leave)()
        assert guard.started is None  # nor did it begin anything
        held_on.take_over()

    with guard.permit("chat") as permit:
        held_on = HeldOn(guard)
        assert status_of(forked(child)) == 0
        assert set(truth.leases()) == {permit.lease}
        assert not permit.released
    assert truth.nothing_left()


class HeldOn:
    """The life line of the parent, which a child does not find any more."""

    def __init__(self, guard):
        self.heartbeat = guard.heartbeat()

    def take_over(self):
        """Assert, in a child, that no beat would give back anything."""
        assert self.heartbeat._given_up.empty()
        assert self.heartbeat.holdings.next_unsent() is None


def test_a_child_of_a_task_has_none_of_its_permit_either(settings, truth):
    """The same for the asynchronous face."""

    async def whole():
        guard = AsyncGuard(settings)
        async with guard.permit("chat") as permit:

            def child():
                has_nothing(permit)
                with pytest.raises(StopIteration):  # it is over without a single step
                    permit.__aexit__(None, None, None).send(None)

            status = await asyncio.to_thread(status_of, fork(child))
            assert set(truth.leases()) == {permit.lease}
        await guard.close()
        return status

    assert asyncio.run(whole()) == 0
    assert truth.nothing_left()


# ---------------------------------------------------------------------- locks


def calls(guard):
    """Get a permit and a nested one, which is lent, and read the store."""
    with guard.permit("chat", timeout=AT_MOST_S) as outer, guard.permit("chat") as inner:
        assert inner.lease == outer.lease
        assert set(guard.snapshot().leases) == {outer.lease}
    guard.close()


def test_a_fork_while_another_thread_makes_the_first_call_does_not_hang_the_child(settings, truth):
    """The store is slow, and the guard is locked until there is a life line: that lock is not the child's."""
    parent, gate, inside = os.getpid(), threading.Event(), threading.Event()

    def slow_store():
        if os.getpid() == parent:
            inside.set()
            gate.wait(HUNG_S + 5)
        return guard._redis()

    with closing(Guard(settings, store=slow_store)) as guard:
        first = threading.Thread(target=calls, args=(guard,))
        first.start()
        try:
            assert inside.wait(5)
            assert guard._lock.locked()
            assert status_of(fork(lambda: calls(guard))) == 0
        finally:
            gate.set()
            first.join()
    assert truth.nothing_left()


def test_a_fork_while_another_thread_borrows_a_permit_does_not_hang_the_child(guard, truth):
    """The lock under which permits are lent may be held by a thread that the child does not have."""
    calls(guard)
    locked, gate = threading.Event(), threading.Event()

    def borrow():
        with permits._lending:
            locked.set()
            gate.wait(HUNG_S + 5)

    other = threading.Thread(target=borrow)
    other.start()
    try:
        assert locked.wait(5)
        assert status_of(fork(lambda: calls(guard))) == 0
    finally:
        gate.set()
        other.join()
    assert truth.nothing_left()
