"""Events: one line of the standard logging for each thing that operators ask about.

They go through the application's own logging set-up, under the logger ``guard_middleware``. An event names endpoints,
reasons, exception types and counts; never a prompt, a key, a password or a URL with credentials (I13).
"""

from __future__ import annotations

import logging
from typing import Any

import structlog

LOGGER = "guard_middleware"


def _logger() -> Any:
    return structlog.wrap_logger(
        logging.getLogger(LOGGER),
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.KeyValueRenderer(key_order=["event"], sort_keys=True),
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


_log = _logger()
_std = logging.getLogger(LOGGER)


def debug(event: str, **fields: object) -> None:
    """Tell what happens all the time: admissions, parks, takes."""
    if _std.isEnabledFor(logging.DEBUG):
        _log.debug(event, **fields)


def info(event: str, **fields: object) -> None:
    """Tell what operators want to see once: start, stop, recovery."""
    _log.info(event, **fields)


def warning(event: str, **fields: object) -> None:
    """Tell what somebody should look at."""
    _log.warning(event, **fields)


def error(event: str, **fields: object) -> None:
    """Tell what the guard could not do; the exception's type stands in the fields."""
    _log.error(event, **fields)
