"""A time limit or a shutdown may be raised between any two lines of the guard: here it is, at each of them in turn.

Dramatiq raises its interrupts in a worker thread from outside, and they arrive anywhere. The tracer below raises one at
the k-th line that the guard's own code runs for one message, for every k, and each time looks at what became of it.
"""

from __future__ import annotations

import dis
import functools
import linecache
import sys
import threading
from pathlib import Path
from typing import ClassVar

import pytest
from dramatiq.middleware import CurrentMessage, Middleware, TimeLimitExceeded
from dramatiq.threading import raise_thread_exception

import guard_middleware
from guard_middleware import pauses
from guard_middleware.errors import StoreUnavailable
from tests.support.deployment import wait_until

PACKAGE = Path(guard_middleware.__file__).parent
TRACED = {
    str(file)
    for file in [
        *PACKAGE.glob("queueing/*.py"),
        *(PACKAGE / name for name in ("heartbeat.py", "threads.py", "pauses.py", "holdings.py", "permit.py")),
    ]
}
NOT_OURS = {"after_process_message", "after_skip_message", "filter"}
"""Not struck: the entry of an after-hook, before its `try`, is as that of any middleware; `filter` runs in Dramatiq's
log call. An interrupt there costs Dramatiq the thread, or acks a message that has failed, with a guard or without."""
WRAPPER = {"guarded_fn", "end"}
"""Around the body: before their `try` or after it, an interrupt is as one at the last line of the body."""


class Striker(Middleware):
    """Raises a time limit at one line of the guard's code, in the thread that processes the message of `actor`."""

    def __init__(self):
        self.at = None
        self.begun = []
        self.struck = None
        self.body = lambda: (0, 0)

    def arm(self, at, body):
        """Strike at line number `at` of the next message, 0 for never; `body` tells how often its body ran."""
        self.at, self.begun, self.struck, self.body = at, [], None, body
        self._last = (None, 0)

    def before_process_message(self, broker, message):
        if message.actor_name == "work" and self.at is not None and self.struck is None:
            sys.settrace(self._calls)

    def after_process_message(self, broker, message, *, result=None, exception=None):
        if message.actor_name == "work":
            sys.settrace(None)
            if self.at == 0:
                self.at = None

    def after_skip_message(self, broker, message):
        self.after_process_message(broker, message)

    def can_strike(self, frame):
        """Whether an interrupt may arrive here: at a function's entry, or behind a line that has called something."""
        last_frame, last_line = self._last
        self._last = (frame, frame.f_lineno)
        if leaves_a_with(frame):
            return False
        return frame is not last_frame or last_line in calling_lines(frame.f_code)

    def _calls(self, frame, event, arg):
        traced = frame.f_code.co_filename in TRACED and frame.f_code.co_name not in NOT_OURS
        return self._line if traced else None

    def _line(self, frame, event, arg):
        if event != "line" or not self.can_strike(frame):
            return self._line
        self.begun.append(self.body()[0] > 0)
        if len(self.begun) == self.at:
            self.at = None
            name = frame.f_code.co_name
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.struck = (name, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {source}", self.body())
            raise_thread_exception(threading.get_ident(), TimeLimitExceeded)
        return self._line


@functools.cache
def calling_lines(code):
    """The lines of some code that call something or jump back: behind these, CPython looks for an interrupt."""
    found, line = set(), 0
    for step in dis.get_instructions(code):
        line = step.starts_line or line if not isinstance(step.starts_line, bool) else step.line_number
        if "CALL" in step.opname or "JUMP_BACKWARD" in step.opname or "WITH" in step.opname:
            found.add(line)
    return found


def leaves_a_with(frame):
    """Whether the line is a `with` on the way out, where its exit is still to be called.

    CPython delivers such exceptions after calls and jumps only, so never there: a lock cannot stay locked.
    """
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    enters = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("LOAD_FAST", "LOAD_GLOBAL", "PUSH_NULL"))
    return source.startswith("with ") and not enters


class OverloadedError(Exception):
    """What a client raises for a server that sheds load."""

    status_code = 503


