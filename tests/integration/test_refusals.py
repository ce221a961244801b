"""What an operator sees of a refusal: exit code, code, message and hint of the real commands."""

import asyncio
import json
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml

from client_agent.state import StateFolder
from tests.support.agents import agent_config, spec, write_data
from tests.support.aggregators import Aggregator, job_spec, running_aggregator
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import veilfed
from veilfed.errors import Code
from veilfed.identity.material import TlsFiles
from veilfed.identity.names import Identity, Role

NOBODY = "127.0.0.1:1"
JOB_FOLDER = "state/jobs/job-1"


@dataclass(frozen=True)
class Row:
    """A command in an institution's folder, of which some files are changed before, and how it must end."""

    name: str
    command: str
    code: Code
    # Parts of the message.
    words: tuple[str, ...]
    # Changed keys of a configuration, or the contents of a file.
    files: dict[str, dict[str, Any] | bytes] = field(default_factory=dict)
    # Most blocks (of 512 or 1024 bytes, as the shell has it) in a file: a disk that is full.
    blocks: int | None = None


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


@pytest.fixture
def folder(federation: Federation, tmp_path: Path) -> Path:
    """Everything that the commands below need, in order."""
    write_data(tmp_path / "data.csv", seed=1)
    agent_config(federation, "north", tmp_path, NOBODY, NOBODY)
    StateFolder(tmp_path / "state").job("job-1").offer(json.dumps(spec(["north"])))
    shutil.copytree(federation.authority.folder, tmp_path / "ca")
    documents: dict[str, dict[str, Any]] = {
        "oracle.yaml": {
            "identity": _names(federation.oracles["north"]),
            "listen": "127.0.0.1:0",
            "model": "minilm",
            "folder": "packages",
            "state": "oracle",
        },
        "aggregator.yaml": {
            "identity": _names(federation.aggregator),
            "listen": "127.0.0.1:0",
            "database": "sqlite:///aggregator.sqlite",
            "artifacts": "artifacts",
        },
        "admin.yaml": {
            "identity": str(federation.admin.key.parent),
            "aggregator": NOBODY,
            "aggregator_id": str(federation.aggregator_id),
        },
        "job.yaml": job_spec(["north"]),
    }
    for name, document in documents.items():
        (tmp_path / name).write_text(yaml.safe_dump(document))
    (tmp_path / "file").write_text("in the way")
    return tmp_path


def _names(files: TlsFiles) -> dict[str, str]:
    return {name: str(path) for name, path in files}


def spoil(folder: Path, files: dict[str, dict[str, Any] | bytes]) -> None:
    for name, change in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(change, dict):
            path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
        else:
            path.write_bytes(change)


def run(folder: Path, command: str, blocks: int | None = None) -> "subprocess.CompletedProcess[str]":
    line = veilfed(*shlex.split(command))
    if blocks is not None:
        line = ["sh", "-c", f'ulimit -f {blocks}; exec "$@"', "sh", *line]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def ends(done: "subprocess.CompletedProcess[str]", code: Code, words: tuple[str, ...]) -> None:
    """A command has ended with `code`, and said it as the catalogue promises."""
    assert done.returncode == code.exit_code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert "secret" not in done.stderr
    error, hint = done.stderr.splitlines()[-2:]
    assert error.startswith(f"error {code.name}: ")
    assert [word for word in words if word not in error] == [], error
    assert hint.startswith("hint: ")


