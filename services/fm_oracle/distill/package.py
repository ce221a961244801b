"""A student as a file: what the engine computes with, and what was measured of it. No code is in it.

A safetensors file: float64 matrices as the engine takes them, and JSON with the shape, the ranges and the figures.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from fm_oracle.distill.model import Shape, Student
from fm_oracle.encrypted.block import Ranges, Weights
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic

__all__ = ["Figures", "StudentPackage", "package"]

Real = NDArray[np.float64]

FORMAT = "veilfed student 1"
MATRICES = ("query_key_value", "output", "hidden", "back", "gains")


@dataclass(frozen=True)
class Figures:
    """What was measured on examples that neither teacher's probe nor student was trained on."""

    train: int
    test: int
    teacher_accuracy: float
    student_accuracy: float
    agreement: float


@dataclass(frozen=True)
class StudentPackage:
    """`embedding` [d, f + t] has a column for each feature and each token; `affine` [2, d] is gain and shift."""

    shape: Shape
    teacher_version: str
    blocks: list[Weights]
    ranges: list[Ranges]
    embedding: Real | None
    affine: Real | None
    figures: Figures

    def save(self, path: Path) -> None:
        """Raises VeilfedError(FILE_UNUSABLE)."""
        arrays: dict[str, Real] = {}
        for number, block in enumerate(self.blocks):
            arrays.update(
                {f"blocks.{number}.{name}": np.ascontiguousarray(value) for name, value in _matrices(block).items()}
            )
        for name, value in (("embedding", self.embedding), ("affine", self.affine)):
            if value is not None:
                arrays[name] = np.ascontiguousarray(value)
        about = _About(FORMAT, self.shape, self.teacher_version, self.ranges, self.figures)
        write_atomic(path, safetensors.numpy.save(arrays, {"student": json.dumps(asdict(about), sort_keys=True)}))

    @classmethod
    def load(cls, path: Path) -> "StudentPackage":
        """Raises VeilfedError: FILE_UNUSABLE, or STATE_CORRUPT for what is no student."""
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                about = TypeAdapter(_About).validate_json(file.metadata()["student"])
                arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no mapping
            made = [_weights(arrays, number) for number in range(about.shape.blocks)]
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror or 'not readable'}") from None
        except (safetensors.SafetensorError, ValidationError, KeyError, TypeError):
            raise VeilfedError(Code.STATE_CORRUPT, f"{path}: not a student", "Distil it again.") from None
        if about.format != FORMAT or len(about.ranges) != about.shape.blocks:
            raise VeilfedError(Code.STATE_CORRUPT, f"{path}: a student of another format, {about.format!r}")
        return cls(
            about.shape,
            about.teacher_version,
            made,
            about.ranges,
            arrays.get("embedding"),
            arrays.get("affine"),
            about.figures,
        )


@dataclass(frozen=True)
class _About:
    format: str
    shape: Shape
    teacher_version: str
    ranges: list[Ranges]
    figures: Figures


def package(student: Student, ranges: Sequence[Ranges], teacher_version: str, figures: Figures) -> StudentPackage:
    """Of a trained student."""
    embedding = None
    if student.patches is not None and student.positions is not None:
        columns = [student.patches.weight.detach(), student.positions.detach().T]
        embedding = np.concatenate([column.double().numpy() for column in columns], axis=1)
        embedding -= embedding.mean(axis=0)
    affine = None if student.affine is None else student.affine.detach().double().numpy()
    weights = [block.weights() for block in student.blocks]
    return StudentPackage(student.shape, teacher_version, weights, list(ranges), embedding, affine, figures)


def _matrices(weights: Weights) -> dict[str, Real]:
    found: dict[str, Any] = {name: getattr(weights, name) for name in MATRICES}
    return {name: value for name, value in found.items() if value is not None}


def _weights(arrays: dict[str, Real], number: int) -> Weights:
    parts = {name: arrays.get(f"blocks.{number}.{name}") for name in MATRICES}
    matrices = [parts[name] for name in MATRICES[:-1]]
    if any(matrix is None for matrix in matrices):
        raise KeyError(number)
    query_key_value, output, hidden, back = (np.asarray(matrix, dtype=np.float64) for matrix in matrices)
    return Weights(query_key_value, output, hidden, back, parts["gains"])
