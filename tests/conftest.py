"""What every test may ask for: a real server, a database and a namespace of its own."""

from __future__ import annotations

import itertools
import os
from uuid import uuid4

import hypothesis
import pytest

from guard_middleware.testing.valkey import DATABASES, EmbeddedValkey

# No deadline for one example: how long a server takes says nothing about whether its answer is right. The same examples
# each time, so that what passes passes again; GUARD_TEST_EXPLORE=1 looks for new ones.
hypothesis.settings.register_profile(
    "guard", deadline=None, print_blob=True, derandomize=os.environ.get("GUARD_TEST_EXPLORE", "0") == "0"
)
hypothesis.settings.load_profile("guard")

_databases = itertools.cycle(range(1, DATABASES))


@pytest.fixture(scope="session")
def valkey():
    """One server for the whole run (one for each xdist worker). Do not stop, pause or flush it: see `own_valkey`."""
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def redis_url(valkey):
    """The session's server, with an empty database that no other test uses meanwhile."""
    database = next(_databases)
    yield valkey.database_url(database)
    valkey.call("FLUSHDB", database=database)


@pytest.fixture
def namespace():
    """A name that no other test has, for the guard's keys and for Dramatiq's; channels have no database."""
    return f"t{uuid4().hex[:12]}"


@pytest.fixture
def own_valkey():
    """A server for this test alone, with an append-only file: stop it, pause it, kill it, restart it."""
    with EmbeddedValkey(appendonly=True) as server:
        yield server
