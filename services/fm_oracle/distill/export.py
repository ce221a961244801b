"""A student in the engine's own arithmetic, before it is given to the engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fm_oracle.distill.model import Student
from fm_oracle.distill.package import StudentPackage
from fm_oracle.distill.teacher import Batch, Teacher
from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.model import EncryptedModel, make_block
from fm_oracle.encrypted.plain import PlainEvaluator, Slots
from fm_oracle.encrypted.plan import Planner, Shape
from veilfed.ckks.parameters import Parameters
from veilfed.ckks.samples import arrange, token_features, with_places
from veilfed.errors import Code, VeilfedError

__all__ = [
    "PADDING_SCALE",
    "PARAMETERS",
    "check",
    "engine_inputs",
    "layout",
    "model_of",
    "plain_streams",
    "pooled",
    "taken",
]

Real = NDArray[np.float64]

# The set that blocks are computed with: 128 bits of security, six levels between refreshes.
PARAMETERS = Parameters(14, (48, *[36] * 9), 48, 36)
PADDING_SCALE = 2.0**24
BABY_STEPS = 16
# Largest error of the arithmetic against the student in floats, relative to the range of the last stream: weights of 12
# bits, and what Taylor, Goldschmidt and Newton leave.
LARGEST_ERROR = 0.02


def layout(tokens: int, slots: int) -> Diagonals:
    """The least power of two of tokens, and as many samples as fill the slots."""
    padded = 1 << (tokens - 1).bit_length()
    return Diagonals(padded, slots // padded, min(BABY_STEPS, padded))


def model_of(student: StudentPackage, diagonals: Diagonals) -> EncryptedModel:
    """What the engine computes."""
    shape = student.shape
    blocks = [
        make_block(weights, ranges, shape.heads, diagonals, shape.epsilon)
        for weights, ranges in zip(student.blocks, student.ranges, strict=True)
    ]
    return EncryptedModel(student.embedding, blocks)


def engine_inputs(student: StudentPackage, batch: Batch, diagonals: Diagonals) -> list[tuple[Real, float]]:
    """Slots and scales of features, mask and numbers of padded tokens; samples beyond the batch are empty."""
    lengths = batch.mask.sum(dim=1).int().tolist()
    samples = [one[:length].double().numpy() for one, length in zip(batch.features, lengths, strict=True)]
    arranged = arrange(samples, diagonals.tokens, diagonals.samples)
    if student.embedding is not None:
        arranged = with_places(arranged, student.shape.tokens, diagonals.samples)
    return [
        (arranged.channels, PARAMETERS.scale),
        (arranged.mask, PARAMETERS.scale),
        (arranged.padding, PADDING_SCALE),
    ]


def plain_streams(student: StudentPackage, batch: Batch) -> list[Real]:
    """The streams [n, t, d] after each block in the engine's arithmetic."""
    count, tokens = batch.mask.shape
    samples = 1 << (count - 1).bit_length()
    diagonals = layout(student.shape.tokens, samples << (student.shape.tokens - 1).bit_length())
    features, mask, padding = (
        Slots(values, scale, PARAMETERS.limbs) for values, scale in engine_inputs(student, batch, diagonals)
    )
    streams = model_of(student, diagonals)(features, mask, padding, PlainEvaluator(PARAMETERS))
    return [taken(stream.values, diagonals, count, tokens) for stream in streams]


def taken(slots: Real, diagonals: Diagonals, count: int, tokens: int) -> Real:
    """The streams [n, t, d] that are in the slots of d channels, padding included."""
    return np.stack(token_features(slots, [tokens] * count, diagonals.samples))


def pooled(student: StudentPackage, stream: Real, mask: Real) -> Real:
    """The embeddings [n, d] of a last stream [n, t, d]; `mask` [n, t]."""
    if student.affine is None:
        return stream[:, 0]
    mean = (stream * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    return np.asarray(student.affine[0] * mean + student.affine[1])


def check(student: StudentPackage, trained: Student, teacher: Teacher, prepared: Sequence[NDArray[Any]]) -> float:
    """The largest error of the engine's arithmetic on some inputs, relative to the last stream's range.

    Raises VeilfedError(INPUT_INVALID) where it is too large, or the parameters have too few levels for the student.
    """
    diagonals = layout(student.shape.tokens, PARAMETERS.slots)
    model = model_of(student, diagonals)
    width = student.shape.features + (0 if student.embedding is None else student.shape.tokens)
    full = PARAMETERS.limbs
    shapes = (Shape(width, PARAMETERS.scale, full), Shape(1, PARAMETERS.scale, full), Shape(1, PADDING_SCALE, full))
    for _ in model(*shapes, Planner(PARAMETERS)):
        pass
    batch = teacher.batch(prepared)
    with torch.no_grad():
        expected = trained(batch).streams[-1].double().numpy()
    found = plain_streams(student, batch)[-1]
    error = float(np.abs(found - expected).max() / np.abs(expected).max())
    if not error <= LARGEST_ERROR:
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"the engine's arithmetic differs from the student by {error:.2g} of its range",
            "Distil it for longer, or with a larger penalty, so that it keeps to narrower ranges.",
        )
    return error
