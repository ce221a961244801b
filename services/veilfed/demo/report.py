"""What the demonstration prints, and its JSON document."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from veilfed.cli import output
from veilfed.demo.study import Cell, Figures, round_accuracies
from veilfed.demo.tasks import Task
from veilfed.v1.aggregator_pb2 import GetJobResponse

__all__ = ["document", "figures_table", "matrix_table", "rounds_table"]


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def rounds_table(jobs: Mapping[Cell, GetJobResponse]) -> Table:
    """Accuracy of the model that each round started from, mean over seeds and held-out institutions."""
    curves = {
        transform: np.mean(
            [round_accuracies(job, cell.held_out) for cell, job in jobs.items() if cell.transform == transform], axis=0
        )
        for transform in ("orthogonal", "identity")
    }
    rows = [
        (index, *(_percent(value) for transform in ("orthogonal", "identity") for value in curves[transform][index]))
        for index in range(len(curves["orthogonal"]))
    ]
    return output.table(
        ["round", "FEDOT G", "FEDOT P", "baseline G", "baseline P"], rows, "Accuracy by round, per cent"
    )


def matrix_table(task: Task, found: Figures) -> Table:
    """The N x N matrix of FEDOT."""
    names = list(task.domains)
    rows = [
        (f"without {name}", *(_percent(value) for value in row)) for name, row in zip(names, found.matrix, strict=True)
    ]
    title = "Final accuracy, per cent: the held-out institution without transform (diagonal), the others with their own"
    return output.table(["", *names], rows, title)


def figures_table(fedot: Figures, baseline: Figures) -> Table:
    """G, P and C with and without the private transform."""
    rows = [
        (
            name,
            _percent(found.generalisation),
            _percent(found.personalisation),
            _percent(found.comprehensive),
        )
        for name, found in (("FEDOT(+B)", fedot), ("baseline (no transform)", baseline))
    ]
    return output.table(["", "G", "P", "C"], rows)


def document(
    task: Task,
    seeds: Sequence[int],
    rounds: int,
    fedot: Figures,
    baseline: Figures,
    seconds: Mapping[str, float],
    bytes_out: Mapping[str, Mapping[str, int]],
    ledger_ok: bool,
) -> dict[str, Any]:
    """The JSON document: accuracies are fractions, means over the seeds."""
    return {
        "task": task.name,
        "seeds": list(seeds),
        "rounds": rounds,
        "institutions": list(task.domains),
        "matrix": fedot.matrix.tolist(),
        "G": fedot.generalisation,
        "P": fedot.personalisation,
        "C": fedot.comprehensive,
        "baseline_matrix": baseline.matrix.tolist(),
        "baseline_G": baseline.generalisation,
        "baseline_P": baseline.personalisation,
        "baseline_C": baseline.comprehensive,
        "seconds": seconds["total"],
        "seconds_by_stage": dict(seconds),
        "bytes_out_per_client": {name: dict(counts) for name, counts in bytes_out.items()},
        "ledger_ok": ledger_ok,
    }
