"""AFL's statistics summed and solved here, against its own pairwise procedure. Both in one run.

    python -m benchmarks.analytic [--json FILE]

100 institutions with 300 samples each, d = 768, 100 classes, float64, ridge 1: the updates are as they come over the
wire, serialised. Ours is parsing, the exact sum in 128-bit fixed point, the Cholesky factorisation with its condition
estimate, and the solution. Theirs is theorems 1 and 2 of the paper as aggregator/solve/pairwise.py has them, from
arrays in memory: what each institution would have solved and inverted for itself is not counted, nor is parsing, and
(C_u + C_v)^-1 is computed once for each merge and kept as the next R_u (the authors' code computes it three times).
Times are the process's own on processors, of all threads of BLAS together: OMP_NUM_THREADS=1 is the fairer setting, as
theirs spends more with two (a ratio of 102 against 64 to 72). The fastest of several sums counts, and one merge of all.

- `ratio_vs_pairwise`: their time over ours.
- `max_rel_error`: ours against ridge regression on all samples at once, by QR of the stacked samples: the largest
  difference of an element over the largest element. `pairwise_rel_error`: theirs, against the same.
- `upload_ratio`: bytes of an update over those of R and C in float64.
- `sum_seconds`, `solve_seconds`: the parts of ours.
- `fold_mb_10`, `fold_mb_100`: growth of the process's memory, at its peak, while 10 and 100 updates are summed and
  solved; one update is there before.
- `large_*`: four updates of 600 samples at d = 4096 summed and solved: processor seconds, growth of memory at its peak
  with the four there before, and the residual max |(R + lambda I) W - C| / max |C|.

MB = 1e6 bytes. Linux: peaks are reset by /proc/self/clear_refs.

What dominates. Of our time, two thirds and more are the sum: ten passes over the 372,196 elements of each update, a
millisecond and more in all, bound by memory and by the number of calls. Two limbs with a carry for each update, the
first way, took two to three times as long; three sums of integers in float64 (veilfed.wide_ring.Total) need no carry
and no conversion before the end. Blocks of 2^12 elements took twice as long as blocks of 2^16, larger ones gain little.
Parsing is 0.2 ms of an update. The solution is some 30 ms, a third of it the factorisation, the rest the condition
estimate and the triangular solutions in blocks. A merge of theirs is six products and an inverse of d x d. The gate is
not part of either: 24 ms for each update here, most of it one factorisation to look for negative eigenvalues.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.solve import pairwise
from aggregator.solve.ridge import Ridge, solve_ridge
from aggregator.solve.statistics import Statistics, Sums
from benchmarks.result import tell
from client_agent.trainers.statistics import Statistics as Accumulated
from veilfed.wire.tensors import map_bytes, parse_map

INSTITUTIONS, SAMPLES, DIMENSION, CLASSES, RIDGE = 100, 300, 768, 100, 1.0
LARGE, LARGE_INSTITUTIONS, LARGE_SAMPLES = 4096, 4, 600
# Of AFL's intermediary; any will do.
GAMMA = 1.0
REPEATS = 3
MEGABYTE = 1e6


def samples(institution: int, dimension: int, count: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Embeddings whose directions matter less and less, and labels."""
    rng = np.random.default_rng([7, institution])
    labels = rng.integers(0, CLASSES, count)
    centres = np.random.default_rng(7).standard_normal((CLASSES, dimension))
    scale = np.linspace(1, 0.1, dimension)
    return ((centres[labels] + rng.standard_normal((count, dimension))) * scale).astype(np.float32), labels


def update(institution: int, dimension: int, count: int) -> bytes:
    """What an institution sends."""
    statistics = Accumulated(dimension, CLASSES)
    statistics.add(*samples(institution, dimension, count))
    return map_bytes(statistics.arrays())


def summed(updates: Iterable[bytes], dimension: int) -> Statistics:
    """The first half of ours."""
    sums = Sums(dimension, CLASSES)
    for data in updates:
        sums.add(parse_map(data))
    return sums.total()


