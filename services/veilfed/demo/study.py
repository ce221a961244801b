"""Leave one domain out: the jobs of the study and the N x N matrix of accuracies (FEDOT, CVPR 2026, section 4)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from veilfed.demo.tasks import Task
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.v1.aggregator_pb2 import GetJobResponse, RoundDetail

__all__ = ["Cell", "Figures", "cells", "figures", "job_spec", "round_accuracies"]

Transform = Literal["orthogonal", "identity"]
TRANSFORMS: tuple[Transform, Transform] = ("orthogonal", "identity")


@dataclass(frozen=True)
class Cell:
    """One job of the study: the institution that is held out, the seed, with or without the private transform."""

    held_out: str
    seed: int
    transform: Transform


def cells(task: Task, seeds: Sequence[int]) -> Iterator[Cell]:
    """All jobs, seed by seed."""
    for seed in seeds:
        for transform in TRANSFORMS:
            for held_out in task.domains:
                yield Cell(held_out, seed, transform)


def job_spec(task: Task, cell: Cell, rounds: int) -> JobSpec:
    """The job of a cell: everybody trains but the institution that is held out, which evaluates alone."""
    train = [name for name in task.domains if name != cell.held_out]
    method = "fedot" if cell.transform == "orthogonal" else "baseline"
    return JobSpec.model_validate(
        {
            "name": f"{task.name}-{method}-{cell.seed}-without-{cell.held_out}"[:63].rstrip("-"),
            "strategy": {
                "name": "fedot",
                "classes": list(task.classes),
                "dimension": task.dimension,
                "transform": cell.transform,
                "blocks": task.blocks,
                "epochs": task.epochs,
                "batch_size": task.batch_size,
                "classifier_rate": task.classifier_rate,
                "transform_rate": task.transform_rate,
            },
            "cohort": {"train": train, "evaluate": [cell.held_out]},
            "rounds": rounds,
            "quorum": len(train),
            "deadline_seconds": 3600,  # the first round embeds every sample
            "seed": cell.seed,
        }
    )


def _accuracies(detail: RoundDetail) -> dict[str, dict[str, float]]:
    """institution -> evaluation name -> accuracy as a fraction."""
    return {
        client.institution: {e.name: e.correct / e.total for e in client.evaluations if e.total}
        for client in detail.clients
    }


def round_accuracies(job: GetJobResponse, held_out: str) -> list[tuple[float, float]]:
    """(G, mean P) of the model that each round started from; the last is the final model's."""
    rows = []
    for detail in job.rounds:
        found = _accuracies(detail)
        personal = [values["personal"] for name, values in found.items() if name != held_out]
        rows.append((found[held_out]["global"], float(np.mean(personal))))
    return rows


@dataclass
class Figures:
    """Means over the seeds, as fractions. `matrix[i][j]`: i is held out, j evaluates."""

    matrix: NDArray[np.float64]
    generalisation: float = field(init=False)  # G: the diagonal, the final model with the identity transform
    personalisation: float = field(init=False)  # P: the rest, each institution with its own transform
    comprehensive: float = field(init=False)  # C: all N^2 cells

    def __post_init__(self) -> None:
        diagonal = np.eye(len(self.matrix), dtype=bool)
        self.generalisation = float(self.matrix[diagonal].mean())
        self.personalisation = float(self.matrix[~diagonal].mean())
        self.comprehensive = float(self.matrix.mean())


def _row(task: Task, cell: Cell, job: GetJobResponse) -> list[float]:
    """The cells of one job's closing evaluation, in the order of the domains."""
    found = _accuracies(job.rounds[-1])
    row = []
    for name in task.domains:
        value = found.get(name, {}).get("global" if name == cell.held_out else "personal")
        if value is None:
            raise VeilfedError(Code.JOB_FAILED, f"{job.summary.name}: {name} gave no closing evaluation")
        row.append(value)
    return row


def figures(task: Task, jobs: Mapping[Cell, GetJobResponse], transform: Transform) -> Figures:
    """The matrix of the finished jobs with this transform, mean over the seeds."""

    def matrix(seed: int) -> list[list[float]]:
        row_cells = [Cell(name, seed, transform) for name in task.domains]
        return [_row(task, cell, jobs[cell]) for cell in row_cells]

    seeds = sorted({cell.seed for cell in jobs})
    return Figures(np.mean([matrix(seed) for seed in seeds], axis=0))
