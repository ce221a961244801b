import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from veilfed.errors import Code, VeilfedError
from veilfed.v1.tensor_pb2 import DTYPE_FLOAT32, NamedTensor, Tensor, TensorMap
from veilfed.wire.tensors import from_tensor, map_bytes, parse_map, to_map, to_tensor, unpack_map

DTYPES: list[np.dtype[np.generic]] = [np.dtype(name) for name in ("<f4", "<f8", "<i8", "u1", "<u8")]
ANY_ARRAY = st.sampled_from(DTYPES).flatmap(
    lambda dtype: arrays.arrays(dtype, arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(ANY_ARRAY)
def test_an_array_comes_back_bit_for_bit(array: NDArray[np.generic]) -> None:
    back = from_tensor(to_tensor(array))
    assert back.dtype == array.dtype
    assert back.shape == array.shape
    assert back.tobytes() == array.tobytes()


def test_big_endian_and_strided_arrays_are_sent_as_their_values() -> None:
    array = np.arange(12, dtype=">f4").reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(from_tensor(to_tensor(array)), [[0, 2], [4, 6], [8, 10]])


def test_equal_contents_have_equal_bytes_whatever_the_order() -> None:
    a, b = np.ones((2, 3), np.float32), np.zeros(4)
    assert map_bytes({"a": a, "b": b}) == map_bytes({"b": b, "a": a})
    assert list(parse_map(map_bytes({"b": b, "a": a}))) == ["a", "b"]


@pytest.mark.parametrize(
    "tensor",
    [
        Tensor(dtype=DTYPE_FLOAT32, shape=[2, 3], data=bytes(23)),
        Tensor(dtype=DTYPE_FLOAT32, shape=[2, 3], data=bytes(28)),
        Tensor(dtype=DTYPE_FLOAT32, shape=[2**31, 2**31, 2**31], data=b""),
        Tensor(shape=[1], data=bytes(4)),
        Tensor(dtype=DTYPE_FLOAT32, shape=[1] * 9, data=bytes(4)),
        Tensor(dtype=DTYPE_FLOAT32, shape=[0, *[2**32 - 1] * 4], data=b""),
    ],
)
def test_a_tensor_that_lies_about_itself_is_refused(tensor: Tensor) -> None:
    with pytest.raises(VeilfedError) as refused:
        from_tensor(tensor)
    assert refused.value.code is Code.PROTOCOL_VIOLATION


@pytest.mark.parametrize("names", [["b", "a"], ["a", "a"], [""]])
def test_names_must_be_sorted_distinct_and_non_empty(names: list[str]) -> None:
    entry = to_tensor(np.zeros(1))
    with pytest.raises(VeilfedError, match="sorted and distinct"):
        unpack_map(TensorMap(tensors=[NamedTensor(name=name, tensor=entry) for name in names]))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_give_arrays_or_the_typed_error(data: bytes) -> None:
    try:
        parse_map(data)
    except VeilfedError as error:
        assert error.code is Code.PROTOCOL_VIOLATION  # noqa: PT017  either outcome is right


def test_an_unknown_dtype_is_refused_before_sending() -> None:
    with pytest.raises(VeilfedError, match="complex128"):
        to_map({"x": np.zeros(1, dtype=complex)})
