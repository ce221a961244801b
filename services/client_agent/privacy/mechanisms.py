"""Noisy updates and noisy statistics: what leaves an institution of a job with privacy.

The noise of each is discrete Gaussian on a grid of integers. Where its sum over several institutions is all that anyone
sees, each of `parties` of them adds that part of the variance; else `parties` is 1. Sensitivities are proved in
docs/explanation/differential-privacy.md.
"""

import secrets
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from client_agent.privacy.gaussian import Source, discrete_gaussian
from client_agent.privacy.lattice import clipped
from veilfed import triangle
from veilfed.jobs import COUNTS, CROSS, GRAM, Privacy, StatisticsPrivacy, UpdatePrivacy
from veilfed.wire.tensors import Arrays

__all__ = ["STATISTICS_BITS", "Noise", "PrivateStatistics", "noisy_update", "share", "symmetric_noise"]

Double = NDArray[np.float64]
Integers = NDArray[np.int64]

# Of an embedding's elements. Their products are multiples of 2^-32, the grid of the noise.
EMBEDDING_BITS = 16
STATISTICS_BITS = 2 * EMBEDDING_BITS
# Rows that are multiplied at a time: with elements of 2^16 or less, sums of their products are exact in float64.
BATCH = 1024


@dataclass(frozen=True)
class Noise:
    """What a job says of its privacy, and where the randomness comes from."""

    privacy: Privacy
    # Of the ring that updates are added in.
    fraction_bits: int = 32
    parties: int = 1
    source: Source = secrets.token_bytes


def share(variance: int, parties: int) -> int:
    """The part of a variance that each of so many adds, rounded up."""
    return -(-variance // parties)


def noisy_update(start: Arrays, trained: Arrays, privacy: UpdatePrivacy, noise: Noise) -> Arrays:
    """`start` plus the clipped and noised change of all tensors of `trained`, as float32.

    On the grid of the ring, 2^-fraction_bits. Raises VeilfedError(INPUT_INVALID) for what is not finite.
    """
    names, bits = sorted(trained), noise.fraction_bits
    change = np.concatenate([np.subtract(trained[name], start[name], dtype=np.float64).reshape(-1) for name in names])
    units = clipped(change[None], privacy.clip, bits)[0]
    units += discrete_gaussian(share(privacy.variance(bits), noise.parties), len(units), noise.source)
    ends = np.cumsum([trained[name].size for name in names])[:-1]
    parts = np.split(units * 2.0**-bits, ends)
    return {
        name: np.add(start[name], part.reshape(trained[name].shape), dtype=np.float64).astype(np.float32)
        for name, part in zip(names, parts, strict=True)
    }


class PrivateStatistics:
    """R, C and counts as integers, so that one sample moves them by exactly what is proved; then with noise.

    Every sample counts, whatever its class: a class that is left out for having few samples would tell how many.
    """

    def __init__(self, dimension: int, classes: int) -> None:
        self._gram = np.zeros((dimension, dimension), np.int64)
        self._sums = np.zeros((classes, dimension), np.int64)
        self._counts = np.zeros(classes, np.int64)

    def add(self, h: Double, labels: NDArray[np.int64]) -> None:
        """Adds embeddings [n, d], clipped to length 1, with their classes [n]."""
        for start in range(0, len(h), BATCH):
            units = clipped(h[start : start + BATCH], 1.0, EMBEDDING_BITS)
            reals = units.astype(np.float64)
            self._gram += (reals.T @ reals).astype(np.int64)
            np.add.at(self._sums, labels[start : start + BATCH], units)
        self._counts += np.bincount(labels, minlength=len(self._counts))

    def exact(self) -> tuple[Integers, Integers, Integers]:
        """R [d, d] and C [K, d] in units of 2^-32, and counts [K], without noise."""
        return self._gram, self._sums << EMBEDDING_BITS, self._counts

    def noisy(self, privacy: StatisticsPrivacy, noise: Noise) -> Arrays:
        """What leaves: gram [d (d + 1) / 2] and cross [d, K] in float64, counts int64 [K].

        An element of R beside the diagonal stands for two, so half of the variance does for it.
        """
        gram, sums, counts = self.exact()
        source, variance = noise.source, share(privacy.variance(STATISTICS_BITS), noise.parties)
        gram = gram + symmetric_noise(variance, gram.shape, source)
        np.einsum("ii->i", gram)[:] += discrete_gaussian(variance, len(gram), source)
        sums = sums + discrete_gaussian(variance, sums.size, source).reshape(sums.shape)
        whole = privacy.variance(0)
        # Of discrete Gaussians with variances of 4 and more, the sum is one to a part in 10^15 (Kairouz et al., 2021).
        counts = counts + discrete_gaussian(max(share(whole, noise.parties), min(whole, 4)), len(counts), source)
        unit = 2.0**-STATISTICS_BITS
        return {
            GRAM: triangle.pack(gram * unit),
            CROSS: np.ascontiguousarray(sums.T * unit),
            COUNTS: counts,
        }


def symmetric_noise(variance: int, shape: tuple[int, ...], source: Source, sign: int = 1) -> Integers:
    """Noise [..., m, m] of half this variance with N^T = sign N, and zeros on the diagonals.

    For matrices of this form, of which each element stands for two: the variance is that for their Frobenius norm.
    """
    noise = np.zeros(shape, np.int64)
    rows, columns = np.triu_indices(shape[-1], 1)
    upper = noise[..., rows, columns]
    noise[..., rows, columns] = discrete_gaussian(share(variance, 2), upper.size, source).reshape(upper.shape)
    return noise + sign * np.swapaxes(noise, -1, -2)
