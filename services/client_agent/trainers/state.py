"""The private state of one institution in one FEDOT job: what it keeps between rounds and never gives away.

FedotState.initial(strategy) -> state      of an institution that has trained no round (X = 0: the identity)
state.to_bytes() -> bytes                  equal states have equal bytes
FedotState.from_bytes(data, strategy)      raises STATE_CORRUPT
state.save(path) / FedotState.load(path, strategy)     one file, atomic, mode 0600
"""

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.jobs import FedotStrategy
from veilfed.wire.tensors import Arrays, map_bytes, parse_map

__all__ = ["FedotState", "transform_shape"]

_MAGIC = b"veilfed fedot state 1\n"
_DIGEST_BYTES = 32

Array = NDArray[np.float32]


def transform_shape(strategy: FedotStrategy) -> tuple[int, int, int]:
    """Shape [r, m, m] of X; r = 0 for `transform: identity`, which has none."""
    side = strategy.dimension // strategy.blocks
    return (strategy.blocks if strategy.transform == "orthogonal" else 0, side, side)


@dataclass(frozen=True, eq=False)
class FedotState:
    """All arrays float32. `mean` and `square` are Adam's running moments of the gradient.

    Nothing random is kept: the order of batches follows from seed, institution and round.
    """

    transform: Array  # X [r, m, m]
    transform_mean: Array  # [r, m, m]
    transform_square: Array  # [r, m, m]
    classifier_mean: Array  # [K, d]
    classifier_square: Array  # [K, d]
    steps: int  # batches trained so far, Adam's t
    last_round: int  # the round that was trained last, -1 before the first

    @classmethod
    def initial(cls, strategy: FedotStrategy) -> Self:
        """The state before the first round."""
        transform = np.zeros(transform_shape(strategy), np.float32)
        classifier = np.zeros((len(strategy.classes), strategy.dimension), np.float32)
        return cls(transform, transform, transform, classifier, classifier, steps=0, last_round=-1)

    def to_bytes(self) -> bytes:
        """A digest and the arrays in the wire's form: no code in it, and a changed byte is found."""
        arrays: Arrays = {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)}
        body = map_bytes(arrays)
        return _MAGIC + hashlib.sha256(body).digest() + body

    @classmethod
    def from_bytes(cls, data: bytes, strategy: FedotStrategy, where: str = "state") -> Self:
        """Raises VeilfedError(STATE_CORRUPT) that names `where`: damaged, or of a job with other shapes."""
        start = len(_MAGIC) + _DIGEST_BYTES
        body = data[start:]
        if data[: len(_MAGIC)] != _MAGIC or hashlib.sha256(body).digest() != data[len(_MAGIC) : start]:
            raise VeilfedError(Code.STATE_CORRUPT, f"{where}: not a whole state of FEDOT")
        try:
            arrays = parse_map(body)
        except VeilfedError:
            raise VeilfedError(Code.STATE_CORRUPT, f"{where}: not a state of FEDOT") from None
        _check(arrays, cls.initial(strategy), where)
        counts = {name: int(arrays.pop(name)) for name in ("steps", "last_round")}
        return cls(**arrays, **counts)  # type: ignore[arg-type]

    def save(self, path: Path) -> None:
        """Replaces the file in one step; it is readable by its owner alone. Raises VeilfedError(FILE_UNUSABLE)."""
        write_atomic(path, self.to_bytes())

    @classmethod
    def load(cls, path: Path, strategy: FedotStrategy) -> Self:
        """Raises VeilfedError(FILE_UNUSABLE or STATE_CORRUPT)."""
        try:
            data = path.read_bytes()
        except OSError as error:
            raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
        return cls.from_bytes(data, strategy, str(path))


def _check(arrays: Arrays, like: FedotState, where: str) -> None:
    """The arrays are those of a state with the shapes and dtypes of `like`, finite, and the counts are possible."""
    expected = {field.name: np.asarray(getattr(like, field.name)) for field in fields(like)}
    if arrays.keys() != expected.keys():
        raise VeilfedError(Code.STATE_CORRUPT, f"{where}: other parts than those of a state of FEDOT")
    for name, array in arrays.items():
        wanted = expected[name]
        if array.shape != wanted.shape or array.dtype != wanted.dtype:
            raise VeilfedError(
                Code.STATE_CORRUPT,
                f"{where}: {name} is {array.dtype} {list(array.shape)}; "
                f"the job needs {wanted.dtype} {list(wanted.shape)}",
            )
        if not np.isfinite(array).all():
            raise VeilfedError(Code.STATE_CORRUPT, f"{where}: {name} is not finite")
    if int(arrays["steps"]) < 0 or int(arrays["last_round"]) < -1:
        raise VeilfedError(Code.STATE_CORRUPT, f"{where}: negative counts")
