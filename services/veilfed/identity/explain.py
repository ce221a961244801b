"""Why a handshake was refused: grpc says only that it was, so the client examines its own files."""

from collections.abc import Iterator
from datetime import UTC, datetime

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from veilfed.errors import VeilfedError
from veilfed.identity.certificates import load_certificates
from veilfed.identity.material import Credentials

__all__ = ["faults"]


def _dates(certificate: x509.Certificate, what: str, now: datetime) -> Iterator[str]:
    if now < certificate.not_valid_before_utc:
        yield f"{what} is not valid before {certificate.not_valid_before_utc.isoformat()}"
    if now > certificate.not_valid_after_utc:
        yield f"{what} expired at {certificate.not_valid_after_utc.isoformat()}"


def _issued_by(certificate: x509.Certificate, root: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(root)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def faults(credentials: Credentials, now: datetime | None = None) -> list[str]:
    """What is wrong with the party's own certificate and bundle, as far as it can tell; empty if nothing is."""
    at = now or datetime.now(UTC)
    try:
        leaf = load_certificates(credentials.certificate_pem, "the certificate")[0]
        roots = load_certificates(credentials.bundle_pem, "the bundle")
    except VeilfedError as error:
        return [error.message]
    found = list(_dates(leaf, f"the certificate of {credentials.identity}", at))
    for root in roots:
        found += _dates(root, f"the root {root.subject.rfc4514_string()} in the bundle", at)
    # A server's own roots admit its clients; its own certificate may be of another root, as an oracle's is.
    if not credentials.identity.is_server and not any(_issued_by(leaf, root) for root in roots):
        found.append(f"the certificate of {credentials.identity} is signed by no root in its own bundle")
    return found
