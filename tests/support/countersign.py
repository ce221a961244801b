"""An aggregator's certificate and its signature under ledger heads, for tests of receipts."""

from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtensionOID, NameOID

from veilfed.identity.names import Identity
from veilfed.ledger import Head, SignedHead, head_statement
from veilfed.v1.aggregator_pb2 import LedgerHead, Receipt

AGGREGATOR = Identity.parse("spiffe://test.veilfed/aggregator/coordinator/main")


def _certificate(
    subject: str,
    issuer: str,
    key: ec.EllipticCurvePublicKey,
    signer: ec.EllipticCurvePrivateKey,
    start: datetime,
    days: float,
    extension: x509.ExtensionType,
) -> x509.Certificate:
    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    builder = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(extension, critical=False)
    )
    return builder.sign(signer, SHA256())


class Countersigner:
    """Signs heads with a certificate of `identity` under a root of its own, valid from `start` for `days`."""

    def __init__(self, identity: Identity = AGGREGATOR, start: datetime | None = None, days: float = 1) -> None:
        start = start or datetime.now(UTC) - timedelta(hours=1)
        root_key, self._key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
        root = _certificate(
            "root",
            "root",
            root_key.public_key(),
            root_key,
            start,
            3650,
            x509.BasicConstraints(ca=True, path_length=None),
        )
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(str(identity))])
        leaf = _certificate("leaf", "root", self._key.public_key(), root_key, start, days, names)
        self.bundle = root.public_bytes(Encoding.PEM)
        self.certificate = leaf.public_bytes(Encoding.PEM)

    def signed(self, identity: Identity | str, job: str, number: int, head: Head) -> SignedHead:
        signature = self._key.sign(head_statement(identity, job, number, head), ec.ECDSA(SHA256()))
        return SignedHead(str(identity), job, number, head, signature, self.certificate)

    def receipt(self, identity: Identity, job: str, number: int, head: Head) -> Receipt:
        signed = self.signed(identity, job, number, head)
        return Receipt(
            job_id=job,
            round=number,
            token="token",
            ledger_head=LedgerHead(records=head.records, sha256=head.sha256),
            signature=signed.signature,
            certificate_pem=signed.certificate_pem,
        )


def unsupported_certificate() -> bytes:
    """A certificate with an alternative name of a kind that its readers do not know."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "odd")])
    x400 = x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, bytes.fromhex("3004a3020c00"))
    builder = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(days=1))
    return builder.add_extension(x400, critical=False).sign(key, SHA256()).public_bytes(Encoding.PEM)
