"""What the tensors of an update must be to count. The aggregator checks each update that it sees; where it sees the sum
alone, each institution checks its own before it masks it, and the aggregator the sum.

Sums of embeddings of length 1 with one class each have trace R = n = sum_c n_c, and the scatter within the classes,
R - sum_c C_c C_c^T / n_c, has no negative eigenvalue; so neither has R. From that follow bounds of every element, which
the ring needs: at most n. What passes may still be sums of samples that were made up.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from veilfed import triangle, wide_ring
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import (
    COUNTS,
    CROSS,
    FLOAT32,
    GRAM,
    PROMPTS,
    AnalyticSpec,
    FedopalStrategy,
    JobSpec,
    Shapes,
)
from veilfed.wire.tensors import Array, Arrays

__all__ = [
    "check_noisy_statistics",
    "check_parameters",
    "check_statistics",
    "check_sums",
    "check_update",
    "check_weight",
]

# Elements that are looked at together: they stay in the processor's cache, and are too few for a second thread.
BLOCK = 2**13
# Rounding of sums of n terms, relative to n.
TOLERANCE = 1e-9
# Far more than an institution has, and far below what the ring holds.
MAX_SAMPLES = 2**36


def check_update(arrays: Arrays, spec: JobSpec, number: int) -> None:
    """The tensors of an update of a training round. Raises VeilfedError(UPDATE_INVALID), which says what is wrong."""
    if isinstance(spec.strategy, FedopalStrategy):
        _check_prompted(arrays, spec, spec.strategy, number)
    elif isinstance(spec.strategy, AnalyticSpec):
        check_sums(arrays, spec.strategy, noisy=spec.privacy is not None)
    else:
        check_parameters(arrays, spec.strategy.round_shapes(number), spec)


def check_weight(weight: float, spec: JobSpec) -> None:
    """The weight of parameters in their average. Raises VeilfedError(UPDATE_INVALID)."""
    if not math.isfinite(weight) or weight <= 0:
        raise _refuse("weight: must be positive and finite")
    if spec.strategy.weighting == "uniform" and weight != 1:
        raise _refuse("weight: must be 1 where the weighting is uniform")
    if weight < 2.0**-spec.fold.fraction_bits:
        raise _refuse("weight: smaller than the resolution of the fold")
    if weight > spec.fold.max_weight:
        raise _refuse(f"weight: larger than max_weight ({spec.fold.max_weight:g})")


def _check_names(arrays: Arrays, shapes: Shapes) -> None:
    """The tensors are those of the method."""
    if set(arrays) != set(shapes):
        raise _refuse(f"expected the tensors {sorted(shapes)}, got {len(arrays)} with other names")


def _check_form(name: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Shape and element type of one tensor."""
    if array.shape != shape:
        raise _refuse(f"{name}: expected shape {list(shape)}, got {list(array.shape)}")
    if array.dtype != dtype:
        raise _refuse(f"{name}: expected {dtype}, got {array.dtype}")


# Parameters.


def check_parameters(arrays: Arrays, shapes: Shapes, spec: JobSpec) -> None:
    """Names, shapes, element type, finiteness, magnitude and norm. Raises VeilfedError(UPDATE_INVALID)."""
    _check_names(arrays, shapes)
    for name, shape in shapes.items():
        _check_tensor(name, arrays[name], shape, spec)


def _check_tensor(name: str, array: NDArray[np.generic], shape: tuple[int, ...], spec: JobSpec) -> None:
    _check_form(name, array, shape, FLOAT32)
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


# Statistics.


def check_sums(arrays: Arrays, spec: AnalyticSpec, noisy: bool) -> None:
    """Statistics, with noise or without. Raises VeilfedError(UPDATE_INVALID)."""
    (check_noisy_statistics if noisy else check_statistics)(arrays, spec)


