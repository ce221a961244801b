"""A batch of ciphertexts."""

from dataclasses import dataclass

import numpy as np

from veilfed.ckks.transform import Float
from veilfed.errors import Code, VeilfedError

__all__ = ["Ciphertexts"]


@dataclass(frozen=True)
class Ciphertexts:
    """C ciphertexts of one level and scale: float64 [C, components, limbs, n], see veilfed.ckks.basis."""

    values: Float
    scale: float

    @property
    def limbs(self) -> int:
        return int(self.values.shape[2])

    @property
    def components(self) -> int:
        return int(self.values.shape[1])

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: slice) -> "Ciphertexts":
        return Ciphertexts(self.values[which], self.scale)

    def read_at(self, scale: float) -> "Ciphertexts":
        """The same, read at another scale."""
        return Ciphertexts(self.values, scale)

    def at(self, limbs: int) -> "Ciphertexts":
        """The same at a lower level: the last primes are dropped, the scale stays. Raises VeilfedError."""
        if not 1 <= limbs <= self.limbs:
            raise VeilfedError(Code.INPUT_INVALID, f"{limbs} limbs are not within 1 and {self.limbs}")
        return Ciphertexts(np.ascontiguousarray(self.values[:, :, :limbs]), self.scale)
