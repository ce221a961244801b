"""Keeps the aggregator's receipts, in the background: those that come together wait for the disk once."""

import asyncio
from collections.abc import Callable

from client_agent.egress import EgressGate
from veilfed.errors import VeilfedError
from veilfed.logs import get_logger
from veilfed.v1.aggregator_pb2 import Receipt

__all__ = ["Clerk"]

log = get_logger("agent.receipts")

# A receipt that is lost with the machine meanwhile is in the aggregator's database still.
GATHER_SECONDS = 0.5

CLOSE_SECONDS = 10.0

# Receipts that may wait; an aggregator that sends more than it was sent updates gets no more written down.
MAX_WAITING = 1024


class Clerk:
    """`on_kept` is called, on the event loop, with each receipt that is the aggregator's and has been kept."""

    def __init__(self, gate: EgressGate, on_kept: Callable[[Receipt], None] = lambda receipt: None) -> None:
        self._gate = gate
        self._on_kept = on_kept
        self._waiting: list[Receipt] = []
        self._keeping: asyncio.Task[None] | None = None

    def take(self, receipt: Receipt) -> None:
        if len(self._waiting) >= MAX_WAITING:
            log.error("receipt dropped", job=receipt.job_id, waiting=len(self._waiting))
            return
        self._waiting.append(receipt)
        if self._keeping is None or self._keeping.done():
            self._keeping = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        while self._waiting:
            await asyncio.sleep(GATHER_SECONDS)
            receipts, self._waiting = self._waiting, []
            try:
                outcomes = await asyncio.to_thread(self._gate.record_receipts, receipts)
            except VeilfedError as error:  # such as a full disk, which the next update says again
                log.error("receipts not kept", receipts=len(receipts), code=error.code.name, message=error.message)
                continue
            for receipt, refusal in zip(receipts, outcomes, strict=True):
                if refusal is None:
                    self._on_kept(receipt)
                else:
                    log.error("receipt refused", job=receipt.job_id, code=refusal.code.name, message=refusal.message)

    async def close(self) -> None:
        """Waits until everything that was taken is kept, but not for ever."""
        if self._keeping is not None:
            await asyncio.wait({self._keeping}, timeout=CLOSE_SECONDS)
