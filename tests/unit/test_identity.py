import stat
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import given
from hypothesis import strategies as st

from tests.support.identities import make_federation
from veilfed.errors import Code, VeilfedError
from veilfed.identity import certificates
from veilfed.identity.authority import CertificateAuthority, make_identity_files
from veilfed.identity.explain import faults
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity, Role
from veilfed.identity.tokens import Token

LABEL = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True)
AGENT = Identity("test.veilfed", Role.AGENT, "one", "agent")
ORACLE = Identity("test.veilfed", Role.ORACLE, "one", "oracle")


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority.create(tmp_path / "ca", "test.veilfed")


@given(LABEL, st.sampled_from(Role), LABEL, LABEL)
def test_an_identity_survives_its_text(federation: str, role: Role, institution: str, name: str) -> None:
    identity = Identity(federation, role, institution, name)
    assert Identity.parse(str(identity)) == identity


@pytest.mark.parametrize(
    "text",
    [
        "",
        "spiffe://fed/agent/one",
        "spiffe://fed/root/one/a",
        "spiffe://fed/agent/One/a",
        "spiffe://fed/agent/one/a/b",
        "https://fed/agent/one/a",
        "spiffe://fed/agent/one/a\n",
        "spiffe://fed/agent/" + "x" * 64 + "/a",
    ],
)
def test_what_is_no_identity_is_refused(text: str) -> None:
    with pytest.raises(VeilfedError) as refused:
        Identity.parse(text)
    assert refused.value.code is Code.IDENTITY_INVALID


def test_key_files_are_private_and_the_parts_belong_together(authority: CertificateAuthority, tmp_path: Path) -> None:
    make_identity_files(authority, AGENT, tmp_path / "agent")
    files = TlsFiles.in_folder(tmp_path / "agent")
    for key in (files.key, authority.folder / "root.key"):
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
    credentials = load_credentials(files)
    assert credentials.identity == AGENT
    assert faults(credentials) == []
    assert "PRIVATE" not in repr(credentials)


def test_only_servers_can_pass_as_servers(authority: CertificateAuthority) -> None:
    key = certificates.make_key()

    def extensions(identity: Identity) -> tuple[list[x509.ObjectIdentifier], list[str]]:
        pem = authority.sign(identity, key.public_key(), ["10.0.0.1"] if identity.is_server else [])
        leaf = certificates.load_certificates(pem, "leaf")[0]
        names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
        return list(usage), names.get_values_for_type(x509.DNSName)

    assert extensions(AGENT) == ([ExtendedKeyUsageOID.CLIENT_AUTH], [])
    assert extensions(ORACLE) == ([ExtendedKeyUsageOID.SERVER_AUTH], ["oracle.one.oracle.test.veilfed"])


@pytest.mark.parametrize(
    ("identity", "endpoint"),
    [
        (AGENT, "10.0.0.1"),
        (ORACLE, "aggregator.coordinator.aggregator.test.veilfed"),
        (ORACLE, "Other.One.Oracle.Test.Veilfed"),
    ],
    ids=["client", "another role's name", "another server's name"],
)
def test_a_certificate_cannot_carry_the_name_of_another_server(
    authority: CertificateAuthority, identity: Identity, endpoint: str
) -> None:
    with pytest.raises(VeilfedError):
        authority.sign(identity, certificates.make_key().public_key(), [endpoint])


def test_a_zones_root_signs_its_own_oracles_alone(tmp_path: Path) -> None:
    zone = CertificateAuthority.create(tmp_path / "zone", "test.veilfed", "one")
    key = certificates.make_key().public_key()
    zone.sign(ORACLE, key)
    for identity in (
        AGENT,
        Identity("test.veilfed", Role.ORACLE, "two", "oracle"),
        Identity.parse("spiffe://other.veilfed/oracle/one/oracle"),
    ):
        with pytest.raises(VeilfedError) as refused:
            zone.sign(identity, key)
        assert refused.value.code is Code.IDENTITY_INVALID


def test_adding_an_institution_touches_no_other_file(tmp_path: Path) -> None:
    federation = make_federation(tmp_path, ["one", "two"])

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    before = contents()
    federation.add("three")
    after = contents()
    assert {path: after[path] for path in before} == before
    assert len(after) > len(before)


