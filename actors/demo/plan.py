"""What the demo runs: the deployment of `settings`, a host just above its budget, and workers for more than both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from guard_middleware import GuardSettings
from guard_middleware.testing.model_server import FakeEndpoint, HostMemory
from settings import deployment

if TYPE_CHECKING:
    from guard_middleware import EndpointConfig

QUEUES = ("embedding", "enrichment", "orchestration")
NAMESPACE = "demo"
MIN_BACKOFF_MS = 500
MAX_BACKOFF_MS = 8_000
"""Dramatiq's own are 15 s and 7 days: shortened, so that retries come back while somebody watches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One size of the demo.

    Attributes:
        name: of the size.
        divisor: of all limits of the deployment; the server's memory shrinks with them.
        processes: worker processes for each queue.
        threads: of each worker process.
        embeddings: background messages for the embedding model, all sent at once.
        enrichments: the same for the language model.
        questions: interactive messages, one after the other.
        question_every_s: seconds between them.
        base_ms: how long the server works on one call.
        dark_s: how long a dead host stays dark; it loads its model for as long again.
        unguarded_s: when the unguarded half is cut off.
        guarded_s: when the guarded half is given up. It ends by itself, long before.
    """

    name: str
    divisor: int
    processes: int
    threads: int
    embeddings: int
    enrichments: int
    questions: int
    question_every_s: float
    base_ms: float
    dark_s: float
    unguarded_s: float
    guarded_s: float

    @property
    def messages(self) -> int:
        """All that is sent."""
        return self.embeddings + self.enrichments + self.questions

    def settings(self, redis_url: str, urls: dict[str, str]) -> GuardSettings:
        """The deployment's settings with limits of this size.

        Args:
            redis_url: where the state is kept.
            urls: each endpoint's base URL, by id.
        """
        usual = deployment()
        return GuardSettings(
            redis_url=redis_url,
            namespace=NAMESPACE,
            models=tuple(self._smaller(one, urls.get(one.id, one.base_url)) for one in usual.models),
            gpu_concurrency_budgets={
                group: max(1, budget // self.divisor) for group, budget in usual.gpu_concurrency_budgets.items()
            },
        )

    def _smaller(self, endpoint: EndpointConfig, base_url: str) -> EndpointConfig:
        ceiling, parallel = endpoint.max_concurrent_requests, endpoint.max_parallel_calls
        return endpoint.model_copy(
            update={
                "base_url": base_url,
                "max_concurrent_requests": ceiling and max(1, ceiling // self.divisor),
                "max_parallel_calls": parallel and max(1, parallel // self.divisor),
            }
        )

    def ceilings(self) -> dict[str, int]:
        """The most calls in flight that each endpoint may ever see, by id."""
        return {one.id: one.ceiling(usual=32) for one in self.settings("redis://localhost", {}).models}

    def budget(self) -> int:
        """The most calls in flight that the host may ever see."""
        return sum(self.settings("redis://localhost", {}).gpu_concurrency_budgets.values())

    def endpoints(self) -> list[FakeEndpoint]:
        """The models that the fake server serves."""
        return [FakeEndpoint(name=name, base_ms=self.base_ms) for name in self.ceilings()]

    def host(self) -> HostMemory:
        """The host that they share: slower from four fifths of the budget, dead a tenth above it."""
        budget = self.budget()
        return HostMemory(
            knee=budget * 0.8, edge=budget + max(1, budget // 10), dark_s=self.dark_s, loading_s=self.dark_s
        )


PLANS = {
    plan.name: plan
    for plan in (
        Plan(
            name="full",
            divisor=1,
            processes=3,
            threads=8,
            embeddings=600,
            enrichments=300,
            questions=100,
            question_every_s=0.15,
            base_ms=250,
            dark_s=2.0,
            unguarded_s=30,
            guarded_s=60,
        ),
        Plan(
            name="small",
            divisor=4,
            processes=1,
            threads=8,
            embeddings=60,
            enrichments=40,
            questions=20,
            question_every_s=0.1,
            base_ms=150,
            dark_s=1.0,
            unguarded_s=5,
            guarded_s=30,
        ),
    )
}
