"""Hear the messages that come over a connection while nothing else happens on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import psycopg
from psycopg import AsyncConnection, Notify


async def hear(
    connection: AsyncConnection[Any],
    on_message: Callable[[Notify], None],
    event: asyncio.Event,
    seconds: float,
) -> None:
    """Wait for *event*, but not longer than that; raise if the connection is gone.

    The generator of psycopg would keep the connection to itself, and have to be cancelled and
    begun again for each statement between.
    """
    loop = asyncio.get_running_loop()
    errors: list[psycopg.Error] = []

    def read() -> None:
        try:
            connection.pgconn.consume_input()
            while (notify := connection.pgconn.notifies()) is not None:
                channel, message = notify.relname.decode(), notify.extra.decode()
                on_message(Notify(channel, message, notify.be_pid))
        except psycopg.Error as error:
            errors.append(error)
            event.set()

    socket = connection.fileno()
    loop.add_reader(socket, read)
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await event.wait()
    finally:
        loop.remove_reader(socket)
    if errors:
        raise errors[0]
