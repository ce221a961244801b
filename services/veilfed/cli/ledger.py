"""`veilfed ledger`: what left an institution, for its people and its auditors. Needs no network and no service."""

from collections import Counter, deque
from pathlib import Path
from typing import Annotated, Any

import typer

from veilfed.cli import output
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import read_file
from veilfed.ledger import Head, Record, Summary, read, verify

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Shows and verifies the record of what left an institution.")

LedgerFile = Annotated[Path, typer.Argument(help="The ledger of an agent.")]


def _head(text: str) -> Head:
    records, _, sha256 = text.partition(":")
    if not records.isdecimal() or len(sha256) != 64:
        raise VeilfedError(Code.INPUT_INVALID, "--head: expected RECORDS:SHA256")
    return Head(int(records), sha256.lower())


@app.command("verify")
def verify_command(
    file: LedgerFile,
    receipts: Annotated[Path | None, typer.Option(help="Receipts, if not in FILE.receipts.")] = None,
    bundle: Annotated[Path | None, typer.Option(help="Root certificates (PEM) that the signers must be under.")] = None,
    head: Annotated[str | None, typer.Option(help="RECORDS:SHA256 known from elsewhere, such as the server.")] = None,
    as_json: output.Json = False,
) -> None:
    """Checks that nothing was changed, taken out or cut off. Ends with LEDGER_BROKEN and the first bad record."""
    summary = verify(
        file,
        receipts=receipts,
        bundle_pem=read_file(bundle) if bundle else None,
        expected=_head(head) if head else None,
    )
    output.result(summary.document(), _words(summary), as_json)


def _words(summary: Summary) -> str:
    """The summary for people."""
    lines = [
        f"The ledger of {summary.identity or 'nobody named'} is whole: {summary.head.records} records.",
        f"From {summary.first_time} to {summary.last_time}" if summary.head.records else "It is empty.",
        f"Messages passed {summary.passed}, refused {summary.refused}; interrupted writes cut {summary.recovered}",
        f"Head {summary.head.records}:{summary.head.sha256}",
    ]
    if summary.receipts:
        lines.append(
            f"Countersigned up to record {summary.countersigned} by {', '.join(summary.signers)}"
            f" ({summary.receipts} receipts)"
        )
        if not summary.signers_checked:
            lines.append("The signers' certificates were not checked: give the roots with --bundle.")
    else:
        lines.append("Nothing is countersigned: a cut tail would not show.")
    return "\n".join(lines)


@app.command("show")
def show(
    file: LedgerFile,
    purpose: Annotated[str | None, typer.Option(help="Only messages of this purpose.")] = None,
    limit: Annotated[int, typer.Option(min=0, help="List this many of the last records; 0 for the sums alone.")] = 20,
    as_json: output.Json = False,
) -> None:
    """What left: messages and bytes by destination and purpose, and the last records."""
    sums: dict[tuple[str, str], Counter[str]] = {}
    last: deque[Record] = deque(maxlen=limit)
    for record in read(file):
        if purpose is not None and record.get("purpose") != purpose:
            continue
        last.append(record)
        if record.get("kind") == "message":
            key = (str(record.get("destination")), str(record.get("purpose")))
            _count(sums.setdefault(key, Counter()), record)
    totals = [
        {"destination": destination, "purpose": name, **{key: counts[key] for key in COUNTS}}
        for (destination, name), counts in sorted(sums.items())
    ]
    output.result({"totals": totals, "records": list(last)}, None, as_json)
    if not as_json:
        columns = ["destination", "purpose", *COUNTS]
        output.result(None, output.table(columns, ([row[key] for key in columns] for row in totals), "What left"))
        rows = (_row(record) for record in last)
        output.result(None, output.table(["record", "time", "what", "job", "round", "bytes", ""], rows, "Last records"))


COUNTS = ("messages", "bytes", "inputs", "refused")


def _count(counts: Counter[str], record: Record) -> None:
    if record.get("decision") == "passed":
        counts.update(messages=1, bytes=record.get("bytes", 0), inputs=record.get("inputs", 0))
    else:
        counts.update(refused=1)


def _row(record: Record) -> list[Any]:
    decision = str(record.get("decision", ""))
    return [
        record["seq"],
        record["time"],
        record.get("purpose") or record.get("kind", ""),
        record.get("job", ""),
        record.get("round", ""),
        record.get("bytes", ""),
        f"{decision}: {record['reason']}" if "reason" in record else decision,
    ]
