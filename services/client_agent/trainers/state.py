"""The private state of one institution in one job: what it keeps between rounds and never gives away.

state.to_bytes() -> bytes                equal states have equal bytes
State.from_bytes(data, like, where)      raises STATE_CORRUPT
State.zeros(private, trained)            of tensors with these shapes
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from client_agent.frame import framed, unframed
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import Shapes
from veilfed.wire.tensors import Arrays, map_bytes, parse_map

__all__ = ["State"]

_MAGIC = b"veilfed private state 1\n"
# Endings of the names of Adam's moments in the bytes.
_MEAN, _SQUARE = "_mean", "_square"


@dataclass(frozen=True, eq=False)
class State:
    """All arrays float32, by the name of their tensor.

    Nothing random is kept: the order of batches follows from seed, institution and round.
    """

    tensors: Arrays  # the private tensors, such as X
    means: Arrays  # Adam's running means of the gradient, of each trained tensor, private or shared
    squares: Arrays  # and of its square
    steps: int  # batches trained so far, Adam's t
    last_round: int  # the round that was trained last, -1 before the first

    @classmethod
    def zeros(cls, private: Shapes, trained: Shapes) -> Self:
        """A state that has trained no round; every tensor is zero."""
        moments = _zeros(trained)
        return cls(_zeros(private), moments, moments, steps=0, last_round=-1)

    def to_bytes(self) -> bytes:
        """The arrays in the wire's form, framed: no code in it."""
        return framed(_MAGIC, map_bytes(self._arrays()))

    def _arrays(self) -> Arrays:
        """Everything by distinct names."""
        return {
            **self.tensors,
            **{name + _MEAN: array for name, array in self.means.items()},
            **{name + _SQUARE: array for name, array in self.squares.items()},
            "steps": np.asarray(self.steps),
            "last_round": np.asarray(self.last_round),
        }

    @classmethod
    def from_bytes(cls, data: bytes, like: "State", where: str = "state") -> Self:
        """Raises VeilfedError(STATE_CORRUPT) that names `where`: damaged, or of other shapes than those of `like`."""
        body = unframed(_MAGIC, data)
        if body is None:
            raise VeilfedError(Code.STATE_CORRUPT, f"{where}: not a whole private state")
        try:
            arrays = parse_map(body)
        except VeilfedError:
            raise VeilfedError(Code.STATE_CORRUPT, f"{where}: not a private state") from None
        _check(arrays, like._arrays(), where)
        return cls(
            {name: arrays[name] for name in like.tensors},
            {name: arrays[name + _MEAN] for name in like.means},
            {name: arrays[name + _SQUARE] for name in like.squares},
            steps=int(arrays["steps"]),
            last_round=int(arrays["last_round"]),
        )


def _zeros(shapes: Shapes) -> Arrays:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def _check(arrays: Arrays, expected: Arrays, where: str) -> None:
    """The arrays have the names, shapes and dtypes of those expected, are finite, and the counts are possible."""
    if arrays.keys() != expected.keys():
        raise VeilfedError(Code.STATE_CORRUPT, f"{where}: other parts than those that the job needs")
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
