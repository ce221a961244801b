"""Adam against the algorithm as it is printed, in double precision."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from client_agent.trainers import adam


def printed(value: Tensor, gradients: list[Tensor], rate: float) -> Tensor:
    """Algorithm 1 of Kingma and Ba (2015)."""
    value, mean, square = value.double(), torch.zeros_like(value).double(), torch.zeros_like(value).double()
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        mean = 0.9 * mean + 0.1 * g
        square = 0.999 * square + 0.001 * g * g
        value = value - rate * (mean / (1 - 0.9**t)) / ((square / (1 - 0.999**t)).sqrt() + 1e-8)
    return value


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 6), st.floats(1e-4, 1), st.integers(0, 2**31))
def test_steps_are_those_of_the_algorithm(rows: int, columns: int, steps: int, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(rows, columns, generator=generator)
    gradients = [torch.randn(columns, rows, generator=generator).T for _ in range(steps)]  # not row-major
    expected = printed(value, gradients, rate)
    parameter = adam.Parameter(value, rate, torch.zeros_like(value), torch.zeros_like(value))
    for count, gradient in enumerate(gradients, start=1):
        adam.step([parameter], [gradient], count)
    torch.testing.assert_close(value.double(), expected, atol=1e-5 * rate * steps, rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_going_on_from_kept_moments_gives_the_same_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(7, 5, generator=generator, dtype=dtype) for _ in range(6)]

    def run(cuts: int) -> Tensor:
        value, mean, square = (torch.zeros(7, 5, dtype=dtype) for _ in range(3))
        for count, gradient in enumerate(gradients, start=1):
            if count == cuts:
                value, mean, square = value.clone(), mean.clone(), square.clone()
            adam.step([adam.Parameter(value, 0.01, mean, square)], [gradient], count)
        return value

    assert torch.equal(run(0), run(3))
