"""What a hostile holder of a token, or of a certificate's private key, tries on the authority."""

import json
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from veilfed.errors import Code, VeilfedError
from veilfed.identity import certificates
from veilfed.identity.authority import CertificateAuthority, make_identity_files
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.identity.tokens import Token

FEDERATION = "test.veilfed"
AGENT = Identity(FEDERATION, Role.AGENT, "north", "agent")
ORACLE = Identity(FEDERATION, Role.ORACLE, "north", "oracle")
AGGREGATOR = Identity(FEDERATION, Role.AGGREGATOR, "coordinator", "main")
URI = x509.UniformResourceIdentifier(str(AGENT))


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "ca", FEDERATION)


def refused(code: Code, words: str | None, call: Callable[[], object]) -> None:
    with pytest.raises(VeilfedError, match=words) as caught:
        call()
    assert caught.value.code is code


def request(identity: Identity = AGENT) -> bytes:
    return certificates.make_request(certificates.make_key(), identity)


def forged(names: list[x509.GeneralName], key: CertificateIssuerPrivateKeyTypes | None = None) -> bytes:
    """A request that `make_request` would not make."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    signer = key or certificates.make_key()
    algorithm = None if isinstance(signer, ed25519.Ed25519PrivateKey) else SHA256()
    return builder.sign(signer, algorithm).public_bytes(Encoding.PEM)


def spoilt() -> bytes:
    """A request whose signature is not of its key: one bit of the identity was changed afterwards."""
    der = x509.load_pem_x509_csr(request()).public_bytes(Encoding.DER)
    changed = x509.load_der_x509_csr(der.replace(b"/agent/north/agent", b"/agent/nortg/agent"))
    return changed.public_bytes(Encoding.PEM)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda: b"no request", Code.INPUT_INVALID),
        (spoilt, Code.INPUT_INVALID),
        (lambda: forged([x509.DNSName("a")]), Code.IDENTITY_INVALID),
        (lambda: forged([URI, URI]), Code.IDENTITY_INVALID),
        (lambda: forged([x509.UniformResourceIdentifier("https://a")]), Code.IDENTITY_INVALID),
        (lambda: forged([URI, x509.DNSName("localhost")]), Code.INPUT_INVALID),
        (lambda: forged([URI], ec.generate_private_key(ec.SECP384R1())), Code.INPUT_INVALID),
        (lambda: forged([URI], ed25519.Ed25519PrivateKey.generate()), Code.INPUT_INVALID),
    ],
    ids=["no PEM", "signature", "no identity", "two identities", "other URI", "agent with host", "P-384", "Ed25519"],
)
def test_a_bad_request_is_refused_and_leaves_the_token_unused(
    authority: CertificateAuthority, make: Callable[[], bytes], code: Code
) -> None:
    token = authority.new_token(AGENT, "127.0.0.1:1")
    refused(code, None, lambda: authority.redeem(token.secret, make()))
    authority.redeem(token.secret, request())


@pytest.mark.parametrize(
    "name",
    [
        AGGREGATOR.server_name,
        f"deeper.{AGGREGATOR.server_name}",
        f"aggregator.{FEDERATION}",
        Identity(FEDERATION, Role.ENROLLMENT, "authority", "enrollment").server_name,
        AGGREGATOR.server_name.upper(),
        f"{AGGREGATOR.server_name}.",
        f"*.coordinator.aggregator.{FEDERATION}",
        "*",
    ],
)
def test_a_token_for_one_server_gives_no_other_servers_name(authority: CertificateAuthority, name: str) -> None:
    """Else an institution's oracle could pass for the aggregator of everybody."""
    token = authority.new_token(ORACLE, "127.0.0.1:1")
    wanted = [x509.UniformResourceIdentifier(str(ORACLE)), x509.DNSName(name)]
    refused(Code.INPUT_INVALID, "endpoint", lambda: authority.redeem(token.secret, forged(wanted)))