def solved(updates: Iterable[bytes], dimension: int) -> tuple[Ridge, Statistics]:
    """Ours."""
    total = summed(updates, dimension)
    return solve_ridge(total, RIDGE), total


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """(processor seconds, result)."""
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def reference() -> NDArray[np.float64]:
    """W [d, K] by QR of all samples and sqrt(lambda) I below them."""
    parts = [samples(institution, DIMENSION, SAMPLES) for institution in range(INSTITUTIONS)]
    h = np.concatenate([features for features, _ in parts]).astype(np.float64)
    h /= np.linalg.norm(h, axis=1, keepdims=True)
    y = np.eye(CLASSES)[np.concatenate([labels for _, labels in parts])]
    q, r = np.linalg.qr(np.concatenate([h, np.sqrt(RIDGE) * np.eye(DIMENSION)]))
    return np.asarray(np.linalg.solve(r, q[: len(h)].T @ y), np.float64)


def error(found: NDArray[np.float64], exact: NDArray[np.float64]) -> float:
    return float(np.abs(found - exact).max() / np.abs(exact).max())


def compare() -> dict[str, float]:
    """Ours and theirs on the same updates."""
    updates = [update(institution, DIMENSION, SAMPLES) for institution in range(INSTITUTIONS)]
    by_time = partial(min, key=lambda pair: pair[0])
    sum_seconds, total = by_time(timed(lambda: summed(updates, DIMENSION)) for _ in range(REPEATS))
    solve_seconds, solution = by_time(timed(lambda: solve_ridge(total, RIDGE)) for _ in range(REPEATS))
    ours = sum_seconds + solve_seconds
    whole = (DIMENSION * DIMENSION + DIMENSION * CLASSES) * 8
    # One after the other, as they come: all inverses at once would not fit into memory.
    theirs, merged = 0.0, None
    for data in updates:
        client = pairwise.local(Statistics.of(parse_map(data)), GAMMA)
        if merged is None:
            merged = client
            continue
        spent, merged = timed(lambda pair=(merged, client): pairwise.merge(pair))  # type: ignore[misc]
        theirs += spent
    spent, weights = timed(lambda: pairwise.without_intermediary(merged, GAMMA, RIDGE))  # type: ignore[arg-type]
    exact = reference()
    return {
        "ours_seconds": ours,
        "sum_seconds": sum_seconds,
        "solve_seconds": solve_seconds,
        "pairwise_seconds": theirs + spent,
        "ratio_vs_pairwise": (theirs + spent) / ours,
        "max_rel_error": error(solution.weights, exact),
        "pairwise_rel_error": error(weights, exact),
        "condition": solution.factors.condition,
        "upload_bytes": float(len(updates[0])),
        "upload_ratio": len(updates[0]) / whole,
    }


def grown(function: Callable[[], Any]) -> tuple[float, Any]:
    """(growth of this process's memory at its peak in MB, result)."""
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    result = function()
    return memory("VmHWM") - before, result


def memory(key: str) -> float:
    """A line of /proc/self/status, in MB."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024 / MEGABYTE


def fold_memory(count: int) -> dict[str, float]:
    """Growth while so many updates are summed, of which one is in memory."""
    data = update(0, DIMENSION, SAMPLES)
    megabytes, _ = grown(lambda: solved((bytes(bytearray(data)) for _ in range(count)), DIMENSION))
    return {f"fold_mb_{count}": megabytes}


def large(_: int) -> dict[str, float]:
    """Many features: the sums and the solution."""
    updates = [update(institution, LARGE, LARGE_SAMPLES) for institution in range(LARGE_INSTITUTIONS)]
    megabytes, (seconds, (solution, total)) = grown(lambda: timed(lambda: solved(updates, LARGE)))
    left = total.gram @ solution.weights + RIDGE * solution.weights - total.cross
    return {
        "large_dimension": LARGE,
        "large_seconds": seconds,
        "large_mb": megabytes,
        "large_condition": solution.factors.condition,
        "large_residual": float(np.abs(left).max() / np.abs(total.cross).max()),
    }


def apart(function: Callable[[int], dict[str, float]], argument: int) -> dict[str, float]:
    """In a process of its own, whose peak of memory is not that of anything before."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, (argument,))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    result = {
        "institutions": INSTITUTIONS,
        "dimension": DIMENSION,
        "classes": CLASSES,
        **compare(),
        **apart(fold_memory, 10),
        **apart(fold_memory, 100),
        **apart(large, 0),
    }
    tell(result, arguments.json)


if __name__ == "__main__":
    main()
