"""Two applications with brokers of their own in front of one server: one order, one ceiling, nobody's message lost."""

from __future__ import annotations

import pytest

from guard_middleware.testing.model_server import FakeEndpoint

pytestmark = pytest.mark.slow


@pytest.fixture
def applications(deploy):
    """Make two applications that share an endpoint and the guard's namespace, not the broker's."""

    def make(*, ceiling, base_ms, reserve=0, env=None):
        options = {
            "models": {"chat": {"max_concurrent_requests": ceiling, "reserve": reserve}, "embed": {}},
            "env": env,
        }
        first = deploy(
            kill_at_end=True,
            endpoints=[FakeEndpoint(name="chat", base_ms=base_ms), FakeEndpoint(name="embed")],
            **options,
        )
        second = deploy(kill_at_end=True, server=first.server, namespace=first.namespace, **options)
        assert first.broker_namespace != second.broker_namespace
        return first, second

    return make


def test_two_applications_never_exceed_one_ceiling_and_lose_nothing(applications, measured):
    """Both saturate one endpoint: the server counts the one ceiling over both, and each gets all of its own done."""
    # Given one ceiling of 4 for both
    first, second = applications(ceiling=4, base_ms=40)
    groups = [
        first.start(processes=1, threads=8, wait=False),
        second.start(processes=1, threads=8, wait=False),
        second.start(processes=1, threads=8, wait=False),
    ]
    for group in groups:
        group.wait_ready(1)
    # When both send more than it holds
    for application in (first, second):
        application.send("enrich", 50)
        application.send("orchestrate", 60)
    first.wait_done(first.sent, 30)
    second.wait_done(second.sent, 30)
    # Then the ceiling was reached and never exceeded, and each ran its own messages, once
    stats = first.server.stats()["chat"]
    measured("use", round(stats.use(4), 3))
    assert stats.most_in_flight == 4
    for application in (first, second):
        application.check_everything_once()
        assert set(application.done_ids()) == set(application.sent)


def test_order_holds_over_two_applications(applications):
    """First come first served over both brokers within a priority, and the better priority first whosever it is."""
    # Given one permit, in a caller's hand, and workers of both applications with idle threads
    first, second = applications(ceiling=1, base_ms=20, env={"GUARD_HOLD_MS": "3000"})
    groups = [application.start(processes=1, threads=4, wait=False) for application in (first, second)]
    for group in groups:
        group.wait_ready(1)
    with first.guard.permit("chat", priority="interactive"):
        # When they come by turns, each batch in line before the next one is sent; interactive last
        batches = []
        for number, application in enumerate((first, second, first, second)):
            batches.append(set(application.send("orchestrate", 5)))
            first.wait_parked(5 * (number + 1))
        best = set(second.send("enrich", 5, guard_priority="interactive"))
        first.wait_parked(25)
    first.wait_done(first.sent, 20)
    second.wait_done(second.sent, 20)
    # Then the server got them in that order
    got = [one.message_id for one in first.calls()]
    assert [set(got[at : at + 5]) for at in range(0, 25, 5)] == [best, *batches]
    assert first.server.stats()["chat"].most_in_flight == 1
    for application in (first, second):
        application.check_everything_once()
