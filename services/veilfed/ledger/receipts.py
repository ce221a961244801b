"""Countersigned heads: the aggregator's signature under how far a ledger had come when it took an update.

A receipt is kept twice, as a record of the ledger and in a file of its own beside it, so that neither of the two can
be cut without the other showing it. The aggregator has the same heads in its database.
"""

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import UNREADABLE, identity_of
from veilfed.identity.names import Identity, Role
from veilfed.identity.trust import certificates, trusted
from veilfed.ledger.chain import Head, Record, head_statement

__all__ = ["KIND", "SignedHead", "receipts_path"]

KIND = "receipt"

# Longer than any chain of so few certificates, and short enough for a record.
MAX_CERTIFICATE_BYTES = 16 * 1024


def receipts_path(ledger: Path) -> Path:
    """The file of receipts that belongs to a ledger."""
    return ledger.with_name(ledger.name + ".receipts")


@dataclass(frozen=True)
class SignedHead:
    """A ledger's head in one round of one job, with the signature of the aggregator that saw it."""

    identity: str
    job_id: str
    round: int
    head: Head
    signature: bytes
    certificate_pem: bytes

    def fields(self) -> dict[str, Any]:
        """The receipt as the fields of a record."""
        return {
            "kind": KIND,
            "identity": self.identity,
            "job": self.job_id,
            "round": self.round,
            "head": {"records": self.head.records, "sha256": self.head.sha256},
            "signature": self.signature.hex(),
            "certificate": self.certificate_pem.decode("ascii", "replace"),
        }

    @classmethod
    def from_record(cls, record: Record) -> Self:
        """Raises VeilfedError(LEDGER_BROKEN) when the record is no receipt."""
        try:
            head = Head(int(record["head"]["records"]), str(record["head"]["sha256"]))
            return cls(
                identity=str(record["identity"]),
                job_id=str(record["job"]),
                round=int(record["round"]),
                head=head,
                signature=bytes.fromhex(record["signature"]),
                certificate_pem=record["certificate"].encode("ascii"),
            )
        except (KeyError, TypeError, ValueError, AttributeError):
            raise VeilfedError(Code.LEDGER_BROKEN, f"record {record.get('seq')} is not a whole receipt") from None

    def __str__(self) -> str:
        return f"the receipt of round {self.round} of job {self.job_id}"

    def check(self, bundle_pem: bytes | None = None, at: datetime | None = None) -> Identity:
        """Checks the signature; returns who signed, which only `bundle_pem` (the trusted roots) proves.

        `at` is the time at which the certificates must have been valid. Raises VeilfedError(LEDGER_BROKEN).
        """
        try:
            # What is not ASCII could not be read back from the record that it would become.
            if len(self.certificate_pem) > MAX_CERTIFICATE_BYTES or not self.certificate_pem.isascii():
                raise ValueError
            return self._check(certificates(self.certificate_pem), bundle_pem, at)
        except UNREADABLE:
            raise VeilfedError(Code.LEDGER_BROKEN, f"{self}: no readable certificate") from None

    def _check(self, chain: tuple[x509.Certificate, ...], bundle_pem: bytes | None, at: datetime | None) -> Identity:
        if not chain:
            raise VeilfedError(Code.LEDGER_BROKEN, f"{self}: no readable certificate")
        signer, key = _signer(chain[0])
        if signer is None or key is None:
            raise VeilfedError(Code.LEDGER_BROKEN, f"{self}: the certificate is not an aggregator's")
        statement = head_statement(self.identity, self.job_id, self.round, self.head)
        try:
            key.verify(self.signature, statement, ec.ECDSA(SHA256()))
        except InvalidSignature:
            raise VeilfedError(Code.LEDGER_BROKEN, f"{self}: the signature is wrong") from None
        if bundle_pem is not None and not trusted(chain, certificates(bundle_pem), at):
            raise VeilfedError(
                Code.LEDGER_BROKEN, f"{self}: the certificate of {signer} was not issued under the bundle's roots"
            )
        return signer


@lru_cache(maxsize=64)
def _signer(leaf: x509.Certificate) -> tuple[Identity | None, ec.EllipticCurvePublicKey | None]:
    """The aggregator that a certificate names and its key; None for what is not one."""
    try:
        identity = identity_of(leaf)
    except VeilfedError:
        return None, None
    key = leaf.public_key()
    return (
        identity if identity.role is Role.AGGREGATOR else None,
        key if isinstance(key, ec.EllipticCurvePublicKey) else None,
    )
