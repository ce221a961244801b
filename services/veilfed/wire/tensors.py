"""NumPy arrays to and from the wire, with every length checked before anything is allocated."""

import hashlib
import itertools
import math
from collections.abc import Mapping

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.v1.tensor_pb2 import (
    DTYPE_FLOAT32,
    DTYPE_FLOAT64,
    DTYPE_INT64,
    DTYPE_UINT8,
    DTYPE_UINT64,
    DType,
    Tensor,
    TensorMap,
)

__all__ = ["Array", "Arrays", "digest", "from_tensor", "map_bytes", "parse_map", "to_map", "to_tensor", "unpack_map"]

Array = NDArray[np.generic]
Arrays = dict[str, Array]

MAX_AXES = 8
MAX_TENSORS = 4096

_DTYPES: dict[DType.ValueType, np.dtype[np.generic]] = {
    DTYPE_FLOAT32: np.dtype("<f4"),
    DTYPE_FLOAT64: np.dtype("<f8"),
    DTYPE_INT64: np.dtype("<i8"),
    DTYPE_UINT8: np.dtype("u1"),
    DTYPE_UINT64: np.dtype("<u8"),
}
_NAMES = {dtype: number for number, dtype in _DTYPES.items()}


def to_tensor(array: NDArray[np.generic]) -> Tensor:
    """The wire form of an array; raises VeilfedError(INPUT_INVALID) for a dtype that the wire lacks."""
    tensor = Tensor()
    _fill(tensor, array)
    return tensor


def _fill(tensor: Tensor, array: NDArray[np.generic]) -> None:
    """In place: a message that is put into another one is copied with all of its bytes."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _NAMES:
        raise VeilfedError(Code.INPUT_INVALID, f"an array of {array.dtype} cannot be sent")
    tensor.dtype = _NAMES[dtype]
    tensor.shape.extend(array.shape)
    tensor.data = np.ascontiguousarray(array, dtype=dtype).tobytes()


def from_tensor(tensor: Tensor) -> NDArray[np.generic]:
    """The array of a message: a read-only view of its bytes. Raises VeilfedError(PROTOCOL_VIOLATION)."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"tensor of unknown element type {tensor.dtype}")
    if len(tensor.shape) > MAX_AXES:
        raise VeilfedError(
            Code.PROTOCOL_VIOLATION, f"tensor with {len(tensor.shape)} axes; at most {MAX_AXES} are allowed"
        )
    expected = math.prod(tensor.shape) * dtype.itemsize
    data = tensor.data  # once: each time makes a copy
    if expected != len(data):
        raise VeilfedError(
            Code.PROTOCOL_VIOLATION,
            f"tensor of shape {list(tensor.shape)} needs {expected} bytes, has {len(data)}",
        )
    try:
        return np.frombuffer(data, dtype=dtype).reshape(tuple(tensor.shape))
    except ValueError:  # an axis of length 0 makes it empty, but NumPy multiplies the others
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"tensor of shape {list(tensor.shape)} is too large") from None


def to_map(arrays: Mapping[str, NDArray[np.generic]]) -> TensorMap:
    """Named arrays, sorted by name, so that equal contents have equal bytes."""
    message = TensorMap()
    for name in sorted(arrays):
        entry = message.tensors.add()
        entry.name = name
        _fill(entry.tensor, arrays[name])
    return message


def unpack_map(message: TensorMap) -> Arrays:
    """Named arrays of a message. Raises VeilfedError(PROTOCOL_VIOLATION), also for names unsorted or twice."""
    names = [entry.name for entry in message.tensors]
    if len(names) > MAX_TENSORS:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, f"{len(names)} tensors; at most {MAX_TENSORS} are allowed")
    if any(not name for name in names) or any(a >= b for a, b in itertools.pairwise(names)):
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "tensor names must be non-empty, sorted and distinct")
    return {entry.name: from_tensor(entry.tensor) for entry in message.tensors}


def map_bytes(arrays: Mapping[str, NDArray[np.generic]]) -> bytes:
    """The canonical bytes of named arrays: a serialised TensorMap."""
    return to_map(arrays).SerializeToString(deterministic=True)


def parse_map(data: bytes) -> Arrays:
    """Named arrays from canonical bytes. Raises VeilfedError(PROTOCOL_VIOLATION)."""
    try:
        message = TensorMap.FromString(data)
    except DecodeError:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "the bytes are not a TensorMap") from None
    return unpack_map(message)


def digest(data: bytes) -> str:
    """SHA-256, lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()
