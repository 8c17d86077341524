"""Callers beside workers: the same line, the same order, the same ceiling, and nothing left behind."""

from __future__ import annotations

import threading
import time

import httpx
import pytest

from guard_middleware import AdmissionDenied
from guard_middleware.testing.model_server import FakeEndpoint
from tests.support.deployment import wait_until

pytestmark = pytest.mark.slow

APP = "tests.support.sharing_app"


def serving(deploy, ceiling, base_ms=20, **env):
    """One endpoint without a reserve."""
    return deploy(
        kill_at_end=True,
        endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed", base_ms=base_ms)],
        models={
            "chat": {"max_concurrent_requests": ceiling, "reserve": 0},
            "embed": {"max_concurrent_requests": 2, "reserve": 0},
        },
        env={"GUARD_HOLD_MS": "3000", **env},
    )


class Caller(threading.Thread):
    """A caller that waits for a permit in this process, and makes one call under it."""

    def __init__(self, deployment, name, priority):
        super().__init__(daemon=True)
        self.deployment, self.called, self.priority, self.failed = deployment, name, priority, None
        self.start()

    def run(self):
        try:
            with self.deployment.guard.permit("chat", priority=self.priority, timeout=15) as permit:
                url = f"{permit.endpoint.base_url}/chat/completions"
                body = {"model": "chat", "messages": [{"role": "user", "content": "hello"}]}
                httpx.post(url, json=body, headers={"x-message-id": self.called}, timeout=10).raise_for_status()
        except Exception as exc:  # noqa: BLE001  # shown by the test
            self.failed = exc


def test_callers_stand_in_the_same_line_and_order_as_messages(deploy):
    """One permit: messages and callers by turns run in the order in which they came, an interactive caller first."""
    # Given the only permit in this process's hand, and a worker with idle threads
    deployment = serving(deploy, 1)
    deployment.start(processes=1, threads=4)
    expected, callers = [], []
    with deployment.guard.permit("chat"):
        # When messages and callers line up by turns, and an interactive caller comes last
        for number in range(1, 7):
            if number % 2:
                expected += deployment.send("orchestrate", 1)
            else:
                callers.append(Caller(deployment, f"caller {number}", "orchestration"))
                expected.append(f"caller {number}")
            deployment.wait_parked(number)
        callers.append(Caller(deployment, "interactive", "interactive"))
        deployment.wait_parked(7)
    for caller in callers:
        caller.join(20)
        assert caller.failed is None
    deployment.wait_done(deployment.sent, 10)
    # Then the server got them in that order, one at a time
    assert [one.message_id for one in deployment.calls()] == ["interactive", *expected]
    assert deployment.server.stats()["chat"].most_in_flight == 1
    deployment.check_everything_once()


def test_callers_and_messages_share_the_ceiling(deploy, measured):
    """Eight calling threads and a worker's eight on a ceiling of 3: the server counts 3."""
    # Given a worker that fills the endpoint
    deployment = serving(deploy, 3, base_ms=40, GUARD_HOLD_MS="50")
    deployment.start(processes=2, threads=8)
    ids = deployment.send("orchestrate", 60)
    # When callers want it too
    callers = [Caller(deployment, f"caller {number}", "orchestration") for number in range(8)]
    for caller in callers:
        caller.join(20)
        assert caller.failed is None
    deployment.wait_done(ids, 20)
    # Then all were served, and never more than 3 at once
    stats = deployment.server.stats()["chat"]
    measured("use", round(stats.use(3), 3))
    assert stats.statuses == {"200": 68}
    assert stats.most_in_flight == 3
    deployment.check_everything_once()


def test_callers_that_give_up_leave_nothing_behind(deploy):
    """A full endpoint: `try_permit` gives None at once, `permit` raises after its time-out; neither is left in line."""
    # Given both permits in use for a while, and messages in line
    deployment = serving(deploy, 2)
    deployment.start(processes=1, threads=4)
    long = deployment.send("orchestrate", 2, kwargs={"ms": 2_500})
    wait_until(lambda: deployment.server.stats()["chat"].in_flight == 2, 10)
    short = deployment.send("orchestrate", 4)
    deployment.wait_parked(4)
    before = deployment.guard.snapshot()
    # When callers come that cannot wait so long
    assert deployment.guard.try_permit("chat", priority="interactive") is None
    begun = time.monotonic()
    with pytest.raises(AdmissionDenied) as caught:
        deployment.guard.permit("chat", priority="interactive", timeout=0.3)
    took = time.monotonic() - begun
    # Then they are told why, in time
    assert 0.3 <= took < 1.5
    assert caught.value.reason == "endpoint_full"
    # And the line is as it was, which reading did not change either
    wait_until(lambda: deployment.guard.snapshot().lines == before.lines, 5)
    after = deployment.guard.snapshot()
    assert after.leases.keys() == before.leases.keys()
    assert after.endpoints == before.endpoints
    # And the messages run as soon as there is a permit, with both of them
    deployment.wait_done([*long, *short], 15)
    assert not set(short) & {entry["id"] for entry in deployment.done()[:2]}
    deployment.check_everything_once()


def test_nested_permit_uses_the_messages_own(deploy):
    """On a ceiling of 1 a guarded actor that asks again runs under its own permit: one lease, no wait, no deadlock."""
    # Given an actor that asks for its own endpoint once more
    deployment = serving(deploy, 1, base_ms=100)
    deployment.start(processes=2, threads=4, module=APP)
    # When several of them want the only permit
    deployment.send("nested", 8, args=("chat",))
    store = deployment.store()
    most = 0
    while set(deployment.sent) - set(deployment.done_ids()):
        most = max(most, store.snapshot().endpoints["chat"].in_flight)
    store.close()
    # Then each ran under one permit, and none was put off or retried
    assert most == 1
    assert deployment.server.stats()["chat"].most_in_flight == 1
    deployment.check_everything_once(retries=0)


def test_nested_permit_for_another_endpoint_never_waits(deploy):
    """A guarded actor that finds another endpoint full is parked, not dead-lettered, and holds nothing meanwhile."""
    # Given the other endpoint's two permits in this process's hand
    deployment = serving(deploy, 2)
    deployment.start(processes=1, threads=4, module=APP)
    held = [deployment.guard.permit("embed", timeout=5) for _ in range(2)]
    # When an actor asks for one while it holds its own
    [refused] = deployment.send("nested", 1, args=("embed",))
    deployment.wait_parked(1)
    # Then its own permit is free for others while it waits
    others = deployment.send("orchestrate", 4)
    deployment.wait_done(others, 5)
    assert refused not in deployment.done_ids()
    for permit in held:
        permit.release()
    # And it runs once the other endpoint has a permit, without a retry burned
    deployment.wait_done([refused], 10)
    deployment.check_everything_once(retries=0)
