"""The subcommands of `veilfed pki` that need no service."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.support.countersign import unsupported_certificate
from veilfed.cli import pki
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.tokens import Token

FEDERATION = "test.veilfed"
AGENT = f"spiffe://{FEDERATION}/agent/north/agent"
ORACLE = f"spiffe://{FEDERATION}/oracle/north/oracle"


def call(*arguments: str | Path) -> str:
    """Standard output of a command that succeeds; the error of one that fails is raised."""
    result = CliRunner().invoke(pki.app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def document(*arguments: str | Path) -> Any:
    return json.loads(call(*arguments, "--json"))


def fails(code: Code, words: str, *arguments: str | Path) -> None:
    with pytest.raises(VeilfedError, match=words) as caught:
        call(*arguments)
    assert caught.value.code is code


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    call("init", "--dir", tmp_path / "ca", "--federation", FEDERATION)
    return tmp_path / "ca"


def issue(ca: Path, identity: str, out: Path, *more: str | Path) -> Path:
    assert document("issue", "--dir", ca, "--id", identity, "--out", out, *more)["identity"] == identity
    return out


def test_an_odd_certificate_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "odd.pem").write_bytes(unsupported_certificate())
    (shown,) = document("show", tmp_path / "odd.pem")
    assert (shown["identity"], shown["endpoints"]) == (None, [])


def test_an_unknown_log_level_is_named(ca: Path) -> None:
    fails(Code.INPUT_INVALID, "log level", "serve", "--dir", ca, "--log-level", "loud")


def test_an_institutions_zone_issues_its_oracle_with_the_federations_bundle(ca: Path, tmp_path: Path) -> None:
    zone = tmp_path / "zone"
    made = document("init", "--dir", zone, "--federation", FEDERATION, "--zone", "north")
    assert made["zone"] == "north"
    out = issue(zone, ORACLE, tmp_path / "oracle", "--bundle", ca / "root.pem", "--endpoint", "10.0.0.7")
    credentials = load_credentials(TlsFiles.in_folder(out))
    assert str(credentials.identity) == ORACLE
    assert credentials.bundle_pem == (ca / "root.pem").read_bytes()
    shown = document("show", out)
    assert shown[0]["endpoints"] == [f"oracle.north.oracle.{FEDERATION}", "10.0.0.7"]
    assert shown[0]["usages"] == ["server"]
    assert shown[0]["problems"] == []
    fails(Code.IDENTITY_INVALID, "zone north", "issue", "--dir", zone, "--id", AGENT, "--out", tmp_path / "agent")
    assert not (tmp_path / "agent").exists()


def test_a_certificate_is_replaced_in_place_only_when_asked(ca: Path, tmp_path: Path) -> None:
    out = issue(ca, AGENT, tmp_path / "agent")
    before = document("show", out)[0]["fingerprint"]
    fails(Code.FILE_UNUSABLE, "exists already", "issue", "--dir", ca, "--id", AGENT, "--out", out)
    assert document("show", out)[0]["fingerprint"] == before
    issue(ca, AGENT, out, "--replace")
    assert document("show", out)[0]["fingerprint"] != before
    assert sorted(path.name for path in out.iterdir()) == ["bundle.pem", "certificate.pem", "key.pem"]


def test_show_says_what_is_wrong(ca: Path, tmp_path: Path) -> None:
    out = issue(ca, AGENT, tmp_path / "agent", "--days", "0.001")
    shown = document("show", out)[0]
    assert (shown["state"], shown["problems"]) == ("valid", [])

    call("init", "--dir", tmp_path / "other", "--federation", FEDERATION)
    (out / "bundle.pem").write_bytes((tmp_path / "other" / "root.pem").read_bytes())
    assert "signed by no root" in document("show", out)[0]["problems"][0]

    stranger = issue(ca, AGENT, tmp_path / "stranger")
    (out / "key.pem").write_bytes((stranger / "key.pem").read_bytes())
    assert "is not the key of" in document("show", out)[0]["problems"][0]
    assert "is not the key of" in call("show", out)


def test_show_of_an_authority_shows_its_root_and_no_key(ca: Path) -> None:
    made = document("show", ca)
    assert [(one["identity"], one["usages"]) for one in made] == [(None, [])]
    assert "PRIVATE" not in call("show", ca)
    assert made == document("show", ca / "root.pem")


def test_show_of_a_key_says_that_it_is_no_certificate(ca: Path) -> None:
    fails(Code.IDENTITY_INVALID, "no certificate", "show", ca / "root.key")
    fails(Code.FILE_UNUSABLE, "holds no", "show", ca.parent)


def test_a_token_carries_what_the_newcomer_needs(ca: Path) -> None:
    made = document("token", "--dir", ca, "--id", AGENT, "--address", "ca.example.org:8440")
    token = Token.parse(made["token"])
    assert (str(token.identity), token.address) == (AGENT, "ca.example.org:8440")
    assert token.root_pem == (ca / "root.pem").read_text()


@pytest.mark.parametrize("more", [[], ["--token", "a", "--token-file", "b"]])
def test_enrolment_takes_one_token(tmp_path: Path, more: list[str]) -> None:
    fails(Code.INPUT_INVALID, "either --token or", "enroll", "--out", tmp_path / "out", *more)
