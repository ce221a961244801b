"""The update gate of the analytic methods: whether sums could be those of samples.

Sums of embeddings of length 1 with one class each have trace R = n = sum_c n_c, and the scatter within the classes,
R - sum_c C_c C_c^T / n_c, has no negative eigenvalue; so neither has R. From that follow bounds of every element, which
the ring needs: at most n. What passes may still be sums of samples that were made up.
"""

import numpy as np

from aggregator import gate
from aggregator.solve.cholesky import shifted
from aggregator.solve.statistics import Statistics
from veilfed import triangle, wide_ring
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import COUNTS, CROSS, GRAM, AnalyticSpec
from veilfed.wire.tensors import Array, Arrays

__all__ = ["check_counts", "check_noisy_statistics", "check_statistics"]

# Rounding of sums of n terms, relative to n.
TOLERANCE = 1e-9
# Far more than an institution has, and far below what the ring holds.
MAX_SAMPLES = 2**36


def check_statistics(arrays: Arrays, spec: AnalyticSpec) -> None:
    """Names, forms, and all of the above. Raises VeilfedError(UPDATE_INVALID)."""
    _check_form(arrays, spec)
    samples = check_counts(arrays[COUNTS])
    trace = float(triangle.diagonal(arrays[GRAM]).sum())
    if abs(trace - samples) > TOLERANCE * samples:
        raise _refuse(f"{GRAM}: the trace of embeddings of length 1 is the number of samples, and {COUNTS} has another")
    _check_scatter(Statistics.of(arrays), samples)


def check_noisy_statistics(arrays: Arrays, spec: AnalyticSpec) -> None:
    """Names, forms, and bounds of sums with noise: of what they could be the sums, noise hides.

    Raises VeilfedError(UPDATE_INVALID).
    """
    _check_form(arrays, spec)
    if np.abs(arrays[COUNTS].astype(np.float64)).max() > MAX_SAMPLES:
        raise _refuse(f"{COUNTS}: more than {MAX_SAMPLES} samples")


def _check_form(arrays: Arrays, spec: AnalyticSpec) -> None:
    gate.check_names(arrays, spec.statistics_shapes)
    for name, shape in spec.statistics_shapes.items():
        gate.check_form(name, arrays[name], shape, spec.dtype(name))
    for name in (GRAM, CROSS):
        if not np.isfinite(arrays[name].astype(np.float64, copy=False)).all():
            raise _refuse(f"{name}: not all elements are finite")
    if np.abs(arrays[GRAM]).max() >= wide_ring.LARGEST or np.abs(arrays[CROSS]).max() >= wide_ring.LARGEST:
        raise _refuse("an element is larger than such sums can be")


def check_counts(counts: Array) -> int:
    """Their sum, of counts int64 [K]. Raises VeilfedError(UPDATE_INVALID)."""
    # One by one first: their sum could overflow.
    if counts.min() < 0 or counts.max() > MAX_SAMPLES or counts.sum(dtype=np.float64) > MAX_SAMPLES:
        raise _refuse(f"{COUNTS}: negative, or more than {MAX_SAMPLES} samples")
    return int(counts.sum())


def _check_scatter(statistics: Statistics, samples: int) -> None:
    there = statistics.counts > 0
    if statistics.cross[:, ~there].any():
        raise _refuse(f"{CROSS}: a class without samples has a sum")
    if samples == 0:
        if statistics.gram.any():
            raise _refuse(f"{GRAM}: no samples, but a sum")
        return
    sums = statistics.cross[:, there] / np.sqrt(statistics.counts[there])
    try:
        np.linalg.cholesky(shifted(statistics.gram - sums @ sums.T, TOLERANCE * samples))
    except np.linalg.LinAlgError:
        raise _refuse(f"{GRAM} and {CROSS} are not sums of the same samples: an eigenvalue is negative") from None


def _refuse(message: str) -> VeilfedError:
    return VeilfedError(Code.UPDATE_INVALID, message)
