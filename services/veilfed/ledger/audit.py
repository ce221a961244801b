"""The auditor's check of a ledger: the chain, the receipts in it and beside it, and who signed them."""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from veilfed.errors import Code, VeilfedError
from veilfed.ledger.chain import EMPTY, Head, Record, read
from veilfed.ledger.receipts import KIND, SignedHead, receipts_path

__all__ = ["Audit", "Summary", "verify"]


@dataclass(frozen=True)
class Summary:
    """What a sound ledger says of itself."""

    head: Head
    identity: str
    first_time: str
    last_time: str
    # Records up to here are countersigned: they cannot have been cut or changed since.
    countersigned: int
    receipts: int
    signers: list[str]
    # The signers' certificates were checked against the roots that the caller trusts.
    signers_checked: bool
    passed: int
    refused: int
    # Incomplete last lines that were cut off after the machine had ended in the middle of a write.
    recovered: int

    def document(self) -> dict[str, Any]:
        """The summary as JSON values."""
        head = {"records": self.head.records, "sha256": self.head.sha256}
        return {**self.__dict__, "head": head}


def verify(
    path: Path, *, receipts: Path | None = None, bundle_pem: bytes | None = None, expected: Head | None = None
) -> Summary:
    """Checks a ledger from its first record to its last, and that none is missing at the end.

    `receipts` is the file of countersigned heads, by default the one beside the ledger. `bundle_pem` are the roots
    under which the signers' certificates must have been issued; `expected` is a head known from elsewhere, such as
    the aggregator's. Raises VeilfedError(LEDGER_BROKEN) that names the first bad record, or FILE_UNUSABLE.
    """
    beside = receipts if receipts is not None or not receipts_path(path).exists() else receipts_path(path)
    audit = Audit(path, bundle_pem)
    # An agent may be writing: what was beside the ledger before must be covered by it, what is in it must be beside
    # it afterwards.
    earlier = list(read(beside)) if beside else []
    for record in read(path):
        audit.take(record)
    if expected is not None:
        audit.check_head(expected, "the given head")
    audit.compare(earlier, list(read(beside)) if beside else [])
    return audit.summary()


class Audit:
    """One pass over a ledger. Its methods raise VeilfedError(LEDGER_BROKEN)."""

    def __init__(self, path: Path, bundle_pem: bytes | None = None) -> None:
        self.path = path
        self.receipts: set[SignedHead] = set()
        self._bundle = bundle_pem
        self._digests = bytearray()  # sha256 of each record: a receipt speaks of any earlier one
        self._head = EMPTY
        self._times: tuple[str, str] | None = None
        self._identities: set[str] = set()
        self._signers: set[str] = set()
        self._counts: Counter[str] = Counter()
        self._countersigned = 0

    def take(self, record: Record) -> None:
        """The next record of the ledger."""
        if record.get("kind") == KIND:
            self.receipts.add(self._check(record))
        elif record.get("kind") == "start":
            self._name(str(record.get("identity")), f"record {record['seq']}")
        self._counts[str(record.get("decision") or record.get("kind"))] += 1
        self._digests += bytes.fromhex(record["sha256"])
        self._head = Head(record["seq"], record["sha256"])
        self._times = (self._times[0] if self._times else record["time"], record["time"])

    def _name(self, identity: str, where: str) -> None:
        self._identities.add(identity)
        if len(self._identities) > 1:
            raise VeilfedError(Code.LEDGER_BROKEN, f"{self.path}: {where} is of another identity than those before")

    def _check(self, record: Record) -> SignedHead:
        """Checks a receipt against what of the ledger has been read."""
        signed = SignedHead.from_record(record)
        self._name(signed.identity, str(signed))
        if signed not in self.receipts:
            at = datetime.fromisoformat(record["time"])
            self._signers.add(str(signed.check(self._bundle, at)))
        self.check_head(signed.head, str(signed))
        self._countersigned = max(self._countersigned, signed.head.records)
        return signed

    def check_head(self, head: Head, source: str) -> None:
        """That the ledger did stand at `head`."""
        if head.records > self._head.records:
            raise VeilfedError(
                Code.LEDGER_BROKEN,
                f"{self.path}: record {self._head.records + 1} is missing: {source} says that there were"
                f" {head.records} records, and here are {self._head.records}",
            )
        end = head.records * 32
        found = self._digests[end - 32 : end].hex() if end else EMPTY.sha256
        if found != head.sha256:
            raise VeilfedError(
                Code.LEDGER_BROKEN, f"{self.path}: record {head.records} is not the one that {source} speaks of"
            )

    def compare(self, earlier: list[Record], later: list[Record]) -> None:
        """Checks the receipts kept beside the ledger, and that none of those in the ledger is missing there.

        The records of the file beside it, as they were before the ledger was read and after.
        """
        beside = {self._check(record) for record in earlier if record.get("kind") == KIND}
        missing = self.receipts - {SignedHead.from_record(record) for record in later if record.get("kind") == KIND}
        if missing:
            raise VeilfedError(
                Code.LEDGER_BROKEN,
                f"{self.path}: {min(map(str, missing))} is not in the file of receipts beside the ledger",
                "Give the file of receipts that belongs to the ledger with --receipts.",
            )
        self.receipts |= beside

    def summary(self) -> Summary:
        first, last = self._times or ("", "")
        return Summary(
            head=self._head,
            identity=next(iter(self._identities), ""),
            first_time=first,
            last_time=last,
            countersigned=self._countersigned,
            receipts=len(self.receipts),
            signers=sorted(self._signers),
            signers_checked=self._bundle is not None,
            passed=self._counts["passed"],
            refused=self._counts["refused"],
            recovered=self._counts["recovered"],
        )
