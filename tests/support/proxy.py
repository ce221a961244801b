"""A TCP proxy whose link can be cut, slowed and black-holed. It runs on a thread and a loop of its own."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Proxy", "proxied"]

PIECE = 16 * 1024
POLL_SECONDS = 0.01


class Proxy:
    """A link to `target` (host:port). Set its attributes at any time; bytes are counted since the last `reset`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._connections: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self.port = 0
        # Bytes per second of each direction of a connection; None is as fast as it goes.
        self.rate: float | None = None
        # Nothing passes, and nobody is told.
        self.black_hole = False
        # Connections end once so many bytes have gone this way; once.
        self.cut_up_at: int | None = None
        self.cut_down_at: int | None = None
        self.cuts = 0
        self.accepted = 0
        self.up = self.down = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def reset(self) -> None:
        """A healthy link, and counting from zero."""
        self.rate, self.black_hole, self.cut_up_at, self.cut_down_at = None, False, None, None
        self.up = self.down = self.cuts = self.accepted = 0

    def cut(self) -> None:
        """Ends all connections now, without a goodbye."""
        self._loop.call_soon_threadsafe(self._cut)

    def _cut(self) -> None:
        self.cuts += 1
        for connection in self._connections:
            connection.cancel()

    def run(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._accept, "127.0.0.1", 0))
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        self._loop.run_forever()
        server.close()
        for connection in self._connections:
            connection.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._connections, return_exceptions=True))
        self._loop.close()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = self._loop.create_task(self._connection(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            there, back = await asyncio.open_connection(*self._target)
            ends.append(back)
            ways = [self._loop.create_task(self._pass(reader, back, True))]
            ways.append(self._loop.create_task(self._pass(there, writer, False)))
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
        except OSError:
            pass  # nobody there: the caller sees its connection end
        finally:
            for end in ends:
                end.transport.abort()

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, upwards: bool) -> None:
        try:
            while data := await source.read(PIECE):
                while self.black_hole:  # noqa: ASYNC110  set from another thread
                    await asyncio.sleep(POLL_SECONDS)
                if self.rate is not None:
                    await asyncio.sleep(len(data) / self.rate)
                sink.write(data)
                await sink.drain()
                self._count(len(data), upwards)
        except OSError:
            return

    def _count(self, length: int, upwards: bool) -> None:
        if upwards:
            self.up += length
            if self.cut_up_at is not None and self.up >= self.cut_up_at:
                self.cut_up_at = None
                self._cut()
        else:
            self.down += length
            if self.cut_down_at is not None and self.down >= self.cut_down_at:
                self.cut_down_at = None
                self._cut()


@contextmanager
def proxied(target: str) -> Iterator[Proxy]:
    """A running proxy to `target`."""
    proxy, started = Proxy(target), threading.Event()
    thread = threading.Thread(target=proxy.run, args=(started,), name="proxy", daemon=True)
    thread.start()
    assert started.wait(10), "the proxy did not start"
    try:
        yield proxy
    finally:
        proxy.stop()
        thread.join(10)
