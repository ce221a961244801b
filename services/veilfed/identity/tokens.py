"""One-time tokens: what an institution needs to get its first certificate.

A token carries the address of the enrolment service, the federation's root certificate (so that nothing is trusted on
first use), the identity it is bound to, and a secret that works once.
"""

import base64
import binascii
import hashlib
from dataclasses import dataclass
from typing import Self

from pydantic import ValidationError

from veilfed.config import Strict
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import load_certificates
from veilfed.identity.names import Identity

__all__ = ["Token", "fingerprint", "hashed"]

PREFIX = "veilfed1."
MAX_LENGTH = 8192


class _Fields(Strict):
    address: str
    server: str
    identity: str
    secret: str
    root: str


@dataclass(frozen=True)
class Token:
    """`text()` is secret: whoever has it first gets the certificate."""

    address: str
    server: Identity
    identity: Identity
    secret: str
    root_pem: str

    def text(self) -> str:
        fields = _Fields(
            address=self.address,
            server=str(self.server),
            identity=str(self.identity),
            secret=self.secret,
            root=self.root_pem,
        )
        return PREFIX + base64.urlsafe_b64encode(fields.model_dump_json().encode()).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises VeilfedError(TOKEN_INVALID) without repeating the token."""
        stripped = text.strip()
        try:
            if not stripped.startswith(PREFIX) or len(stripped) > MAX_LENGTH:
                raise ValueError
            body = stripped.removeprefix(PREFIX)
            decoded = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
            fields = _Fields.model_validate_json(decoded)
            load_certificates(fields.root.encode(), "the token's root")
            return cls(
                fields.address,
                Identity.parse(fields.server),
                Identity.parse(fields.identity),
                fields.secret,
                fields.root,
            )
        except (ValueError, ValidationError, VeilfedError, binascii.Error, UnicodeError):
            raise VeilfedError(
                Code.TOKEN_INVALID, "this is not an enrolment token", "Copy the token whole, in one line."
            ) from None

    def __repr__(self) -> str:
        return f"Token({self.identity})"


def hashed(secret: str) -> str:
    """What the authority keeps of a secret. The secret is 256 random bits, so a plain hash is enough."""
    return hashlib.sha256(secret.encode()).hexdigest()


def fingerprint(der: bytes) -> str:
    """SHA-256 of a certificate, in the groups in which people compare them."""
    digest = hashlib.sha256(der).hexdigest().upper()
    return ":".join(digest[index : index + 2] for index in range(0, len(digest), 2))
