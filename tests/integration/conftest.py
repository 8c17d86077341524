"""Deployments for integration tests."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.support.deployment import Deployment


@pytest.fixture
def deploy(redis_url, tmp_path):
    """Make deployments on the session's server; each ends with its test."""
    with ExitStack() as stack:

        def make(**options):
            return stack.enter_context(Deployment(redis_url, tmp_path, **options))

        yield make


@pytest.fixture
def measured(request):
    """Keep a measured figure with the test's result; it stands in the report of ``--junitxml``."""

    def keep(name, value):
        request.node.user_properties.append((name, value))

    return keep
