"""`veilfed pki` as a person uses it: authority, service, token, enrolment."""

import asyncio
import json
import stat
import subprocess
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.processes import started, veilfed
from veilfed.errors import Code, VeilfedError
from veilfed.identity.authority import CertificateAuthority
from veilfed.identity.enrollment import enroll
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.identity.names import Identity
from veilfed.identity.tokens import Token
from veilfed.rpc.channel import translated

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


def test_a_token_survives_the_services_death_and_is_spent_across_it(tmp_path: Path) -> None:
    authority = CertificateAuthority.create(tmp_path / "ca", "test.veilfed")
    command = veilfed("pki", "serve", "--dir", authority.folder, "--listen", "127.0.0.1:0")

    def enrolled(secret: str, address: str, out: Path, *, replace: bool = False) -> None:
        token = Token(address, authority.enrollment, Identity.parse(AGENT), secret, authority.root_pem.decode())
        asyncio.run(enroll(token, out, replace=replace))

    tokens = [authority.new_token(Identity.parse(AGENT), "") for _ in range(2)]
    with started(command, tmp_path / "first") as service:
        enrolled(tokens[0].secret, f"127.0.0.1:{service.ready()['port']}", tmp_path / "agent")
        service.kill()
    before = load_credentials(TlsFiles.in_folder(tmp_path / "agent"))
    with started(command, tmp_path / "second") as service:
        address = f"127.0.0.1:{service.ready()['port']}"
        with pytest.raises(VeilfedError) as refused:
            enrolled(tokens[0].secret, address, tmp_path / "again")
        assert refused.value.code is Code.TOKEN_INVALID
        with pytest.raises(VeilfedError) as kept:
            enrolled(tokens[1].secret, address, tmp_path / "agent")
        assert kept.value.code is Code.FILE_UNUSABLE
        enrolled(tokens[1].secret, address, tmp_path / "agent", replace=True)
        asyncio.run(only_enrolment_is_open(authority, address))
    after = load_credentials(TlsFiles.in_folder(tmp_path / "agent"))
    assert (after.identity, after.key_pem == before.key_pem) == (before.identity, False)


async def only_enrolment_is_open(authority: CertificateAuthority, address: str) -> None:
    """Without a certificate, health's Check is answered and its Watch, which holds a stream open, is not."""
    secure = grpc.ssl_channel_credentials(authority.root_pem)
    options = [("grpc.ssl_target_name_override", authority.enrollment.server_name)]
    async with grpc.aio.secure_channel(address, secure, options=options) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(VeilfedError) as refused, translated(None, address):
            async for _ in health.Watch(health_pb2.HealthCheckRequest(), timeout=20):
                pass
        assert refused.value.code is Code.UNAUTHENTICATED


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
