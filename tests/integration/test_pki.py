"""`veilfed pki` as a person uses it: authority, service, token, enrolment."""

import json
import stat
import subprocess
from pathlib import Path

import pytest

from tests.support.processes import started, veilfed
from veilfed.errors import Code
from veilfed.identity.material import TlsFiles, load_credentials

AGENT = "spiffe://test.veilfed/agent/one/agent"


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(veilfed("pki", *arguments), capture_output=True, text=True, timeout=60, check=False)


def test_a_newcomer_gets_a_certificate_for_a_token_once(tmp_path: Path) -> None:
    authority, out = tmp_path / "ca", tmp_path / "agent"
    made = run("init", "--dir", authority, "--federation", "test.veilfed", "--json")
    assert made.returncode == 0, made.stderr
    fingerprint = json.loads(made.stdout)["fingerprint"]
    with started(veilfed("pki", "serve", "--dir", authority, "--listen", "127.0.0.1:0"), tmp_path / "pki") as service:
        address = f"127.0.0.1:{service.ready()['port']}"
        token = run("token", "--dir", authority, "--id", AGENT, "--address", address)
        (tmp_path / "token").write_text(token.stdout)
        enrolled = run("enroll", "--token-file", tmp_path / "token", "--out", out)
        assert enrolled.returncode == 0, enrolled.stderr
        assert str(load_credentials(TlsFiles.in_folder(out)).identity) == AGENT
        assert stat.S_IMODE((out / "key.pem").stat().st_mode) == 0o600

        again = run("enroll", "--token-file", tmp_path / "token", "--out", tmp_path / "second", "--json")
        assert again.returncode == Code.TOKEN_INVALID.exit_code
        assert json.loads(again.stderr)["error"] == "TOKEN_INVALID"
        assert not (tmp_path / "second").exists()
        assert service.terminate() == 0
    shown = json.loads(run("show", out, "--json").stdout)
    assert shown[0]["identity"] == AGENT
    assert shown[1]["fingerprint"] == fingerprint
    assert "PRIVATE" not in run("show", out).stdout


def test_a_false_enrolment_service_is_refused_by_the_root_in_the_token(tmp_path: Path) -> None:
    for name in ("true", "false"):
        assert run("init", "--dir", tmp_path / name, "--federation", "test.veilfed").returncode == 0
    command = veilfed("pki", "serve", "--dir", tmp_path / "false", "--listen", "127.0.0.1:0")
    with started(command, tmp_path / "pki") as service:
        address = f"127.0.0.1:{service.ready()['port']}"
        token = run("token", "--dir", tmp_path / "true", "--id", AGENT, "--address", address).stdout.strip()
        refused = run("enroll", "--token", token, "--out", tmp_path / "agent")
    assert refused.returncode == Code.TLS_REFUSED.exit_code, refused.stderr
    assert token not in refused.stderr


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["init", "--dir", "ca", "--federation", "Not A Name"], Code.IDENTITY_INVALID),
        (["issue", "--dir", "missing", "--id", AGENT, "--out", "out"], Code.FILE_UNUSABLE),
        (["enroll", "--token", "nonsense", "--out", "out"], Code.TOKEN_INVALID),
        (["enroll", "--out", "out"], Code.INPUT_INVALID),
        (["show", "missing.pem"], Code.FILE_UNUSABLE),
    ],
)
def test_a_wrong_call_ends_with_its_code_a_message_and_a_hint(arguments: list[str], code: Code, tmp_path: Path) -> None:
    done = subprocess.run(
        veilfed("pki", *arguments), capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == code.exit_code, done.stderr
    assert code.name in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
