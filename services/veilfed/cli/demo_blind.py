"""`veilfed demo --task blind`: neither the data nor the model is seen by the other side."""

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from veilfed.cli import output
from veilfed.demo.blind import BLIND, BlindWorkspace, check, distil, job, running_blind
from veilfed.demo.run import Stopwatch, audit, fetch, run_job
from veilfed.ledger import read
from veilfed.v1.aggregator_pb2 import GetJobResponse

__all__ = ["demo_blind"]


def demo_blind(folder: Path, packages: Path, rounds: int | None, seed: int) -> dict[str, Any]:
    """Runs it, prints what came out, and returns the JSON document. Raises VeilfedError."""
    watch, count = Stopwatch(), rounds or BLIND.rounds
    workspace = BlindWorkspace(folder, BLIND)
    with watch.stage("fetch"):
        fetch(BLIND.model, "vader", packages)
    output.say("The vendor distils a student on texts of another domain: some minutes.")
    with watch.stage("distil"):
        student = distil(workspace, packages)
    output.say(
        f"Its linear probe is right on {100 * student['student_accuracy']:.1f} % of held-out texts,"
        f" the teacher's on {100 * student['teacher_accuracy']:.1f} %."
    )
    with output.progress() as bars:
        bar = bars.add_task("starting", total=None)

        def step(text: str) -> None:
            bars.update(bar, description=text)

        with watch.stage("services"), running_blind(workspace, packages, step) as federation:
            spec = job(workspace, count, seed)
            bars.update(bar, description="passes on ciphertexts, then rounds under masks", total=count + 1)
            with watch.stage("job"):
                ended = run_job(federation, spec, lambda: bars.advance(bar))
    output.say("The same job in the clear, to compare with.")
    with watch.stage("check"):
        checked = check(workspace)
    sent = _sent(workspace)
    released = list(spec.strategy.released)  # type: ignore[union-attr]
    document = {
        "task": BLIND.name,
        "seed": seed,
        "rounds": count,
        "institutions": list(BLIND.domains),
        "released": released,
        "student": {name: student[name] for name in ("teacher_accuracy", "student_accuracy", "arithmetic_error")},
        "accuracy": _accuracy(ended),
        **checked,
        # The decrypted features, put through the job once more, give the very model that was published.
        "same_model": checked["model_sha256"] == _published(ended),
        **_costs(workspace, sent),
        "seconds": watch.document()["total"],
        "seconds_by_stage": watch.document(),
        "bytes_out_per_client": sent,
        "ledger_ok": True,  # else `audit` has raised
    }
    _print(document)
    return document


def _costs(workspace: BlindWorkspace, sent: dict[str, dict[str, int]]) -> dict[str, float]:
    """Of a sample and a block, amortised: seconds of both sides by the vendor's log, and bytes that were sent to it."""
    seconds, begun = 0.0, 0.0
    for line in workspace.log("vendor").with_suffix(".err").read_text().splitlines():
        record = json.loads(line)
        at = datetime.fromisoformat(record["timestamp"]).timestamp()
        if record["event"] == "pass":
            begun = at
        elif record["event"] == "half of a block":
            seconds, begun = seconds + at - begun, at
    done = BLIND.blocks * sum(config["limit"] for config in BLIND.domains.values())
    upload = sum(counts["ciphertexts"] for counts in sent.values())
    return {"s_per_sample_block": round(seconds / done, 4), "bytes_per_sample_block": round(upload / done)}


def _published(ended: GetJobResponse) -> str:
    """The last model that was published."""
    return next((item.published_sha256 for item in reversed(ended.rounds) if item.published_sha256), "")


def _accuracy(ended: GetJobResponse) -> dict[str, float]:
    """Of the last model, by institution, as the agents counted it."""
    found = {}
    for client in ended.rounds[-1].clients:
        for one in client.evaluations:
            if one.name == "global" and one.total:
                found[client.institution] = one.correct / one.total
    return found


def _sent(workspace: BlindWorkspace) -> dict[str, dict[str, int]]:
    """Verifies the ledgers, and adds up what has left by purpose."""
    sent: dict[str, dict[str, int]] = {}
    for institution in workspace.institutions:
        audit(institution)
        counts = sent.setdefault(institution.name, {})
        for record in read(institution.ledger):
            if record.get("kind") == "message" and record["decision"] == "passed":
                counts[record["purpose"]] = counts.get(record["purpose"], 0) + record["bytes"]
    return sent


def _print(document: dict[str, Any]) -> None:
    rows = [
        (name, *(f"{100 * document[which][name]:.1f}" for which in ("accuracy", "accuracy_plain")))
        for name in document["institutions"]
    ]
    title = f"Accuracy on held-out texts, per cent; released: {document['released']} of {BLIND.blocks} blocks"
    output.result(None, output.table(["institution", "double-blind", "in the clear"], rows, title))
    output.say(
        f"The same class for {100 * document['agree_top1']:.1f} % of {document['held_out']} texts; outputs differ by"
        f" {document['largest_difference']:.2g} at most, of {document['range']:.3g}."
    )
    output.say(
        f"Linear probes of all rows together: {100 * document['acc_linear_probe']:.1f} % on the last released output,"
        f" {100 * document['acc_teacher']:.1f} % on the teacher's embedding."
    )
    keys, texts = (
        sum(counts[purpose] for counts in document["bytes_out_per_client"].values())
        for purpose in ("evaluation_keys", "ciphertexts")
    )
    output.say(
        f"The vendor has seen {keys:,} bytes of keys and {texts:,} bytes of ciphertexts, and no text. The institutions"
        f" have seen the outputs of the blocks {document['released']}, and no weight. The coordinator has seen sums."
    )
    purposes = sorted({purpose for counts in document["bytes_out_per_client"].values() for purpose in counts})
    rows = [
        (purpose, *(document["bytes_out_per_client"][name].get(purpose, 0) for name in document["institutions"]))
        for purpose in purposes
    ]
    output.result(None, output.table(["purpose", *document["institutions"]], rows, "Bytes out, by the ledgers"))