def test_the_subject_and_other_extensions_of_a_request_are_not_taken_over(authority: CertificateAuthority) -> None:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "root")])
    builder = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(subject)
        .add_extension(x509.SubjectAlternativeName([URI]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    )
    pem = builder.sign(certificates.make_key(), SHA256()).public_bytes(Encoding.PEM)
    made = x509.load_pem_x509_certificate(authority.redeem(authority.new_token(AGENT, "127.0.0.1:1").secret, pem))
    assert made.subject != subject
    assert not made.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usages = list(made.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value)
    assert usages == [ExtendedKeyUsageOID.CLIENT_AUTH]


def test_of_many_at_once_one_gets_the_certificate(authority: CertificateAuthority) -> None:
    """Each opens the authority and its database anew, as processes do."""
    token = authority.new_token(AGENT, "127.0.0.1:1")
    requests = [request() for _ in range(8)]
    start, outcomes = threading.Barrier(len(requests)), list[str]()

    def redeem(pem: bytes) -> None:
        other = CertificateAuthority.open(authority.folder)
        start.wait()
        try:
            other.redeem(token.secret, pem)
            outcomes.append("signed")
        except VeilfedError as error:
            outcomes.append(error.code.name)

    threads = [threading.Thread(target=redeem, args=(pem,)) for pem in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["TOKEN_INVALID"] * 7 + ["signed"]


def test_nobody_gets_the_enrolment_services_own_identity(authority: CertificateAuthority) -> None:
    refused(Code.INPUT_INVALID, "makes its own", lambda: authority.new_token(authority.enrollment, "127.0.0.1:1"))


def test_a_token_with_another_federations_identity_is_not_made(authority: CertificateAuthority) -> None:
    other = Identity("other.veilfed", Role.AGENT, "north", "agent")
    refused(Code.IDENTITY_INVALID, "not of the federation", lambda: authority.new_token(other, "127.0.0.1:1"))


def test_a_token_whose_root_is_no_certificate_is_no_token(authority: CertificateAuthority) -> None:
    made = Token("127.0.0.1:1", authority.enrollment, AGENT, "secret", "no root")
    refused(Code.TOKEN_INVALID, "not an enrolment token", lambda: Token.parse(made.text()))


@pytest.mark.parametrize(
    "endpoint",
    ["*.example.org", "agg.example.org.", "AGG.example.org", "a b", "", "-a", "http://a", "a" * 64, "10.0.0.1/8"],
)
def test_endpoints_that_are_no_hosts_are_refused(authority: CertificateAuthority, endpoint: str) -> None:
    key = certificates.make_key().public_key()
    refused(Code.INPUT_INVALID, "endpoint", lambda: authority.sign(AGGREGATOR, key, [endpoint]))


def test_endpoints_become_names_and_addresses(authority: CertificateAuthority) -> None:
    pem = authority.sign(AGGREGATOR, certificates.make_key().public_key(), ["10.0.0.7", "::1", "agg.example.org"])
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [AGGREGATOR.server_name, "agg.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "::1"]


def test_no_certificate_outlives_its_root(authority: CertificateAuthority) -> None:
    pem = authority.sign(AGENT, certificates.make_key().public_key(), lifetime=timedelta(days=36_500))
    assert x509.load_pem_x509_certificate(pem).not_valid_after_utc == authority.root.not_valid_after_utc


# The authority's folder


def test_an_authority_is_never_replaced(authority: CertificateAuthority) -> None:
    before = (authority.folder / "root.key").read_bytes()
    refused(Code.FILE_UNUSABLE, "already", lambda: CertificateAuthority.create(authority.folder, FEDERATION))
    assert (authority.folder / "root.key").read_bytes() == before


def open_root_key(folder: Path) -> None:
    (folder / "root.key").chmod(0o644)


def swap_root_key(folder: Path) -> None:
    (folder / "root.key").write_bytes(certificates.key_pem(certificates.make_key()))


def spoil_description(folder: Path) -> None:
    (folder / "ca.json").write_text(json.dumps(["federation"]))


@pytest.mark.parametrize(
    ("spoil", "code", "words"),
    [
        (open_root_key, Code.FILE_UNUSABLE, "others may read"),
        (swap_root_key, Code.IDENTITY_INVALID, "not the key of"),
        (spoil_description, Code.STATE_CORRUPT, "ca.json"),
    ],
)
def test_a_damaged_authority_is_not_used(
    authority: CertificateAuthority, spoil: Callable[[Path], None], code: Code, words: str
) -> None:
    spoil(authority.folder)
    refused(code, words, lambda: CertificateAuthority.open(authority.folder))


def test_a_damaged_token_store_is_a_typed_error(authority: CertificateAuthority) -> None:
    (authority.folder / "tokens.sqlite").write_bytes(b"no database " * 100)
    refused(Code.STATE_CORRUPT, "tokens.sqlite", lambda: authority.new_token(AGENT, "127.0.0.1:1"))


# Replacing a certificate in place


def test_a_key_is_replaced_only_when_asked(authority: CertificateAuthority, tmp_path: Path) -> None:
    make_identity_files(authority, AGENT, tmp_path / "agent")
    files = TlsFiles.in_folder(tmp_path / "agent")
    before = load_credentials(files)
    refused(Code.FILE_UNUSABLE, "exists already", lambda: make_identity_files(authority, AGENT, files.key.parent))
    assert load_credentials(files) == before
    make_identity_files(authority, AGENT, files.key.parent, replace=True)
    after = load_credentials(files)
    assert (after.identity, after.bundle_pem) == (before.identity, before.bundle_pem)
    assert after.key_pem != before.key_pem
