"""Heads of the ledger that the aggregator has countersigned: kept beside the ledger, and in it."""

from collections.abc import Sequence
from datetime import UTC, datetime

from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity
from veilfed.ledger import Head, Ledger, SignedHead
from veilfed.v1.aggregator_pb2 import Receipt

__all__ = ["ReceiptKeeper"]

MAX_JOB_ID = 128
MAX_REMEMBERED = 4096


class ReceiptKeeper:
    """Of one ledger of `identity`. The `aggregator` signs with a certificate under the roots `bundle_pem`."""

    def __init__(
        self, ledger: Ledger, receipts: Ledger, identity: Identity, aggregator: Identity, bundle_pem: bytes
    ) -> None:
        self._ledger, self._receipts = ledger, receipts
        self._identity, self._aggregator, self._bundle = identity, aggregator, bundle_pem
        # Those that were kept last.
        self._kept: dict[SignedHead, None] = {}

    def record(self, receipts: Sequence[Receipt]) -> list[VeilfedError | None]:
        """See EgressGate.record_receipts."""
        outcomes: list[VeilfedError | None] = []
        kept = []
        for receipt in receipts:
            head = Head(receipt.ledger_head.records, receipt.ledger_head.sha256)
            signed = SignedHead(
                str(self._identity), receipt.job_id, receipt.round, head, receipt.signature, receipt.certificate_pem
            )
            try:
                self._check(signed)
            except VeilfedError as error:
                self._ledger.append(
                    {"kind": "receipt_refused", "job": signed.job_id[:128], "reason": error.message[:500]}
                )
                outcomes.append(VeilfedError(Code.PROTOCOL_VIOLATION, error.message))
            else:
                outcomes.append(None)
                if signed not in self._kept and signed not in kept:  # sent again, it says nothing new
                    kept.append(signed)
        if kept:
            self._ledger.sync(max(signed.head.records for signed in kept))
            # First beside, then in the ledger: a receipt in the ledger without its copy means that the copy was cut.
            for signed in kept:
                self._receipts.append(signed.fields())
            self._receipts.sync()
            for signed in kept:
                self._ledger.append(signed.fields())
                self._kept[signed] = None
            while len(self._kept) > MAX_REMEMBERED:
                del self._kept[next(iter(self._kept))]
        return outcomes

    def _check(self, signed: SignedHead) -> None:
        """Raises VeilfedError(LEDGER_BROKEN)."""
        if len(signed.job_id) > MAX_JOB_ID:
            raise VeilfedError(Code.LEDGER_BROKEN, "the receipt names no job")
        # Else a false head, once it were kept, would make a sound ledger look broken.
        if not self._ledger.holds(signed.head):
            raise VeilfedError(Code.LEDGER_BROKEN, f"{signed}: the ledger never stood at that head")
        signer = signed.check(self._bundle, datetime.now(UTC))
        if signer != self._aggregator:
            raise VeilfedError(Code.LEDGER_BROKEN, f"{signed}: signed by {signer}, not by {self._aggregator}")
