"""Student blocks: the formulas of the engine, their ranges, and what becomes of a teacher's weights."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fm_oracle.distill.folding import fold_minilm, fold_vit
from fm_oracle.distill.student import Seen, StudentBlock, taylor
from fm_oracle.models import minilm, vit
from tests.support.blocks import CHANNELS, HEADS, HIDDEN, Case, make_case


def student_of(case: Case) -> StudentBlock:
    """In float64, with the weights of the formulas."""
    formulas = case.formulas
    block = StudentBlock(CHANNELS, HEADS, HIDDEN, post=formulas.gains is not None).double()
    layers = zip(
        (block.qkv, block.out, block.up, block.down),
        (formulas.qkv, formulas.output, formulas.hidden, formulas.back),
        strict=True,
    )
    with torch.no_grad():
        for layer, matrix in layers:
            layer.weight.copy_(torch.from_numpy(matrix[:, :-1]))
            layer.bias.copy_(torch.from_numpy(matrix[:, -1]))
        if block.gains is not None:
            block.gains.copy_(torch.from_numpy(np.asarray(formulas.gains)))
    return block


@pytest.mark.parametrize("post", [False, True], ids=["pre", "post"])
def test_a_student_is_what_the_engine_computes(post: bool) -> None:
    case, seen = make_case(post), Seen()
    block = student_of(case)
    x, mask = torch.from_numpy(case.x.transpose(2, 1, 0).copy()), torch.from_numpy(case.mask.T.copy())
    with torch.no_grad():
        found, attention = block(x, mask, seen)
    assert np.allclose(found.numpy(), case.expected.transpose(2, 1, 0), atol=1e-9)
    assert torch.allclose(attention.sum(dim=-1), torch.ones(1, dtype=torch.float64))
    exported, given = block.weights(), case.block.weights
    for name in ("query_key_value", "output", "hidden", "back"):
        assert np.allclose(getattr(exported, name), getattr(given, name), atol=1e-12)
    ranges = seen.ranges()
    for name in ("row_sum", "first_variance", "second_variance"):
        (low, high), (least, most) = getattr(ranges, name), getattr(case.block.ranges, name)
        assert low <= least * 1.12
        assert high >= most / 1.12
    assert 0 < ranges.score < 8


def test_taylor_is_the_polynomial_of_degree_six() -> None:
    x = torch.linspace(-4, 4, 50, dtype=torch.float64)
    expected = sum((x**k / math.factorial(k) for k in range(7)), torch.zeros_like(x))
    assert torch.allclose(taylor(x), expected, rtol=1e-12)


def random_parts(module: nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.05)
            if parameter.ndim == 1:
                parameter.add_(0.5)


def scores(layer: nn.Linear, x: Tensor, heads: int) -> Tensor:
    n, tokens, dimension = x.shape
    q, k, _ = layer(x).view(n, tokens, 3, heads, dimension // heads).permute(2, 0, 3, 1, 4)
    return torch.as_tensor(q @ k.transpose(-1, -2))


def normalised(x: Tensor, epsilon: float) -> Tensor:
    return nn.functional.layer_norm(x, x.shape[-1:], eps=epsilon)


def test_a_pre_normalised_teacher_s_layers_are_in_the_student_s() -> None:
    teacher = vit.Block()
    random_parts(teacher)
    student = fold_vit(teacher)
    x = torch.randn(2, 5, vit.DIMENSION)
    n = normalised(x, teacher.norm1.eps)
    heads = teacher.attention.heads
    with torch.no_grad():
        expected = scores(teacher.attention.qkv, teacher.norm1(x), heads) / math.sqrt(vit.DIMENSION // heads)
        assert torch.allclose(scores(student.qkv, n, heads), expected, atol=1e-3)
        assert torch.allclose(student.up(n), teacher.up(teacher.norm2(x)), atol=1e-3)
        assert torch.allclose(student.out(x), teacher.scale1 * teacher.attention.out(x), atol=1e-4)
        h = torch.randn(2, 5, teacher.down.in_features)
        assert torch.allclose(student.down(h), teacher.scale2 * teacher.down(h), atol=1e-4)


def test_a_post_normalised_teacher_s_layers_are_in_the_student_s() -> None:
    teacher = minilm.Block()
    random_parts(teacher)
    gain, shift = torch.rand(minilm.DIMENSION) + 0.5, torch.randn(minilm.DIMENSION)
    student, after = fold_minilm(teacher, (gain, shift))
    n = normalised(torch.randn(2, 5, minilm.DIMENSION), teacher.norm.eps)
    x, heads = gain * n + shift, teacher.attention.heads
    with torch.no_grad():
        expected = scores(teacher.attention.qkv, x, heads) / math.sqrt(minilm.DIMENSION // heads)
        assert torch.allclose(scores(student.qkv, n, heads), expected, atol=1e-3)
        assert student.gains is not None
        mixed = torch.randn(2, 5, minilm.DIMENSION)
        around = student.gains[0] * n + student.out(mixed)
        assert torch.allclose(around, x + teacher.attention.out(mixed), atol=1e-4)
        middle = teacher.attention_norm.weight * n + teacher.attention_norm.bias
        assert torch.allclose(student.up(n), teacher.up(middle), atol=1e-3)
        h = torch.randn(2, 5, teacher.down.in_features)
        assert torch.allclose(student.gains[1] * n + student.down(h), middle + teacher.down(h), atol=1e-3)
        assert torch.equal(after[0], teacher.norm.weight)