class Scene:
    """One way of a message through the guard, to be played again and again with the strike at another line."""

    waits = False
    """Whether the message is parked before the strike is armed."""
    settings: ClassVar = {"model_circuit_breaker": False}
    strikes_before = strikes_after = True
    """Whether the lines before the body begins are struck, and those after it; each is in some scene."""

    def __init__(self, make_bench):
        self.striker = Striker()
        self.others = []
        self.bench = make_bench(before=[self.striker], heartbeat_s=0.1, **self.settings)
        self.work = self.bench.actor(self.body, actor_name="work", max_retries=2, min_backoff=1, max_backoff=2)
        self.other = self.bench.actor(lambda: None, actor_name="other")
        self.bench.start(threads=2, worker_timeout=10)
        self.prepare()

    def prepare(self):
        """Arrange what the scene needs."""

    def body(self):
        """The actor's body."""

    def play(self, at):
        """Let one message go its way, with a strike at line `at`. Returns it."""
        bench, message = self.bench, self.work.message()
        self.others = []

        def seen():
            return bench.count_of(message)

        if self.waits:
            bench.pause()
            bench.broker.enqueue(message)
            bench.wait_parked(1)
            self.more()
            wait_until(lambda: bench.member.idle() == 2, 5)
            self.striker.arm(at, seen)
            bench.resume()
        else:
            self.striker.arm(at, seen)
            bench.broker.enqueue(message)
            self.more()
        return message

    def more(self):
        """Send what else belongs to the scene."""

    def settle(self, message):
        """Wait until everything has come to rest."""
        try:
            self.bench.wait_ended(message, *self.others, timeout_s=6)
            self.bench.wait_idle(6)
        except AssertionError as exc:
            raise AssertionError(self.describe()) from exc

    def describe(self):
        """Where everything is, for a failed test."""
        bench = self.bench
        member = bench.member
        return (
            f"struck={self.striker.struck} threads={bench.threads_alive()} "
            f"stored={bench.stored()} snapshot={bench.snapshot()} held={member.heartbeat.holdings._held} "
            f"turns={member.turns._turns} queue={bench.worker.work_queue.queue} "
            f"unfinished={bench.worker.work_queue.unfinished_tasks}"
        )


class Runs(Scene):
    """It is admitted, and its body returns."""


class Raises(Scene):
    """Its body raises once."""

    strikes_before = False
    raised = None

    def body(self):
        message = CurrentMessage.get_current_message()
        if self.raised != message.message_id:
            self.raised = message.message_id
            raise ValueError


class Parks(Scene):
    """It is parked, and runs later."""

    def play(self, at):
        self.bench.pause()
        message = super().play(at)
        self.bench.wait_parked(1)
        wait_until(lambda: self.bench.worker.work_queue.unfinished_tasks == 0, 5)
        assert len(self.bench.stored()) == 1, f"parked and copied; struck at {self.striker.struck}"
        self.bench.resume()
        return message


class IsTaken(Scene):
    """It comes from the line with its permit."""

    waits = True
    strikes_after = False


class HandsOn(Scene):
    """It comes from the line, and its end brings the next one."""

    waits = True
    strikes_before = False

    def more(self):
        self.others = [self.other.send()]
        self.bench.wait_parked(2)


class ParksAgain(Scene):
    """Its server sheds load once: it goes back to the line from the end of its body."""

    strikes_before = False
    raised = None
    settings: ClassVar = {"model_breaker_base_cooldown_s": 0.01}

    def body(self):
        message = CurrentMessage.get_current_message()
        if self.raised != message.message_id:
            self.raised = message.message_id
            raise OverloadedError


class StoreAway(Scene):
    """The store gives no answer at first, neither to the admission nor to the end."""

    def prepare(self):
        asked = set()
        store = self.bench.member.heartbeat.store
        for verb in ("admit", "finish"):
            sound = getattr(store, verb)

            def moody(command, sound=sound, verb=verb):
                if (verb, command.lease) not in asked:
                    asked.add((verb, command.lease))
                    msg = "away for a moment"
                    raise StoreUnavailable(msg)
                return sound(command)

            setattr(store, verb, moody)


@pytest.mark.slow
@pytest.mark.parametrize("scene", [Runs, Raises, Parks, IsTaken, HandsOn, ParksAgain, StoreAway])
def test_an_interrupt_at_any_line_leaves_no_permit_and_neither_loses_nor_doubles_the_message(
    make_bench, monkeypatch, scene
):
    """At each line in turn: the lease is released, the message runs once, the thread lives.

    Except that an interrupt at the last line of a body, or right behind it, costs a second run: guard or no guard.
    """
    monkeypatch.setattr(pauses, "FIRST_S", 0.002)
    # Given one undisturbed run, to count the lines
    played = scene(make_bench)
    played.settle(played.play(0))
    wanted = {False: scene.strikes_before, True: scene.strikes_after}
    lines = [at for at, begun in enumerate(played.striker.begun, 1) if wanted[begun]]
    assert len(lines) > 30
    doubled = []
    for at in lines:
        # When the interrupt strikes at this line
        message = played.play(at)
        played.settle(message)
        if played.striker.struck is None:
            continue
        # Then nothing is held or remembered any more...
        bench, (name, line, (_, ended_before)) = played.bench, played.striker.struck
        assert bench.threads_alive(), line
        assert bench.member.heartbeat.holdings.in_use() == 0, line
        assert (bench.member.turns._turns, bench.member._to_requeue) == ({}, []), line
        assert bench.dead() == [], line
        # ...and it ran as often as it would without a guard
        runs = bench.count_of(message)[1]
        if runs != 1:
            assert (runs, ended_before) == (2, 1), line
            doubled.append(name)
    assert set(doubled) <= WRAPPER
    assert len(doubled) < 8
