"""A party's own certificate, key and trusted roots, read from files and checked against each other."""

import stat
from dataclasses import dataclass
from pathlib import Path

from veilfed.config import Strict
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import identity_of, load_certificates, load_key
from veilfed.identity.names import Identity

__all__ = ["Credentials", "TlsFiles", "load_credentials", "read_file", "read_private_file"]


class TlsFiles(Strict):
    """The section `identity` of a configuration."""

    certificate: Path
    key: Path
    # The roots that this party trusts.
    bundle: Path

    @classmethod
    def in_folder(cls, folder: Path) -> "TlsFiles":
        """The files where `veilfed pki enroll` and `issue` leave them."""
        return cls(certificate=folder / "certificate.pem", key=folder / "key.pem", bundle=folder / "bundle.pem")


@dataclass(frozen=True)
class Credentials:
    """Who a party is, with what proves it. Its repr shows no key."""

    identity: Identity
    certificate_pem: bytes
    key_pem: bytes
    bundle_pem: bytes

    def __repr__(self) -> str:
        return f"Credentials({self.identity})"


def read_file(path: Path) -> bytes:
    """The bytes of a file. Raises VeilfedError(FILE_UNUSABLE) with its path."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None


def read_private_file(path: Path) -> bytes:
    """The bytes of a file that its owner alone may read. Raises VeilfedError(FILE_UNUSABLE) otherwise."""
    data = read_file(path)
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: others may read this private key", f"Run `chmod 600 {path}`.")
    return data


def load_credentials(files: TlsFiles) -> Credentials:
    """Reads and checks the three files.

    Raises VeilfedError: FILE_UNUSABLE for a missing file or a key that others may read; IDENTITY_INVALID when they
    are malformed or the key is not the certificate's. Dates and signatures are left to the handshake.
    """
    certificate_pem, bundle_pem = read_file(files.certificate), read_file(files.bundle)
    key_pem = read_private_file(files.key)
    leaf = load_certificates(certificate_pem, str(files.certificate))[0]
    key = load_key(key_pem, str(files.key))
    load_certificates(bundle_pem, str(files.bundle))
    if leaf.public_key() != key.public_key():
        raise VeilfedError(Code.IDENTITY_INVALID, f"{files.key} is not the key of {files.certificate}")
    return Credentials(identity_of(leaf, str(files.certificate)), certificate_pem, key_pem, bundle_pem)
