"""A time limit or a shutdown may be raised between any two lines of the guard: here it is, at each of them in turn.

Dramatiq raises its interrupts in a worker thread from outside, and they arrive anywhere. The tracer below raises one at
the k-th line that the guard's own code runs for one message, for every k, and each time looks at what became of it.
"""

from __future__ import annotations

import dis
import linecache
import sys
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest
from dramatiq.middleware import Middleware, TimeLimitExceeded
from dramatiq.threading import raise_thread_exception

import guard_middleware
from guard_middleware.errors import StoreUnavailable
from tests.support.deployment import wait_until

PACKAGE = Path(guard_middleware.__file__).parent
TRACED = {
    str(file)
    for file in [*PACKAGE.glob("queueing/*.py"), *(PACKAGE / name for name in ("heartbeat.py", "holdings.py", "permit.py"))]
}
HOOK = {"after_process_message", "after_skip_message", "member_of"}
"""Functions of the after-hook with lines outside of its `try`: an interrupt there is one in any middleware's hook."""


class Striker(Middleware):
    """Raises a time limit at one line of the guard's code, in the thread that processes the message of `actor`."""

    def __init__(self):
        self.at = None
        self.lines = 0
        self.struck = None
        self.body = lambda: (0, 0)

    def arm(self, at, body):
        """Strike at line number `at` of the next message, 0 for never; `body` tells how often its body ran."""
        self.at, self.lines, self.struck, self.body = at, 0, None, body

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

    def _calls(self, frame, event, arg):
        return self._line if frame.f_code.co_filename in TRACED else None

    def _line(self, frame, event, arg):
        if event != "line" or leaves_a_with(frame):
            return self._line
        self.lines += 1
        if self.lines == self.at:
            self.at = None
            name = frame.f_code.co_name
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.struck = (name, f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {source}", self.body())
            raise_thread_exception(threading.get_ident(), TimeLimitExceeded)
        return self._line


def leaves_a_with(frame):
    """Whether the line is a `with` on the way out, before its exit is called.

    CPython delivers such exceptions after calls and jumps only, so never there: a lock cannot stay locked.
    """
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    if not source.startswith("with "):
        return False
    code = frame.f_code.co_code
    return dis.opname[code[frame.f_lasti]] == "LOAD_CONST"


class Overloaded(Exception):
    """What a client raises for a server that sheds load."""

    status_code = 503


class Scene:
    """One way of a message through the guard, played again and again with the strike at another line."""

    def __init__(self, make_bench, kind):
        self.kind = kind
        self.make_bench = make_bench
        self.striker = Striker()
        self.fails = []
        self.deaths = Counter()
        self._open()

    def _open(self):
        extra = {"model_circuit_breaker": self.kind == "parks again", "model_breaker_base_cooldown_s": 0.01}
        self.bench = self.make_bench(before=[self.striker], heartbeat_s=0.1, **extra)
        self.work = self.bench.actor(self._body, actor_name="work", max_retries=2, min_backoff=1, max_backoff=2)
        self.other = self.bench.actor(lambda: None, actor_name="other")
        self.bench.start(threads=1, worker_timeout=10)
        if self.kind == "store away":
            self._away()

    def _away(self):
        store = self.bench.member.heartbeat.store
        for verb in ("admit", "finish"):
            sound = getattr(store, verb)

            def moody(command, sound=sound):
                if self.striker.at is not None and command.lease not in self.moody:
                    self.moody.add(command.lease)
                    msg = "away for a moment"
                    raise StoreUnavailable(msg)
                return sound(command)

            setattr(store, verb, moody)
        self.moody = set()

    def _body(self):
        if self.kind in ("raises", "parks again") and not self.fails:
            self.fails.append(1)
            if self.kind == "raises":
                raise ValueError
            raise Overloaded

    def play(self, at):
        """Let one message go its way, with a strike at line `at`; check what became of it, and return the lines."""
        bench = self.bench
        message = self.work.message()
        ident = message.message_id
        self.fails.clear()
        self.striker.arm(None, lambda: (0, 0))
        begun, ended = bench.count_of(message)
        waits = self.kind in ("parks", "is taken", "hands on")
        others = []
        if waits:
            bench.pause()
        if self.kind == "parks":
            self.striker.arm(at, lambda: bench.count_of(message))
        bench.broker.enqueue(message)
        if waits:
            if self.kind == "parks":
                wait_until(lambda: bench.worker.work_queue.unfinished_tasks == 0 or not bench.threads_alive(), 5)
            bench.wait_parked(1)
            if self.kind == "hands on":
                others.append(self.other.send())
                bench.wait_parked(2)
            if self.kind != "parks":
                wait_until(lambda: bench.member.idle() == 1, 5)
                self.striker.arm(at, lambda: bench.count_of(message))
            bench.resume()
        else:
            pass
        return message, others, ident, begun, ended
