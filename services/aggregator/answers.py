"""Updates on their way into the database: those that come while others are written share the next transaction."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from sqlalchemy.exc import InterfaceError, OperationalError

from aggregator.engine import Engine
from aggregator.rounds.answers import Claim, Taken
from veilfed.errors import VeilfedError
from veilfed.logs import get_logger

__all__ = ["AnswerQueue"]

log = get_logger("aggregator.answers")

MAX_TOGETHER = 64
# An update waits so long for others of its round that are on their way, unless it is the last of them.
GATHER_SECONDS = 0.05


@dataclass
class _Waiting:
    claim: Claim
    taken: Taken
    # Called when the answer is in its round, before anything that follows from it.
    first: Callable[[], None]
    done: "asyncio.Future[None]"


class AnswerQueue:
    """Event loop only."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: list[_Waiting] = []
        self._writing: asyncio.Task[None] | None = None
        self._now = asyncio.Event()

    async def accept(self, claim: Claim, taken: Taken, first: Callable[[], None]) -> None:
        """Takes an update into its round, even if who asked has gone meanwhile. Errors as in `Answers.find`."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(claim, taken, first, done))
        if not self._engine.expects_more(claim.job_id, claim.round):
            self._now.set()
        if self._writing is None or self._writing.done():
            self._writing = self._engine.spawn(self._write())
        await done

    async def _write(self) -> None:
        while self._waiting:
            if len(self._waiting) < MAX_TOGETHER:
                with suppress(TimeoutError):
                    async with asyncio.timeout(GATHER_SECONDS):
                        await self._now.wait()
            self._now.clear()
            batch, self._waiting = self._waiting[:MAX_TOGETHER], self._waiting[MAX_TOGETHER:]
            try:
                await self._take(batch)
            except Exception as error:
                # A database that fails would fail them all again, each after its own wait. If it has kept them
                # nevertheless, they would be told to be duplicates.
                if len(batch) == 1 or isinstance(error, VeilfedError | OperationalError | InterfaceError):
                    for item in batch:
                        _fail(item, error)
                    continue
                # The fault may be one answer's alone.
                log.error("answers are taken one by one", answers=len(batch), exc_info=error)
                for item in batch:
                    try:
                        await self._take([item])
                    except Exception as own:  # given to who waits
                        _fail(item, own)

    async def _take(self, batch: list[_Waiting]) -> None:
        answers = [(item.claim, item.taken) for item in batch]
        outcomes, effects = await self._engine.run(partial(self._engine.machine.accept, answers=answers))
        for item, error in zip(batch, outcomes, strict=True):
            if error is not None:
                _fail(item, error)
                continue
            item.first()
            if not item.done.done():
                item.done.set_result(None)
        self._engine.apply(effects)


def _fail(item: _Waiting, error: Exception) -> None:
    if not item.done.done():
        item.done.set_exception(error)
