"""Whether certificates that came with a message lead to a trusted root, as the handshake would decide it."""

from datetime import datetime
from functools import lru_cache

from cryptography import x509

from veilfed.identity.certificates import UNREADABLE

__all__ = ["certificates", "trusted"]

# Leaf, an intermediate or two, a root.
MAX_CHAIN = 4


@lru_cache(maxsize=1024)
def certificates(pem: bytes) -> tuple[x509.Certificate, ...]:
    """Those of some PEM; none if it cannot be read."""
    try:
        return tuple(x509.load_pem_x509_certificates(pem))
    except ValueError:
        return ()


def trusted(chain: tuple[x509.Certificate, ...], roots: tuple[x509.Certificate, ...], at: datetime | None) -> bool:
    """Whether a path of certificates valid at `at` (at any time, if None) leads from chain[0] to one of the roots."""
    current = chain[0]
    for _ in range(MAX_CHAIN):
        if not _valid(current, at):
            return False
        if any(_issued(current, root) and _valid(root, at) for root in roots):
            return True
        above = [issuer for issuer in chain[1:] if issuer != current and _issued(current, issuer)]
        if not above:
            return False
        current = above[0]
    return False


def _valid(certificate: x509.Certificate, at: datetime | None) -> bool:
    return at is None or certificate.not_valid_before_utc <= at <= certificate.not_valid_after_utc


@lru_cache(maxsize=1024)  # the same certificates come in every round
def _issued(certificate: x509.Certificate, issuer: x509.Certificate) -> bool:
    """Whether `issuer` is a certificate authority that signed `certificate`."""
    try:
        authority = issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        certificate.verify_directly_issued_by(issuer)
    except UNREADABLE:
        return False
    return authority
