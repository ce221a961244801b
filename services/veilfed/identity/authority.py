"""A certificate authority in a folder: the federation's, or the root of one institution's zone.

ca.json       federation and, for a zone, the institution
root.pem      the root certificate
root.key      its private key, mode 0600
tokens.sqlite one-time tokens, hashed
"""

import json
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.identity import certificates
from veilfed.identity.material import read_file, read_private_file
from veilfed.identity.names import Identity, Role
from veilfed.identity.tokens import Token, hashed

__all__ = ["CertificateAuthority", "make_identity_files", "write_identity"]

ROOT_LIFETIME = timedelta(days=3650)
LEAF_LIFETIME = timedelta(days=30)
TOKEN_LIFETIME = timedelta(hours=24)
KEY_EXISTS_HINT = "Choose another folder, or replace what is there with --replace."

_SCHEMA = """
CREATE TABLE IF NOT EXISTS tokens (
    secret_sha256 TEXT PRIMARY KEY,
    identity TEXT NOT NULL,
    expires REAL NOT NULL,
    used REAL
)
"""


def write_identity(folder: Path, certificate: bytes, key: bytes, bundle: bytes, *, replace: bool = False) -> None:
    """Leaves certificate.pem, key.pem (0600) and bundle.pem in `folder`. Refuses to replace a key unless told to."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
    if not replace and (folder / "key.pem").exists():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{folder / 'key.pem'} exists already", KEY_EXISTS_HINT)
    write_atomic(folder / "key.pem", key)
    write_atomic(folder / "bundle.pem", bundle, mode=0o644)
    write_atomic(folder / "certificate.pem", certificate, mode=0o644)


@dataclass(frozen=True)
class CertificateAuthority:
    """Signs identities of its federation; a zone's root signs those of its institution alone."""

    folder: Path
    federation: str
    zone: str | None
    root: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def create(cls, folder: Path, federation: str, zone: str | None = None) -> Self:
        """Makes the root key and certificate. Raises VeilfedError(FILE_UNUSABLE) if the folder has one already."""
        Identity.parse(f"spiffe://{federation}/{Role.ENROLLMENT}/{zone or 'authority'}/enrollment")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{folder}: {error.strerror}") from None
        if (folder / "root.key").exists():
            raise VeilfedError(
                Code.FILE_UNUSABLE, f"{folder} holds a certificate authority already", "Choose another folder."
            )
        key = certificates.make_key()
        root = certificates.make_root(key, f"Veilfed {zone or federation}", ROOT_LIFETIME)
        write_atomic(folder / "root.key", certificates.key_pem(key))
        write_atomic(folder / "root.pem", certificates.certificate_pem(root), mode=0o644)
        write_atomic(folder / "ca.json", json.dumps({"federation": federation, "zone": zone}).encode(), mode=0o644)
        return cls(folder, federation, zone, root, key)

    @classmethod
    def open(cls, folder: Path) -> Self:
        """Raises VeilfedError: FILE_UNUSABLE, IDENTITY_INVALID or STATE_CORRUPT."""
        key = certificates.load_key(read_private_file(folder / "root.key"), str(folder / "root.key"))
        root = certificates.load_certificates(read_file(folder / "root.pem"), str(folder / "root.pem"))[0]
        if root.public_key() != key.public_key():
            raise VeilfedError(Code.IDENTITY_INVALID, f"{folder / 'root.key'} is not the key of {folder / 'root.pem'}")
        try:
            description = json.loads(read_file(folder / "ca.json"))
            federation, zone = str(description["federation"]), description["zone"]
        except (ValueError, KeyError, TypeError):
            raise VeilfedError(Code.STATE_CORRUPT, f"{folder / 'ca.json'}: not readable") from None
        return cls(folder, federation, zone, root, key)

    @property
    def root_pem(self) -> bytes:
        return certificates.certificate_pem(self.root)

    @property
    def enrollment(self) -> Identity:
        """The identity of this authority's own server."""
        return Identity(self.federation, Role.ENROLLMENT, "authority", "enrollment")

    def check(self, identity: Identity) -> None:
        """Raises VeilfedError(IDENTITY_INVALID) for an identity that this authority does not sign."""
        if identity.federation != self.federation:
            raise VeilfedError(Code.IDENTITY_INVALID, f"{identity} is not of the federation {self.federation}")
        if self.zone is not None and (identity.institution, identity.role) != (self.zone, Role.ORACLE):
            raise VeilfedError(
                Code.IDENTITY_INVALID, f"the root of the zone {self.zone} signs the oracles of that institution alone"
            )

    def sign(
        self,
        identity: Identity,
        public_key: ec.EllipticCurvePublicKey,
        endpoints: Sequence[str] = (),
        lifetime: timedelta = LEAF_LIFETIME,
        not_before: datetime | None = None,
    ) -> bytes:
        """A certificate, PEM."""
        self.check(identity)
        start = not_before or datetime.now(UTC) - certificates.CLOCK_SKEW
        end = (not_before or datetime.now(UTC)) + lifetime
        return certificates.certificate_pem(
            certificates.sign(self.root, self.key, identity, public_key, start, end, endpoints)
        )

    @contextmanager
    def _tokens(self) -> Iterator[sqlite3.Connection]:
        """The tokens' database. Raises VeilfedError(FILE_UNUSABLE or STATE_CORRUPT), also for what the block does."""
        path = self.folder / "tokens.sqlite"
        try:
            path.touch(mode=0o600)
            with closing(sqlite3.connect(path, timeout=30, isolation_level=None)) as connection:
                connection.execute(_SCHEMA)
                yield connection
        except (OSError, sqlite3.OperationalError) as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error}") from None
        except sqlite3.DatabaseError:
            raise VeilfedError(Code.STATE_CORRUPT, f"{path}: not a database of tokens") from None

    def new_token(self, identity: Identity, address: str, lifetime: timedelta = TOKEN_LIFETIME) -> Token:
        """A token that gives `identity` its certificate, once, from the enrolment service at `address`."""
        self.check(identity)
        if identity.role is Role.ENROLLMENT:
            raise VeilfedError(Code.INPUT_INVALID, "the enrolment service makes its own certificate")
        secret = secrets.token_urlsafe(32)
        expires = (datetime.now(UTC) + lifetime).timestamp()
        with self._tokens() as tokens:
            tokens.execute(
                "INSERT INTO tokens (secret_sha256, identity, expires) VALUES (?, ?, ?)",
                (hashed(secret), str(identity), expires),
            )
        return Token(address, self.enrollment, identity, secret, self.root_pem.decode())

    def redeem(self, secret: str, request_pem: bytes) -> bytes:
        """Signs a certificate request in exchange for a token's secret, once. Returns the certificate, PEM.

        Raises VeilfedError: TOKEN_INVALID for a token that is unknown, used, expired or bound to another identity;
        INPUT_INVALID or IDENTITY_INVALID for a bad request, which leaves the token unused.
        """
        identity, public_key, endpoints = certificates.verified_request(request_pem)
        self.check(identity)
        certificates.subject_names(identity, endpoints)
        now = datetime.now(UTC).timestamp()
        with self._tokens() as tokens:
            # One statement, so that of two requests at once only one can win.
            changed = tokens.execute(
                "UPDATE tokens SET used = ? WHERE secret_sha256 = ? AND identity = ? AND used IS NULL AND expires > ?",
                (now, hashed(secret), str(identity), now),
            ).rowcount
        if changed != 1:
            raise VeilfedError(Code.TOKEN_INVALID, "the token is unknown, used, expired, or bound to another identity")
        return self.sign(identity, public_key, endpoints)


def make_identity_files(
    authority: CertificateAuthority,
    identity: Identity,
    folder: Path,
    bundle: bytes | None = None,
    endpoints: Sequence[str] = (),
    lifetime: timedelta = LEAF_LIFETIME,
    not_before: datetime | None = None,
    *,
    replace: bool = False,
) -> None:
    """Makes a key in `folder` and has it signed there: for an authority and a party on one machine.

    The bundle is the authority's own root unless another is given.
    """
    key = certificates.make_key()
    signed = authority.sign(identity, key.public_key(), endpoints, lifetime, not_before)
    write_identity(folder, signed, certificates.key_pem(key), bundle or authority.root_pem, replace=replace)
