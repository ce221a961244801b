"""The tables and the page of a study of BlindFed."""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from veilfed.files import write_atomic
from veilfed_study.tables import Table, percent

__all__ = ["page", "tables", "write_page"]

Document = Mapping[str, Any]

# What is said by hand (`why-blind.md`) is about these students, as the command names them, seeds and numbers of rows.
STUDENTS, SEEDS, ROWS = ["minilm-2"], [50, 77, 98], {"training": 600, "test": 400}

HEAD = """\
# Results: BlindFed's adapters

Written by `veilfed study blind` ([how](studies.md#blindfed)); every table is computed by it, what is said to them in
words is written by hand. Adapters and classifiers of [BlindFed](blindfed.md) are trained on a
[student's](../how-to/distil-a-student.md) block outputs. These are computed in the clear, in the engine's own
arithmetic; masks change no byte of what is published, so sums are computed without them.
"""


def tables(document: Document) -> list[Table]:
    """For each student its variants over all places, accuracy in per cent."""
    return [_table(document, student) for student in document["students"]]


def _table(document: Document, student: Mapping[str, Any]) -> Table:
    rows = []
    for row in student["rows"]:
        found = {cell["place"]: percent(cell["accuracy"]) for cell in row["cells"]}
        cells = [found.get(place["label"], "") for place in document["places"]]
        rows.append([row["label"], *cells, " or ".join(f"{count:,}" for count in row["parameters"])])
    columns = ["what is trained", *(place["label"] for place in document["places"]), "parameters"]
    return Table(f"{student['label']}: accuracy, per cent", columns, rows)


def page(document: Document) -> str:
    """The whole page."""
    used, rows, seeds = document["settings"], document["rows"], ", ".join(map(str, document["seeds"]))
    lines = [
        HEAD,
        f"{rows['training']:,} training and {rows['test']:,} test examples, {len(document['classes'])} classes; "
        f"{used['rounds']} rounds, epochs of a round: {used['epochs']}, batches of {used['batch_size']}, SGD's rate "
        f"{used['rate']:g}, rank {document['rank']} where nothing else is said. Mean ± standard deviation over the "
        f"seeds ({seeds}), which draw split, division, first values, batches and blocks. `Centralised` is one client "
        "with all training examples; alpha is Dirichlet's, small for clients with few classes. Parameters are those "
        "that are ever trained: adapters before the first released block are not.",
    ]
    for student, made in zip(document["students"], tables(document), strict=True):
        released = "; ".join(
            f"seed {seed}: {', '.join(map(str, blocks))}" for seed, blocks in student["released"].items()
        )
        lines += [
            f"## {student['label']}",
            f"A student of `{student['fm']}` with {student['blocks']} blocks, d = {student['dimension']}, distilled on "
            f"{student['train']:,} examples; on {student['test']:,} others a linear probe is right for "
            f"{100 * student['teacher_accuracy']:.1f} per cent with the teacher's embedding and for "
            f"{100 * student['student_accuracy']:.1f} with the student's. Blocks drawn once: {released}.",
            made.markdown(),
        ]
    asked = [student["label"] for student in document["students"]], document["seeds"], document["rows"]
    if asked == (STUDENTS, SEEDS, ROWS):
        lines.append(_said("why-blind.md"))
    lines.append(_said("blind-paper.md"))
    return "\n\n".join(line.rstrip("\n") for line in lines) + "\n"


def _said(name: str) -> str:
    return files("veilfed_study").joinpath(name).read_text(encoding="utf-8")


def write_page(document: Document, target: Path) -> None:
    """Raises VeilfedError(FILE_UNUSABLE)."""
    write_atomic(target, page(document).encode(), mode=0o644)
