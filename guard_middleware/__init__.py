"""guard_middleware: one model server's capacity, obeyed by every Dramatiq worker that shares it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from guard_middleware.aguard import AsyncGuard
    from guard_middleware.config import EndpointConfig, GuardSettings, server_ceiling
    from guard_middleware.errors import (
        AdmissionDenied,
        ConfigurationError,
        GuardError,
        StoreError,
        StoreUnavailable,
    )
    from guard_middleware.fanout import map_concurrent, map_concurrent_sync
    from guard_middleware.guard import Guard
    from guard_middleware.permit import AsyncPermit, Permit, current_permit
    from guard_middleware.priority import Priority, current_priority, priority_scope
    from guard_middleware.queueing.decorator import guarded
    from guard_middleware.queueing.drain import drain
    from guard_middleware.queueing.middleware import GuardMiddleware
    from guard_middleware.transport import AsyncGuardTransport, GuardTransport

_HOMES = {
    "AdmissionDenied": "errors",
    "AsyncGuard": "aguard",
    "AsyncGuardTransport": "transport",
    "AsyncPermit": "permit",
    "ConfigurationError": "errors",
    "EndpointConfig": "config",
    "Guard": "guard",
    "GuardError": "errors",
    "GuardMiddleware": "queueing.middleware",
    "GuardSettings": "config",
    "GuardTransport": "transport",
    "Permit": "permit",
    "Priority": "priority",
    "StoreError": "errors",
    "StoreUnavailable": "errors",
    "current_permit": "permit",
    "current_priority": "priority",
    "drain": "queueing.drain",
    "guarded": "queueing.decorator",
    "map_concurrent": "fanout",
    "map_concurrent_sync": "fanout",
    "priority_scope": "priority",
    "server_ceiling": "config",
}

__all__ = [
    "AdmissionDenied",
    "AsyncGuard",
    "AsyncGuardTransport",
    "AsyncPermit",
    "ConfigurationError",
    "EndpointConfig",
    "Guard",
    "GuardError",
    "GuardMiddleware",
    "GuardSettings",
    "GuardTransport",
    "Permit",
    "Priority",
    "StoreError",
    "StoreUnavailable",
    "current_permit",
    "current_priority",
    "drain",
    "guarded",
    "map_concurrent",
    "map_concurrent_sync",
    "priority_scope",
    "server_ceiling",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: `import guard_middleware` itself loads nothing else."""
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
