"""`veilfed ledger` and `veilfed config`."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from tests.support.countersign import AGGREGATOR, Countersigner
from veilfed.cli import config, ledger
from veilfed.errors import Code, VeilfedError
from veilfed.ledger import Ledger, receipts_path

AGENT = "spiffe://test.veilfed/agent/north/main"
JOB = {
    "name": "trial",
    "strategy": {"name": "fedot", "classes": ["a", "b"], "dimension": 4},
    "cohort": {"train": ["north"]},
    "rounds": 1,
    "quorum": 1,
}


def call(app: typer.Typer, *arguments: str) -> str:
    """Standard output of a command that succeeds; the error of one that fails is raised."""
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def fails(app: typer.Typer, code: Code, text: str, *arguments: str) -> None:
    with pytest.raises(VeilfedError, match=text) as caught:
        call(app, *arguments)
    assert caught.value.code is code


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


@pytest.fixture
def file(tmp_path: Path, signer: Countersigner) -> Path:
    """A ledger with messages of two purposes, a refusal and a receipt."""
    path = tmp_path / "ledger"
    message: dict[str, Any] = {"kind": "message", "decision": "passed", "destination": str(AGGREGATOR)}
    with Ledger.open(path) as made, Ledger.open(receipts_path(path)) as receipts:
        made.append({"kind": "start", "identity": AGENT})
        made.append({**message, "purpose": "update", "job": "job-1", "round": 0, "bytes": 100})
        head = made.append({**message, "purpose": "update", "job": "job-1", "round": 1, "bytes": 150})
        made.append({**message, "purpose": "heartbeat", "bytes": 9})
        refused = {**message, "purpose": "update", "bytes": 7, "decision": "refused", "reason": "another shape"}
        made.append(refused)
        receipts.append(signer.signed(AGENT, "job-1", 1, head).fields())
    return path


def test_verify(file: Path, tmp_path: Path, signer: Countersigner) -> None:
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(signer.bundle)
    document = json.loads(call(ledger.app, "verify", str(file), "--bundle", str(bundle), "--json"))
    assert document["head"]["records"] == 5
    assert (document["passed"], document["refused"], document["countersigned"]) == (3, 1, 3)
    assert document["signers"] == [str(AGGREGATOR)]
    assert document["signers_checked"] is True
    text = call(ledger.app, "verify", str(file))
    assert "is whole: 5 records" in text
    assert "give the roots with --bundle" in text
    head = f"{document['head']['records']}:{document['head']['sha256']}"
    assert head in call(ledger.app, "verify", str(file), "--head", head)


def test_verify_finds_a_cut(file: Path, tmp_path: Path) -> None:
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:2]))
    fails(ledger.app, Code.LEDGER_BROKEN, "record 3 is missing", "verify", str(file))
    moved = receipts_path(file).rename(tmp_path / "elsewhere")
    assert "a cut tail would not show" in call(ledger.app, "verify", str(file))
    fails(ledger.app, Code.LEDGER_BROKEN, "record 3 is missing", "verify", str(file), "--receipts", str(moved))


def test_show(file: Path) -> None:
    document = json.loads(call(ledger.app, "show", str(file), "--json", "--limit", "2"))
    assert [record["seq"] for record in document["records"]] == [4, 5]
    totals = {row["purpose"]: row for row in document["totals"]}
    assert totals["update"] == {
        "destination": str(AGGREGATOR),
        "purpose": "update",
        "messages": 2,
        "bytes": 250,
        "inputs": 0,
        "refused": 1,
    }
    only = json.loads(call(ledger.app, "show", str(file), "--purpose", "heartbeat", "--json"))
    assert [row["purpose"] for row in only["totals"]] == ["heartbeat"]
    assert len(only["records"]) == 1
    text = call(ledger.app, "show", str(file))
    assert "refused: another" in text  # a narrow table breaks the line
    assert "250" in text


def test_what_cannot_be_read(tmp_path: Path, file: Path) -> None:
    fails(ledger.app, Code.FILE_UNUSABLE, "missing: No such file", "verify", str(tmp_path / "missing"))
    fails(ledger.app, Code.INPUT_INVALID, "RECORDS:SHA256", "verify", str(file), "--head", "7")
    fails(ledger.app, Code.FILE_UNUSABLE, "No such file", "verify", str(file), "--bundle", str(tmp_path / "missing"))


@pytest.mark.parametrize("kind", [[], ["--kind", "job"]])
def test_check_a_job(tmp_path: Path, kind: list[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(json.dumps(JOB))
    assert json.loads(call(config.app, "check", str(file), *kind, "--json"))["kind"] == "job"
    file.write_text(json.dumps({**JOB, "quorum": 2}))
    fails(config.app, Code.JOB_INVALID, "quorum", "check", str(file), *kind)


def test_check_says_where_a_problem_is(tmp_path: Path) -> None:
    file = tmp_path / "aggregator.yaml"
    file.write_text("artifacts: /srv/artifacts\nlisten: 127.0.0.1:0\nunheard_of: 1\n")
    fails(config.app, Code.CONFIG_INVALID, "line 3: unheard_of", "check", str(file))


def test_check_needs_to_know_the_kind(tmp_path: Path) -> None:
    file = tmp_path / "some.yaml"
    file.write_text("color: red\n")
    fails(config.app, Code.CONFIG_INVALID, "do not tell what it configures", "check", str(file))
    fails(config.app, Code.FILE_UNUSABLE, "No such file", "check", str(tmp_path / "missing"))
