"""Benches for contract tests: workers of this process on the session's server."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.support.bench import Bench


@pytest.fixture
def make_bench(redis_url, namespace):
    """Make benches in the test's own database; two of them share one deployment, as two processes would."""
    with ExitStack() as stack:

        def make(**options):
            url = options.pop("redis_url", redis_url)
            return stack.enter_context(Bench(url, options.pop("namespace", namespace), **options))

        yield make