def spoil_key(files: TlsFiles) -> None:
    files.key.write_bytes(certificates.key_pem(certificates.make_key()))


def open_key(files: TlsFiles) -> None:
    files.key.chmod(0o640)


def spoil_certificate(files: TlsFiles) -> None:
    files.certificate.write_text("nothing")


def spoil_bundle(files: TlsFiles) -> None:
    files.bundle.write_bytes(b"\x00")


def remove_key(files: TlsFiles) -> None:
    files.key.unlink()


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (spoil_key, Code.IDENTITY_INVALID),
        (open_key, Code.FILE_UNUSABLE),
        (spoil_certificate, Code.IDENTITY_INVALID),
        (spoil_bundle, Code.IDENTITY_INVALID),
        (remove_key, Code.FILE_UNUSABLE),
    ],
)
def test_bad_identity_files_are_named(
    authority: CertificateAuthority, tmp_path: Path, spoil: Callable[[TlsFiles], None], code: Code
) -> None:
    make_identity_files(authority, AGENT, tmp_path / "agent")
    files = TlsFiles.in_folder(tmp_path / "agent")
    spoil(files)
    with pytest.raises(VeilfedError, match=str(tmp_path)) as refused:
        load_credentials(files)
    assert refused.value.code is code


def test_own_files_are_examined_for_what_a_handshake_refused(authority: CertificateAuthority, tmp_path: Path) -> None:
    other = CertificateAuthority.create(tmp_path / "other", "test.veilfed")
    now = datetime.now(UTC)
    cases = {
        "expired": (authority, authority, now - timedelta(days=2)),
        "not valid before": (authority, authority, now + timedelta(days=2)),
        "signed by no root": (other, authority, now),
    }
    for words, (signer, root, start) in cases.items():
        folder = tmp_path / words
        make_identity_files(signer, AGENT, folder, bundle=root.root_pem, lifetime=timedelta(days=1), not_before=start)
        assert any(words in fault for fault in faults(load_credentials(TlsFiles.in_folder(folder))))


def request(identity: Identity = AGENT) -> bytes:
    return certificates.make_request(certificates.make_key(), identity)


def test_a_token_works_once(authority: CertificateAuthority) -> None:
    token = authority.new_token(AGENT, "127.0.0.1:1")
    leaf = certificates.load_certificates(authority.redeem(token.secret, request()), "leaf")[0]
    assert certificates.identity_of(leaf) == AGENT
    with pytest.raises(VeilfedError) as refused:
        authority.redeem(token.secret, request())
    assert refused.value.code is Code.TOKEN_INVALID


def test_a_token_is_bound_to_its_identity_and_a_bad_request_does_not_spend_it(authority: CertificateAuthority) -> None:
    token = authority.new_token(AGENT, "127.0.0.1:1")
    for bad in (request(ORACLE), b"nothing", b""):
        with pytest.raises(VeilfedError):
            authority.redeem(token.secret, bad)
    authority.redeem(token.secret, request())


def test_an_expired_or_invented_token_is_refused(authority: CertificateAuthority) -> None:
    token = authority.new_token(AGENT, "127.0.0.1:1", timedelta(seconds=-1))
    for secret in (token.secret, "invented"):
        with pytest.raises(VeilfedError) as refused:
            authority.redeem(secret, request())
        assert refused.value.code is Code.TOKEN_INVALID


def test_secrets_are_not_kept_and_not_shown(authority: CertificateAuthority) -> None:
    token = authority.new_token(AGENT, "127.0.0.1:1")
    kept = (authority.folder / "tokens.sqlite").read_bytes()
    assert token.secret.encode() not in kept
    assert token.secret not in repr(token)


def test_a_token_survives_its_text_and_nothing_else_is_one(authority: CertificateAuthority) -> None:
    token = authority.new_token(AGENT, "127.0.0.1:1")
    assert Token.parse(f"  {token.text()}\n") == token
    for text in ("", "veilfed1.", "veilfed1.!!!", token.text()[:-9], "x" + token.text(), "veilfed1." + "e30"):
        with pytest.raises(VeilfedError) as refused:
            Token.parse(text)
        assert refused.value.code is Code.TOKEN_INVALID
        assert token.secret not in str(refused.value)
