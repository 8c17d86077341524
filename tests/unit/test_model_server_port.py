"""A port that closes while clients are on their way in."""

from __future__ import annotations

import asyncio
import socket

import pytest

from guard_middleware.testing.model_server.port import Port


async def turn(times: int = 5) -> None:
    """Let the loop do what it has to."""
    for _ in range(times):
        await asyncio.sleep(0)


def test_a_client_that_was_on_its_way_in_when_the_port_closed_is_reset():
    """It got through the listening socket, but finds nobody behind it."""

    async def scenario() -> None:
        port = Port(0, begin=lambda exchange: None, ended=lambda exchange: None)
        port.open()
        with socket.create_connection(("127.0.0.1", port.number), timeout=5) as client:
            port._accept(port._listener)
            port.shut("keep")
            await turn()
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port.number), timeout=5)
        port.give_up()

    asyncio.run(scenario())


def test_a_port_opens_and_closes_any_number_of_times_at_the_same_number():
    """The number is kept, and opening twice or closing twice does no harm."""

    async def scenario() -> None:
        port = Port(0, begin=lambda exchange: None, ended=lambda exchange: None)
        number = port.number
        for _ in range(3):
            port.open()
            port.open()
            socket.create_connection(("127.0.0.1", number), timeout=5).close()
            await turn()
            port.shut("keep")
            port.shut("keep")
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", number), timeout=5)
        assert (port.number, port.is_open) == (number, False)
        port.give_up()

    asyncio.run(scenario())
