"""A proxy that passes everything on, and now and then swallows the answer to a commit.

The server has done what it was asked for, and has said so; the client sees only that its
connection breaks.  What is a commit is read from the bytes: a COMMIT, or a call in autocommit.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from contextlib import suppress

# A simple query that commits, or a call of a function that changes something.
ENDS = {
    "COMMIT": re.compile(rb"Q....COMMIT\0", re.DOTALL),
    "call": re.compile(rb'from "rota"\."(?:enqueue|claim|finish|fail|snooze|release)'),
}
READY = b"Z\0\0\0\5"
IDLE = b"I"


class Proxy:
    """Listens on *port* as soon as it is made, and swallows an answer that is `wanted`."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self.wanted = ""
        """The next answer to swallow: to a COMMIT, to a call, or none."""
        self.lost: Counter[str] = Counter()
        """How many answers were swallowed: of a COMMIT, or of a call."""
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._is_open = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._is_open.wait()

    def stop(self) -> None:
        """Break all connections."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        self._loop.run_forever()
        self._server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))  # for what was aborted
        self._loop.close()

    async def _listen(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self._is_open.set()

    async def _serve(
        self, from_client: asyncio.StreamReader, to_client: asyncio.StreamWriter
    ) -> None:
        try:
            from_server, to_server = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            to_client.transport.abort()
            return
        link = Link(self, to_client, to_server)
        ways = [link.pass_up(from_client), link.pass_down(from_server)]
        tasks = [asyncio.create_task(way) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            to_server.transport.abort()
            to_client.transport.abort()


class Link:
    """One connection through the proxy."""

    def __init__(
        self, proxy: Proxy, to_client: asyncio.StreamWriter, to_server: asyncio.StreamWriter
    ) -> None:
        self._proxy, self._to_client, self._to_server = proxy, to_client, to_server
        self._swallowing = ""

    async def pass_up(self, reader: asyncio.StreamReader) -> None:
        """Pass on what the client sends; look whether it would commit."""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                wanted = self._proxy.wanted
                if wanted and ENDS[wanted].search(data):
                    self._proxy.wanted, self._swallowing = "", wanted
                self._to_server.write(data)
                await self._to_server.drain()

    async def pass_down(self, reader: asyncio.StreamReader) -> None:
        """Pass on what the server answers, unless it is to be swallowed."""
        end = b""
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                if not self._swallowing:
                    self._to_client.write(data)
                    await self._to_client.drain()
                    continue
                end = (end + data)[-6:]
                if end[:5] == READY:
                    # In a transaction nothing was committed yet, and that will be undone.
                    lost = self._swallowing if end[5:] == IDLE else "in transaction"
                    self._proxy.lost[lost] += 1
                    return
