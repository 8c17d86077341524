"""A reference application: three kinds of work in front of one model server. Copy what you need.

::

    dramatiq actors --queues embedding --processes 2 --threads 8

The broker comes first: an actor belongs to the broker that is set when it is declared.
"""

from __future__ import annotations

from actors.broker import broker
from actors.embedding import embed
from actors.enrichment import enrich
from actors.orchestration import ask, orchestrate

__all__ = ["ask", "broker", "embed", "enrich", "orchestrate"]
