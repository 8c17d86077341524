"""The seam to the store: a few verbs, the same for Redis and for memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from guard_middleware.core.commands import Ask, Beat, Configure, Finish, Operate, Reply, Snapshot


class Wakeups(Protocol):
    """One process's own channel: who was notified hears of it here."""

    def get(self, timeout_s: float) -> str | None:
        """Wait for the next notification.

        Args:
            timeout_s: how long to wait, in seconds.

        Returns:
            The id of the lease that a waiting caller was given, "" for "take now", `None` if nothing came.

        Raises:
            StoreUnavailable: the connection broke; ask for new `Wakeups`.
        """
        ...

    def close(self) -> None:
        """Give up the connection."""
        ...


class Store(Protocol):
    """One guard namespace in one store. Every verb is one atomic step and can be repeated (I11).

    Every verb raises `StoreUnavailable` if there was no usable answer; the command may or may not have been carried
    out, and is repeated with the same ids.
    """

    def admit(self, command: Ask) -> Reply:
        """Lease a permit, park the message, wait, or refuse."""
        ...

    def finish(self, command: Finish) -> Reply:
        """Release a lease, count its outcome, perhaps park, and take."""
        ...

    def beat(self, command: Beat) -> Reply:
        """Renew, report, give back, assert, and take."""
        ...

    def configure(self, command: Configure) -> Reply:
        """Publish a process's configuration."""
        ...

    def operate(self, command: Operate) -> Reply:
        """Carry out an operator's wish."""
        ...

    def snapshot(self) -> Snapshot:
        """Read everything, change nothing."""
        ...

    def check_server(self) -> list[str]:
        """What about the server works and is not safe, one sentence each.

        Raises:
            ConfigurationError: the server cannot hold the guard's state at all.
        """
        ...

    def shares_server(self, client: object) -> bool:
        """Whether a broker's client reaches the same server and database as this store, proved by a nonce."""
        ...

    def wakeups(self, process: str) -> Wakeups:
        """Listen to what this process is notified of."""
        ...

    def close(self) -> None:
        """Give up the connections."""
        ...
