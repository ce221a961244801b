"""The update gate: what an update must be to count. All or nothing, and every refusal says what was wrong."""

import math
import re
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FLOAT32, JobSpec, Shapes
from veilfed.v1.aggregator_pb2 import Evaluation, LedgerHead, Update
from veilfed.wire.tensors import Array, Arrays

__all__ = [
    "EVALUATIONS",
    "check_evaluations",
    "check_form",
    "check_head",
    "check_names",
    "check_parameters",
    "check_weight",
]

EVALUATIONS = ("personal", "global")
# Elements that are looked at together: they stay in the processor's cache, and are too few for a second thread.
BLOCK = 2**13
MAX_TOTAL = 2**53  # counts stay exact as float64 and as signed 64-bit integers
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _refuse(message: str) -> VeilfedError:
    return VeilfedError(Code.UPDATE_INVALID, message)


def check_names(arrays: Arrays, shapes: Shapes) -> None:
    """The tensors are those of the method. Raises VeilfedError(UPDATE_INVALID)."""
    if set(arrays) != set(shapes):
        raise _refuse(f"expected the tensors {sorted(shapes)}, got {len(arrays)} with other names")


def check_form(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Shape and element type of one tensor. Raises VeilfedError(UPDATE_INVALID)."""
    if array.shape != shape:
        raise _refuse(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    if array.dtype != dtype:
        raise _refuse(f"{name}: expected {dtype}, got {array.dtype}")


def check_parameters(arrays: Arrays, shapes: Shapes, spec: JobSpec) -> None:
    """Names, shapes, element type, finiteness, magnitude and norm. Raises VeilfedError(UPDATE_INVALID)."""
    check_names(arrays, shapes)
    for name, shape in shapes.items():
        _check_tensor(name, arrays[name], shape, spec)


def _check_tensor(name: str, array: NDArray[np.generic], shape: tuple[int, ...], spec: JobSpec) -> None:
    check_form(name, array, shape, FLOAT32)
    largest, norm = _extent(array.reshape(-1))
    if not math.isfinite(largest):
        raise _refuse(f"{name}: not all elements are finite")
    if largest > spec.fold.max_abs:
        raise _refuse(f"{name}: an element is larger in magnitude than max_abs ({spec.fold.max_abs:g})")
    if norm > spec.fold.max_norm:
        raise _refuse(f"{name}: the norm is larger than max_norm ({spec.fold.max_norm:g})")


def _extent(flat: NDArray[np.generic]) -> tuple[float, float]:
    """The largest magnitude (NaN if any element is) and the norm, in float64, block by block."""
    largest = squares = 0.0
    for start in range(0, flat.size, BLOCK):
        block = flat[start : start + BLOCK].astype(np.float64)
        largest = float(np.maximum(largest, np.maximum(block.max(), -block.min())))
        squares += float(block @ block)
    return largest, math.sqrt(squares) if squares >= 0 else math.nan


def check_weight(weight: float, trains: bool, spec: JobSpec) -> None:
    """The weight in the average; 0 where no tensors are sent. Raises VeilfedError(UPDATE_INVALID)."""
    if not trains or not spec.strategy.update_shapes:
        if weight != 0:
            raise _refuse("weight: without parameters it is 0")
        return
    if not math.isfinite(weight) or weight <= 0:
        raise _refuse("weight: must be positive and finite")
    if spec.strategy.weighting == "uniform" and weight != 1:
        raise _refuse("weight: must be 1 where the weighting is uniform")
    if weight < 2.0**-spec.fold.fraction_bits:
        raise _refuse("weight: smaller than the resolution of the fold")
    if weight > spec.fold.max_weight:
        raise _refuse(f"weight: larger than max_weight ({spec.fold.max_weight:g})")


def check_evaluations(update: Update) -> list[Evaluation]:
    """The counts: known names, each once, correct at most total. Raises VeilfedError(UPDATE_INVALID)."""
    if len(update.evaluations) > len(EVALUATIONS):
        raise _refuse(
            f"evaluations: {len(update.evaluations)}; at most {len(EVALUATIONS)}, each with a name of its own"
        )
    names = [evaluation.name for evaluation in update.evaluations]
    if any(name not in EVALUATIONS for name in names) or len(set(names)) != len(names):
        raise _refuse(f"evaluations: the names must be of {list(EVALUATIONS)}, each at most once")
    for evaluation in update.evaluations:
        if not 0 < evaluation.total <= MAX_TOTAL:
            raise _refuse(f"evaluations: {evaluation.name} has no samples, or too many")
        if evaluation.correct > evaluation.total:
            raise _refuse(f"evaluations: {evaluation.name} has more right answers than samples")
    return list(update.evaluations)


def check_head(head: LedgerHead) -> None:
    """The ledger head that will be countersigned. Raises VeilfedError(PROTOCOL_VIOLATION)."""
    if not _SHA256.fullmatch(head.sha256) or head.records > MAX_TOTAL:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "ledger_head: expected a number of records and a SHA-256")
