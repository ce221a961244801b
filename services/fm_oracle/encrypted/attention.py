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

    def babies(self, x: B, operations: Operations[B]) -> B:
        """x rotated by each baby step: channel c by step i is number i C + c."""
        return operations.rotate(x, [i * self.samples for i in range(self.baby)])

    def giants(self, x: B, operations: Operations[B]) -> B:
        """x rotated back by each giant step: channel c by step j is number j C + c."""
        return operations.rotate(x, [-j * self.baby * self.samples for j in range(self.giant)])

    def scores(self, queries: B, keys: B, operations: Operations[B]) -> B:
        """The n diagonals of one head from its channels; number i + j m is that diagonal rotated by -j m."""
        count = len(queries)
        of_giants = [range(j * count, (j + 1) * count) for j in range(self.giant)]
        of_babies = [range(i * count, (i + 1) * count) for i in range(self.baby)]
        babies, giants = self.babies(keys, operations), self.giants(queries, operations)
        sums = operations.sum_products(giants, of_giants, babies, of_babies)
        # Number i (n / m) + j comes to i + j m.
        ordered = operations.join([sums[slice(j, None, self.giant)] for j in range(self.giant)])
        return operations.rescale(operations.relinearise(ordered))

    def apply(self, weights: B, values: B, operations: Operations[B]) -> B:
        """Sums of the values' channels, weighted by diagonals as `scores` has them; one ciphertext for each channel."""
        count = len(values)
        of_weights = [range(j * self.baby, (j + 1) * self.baby) for j in range(self.giant)]
        of_values = [range(c, c + count * self.baby, count) for c in range(count)]
        sums = operations.sum_products(weights, of_weights, self.babies(values, operations), of_values)
        return self._undone(operations.rescale(operations.relinearise(sums)), operations)

    def row_sums(self, weights: B, operations: Operations[B]) -> B:
        """The sum of all diagonals, for each token."""
        groups = [operations.total(weights[slice(j * self.baby, (j + 1) * self.baby)]) for j in range(self.giant)]
        return self._undone(operations.join(groups), operations)

    def _undone(self, sums: B, operations: Operations[B]) -> B:
        """The sums of each channel c over giant steps j, undone; number c (n / m) + j is one of them."""
        total = sums[slice(0, None, self.giant)]
        for j in range(1, self.giant):
            moved = operations.rotate(sums[slice(j, None, self.giant)], [j * self.baby * self.samples])
            total = operations.add(total, moved)
        return total
