"""Attention of one head on ciphertexts, by diagonals.

A ciphertext has one channel of all tokens of all samples: slot t * B + b is token t of sample b, n tokens (a power of
two) and B samples fill it, so a rotation by B slots is one by a token, around the end. Diagonal r of the scores,
    S_r(t) = sum over channels c of Q_c(t) K_c(t + r),
is computed with r = i + j m in baby steps i and giant steps j: the rotations are of Q by -j m and of K by i, and what
comes out is S_r rotated by -j m. It stays so: the exponential goes slot by slot, and with the values the giant steps
are undone once for each channel of the output,
    O_c = sum over j of rotate_{j m} ( sum over i of E_{i + j m} rotate_i(V_c) ).
"""

from dataclasses import dataclass

from fm_oracle.encrypted.operations import B, Operations
from veilfed.errors import Code, VeilfedError

__all__ = ["Diagonals"]


@dataclass(frozen=True)
class Diagonals:
    """How n tokens of B samples are laid out, and m, the number of baby steps."""

    tokens: int
    samples: int
    baby: int

    def __post_init__(self) -> None:
        powers = all(value >= 1 and value & (value - 1) == 0 for value in (self.tokens, self.samples, self.baby))
        if not powers or self.baby > self.tokens:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"{self.tokens} tokens of {self.samples} samples in {self.baby} baby steps: expected powers of two",
            )

    @property
    def giant(self) -> int:
        return self.tokens // self.baby

    @property
    def steps(self) -> tuple[int, ...]:
        """The rotations for which keys are needed."""
        baby = [i * self.samples for i in range(1, self.baby)]
        giant = [j * self.baby * self.samples for j in range(1, self.giant)]
        return tuple(sorted({*baby, *giant, *(-step for step in giant)}))

    def babies(self, x: B, operations: Operations[B]) -> list[B]:
        """x rotated by each baby step."""
        return [x, *operations.rotate(x, [i * self.samples for i in range(1, self.baby)])] if self.baby > 1 else [x]

    def giants(self, x: B, operations: Operations[B], sign: int) -> list[B]:
        """x rotated by each giant step, to the left for sign 1, back for -1."""
        steps = [sign * j * self.baby * self.samples for j in range(1, self.giant)]
        return [x, *operations.rotate(x, steps)] if steps else [x]

    def scores(self, queries: B, keys: B, operations: Operations[B]) -> B:
        """The n diagonals of one head from its channels; number i + j m is that diagonal rotated by -j m."""
        channels = range(len(queries))
        babies, giants = self.babies(keys, operations), self.giants(queries, operations, -1)
        sums = [operations.sum_products(q, channels, k, channels) for q in giants for k in babies]
        return operations.rescale(operations.relinearise(operations.join(sums)))

    def apply(self, weights: B, values: B, operations: Operations[B]) -> B:
        """Sums of the values' channels, weighted by diagonals as `scores` has them; one ciphertext for each channel."""
        rotated = operations.join(self.babies(values, operations))
        count, channels = len(values), []
        for c in range(count):
            of_values = range(c, c + count * self.baby, count)
            sums = [
                operations.sum_products(weights, range(j * self.baby, (j + 1) * self.baby), rotated, of_values)
                for j in range(self.giant)
            ]
            channels.append(operations.rescale(operations.relinearise(operations.join(sums))))
        return self._undone(channels, operations)

    def row_sums(self, weights: B, operations: Operations[B]) -> B:
        """The sum of all diagonals, for each token."""
        groups = [operations.total(weights[slice(j * self.baby, (j + 1) * self.baby)]) for j in range(self.giant)]
        return self._undone([operations.join(groups)], operations)

    def _undone(self, groups: list[B], operations: Operations[B]) -> B:
        """For each list of partial sums, one for each giant step, their sum with the steps undone."""
        by_step = [operations.join([group[slice(j, j + 1)] for group in groups]) for j in range(self.giant)]
        total = by_step[0]
        for j in range(1, self.giant):
            (moved,) = operations.rotate(by_step[j], [j * self.baby * self.samples])
            total = operations.add(total, moved)
        return total