def check_statistics(arrays: Arrays, spec: AnalyticSpec) -> None:
    """Names, forms, and whether sums could be those of samples. Raises VeilfedError(UPDATE_INVALID)."""
    _check_sum_forms(arrays, spec)
    samples = _check_counts(arrays[COUNTS])
    trace = float(triangle.diagonal(arrays[GRAM]).sum())
    if abs(trace - samples) > TOLERANCE * samples:
        raise _refuse(f"{GRAM}: the trace of embeddings of length 1 is the number of samples, and {COUNTS} has another")
    counts = np.asarray(arrays[COUNTS], np.int64)
    _check_scatter(triangle.unpack(arrays[GRAM]), np.asarray(arrays[CROSS], np.float64), counts)


def check_noisy_statistics(arrays: Arrays, spec: AnalyticSpec) -> None:
    """Names, forms, and bounds of sums with noise: of what they could be the sums, noise hides.

    Raises VeilfedError(UPDATE_INVALID).
    """
    _check_sum_forms(arrays, spec)
    if np.abs(arrays[COUNTS].astype(np.float64)).max() > MAX_SAMPLES:
        raise _refuse(f"{COUNTS}: more than {MAX_SAMPLES} samples")


def _check_sum_forms(arrays: Arrays, spec: AnalyticSpec) -> None:
    _check_names(arrays, spec.statistics_shapes)
    for name, shape in spec.statistics_shapes.items():
        _check_form(name, arrays[name], shape, spec.dtype(name))
    for name in (GRAM, CROSS):
        if not np.isfinite(arrays[name].astype(np.float64, copy=False)).all():
            raise _refuse(f"{name}: not all elements are finite")
    if np.abs(arrays[GRAM]).max() >= wide_ring.LARGEST or np.abs(arrays[CROSS]).max() >= wide_ring.LARGEST:
        raise _refuse("an element is larger than such sums can be")


def _check_counts(counts: Array) -> int:
    """Their sum, of counts int64 [K]."""
    # One by one first: their sum could overflow.
    if counts.min() < 0 or counts.max() > MAX_SAMPLES or counts.sum(dtype=np.float64) > MAX_SAMPLES:
        raise _refuse(f"{COUNTS}: negative, or more than {MAX_SAMPLES} samples")
    return int(counts.sum())


def _check_scatter(gram: NDArray[np.float64], cross: NDArray[np.float64], counts: NDArray[np.int64]) -> None:
    there = counts > 0
    if cross[:, ~there].any():
        raise _refuse(f"{CROSS}: a class without samples has a sum")
    if not there.any():
        if gram.any():
            raise _refuse(f"{GRAM}: no samples, but a sum")
        return
    sums = cross[:, there] / np.sqrt(counts[there])
    within = gram - sums @ sums.T
    np.einsum("ii->i", within)[:] += TOLERANCE * counts.sum()
    try:
        np.linalg.cholesky(within)
    except np.linalg.LinAlgError:
        raise _refuse(f"{GRAM} and {CROSS} are not sums of the same samples: an eigenvalue is negative") from None


# Prompts.


def _check_prompted(arrays: Arrays, spec: JobSpec, strategy: FedopalStrategy, number: int) -> None:
    shapes = strategy.round_shapes(number)
    _check_names(arrays, shapes)
    if GRAM in shapes:
        check_statistics({name: arrays[name] for name in strategy.statistics_shapes}, strategy)
    else:
        _check_form(COUNTS, arrays[COUNTS], shapes[COUNTS], strategy.dtype(COUNTS))
        _check_counts(arrays[COUNTS])
    if PROMPTS in shapes:
        _check_prompts(arrays[PROMPTS], strategy.prompts_shape, int(arrays[COUNTS].sum()), spec)


def _check_prompts(prompts: Array, shape: tuple[int, ...], samples: int, spec: JobSpec) -> None:
    _check_form(PROMPTS, prompts, shape, FLOAT32)
    largest = float(np.abs(prompts.astype(np.float64)).max())
    if not largest <= spec.fold.max_abs or largest * samples >= wide_ring.LARGEST:
        raise _refuse(f"{PROMPTS}: not finite, or an element is larger than max_abs ({spec.fold.max_abs:g})")


def _refuse(message: str) -> VeilfedError:
    return VeilfedError(Code.UPDATE_INVALID, message)