def snapshot(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


MALFORMED = [
    Row("a job", "config check job.yaml", Code.JOB_INVALID, ("job.yaml: line 9: rounds:",),
        {"job.yaml": {"rounds": "many"}}),
    Row("an agent", "agent jobs --config agent.yaml", Code.CONFIG_INVALID, ("agent.yaml: line ", "policy.consent:"),
        {"agent.yaml": {"policy": {"consent": "perhaps"}}}),
    Row("an aggregator", "aggregator serve --config aggregator.yaml", Code.CONFIG_INVALID,
        ("aggregator.yaml: line 7: lease_second:",), {"aggregator.yaml": {"lease_second": 3}}),
    Row("an oracle", "oracle usage --config oracle.yaml", Code.CONFIG_INVALID,
        ("oracle.yaml: line ", "quotas.North Clinic"), {"oracle.yaml": {"quotas": {"North Clinic": 3}}}),
    Row("an administrator", "job list --config admin.yaml", Code.CONFIG_INVALID, ("admin.yaml: line 1: aggregator:",),
        {"admin.yaml": {"aggregator": 7443}}),
    Row("no YAML", "config check agent.yaml", Code.CONFIG_INVALID, ("agent.yaml: line 2, column 6",),
        {"agent.yaml": b"identity: [a\nstate: b\n"}),
]  # fmt: skip

CORRUPT = [
    Row("specification", "agent jobs --config agent.yaml", Code.STATE_CORRUPT, ("spec.json: line 1",),
        {f"{JOB_FOLDER}/spec.json": b'{"name": '}),
    Row("specification to approve", "agent approve job-1 --config agent.yaml", Code.STATE_CORRUPT, ("spec.json",),
        {f"{JOB_FOLDER}/spec.json": b"\xff\xfe"}),
    Row("approval", "agent jobs --config agent.yaml", Code.STATE_CORRUPT, ("approval.json: not an approval",),
        {f"{JOB_FOLDER}/approval.json": b"{}"}),
    Row("result of a round", "predict text --config agent.yaml --job job-1", Code.STATE_CORRUPT,
        ("round-0.bin: not a whole result",), {f"{JOB_FOLDER}/round-0.bin": b"x" * 99, "text": b"aeiou"}),
    Row("ledger", "agent purge job-1 --config agent.yaml", Code.LEDGER_BROKEN, ("ledger.jsonl: record 1",),
        {"state/ledger.jsonl": b"{}\n"}),
    Row("quota", "oracle usage --config oracle.yaml", Code.STATE_CORRUPT, ("quota.sqlite: not a readable database",),
        {"oracle/quota.sqlite": b"no database" * 99}),
    Row("database", "aggregator serve --config aggregator.yaml", Code.STATE_CORRUPT, ("database aggregator.sqlite",),
        {"aggregator.sqlite": b"no database" * 99}),
    Row("tokens", f"pki token --dir ca --id spiffe://test.veilfed/agent/south/agent --address {NOBODY}",
        Code.STATE_CORRUPT, ("ca/tokens.sqlite",), {"ca/tokens.sqlite": b"no database" * 99}),
    Row("authority", "pki issue --dir ca --id spiffe://test.veilfed/agent/south/agent --out new", Code.STATE_CORRUPT,
        ("ca/ca.json",), {"ca/ca.json": b"{"}),
]  # fmt: skip

FULL = [
    Row("approval", "agent approve job-1 --config agent.yaml", Code.FILE_UNUSABLE, ("approval.json: File too",),
        blocks=0),
    Row("ledger", "agent purge job-1 --config agent.yaml", Code.FILE_UNUSABLE, ("ledger.jsonl: File too",), blocks=0),
    Row("database", "aggregator serve --config aggregator.yaml", Code.FILE_UNUSABLE,
        ("database aggregator.sqlite: the disk",), blocks=40),
    Row("quota", "oracle usage --config oracle.yaml", Code.FILE_UNUSABLE, ("oracle/quota.sqlite: ",), blocks=0),
    Row("key", "pki issue --dir ca --id spiffe://test.veilfed/agent/south/agent --out new", Code.FILE_UNUSABLE,
        ("new/key.pem: File too",), blocks=0),
    Row("token", f"pki token --dir ca --id spiffe://test.veilfed/agent/south/agent --address {NOBODY}",
        Code.FILE_UNUSABLE, ("ca/tokens.sqlite: ",), blocks=0),
    Row("download", "data fetch heart --folder new", Code.FILE_UNUSABLE, ("temporary files",), blocks=0),
]  # fmt: skip

UNUSABLE = [
    Row("state", "agent purge job-1 --config agent.yaml", Code.FILE_UNUSABLE, ("file: File exists",),
        {"agent.yaml": {"state": "file/state"}}),
    Row("state to list", "agent jobs --config agent.yaml", Code.FILE_UNUSABLE, ("file/jobs: Not a directory",),
        {"agent.yaml": {"state": "file"}}),
    Row("artifacts", "aggregator serve --config aggregator.yaml", Code.FILE_UNUSABLE, ("file: File exists",),
        {"aggregator.yaml": {"artifacts": "file"}}),
    Row("database", "aggregator serve --config aggregator.yaml", Code.FILE_UNUSABLE,
        ("database file/a.sqlite: the file cannot be opened",),
        {"aggregator.yaml": {"database": "sqlite:///file/a.sqlite"}}),
    Row("authority", "pki init --dir file --federation test.veilfed", Code.FILE_UNUSABLE, ("file: File exists",)),
    Row("identity", "pki issue --dir ca --id spiffe://test.veilfed/agent/south/agent --out file",
        Code.FILE_UNUSABLE, ("file: File exists",)),
    Row("demonstration", "demo --folder file/new", Code.FILE_UNUSABLE, ("file/new: Not a directory",)),
    Row("model", "oracle serve --config oracle.yaml", Code.MODEL_MISSING, ("is not in packages",)),
]  # fmt: skip

WRONG = [
    Row("model to fetch", "oracle fetch gpt", Code.INPUT_INVALID, ("there is no model gpt; installed are minilm,",)),
    Row("data to fetch", "data fetch none", Code.INPUT_INVALID, ("there is no data set none; there are vader,",)),
    Row("nothing to purge", "agent purge --config agent.yaml", Code.INPUT_INVALID, ("name one job, or say --all",)),
    Row("no texts", "predict empty --config agent.yaml --job job-1", Code.INPUT_INVALID, ("empty: no texts",),
        {"empty": b"\n"}),
    Row("job to approve", "agent approve job-2 --config agent.yaml", Code.NOT_FOUND,
        ("job job-2 was not offered here",)),
    Row("job to purge", "agent purge job-2 --config agent.yaml", Code.NOT_FOUND, ("there is no state of job job-2",)),
    Row("no model yet", "predict file --config agent.yaml --job job-1", Code.NOT_FOUND,
        ("no model of job job-1 yet",)),
    Row("data that is not here", "study fedot --task vader --packages none --out out", Code.DATA_MISSING,
        ("is not in none",)),
    Row("strategy", "agent approve job-1 --config agent.yaml", Code.POLICY_DENIED,
        ("jobs of strategy 'fedot' are not allowed here",), {"agent.yaml": {"policy": {"strategies": ["fedclip"]}}}),
    Row("server", "job list --config admin.yaml", Code.CONFIG_INVALID, ("the aggregator-id: expected an identity",),
        {"admin.yaml": {"aggregator_id": "none"}}),
    Row("driver", "aggregator serve --config aggregator.yaml", Code.PACKAGE_MISSING,
        ("database: its driver cx_Oracle is not installed",),
        {"aggregator.yaml": {"database": "oracle+cx_oracle://user:secret@host/database"}}),
]  # fmt: skip
# They load everything that there is before they start.
LOADING = {"demonstration", "data that is not here"}
KINDS = {"malformed": MALFORMED, "corrupt": CORRUPT, "full": FULL, "unusable": UNUSABLE, "wrong": WRONG}

TABLE = [
    pytest.param(row, id=f"{kind}: {row.name}", marks=[pytest.mark.slow] if row.name in LOADING else [])
    for kind, rows in KINDS.items()
    for row in rows
]


@pytest.mark.parametrize("row", TABLE)
def test_a_command_ends_with_its_code_and_changes_nothing(folder: Path, row: Row) -> None:
    spoil(folder, row.files)
    before = snapshot(folder)
    ends(run(folder, row.command, row.blocks), row.code, row.words)
    after = snapshot(folder)
    assert {path: after.get(path) for path in before} == before


@pytest.fixture(scope="module")
def aggregator(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregator]:
    with running_aggregator(federation, tmp_path_factory.mktemp("aggregator")) as made:
        yield made


def submit(folder: Path, identity: Path, address: str, server: Identity) -> "subprocess.CompletedProcess[str]":
    spoil(folder, {"admin.yaml": {"identity": str(identity), "aggregator": address, "aggregator_id": str(server)}})
    return run(folder, "job submit job.yaml --config admin.yaml")


def presented(federation: Federation, folder: Path, how: str) -> Path:
    """An administrator's folder with a certificate that no aggregator of the federation accepts."""
    admin = Identity(federation.name, Role.ADMIN, "coordinator", "admin")
    now = datetime.now(UTC)
    if how == "other authority":
        other = make_federation(folder / "other", [])
        (other.admin.bundle).write_bytes(federation.root.read_bytes())
        return other.admin.key.parent
    if how == "no certificate":
        federation.make(admin, folder / how).certificate.write_bytes(b"")
        return folder / how
    start = now - timedelta(days=9) if how == "expired" else now + timedelta(days=9)
    return federation.make(admin, folder / how, not_before=start, lifetime=timedelta(days=1)).key.parent


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("other authority", Code.TLS_REFUSED, "coordinator/admin is signed by no root in its own bundle"),
        ("expired", Code.TLS_REFUSED, "coordinator/admin expired at 20"),
        ("not yet valid", Code.TLS_REFUSED, "coordinator/admin is not valid before 20"),
        ("no certificate", Code.IDENTITY_INVALID, "certificate.pem: no certificate in PEM"),
    ],
)
@asynchronous
async def test_a_job_with_a_certificate_that_is_not_accepted(
    federation: Federation, aggregator: Aggregator, folder: Path, how: str, code: Code, words: str
) -> None:
    """The command says what is wrong in its own files; the aggregator has no job more."""
    async with aggregator.admin() as admin:
        before = await admin.jobs()
        done = await asyncio.to_thread(
            submit, folder, presented(federation, folder, how), aggregator.address, federation.aggregator_id
        )
        ends(done, code, (words,))
        assert await admin.jobs() == before


@asynchronous
async def test_a_job_for_another_server_than_the_one_that_answers(
    federation: Federation, aggregator: Aggregator, folder: Path
) -> None:
    identity = federation.admin.key.parent
    elsewhere = Identity(federation.name, Role.AGGREGATOR, "elsewhere", "aggregator")
    done = await asyncio.to_thread(submit, folder, identity, aggregator.address, elsewhere)
    ends(done, Code.TLS_REFUSED, ("did not prove to be the one expected",))
    plain = grpc.aio.server()
    port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    try:
        done = await asyncio.to_thread(submit, folder, identity, f"127.0.0.1:{port}", federation.aggregator_id)
    finally:
        await plain.stop(0)
    ends(done, Code.TLS_REFUSED, ("is not TLS 1.3",))
    done = await asyncio.to_thread(submit, folder, identity, NOBODY, federation.aggregator_id)
    ends(done, Code.UNREACHABLE, (f"{NOBODY}: nobody answers",))
    async with aggregator.admin() as admin:
        assert await admin.jobs() == []
