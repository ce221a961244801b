"""From a model and public examples to a student in a file, with what was measured of it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fm_oracle.distill.examples import Examples
from fm_oracle.distill.export import check
from fm_oracle.distill.model import Student
from fm_oracle.distill.package import Figures, StudentPackage, package
from fm_oracle.distill.probe import fit_probe
from fm_oracle.distill.student import Seen
from fm_oracle.distill.teacher import teacher_of
from fm_oracle.distill.training import Plan, Progress, distil, embeddings, tame
from fm_oracle.models.base import Model

__all__ = ["Options", "distilled"]

# Inputs that say how large a teacher's scores are.
TAMED_ON = 64
# Held-out inputs on which the engine's arithmetic is compared with the student's.
CHECKED = 16


@dataclass(frozen=True)
class Options:
    """`tokens` of a text at most, `image_side` in pixels: both as the institutions will encrypt them."""

    blocks: int
    tokens: int = 64
    image_side: int = 98
    plan: Plan = field(default_factory=Plan)


def distilled(
    model: Model[Any], examples: Examples, options: Options, kept: Path, progress: Progress
) -> tuple[StudentPackage, float]:
    """A student, and the largest error of the engine's arithmetic against it, relative to the embeddings' range.

    Goes on from `kept` if it is there. Raises VeilfedError as `fm_oracle.distill.training.distil` and `export.check`.
    """
    teacher = teacher_of(model, options.tokens, options.image_side)
    prepared = teacher.prepare(examples.inputs)
    known = model.embed(examples.inputs)
    train, test = np.flatnonzero(~examples.test), np.flatnonzero(examples.test)
    probe = fit_probe(known[train], examples.labels[train], len(examples.classes))
    torch.manual_seed(options.plan.seed)
    student = Student.of(teacher, options.blocks)
    spread = np.linspace(0, len(train) - 1, min(TAMED_ON, len(train))).astype(int)
    tame(student, teacher, [prepared[row] for row in train[spread]])
    distil(student, teacher, [prepared[row] for row in train], probe, options.plan, kept, progress)

    seen = [Seen() for _ in range(options.blocks)]
    found = embeddings(student, teacher, prepared, options.plan.batch, seen)
    own = fit_probe(found[train], examples.labels[train], len(examples.classes))
    figures = Figures(
        train=len(train),
        test=len(test),
        teacher_accuracy=probe.accuracy(known[test], examples.labels[test]),
        student_accuracy=own.accuracy(found[test], examples.labels[test]),
        agreement=_agreement(probe.logits(torch.from_numpy(known[test])), own.logits(torch.from_numpy(found[test]))),
    )
    made = package(student, [one.ranges() for one in seen], model.card.version, figures)
    return made, check(made, student, teacher, [prepared[row] for row in test[:CHECKED]])


def _agreement(first: torch.Tensor, second: torch.Tensor) -> float:
    return float((first.argmax(dim=1) == second.argmax(dim=1)).float().mean())
