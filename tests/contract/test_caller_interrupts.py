"""A time limit or a shutdown may be raised at any point of a caller's own call: here it is, at each of them in turn.

An actor that is not guarded, or any thread that somebody interrupts, asks for permits by ``with guard.permit(...)``.
The tracer below raises at the k-th point, for every k, at which CPython looks for such an exception in the guard's own
code. What the call had or asked for must be back with the next beats, though the thread lives on.
"""

from __future__ import annotations

import dis
import functools
import gc
import linecache
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import pytest
from dramatiq.middleware import TimeLimitExceeded

import guard_middleware
from guard_middleware import Guard, current_permit
from tests.support.deployment import wait_until
from tests.support.faces import AT_ONCE_S, Truth, settings_of

PACKAGE = Path(guard_middleware.__file__).parent
TRACED = {
    str(PACKAGE / name)
    for name in [
        *("guard.py", "calls.py", "steps.py", "permit.py", "holdings.py", "heartbeat.py", "threads.py", "pauses.py"),
        *("store/redis.py", "core/outcome.py", "core/outcome_evidence.py", "core/retry_after.py"),
    ]
}
CALLS = {"CALL", "CALL_KW", "CALL_FUNCTION_EX"}
LOOKS = {*CALLS, "RESUME", "JUMP_BACKWARD"}
"""Behind these instructions CPython looks for an exception that another thread has raised in this one."""


class Strike:
    """Raises a time limit at one point of the guard's code, in the thread that it traces.

    Args:
        at: number of the point.
    """

    def __init__(self, at):
        self.at = at
        self.struck = None
        self._points = 0
        self._entered = 0
        self._last = {}  # by id: a frame that is kept keeps its permit

    def __call__(self, frame, event, arg):
        """Trace a function that is called, if it is the guard's."""
        self._entered += 1
        if frame.f_code.co_filename not in TRACED:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        self._last[id(frame)] = dis.opname[frame.f_code.co_code[frame.f_lasti]], frame.f_lasti, self._entered
        return self._step

    def _step(self, frame, event, arg):
        if event == "return":
            self._last.pop(id(frame), None)
        if event == "opcode" and self.struck is None and self._looks(frame):
            self._points += 1
            if self._points == self.at:
                line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
                self.struck = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {line}"
                raise TimeLimitExceeded
        return self._step

    def _looks(self, frame):
        """Whether an interrupt may arrive here, behind the instruction before; one is raised as if by that."""
        code, at = frame.f_code, frame.f_lasti
        name = dis.opname[code.co_code[at]]
        last, last_at, entered = self._last.get(id(frame), ("", 0, 0))
        self._last[id(frame)] = name, at, self._entered
        # What was called in Python has looked itself, at its own RESUME.
        looks = last in LOOKS and (last not in CALLS or entered == self._entered)
        return looks and handlers(code, last_at) == handlers(code, at)


@functools.cache
def handlers(code, at):
    """Where an exception goes that is raised at this instruction."""
    return [entry.target for entry in dis._parse_exception_table(code) if entry.start <= at < entry.end]


class OverloadedError(Exception):
    """What a client raises for a server that sheds load."""

    status_code = 503


def returns(guard):
    """A call that returns."""
    with guard.permit("chat", timeout=10):
        pass


def raises(guard):
    """A call whose server sheds load."""
    with suppress(OverloadedError), guard.permit("chat", timeout=10):
        raise OverloadedError


def nests(guard):
    """A call inside of a call."""
    with guard.permit("chat", timeout=10), guard.permit("chat", timeout=10):
        pass


def by_hand(guard):
    """A call without a block, whose own clean-up an interrupt may cut off before it begins."""
    permit = guard.try_permit("chat")
    try:
        permit.record(status=200)
    finally:
        permit.release()


def waits(guard):
    """A call that stands in line first."""
    returns(guard)


@pytest.fixture
def uncollected():
    """Nothing is collected while a test runs, but what nobody refers to and what it collects itself."""
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("call", [raises, nests, by_hand, waits])
def test_an_interrupt_at_any_point_of_a_call_leaves_neither_lease_nor_waiter(redis_url, namespace, call):
    """At each point in turn: with the next beats nothing is leased, nobody waits, and the thread can call again."""
    settings = settings_of(
        redis_url, namespace, {"chat": {"max_concurrent_requests": 1}}, heartbeat_s=0.03, model_circuit_breaker=False
    )

    def struck_call(strike):
        sys.settrace(strike)
        try:
            call(guard)
        except TimeLimitExceeded:
            pass
        finally:
            sys.settrace(None)

    def is_idle():
        holdings = guard.heartbeat().holdings
        return not holdings._held and not holdings._outstanding and truth.nothing_left()

    with closing(Guard(settings)) as guard, closing(Truth(settings)) as truth, ExitStack() as threads:
        thread = threads.enter_context(ThreadPoolExecutor(1))
        returns(guard)  # so that the life line is there
        leaks, at, strike = [], 0, None
        while strike is None or strike.struck is not None:
            at, strike = at + 1, Strike(at + 1)
            held = guard.permit("chat") if call is waits else None
            called = thread.submit(struck_call, strike)
            if held is not None:
                wait_until(lambda now=called: now.done() or truth.waiting(), 10)
                held.release()
            called.result(20)
            try:
                wait_until(is_idle, AT_ONCE_S, every_s=0.005)
                assert thread.submit(current_permit).result(5) is None
            except AssertionError:
                leaks.append(strike.struck)
                threads.close()  # with its context
                thread = threads.enter_context(ThreadPoolExecutor(1))
                wait_until(is_idle, AT_ONCE_S)
            gc.collect()  # now, and not at a point that is struck
        assert leaks == []
        assert at > 30
        thread.submit(returns, guard).result(5)
