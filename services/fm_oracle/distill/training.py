"""Distillation of a student, epoch by epoch; what is done is kept in a file, so that it can be stopped and go on."""

import io
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fm_oracle.distill.losses import Penalty, hidden_loss, label_loss
from fm_oracle.distill.model import Student, aligned
from fm_oracle.distill.probe import LinearProbe
from fm_oracle.distill.student import Seen
from fm_oracle.distill.teacher import Teacher
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic

__all__ = ["Plan", "Progress", "distil", "embeddings", "tame"]

# After each batch: batches done in this epoch, how many it has, the epoch's number from 0, and the loss.
Progress = Callable[[int, int, int, float], None]

TAMED_SCORE = 4.0
WARM_UP = 0.05
LARGEST_GRADIENT = 1.0


@dataclass(frozen=True)
class Plan:
    """Half of the epochs are for streams and attention, half for classes; `batch` is in tokens, padding included."""

    epochs: int = 10
    batch: int = 2048
    rate: float = 5e-4
    penalty: float = 0.1
    seed: int = 50


def batches(lengths: Sequence[int], tokens: int, seed: str | None = None) -> list[list[int]]:
    """Positions of inputs of similar length, at most so many tokens together; in other batches for each seed."""
    random = np.random.default_rng(list((seed or "").encode()))
    noise = random.uniform(0, 4, len(lengths)) if seed is not None else np.zeros(len(lengths))
    order = np.argsort(np.asarray(lengths) + noise, kind="stable").tolist()
    groups: list[list[int]] = []
    longest = 0
    for position in order:
        longest = max(longest, lengths[position])
        if not groups or (len(groups[-1]) + 1) * longest > tokens:
            groups.append([])
            longest = lengths[position]
        groups[-1].append(position)
    if seed is not None:
        groups = [groups[number] for number in random.permutation(len(groups))]
    return groups


@torch.no_grad()
def embeddings(
    student: Student, teacher: Teacher, prepared: Sequence[NDArray[Any]], batch: int, seen: Sequence[Seen] | None = None
) -> NDArray[np.float32]:
    """The student's embeddings [n, d]; `seen` notes the ranges of each block."""
    out = np.empty((len(prepared), student.shape.dimension), dtype=np.float32)
    for rows in batches([teacher.length(item) for item in prepared], batch):
        out[rows] = student(teacher.batch([prepared[row] for row in rows]), seen).embedding.numpy()
    return out


@torch.no_grad()
def tame(student: Student, teacher: Teacher, prepared: Sequence[NDArray[Any]]) -> None:
    """Makes the queries of each block so small that no score of these inputs is larger than the exponential's range.

    A teacher's scores go far beyond, where a polynomial of degree 6 grows into nonsense: a student starts with softer
    attention instead, and learns to sharpen it within the range.
    """
    batch = teacher.batch(prepared)
    for number, block in enumerate(student.blocks):
        seen = [Seen() for _ in student.blocks]
        student(batch, seen)
        factor = min(1.0, TAMED_SCORE / max(seen[number].score, 1e-6))
        block.qkv.weight[: student.shape.dimension] *= factor
        block.qkv.bias[: student.shape.dimension] *= factor


class _Run:
    """A student with its optimiser, and where it is."""

    def __init__(self, student: Student, teacher: Teacher, probe: LinearProbe, plan: Plan) -> None:
        self.student, self.teacher, self.probe, self.plan = student, teacher, probe, plan
        self.head = nn.Linear(student.shape.dimension, len(probe.bias))
        self.head.load_state_dict({"weight": probe.weight, "bias": probe.bias})
        self.parameters = [*student.parameters(), *self.head.parameters()]
        self.optimiser = torch.optim.AdamW(self.parameters, lr=plan.rate, weight_decay=0.01)
        self.epoch = 0

    def rate(self, part: float) -> float:
        """Up at the start, then down along a cosine; `part` of the half that is done."""
        return self.plan.rate * min(1.0, part / WARM_UP) * (1 + math.cos(math.pi * part)) / 2

    def step(self, prepared: list[NDArray[Any]], part: float) -> float:
        """One batch; its loss."""
        batch = self.teacher.batch(prepared)
        lesson = self.teacher.lesson(prepared, aligned(self.student.shape.blocks, self.teacher.blocks))
        penalties = [Penalty.none() for _ in self.student.blocks]
        passed = self.student(batch, penalties)
        if 2 * self.epoch < self.plan.epochs:
            loss = hidden_loss(passed, lesson, batch)
        else:
            scaled = (passed.embedding - self.probe.mean) / self.probe.deviation
            loss = label_loss(self.head(scaled), self.probe.logits(lesson.embedding))
        total: Tensor = loss + self.plan.penalty * sum((penalty.total for penalty in penalties), torch.zeros(()))
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate(part)
        self.optimiser.zero_grad()
        total.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, LARGEST_GRADIENT)
        self.optimiser.step()
        return float(total.detach())

    def save(self, path: Path) -> None:
        buffer = io.BytesIO()
        torch.save(
            {
                "plan": asdict(self.plan),
                "shape": asdict(self.student.shape),
                "epoch": self.epoch,
                "student": self.student.state_dict(),
                "head": self.head.state_dict(),
                "optimiser": self.optimiser.state_dict(),
            },
            buffer,
        )
        write_atomic(path, buffer.getvalue())

    def resume(self, path: Path) -> None:
        """Goes on where a file says that an earlier run was. Raises VeilfedError(STATE_CORRUPT) for another plan."""
        try:
            kept = torch.load(path, weights_only=True)
            same = (kept["plan"], kept["shape"]) == (asdict(self.plan), asdict(self.student.shape))
        except Exception:  # noqa: BLE001, RUF100  whatever torch raises on a damaged file
            raise VeilfedError(Code.STATE_CORRUPT, f"{path}: not a kept distillation") from None
        if not same:
            raise VeilfedError(
                Code.STATE_CORRUPT, f"{path}: of a distillation with other options", "Remove it to start anew."
            )
        self.student.load_state_dict(kept["student"])
        self.head.load_state_dict(kept["head"])
        self.optimiser.load_state_dict(kept["optimiser"])
        self.epoch = kept["epoch"]


def distil(
    student: Student,
    teacher: Teacher,
    prepared: Sequence[NDArray[Any]],
    probe: LinearProbe,
    plan: Plan,
    kept: Path,
    progress: Progress,
) -> None:
    """Trains a student in place; `probe` classifies the teacher's embeddings.

    After each epoch everything is written to `kept`; if that is there already, its run goes on. Raises
    VeilfedError: STATE_CORRUPT for what is kept of another plan, INPUT_INVALID when the loss is not finite.
    """
    run = _Run(student, teacher, probe, plan)
    if kept.exists():
        run.resume(kept)
    lengths = [teacher.length(item) for item in prepared]
    half = plan.epochs / 2
    while run.epoch < plan.epochs:
        groups = batches(lengths, plan.batch, f"{plan.seed}:{run.epoch}")
        for number, rows in enumerate(groups):
            # Each half has a warm-up and a cosine of its own.
            part = math.fmod(run.epoch + number / len(groups), math.ceil(half)) / math.ceil(half)
            loss = run.step([prepared[row] for row in rows], part)
            if not math.isfinite(loss):
                raise VeilfedError(
                    Code.INPUT_INVALID, f"epoch {run.epoch}: the loss is not finite", "Take a smaller learning rate."
                )
            progress(number + 1, len(groups), run.epoch, loss)
        run.epoch += 1
        run.save(kept)
