"""X.509 certificates of identities: P-256, the identity as the only URI name, the role's extended key usage."""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import LABEL, SERVER_ROLES, Identity

__all__ = [
    "UNREADABLE",
    "certificate_pem",
    "identity_of",
    "key_pem",
    "load_certificates",
    "load_key",
    "make_key",
    "make_request",
    "make_root",
    "sign",
    "subject_names",
    "verified_request",
]

# A party whose clock is a little behind must not refuse a certificate that was just made.
CLOCK_SKEW = timedelta(minutes=5)

# What a certificate or request that was made with intent, or is merely odd, makes its reader raise.
UNREADABLE = (
    ValueError,
    TypeError,
    x509.DuplicateExtension,
    x509.ExtensionNotFound,
    x509.UnsupportedGeneralNameType,
    x509.InvalidVersion,
    InvalidSignature,
    UnsupportedAlgorithm,
)

# Lower case, no wildcard, no dot at the end: one spelling per name, so that a comparison of texts is enough.
_HOST = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(?:\.{LABEL})*")


def make_key() -> ec.EllipticCurvePrivateKey:
    """A P-256 key: Ed25519 leaves fail the handshake in grpc."""
    return ec.generate_private_key(ec.SECP256R1())


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def certificate_pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


def load_key(pem: bytes, where: str) -> ec.EllipticCurvePrivateKey:
    """Raises VeilfedError(IDENTITY_INVALID) when `pem` is not a P-256 key; `where` names it."""
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise VeilfedError(Code.IDENTITY_INVALID, f"{where}: not an unencrypted private key in PEM") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise VeilfedError(Code.IDENTITY_INVALID, f"{where}: not a P-256 key")
    return key


def load_certificates(pem: bytes, where: str) -> list[x509.Certificate]:
    """At least one certificate. Raises VeilfedError(IDENTITY_INVALID); `where` names the file."""
    try:
        return x509.load_pem_x509_certificates(pem)
    except ValueError:
        raise VeilfedError(Code.IDENTITY_INVALID, f"{where}: no certificate in PEM") from None


def identity_of(certificate: x509.Certificate, where: str = "certificate") -> Identity:
    """The identity that a certificate names. Raises VeilfedError(IDENTITY_INVALID)."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except UNREADABLE:
        uris = []
    if len(uris) != 1:
        raise VeilfedError(Code.IDENTITY_INVALID, f"{where}: names {len(uris)} URIs, an identity is exactly one")
    return Identity.parse(uris[0])


def _endpoint(text: str, federation: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text))
    except ValueError:
        pass
    if not _HOST.fullmatch(text):
        raise VeilfedError(
            Code.INPUT_INVALID, f"endpoint {text!r} is neither an IP address nor a DNS name in lower case"
        )
    # Clients know a server by its name below <role>.<federation>: as an endpoint it would let its holder pass for
    # another server.
    if any(f".{text}".endswith(f".{role}.{federation}") for role in SERVER_ROLES):
        raise VeilfedError(Code.INPUT_INVALID, f"endpoint {text!r} is a name that stands for an identity")
    return x509.DNSName(text)


def _subject(identity: Identity) -> x509.Name:
    # Common names are limited to 64 characters and carry no meaning here: the URI name is the identity.
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity.institution),
            x509.NameAttribute(NameOID.COMMON_NAME, f"{identity.role} {identity.name}"[:64]),
        ]
    )


def subject_names(identity: Identity, endpoints: Sequence[str]) -> x509.SubjectAlternativeName:
    """Servers carry their DNS name and endpoints. Clients carry none, so that none can pass as a server.

    Raises VeilfedError(INPUT_INVALID) for an endpoint that this identity cannot have.
    """
    uri = x509.UniformResourceIdentifier(str(identity))
    if not identity.is_server:
        if endpoints:
            raise VeilfedError(Code.INPUT_INVALID, f"{identity} is not a server and can have no endpoints")
        return x509.SubjectAlternativeName([uri])
    names = [x509.DNSName(identity.server_name), *(_endpoint(text, identity.federation) for text in endpoints)]
    return x509.SubjectAlternativeName([uri, *names])


def _usages(identity: Identity) -> x509.ExtendedKeyUsage:
    usage = ExtendedKeyUsageOID.SERVER_AUTH if identity.is_server else ExtendedKeyUsageOID.CLIENT_AUTH
    return x509.ExtendedKeyUsage([usage])


def _key_usage(*, ca: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not ca,
        key_cert_sign=ca,
        crl_sign=ca,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def make_root(key: ec.EllipticCurvePrivateKey, name: str, lifetime: timedelta) -> x509.Certificate:
    """A self-signed root certificate."""
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"{name} {secrets.token_hex(4)}"[-64:])])
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(ca=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )


def sign(
    root: x509.Certificate,
    root_key: ec.EllipticCurvePrivateKey,
    identity: Identity,
    public_key: ec.EllipticCurvePublicKey,
    not_before: datetime,
    not_after: datetime,
    endpoints: Sequence[str] = (),
) -> x509.Certificate:
    """A certificate for `identity`, signed by the root."""
    return (
        x509.CertificateBuilder()
        .subject_name(_subject(identity))
        .issuer_name(root.subject)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(not_before)
        .not_valid_after(min(not_after, root.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(ca=False), critical=True)
        .add_extension(_usages(identity), critical=False)
        .add_extension(subject_names(identity, endpoints), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(root_key.public_key()), critical=False)
        .sign(root_key, hashes.SHA256())
    )


def make_request(key: ec.EllipticCurvePrivateKey, identity: Identity, endpoints: Sequence[str] = ()) -> bytes:
    """A certificate signing request, PEM."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(_subject(identity))
    builder = builder.add_extension(subject_names(identity, endpoints), critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


def verified_request(pem: bytes) -> tuple[Identity, ec.EllipticCurvePublicKey, list[str]]:
    """(identity, public key, endpoints) of a request whose signature was checked.

    Raises VeilfedError(INPUT_INVALID or IDENTITY_INVALID).
    """
    try:
        request = x509.load_pem_x509_csr(pem)
        names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        valid = request.is_signature_valid
        key = request.public_key()
    except UNREADABLE:
        raise VeilfedError(Code.INPUT_INVALID, "not a certificate request with an identity") from None
    if not valid:
        raise VeilfedError(Code.INPUT_INVALID, "the certificate request is not signed by its own key")
    if not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise VeilfedError(Code.INPUT_INVALID, "the certificate request's key is not P-256")
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    if len(uris) != 1:
        raise VeilfedError(Code.IDENTITY_INVALID, f"the certificate request names {len(uris)} identities, not one")
    identity = Identity.parse(uris[0])
    dns = list(names.get_values_for_type(x509.DNSName))
    if identity.is_server:
        dns = [name for name in dns if name != identity.server_name]
    return identity, key, dns + [str(address) for address in names.get_values_for_type(x509.IPAddress)]
