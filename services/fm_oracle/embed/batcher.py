"""Dynamic batching: inputs of several clients go through the model together, each client getting its fair share."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from veilfed.logs import get_logger

__all__ = ["Batcher"]

log = get_logger("oracle.batcher")

Result = TypeVar("Result")
Forward = Callable[[Sequence[NDArray[Any]]], NDArray[np.float32]]


@dataclass(eq=False)
class _Request:
    """Inputs of one client that are answered together, though they may go through the model in several passes."""

    inputs: Sequence[NDArray[Any]]
    future: "asyncio.Future[NDArray[np.float32]]"
    taken: int = 0
    rows: list[NDArray[np.float32]] = field(default_factory=list)

    def take(self) -> NDArray[Any]:
        self.taken += 1
        return self.inputs[self.taken - 1]

    def add(self, row: NDArray[np.float32]) -> None:
        """Rows come in the order of the inputs, since inputs are taken in order and passes follow each other."""
        self.rows.append(row)
        if len(self.rows) == len(self.inputs) and not self.future.done():
            self.future.set_result(np.stack(self.rows))


@dataclass(eq=False)
class _Alone:
    """Work of one client that is a pass of its own."""

    work: Callable[[], Any]
    future: "asyncio.Future[Any]"


class Batcher:
    """Runs `forward` ([n inputs] -> [n, d]) in `executor`, over at most `max_batch` inputs at a time.

    Clients take turns input by input, so one with much to do does not hold up one with little. What no other client's
    inputs may go with, such as inputs with prompts, is a pass of its own and takes one turn. What waits here is bounded
    by the callers: each stream has a limited number of requests under way.
    """

    def __init__(self, forward: Forward, executor: Executor, *, max_batch: int, wait_seconds: float) -> None:
        self._forward = forward
        self._executor = executor
        self._max_batch = max_batch
        self._wait_seconds = wait_seconds
        self._clients: dict[str, deque[_Request | _Alone]] = {}  # in the order of their turns; no empty queues
        self._computing: list[_Request | _Alone] = []
        self._waiting = 0
        self._arrived = asyncio.Event()
        self._full = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    async def embed(self, client: str, inputs: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        """The embeddings [n, d] of n >= 1 prepared inputs. Raises what `forward` raises for these inputs."""
        request = _Request(inputs, asyncio.get_running_loop().create_future())
        self._add(client, request, len(inputs))
        return await request.future

    async def alone(self, client: str, work: Callable[[], Result]) -> Result:
        """What `work` returns or raises; nothing else is computed meanwhile, and nothing together with it."""
        request = _Alone(work, asyncio.get_running_loop().create_future())
        self._add(client, request, self._max_batch)  # nothing can join it: no wait for more
        result: Result = await request.future
        return result

    def _add(self, client: str, request: _Request | _Alone, count: int) -> None:
        if self._worker is None:
            self._worker = asyncio.create_task(self._work())
        self._clients.setdefault(client, deque()).append(request)
        self._waiting += count
        self._arrived.set()
        if self._waiting >= self._max_batch:
            self._full.set()

    async def close(self) -> None:
        """Ends the worker; requests that wait or are under way are cancelled."""
        if self._worker is not None:
            self._worker.cancel()
            with suppress(asyncio.CancelledError):
                await self._worker
        for request in [*self._computing, *itertools.chain(*self._clients.values())]:
            request.future.cancel()
        self._clients.clear()

    async def _work(self) -> None:
        while True:
            await self._arrived.wait()
            if self._waiting < self._max_batch and self._wait_seconds:
                # Not wait_for: that of Python 3.11 loses a cancellation that comes together with the event.
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._wait_seconds):
                        await self._full.wait()
            taken = self._take()
            if isinstance(taken, _Alone):
                self._computing = [taken]
                await self._run(taken)
            elif taken:
                self._computing = [request for request, _ in taken]
                await self._compute(taken)

    def _take(self) -> list[tuple[_Request, NDArray[Any]]] | _Alone:
        """The next pass: one input of each client in turn until it is full, or what is a pass of its own."""
        turns: list[tuple[_Request, NDArray[Any]]] = []
        alone: _Alone | None = None
        while self._clients and alone is None and len(turns) < self._max_batch:
            # What is a pass of its own keeps its place until the next one.
            fitting = (name for name, queue in self._clients.items() if not (turns and isinstance(queue[0], _Alone)))
            client = next(fitting, None)
            if client is None:
                break
            queue = self._clients.pop(client)
            request = queue[0]
            if isinstance(request, _Alone):
                queue.popleft()
                self._waiting -= self._max_batch
                alone = None if request.future.done() else request
            elif request.future.done():  # its client is gone, or an earlier pass failed
                self._waiting -= len(request.inputs) - request.taken
                queue.popleft()
            else:
                turns.append((request, request.take()))
                self._waiting -= 1
                if request.taken == len(request.inputs):
                    queue.popleft()
            if queue:
                self._clients[client] = queue  # to the end of the turns
        if not self._clients:
            self._arrived.clear()
        if self._waiting < self._max_batch:
            self._full.clear()
        return turns if alone is None else alone

    async def _run(self, request: _Alone) -> None:
        try:
            result = await asyncio.get_running_loop().run_in_executor(self._executor, request.work)
        except Exception as error:
            log.warning("pass failed", error=type(error).__name__)
            if not request.future.done():
                request.future.set_exception(error)
        else:
            if not request.future.done():
                request.future.set_result(result)

    async def _compute(self, turns: Sequence[tuple[_Request, NDArray[Any]]]) -> None:
        """One pass; when it fails, each request alone, so that only the guilty one is told."""
        try:
            await self._pass(turns)
        except Exception as error:
            requests = list(dict.fromkeys(request for request, _ in turns))
            log.warning("pass failed", inputs=len(turns), requests=len(requests), error=type(error).__name__)
            for request in requests:
                try:
                    await self._pass([turn for turn in turns if turn[0] is request])
                except Exception as own:
                    if not request.future.done():
                        request.future.set_exception(own)

    async def _pass(self, turns: Sequence[tuple[_Request, NDArray[Any]]]) -> None:
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(self._executor, self._forward, [array for _, array in turns])
        for (request, _), row in zip(turns, rows, strict=True):
            request.add(row)
