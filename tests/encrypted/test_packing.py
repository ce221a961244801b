"""Residues as bits, against integers of any length."""

import numpy as np
import pytest

from veilfed.ckks.basis import Basis
from veilfed.ckks.packing import pack, packed_bytes, unpack
from veilfed.ckks.parameters import Parameters
from veilfed.ckks.sampling import uniform
from veilfed.errors import Code, VeilfedError

pytestmark = pytest.mark.encrypted


@pytest.fixture(scope="module")
def basis() -> Basis:
    """Primes of which some divide a word of 64 bits and some do not."""
    return Basis(Parameters(12, (25, 32), 48, 20), threads=2)


def bits_of(values: np.ndarray, basis: Basis) -> bytes:
    """The format as it is defined, by Python's integers."""
    out = b""
    for polynomial in values.reshape(-1, values.shape[-2], basis.n):
        for q, limb in zip(basis.primes, polynomial, strict=False):
            bits = q.bit_length()
            integer = sum((int(value) % q) << (bits * j) for j, value in enumerate(limb))
            out += integer.to_bytes(bits * basis.n // 8, "little")
    return out


def test_bytes_are_as_defined_and_come_back(basis: Basis) -> None:
    values = np.stack([[uniform(basis, 3)[:2] for _ in range(2)] for _ in range(3)])
    values[0, 0, 0, :3] = [0, (basis.primes[0] - 1) // 2, -(basis.primes[0] - 1) // 2]
    data = pack(values, basis)
    assert data == bits_of(values, basis)
    assert len(data) == packed_bytes(6, 2, basis)
    assert np.array_equal(unpack(data, values.shape, basis), values)


def test_all_primes_come_back(basis: Basis) -> None:
    values = uniform(basis, 3)
    assert np.array_equal(unpack(pack(values, basis), values.shape, basis), values)


def test_what_cannot_be_residues_is_refused(basis: Basis) -> None:
    data = pack(np.stack([uniform(basis, 2), uniform(basis, 2)]), basis)
    with pytest.raises(VeilfedError, match=r"need .* bytes, there are") as caught:
        unpack(data[:-1], (2, 2, basis.n), basis)
    assert caught.value.code is Code.PROTOCOL_VIOLATION
    second = packed_bytes(1, 2, basis) + packed_bytes(1, 1, basis)
    with pytest.raises(VeilfedError, match="polynomial 1, limb 1: a residue is not below its prime"):
        unpack(data[:second] + b"\xff" * (len(data) - second), (2, 2, basis.n), basis)
