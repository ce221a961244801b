"""What is told of a student: how good it is, and the ranges that it keeps."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from fm_oracle.distill.package import StudentPackage
from veilfed.cli import output

__all__ = ["document", "shown"]


def document(student: StudentPackage, error: float) -> dict[str, Any]:
    return {
        "shape": asdict(student.shape),
        "teacher_version": student.teacher_version,
        **asdict(student.figures),
        "arithmetic_error": error,
        "ranges": [asdict(ranges) for ranges in student.ranges],
    }


def shown(student: StudentPackage, error: float, path: Path) -> Table:
    figures = student.figures
    rows = [
        ("examples", f"{figures.train} for training, {figures.test} for tests"),
        ("linear probe, teacher", f"{figures.teacher_accuracy:.3f}"),
        ("linear probe, student", f"{figures.student_accuracy:.3f}"),
        ("same class as the teacher", f"{figures.agreement:.3f}"),
        ("the engine's arithmetic", f"differs by at most {error:.1e} of the last stream's range"),
    ]
    for number, ranges in enumerate(student.ranges):
        spans = ", ".join(
            f"{name} {low:.3g} to {high:.3g}"
            for name, (low, high) in (
                ("row sums", ranges.row_sum),
                ("variances", ranges.first_variance),
                ("and", ranges.second_variance),
            )
        )
        rows.append((f"block {number}", f"scores up to {ranges.score:.3g}, {spans}"))
    return output.table(("of the student", ""), rows, f"In {path}")
