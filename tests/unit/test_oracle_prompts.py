"""Prompt tokens in the models, against the formulas written out for one input at a time, and finite differences."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fm_oracle.models import minilm, vit
from fm_oracle.models.minilm import MiniLM
from fm_oracle.models.prompts import cross_entropy
from fm_oracle.models.vit import ViT, normalise
from tests.support.models import TinyModel, png, published
from tests.unit.test_oracle_minilm import TEXTS, Reference
from tests.unit.test_oracle_vit import images
from veilfed.errors import Code, VeilfedError
from veilfed.packages import locate

Float = NDArray[np.float32]


@pytest.fixture(scope="module")
def text_model() -> MiniLM:
    torch.set_num_threads(1)
    return MiniLM.load(published("minilm"))


@pytest.fixture(scope="module")
def image_model() -> ViT:
    torch.set_num_threads(1)
    return ViT.load(published("vit"))


def drawn(count: int, seed: int = 0) -> Float:
    return np.random.default_rng(seed).standard_normal((count, 384)).astype(np.float32)


class Prompted(Reference):
    """The float64 reference of MiniLM, with prompts after the embedding's normalisation."""

    def embed_prompted(self, tokens: NDArray[np.int64], prompts: Float) -> NDArray[np.float64]:
        words, positions = (self.weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
        first = self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.norm("embeddings.LayerNorm", words[tokens] + positions[: len(tokens)] + first)
        x = np.concatenate([x[:1], minilm.PROMPT_SCALE * prompts.astype(np.float64), x[1:]])
        for index in range(6):
            layer = f"encoder.layer.{index}"
            x = self.norm(f"{layer}.attention.output.LayerNorm", x + self.attention(layer, x))
            up = self.linear(f"{layer}.intermediate.dense", x)
            gelu = torch.nn.functional.gelu(torch.from_numpy(up)).numpy()
            x = self.norm(f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", gelu))
        return np.asarray(np.concatenate([x[:1], x[1 + len(prompts) :]]).mean(axis=0))


def test_texts_with_prompts_equal_an_independent_implementation(text_model: MiniLM) -> None:
    reference = Prompted(safetensors.numpy.load(locate(minilm.WEIGHTS, published("minilm")).read_bytes()))
    prepared, prompts = text_model.prepare(TEXTS), drawn(10)
    expected = np.stack([reference.embed_prompted(tokens, prompts) for tokens in prepared])
    found = text_model.forward_prompted(prepared, prompts)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found - text_model.forward(prepared)).max() > 1e-2  # prompts do something


def test_images_with_prompts_equal_the_formulas_for_one_image(image_model: ViT) -> None:
    """Equations 4 and 5 one token at a time, and the blocks written out with a loop over heads; float64."""
    prompts, pictures = drawn(10), images(3)
    found = image_model.forward_prompted(image_model.prepare([png(image) for image in pictures]), prompts)
    model = copy.deepcopy(image_model.transformer).double()
    for picture, row in zip(pictures, found, strict=True):
        with torch.inference_mode():
            raw = model.embed_tokens(normalise(torch.from_numpy(picture[None])).double())[0]
            tokens = [raw[0], *(vit.PROMPT_SCALE * torch.from_numpy(prompts).double()), *raw[1:]]
            x = torch.stack(tokens)
            blocks: Any = model.blocks
            for block in blocks:
                x = x + block.scale1 * one_by_one(block.attention, block.norm1(x))
                x = x + block.scale2 * block.down(torch.nn.functional.gelu(block.up(block.norm2(x))))
        assert np.abs(x[0].numpy() - row).max() < 1e-4


def one_by_one(attention: Any, x: Tensor) -> Tensor:
    """Self-attention of [t, d], head by head."""
    q, k, v = attention.qkv(x).chunk(3, dim=1)
    width = x.shape[1] // attention.heads
    heads = []
    for start in range(0, x.shape[1], width):
        part = slice(start, start + width)
        scores = torch.softmax(q[:, part] @ k[:, part].T / width**0.5, dim=1)
        heads.append(scores @ v[:, part])
    mixed: Tensor = attention.out(torch.cat(heads, dim=1))
    return mixed


def test_prompts_do_not_take_room_from_a_long_text(text_model: MiniLM) -> None:
    prompts = drawn(64)
    (longest,) = text_model.prepare(["word " * 1000])
    (cut,) = text_model.prepare(["word " * 300])
    assert len(longest) == 256
    assert np.array_equal(text_model.forward_prompted([longest], prompts), text_model.forward_prompted([cut], prompts))


def test_an_embedding_with_prompts_does_not_depend_on_its_neighbours(text_model: MiniLM, image_model: ViT) -> None:
    texts = text_model.prepare([*TEXTS, "a long text " * 100])
    pictures = image_model.prepare([png(image) for image in images(18)])
    cases: Sequence[tuple[Any, Any]] = [(text_model, texts), (image_model, pictures)]
    for model, prepared in cases:
        together = model.forward_prompted(prepared, drawn(4))
        alone = np.concatenate([model.forward_prompted([one], drawn(4)) for one in prepared[-3:]])
        assert np.abs(together[-3:] - alone).max() < 1e-4


def passes(model: MiniLM | ViT, double: Any, prepared: Sequence[NDArray[Any]], count: int) -> Any:
    """The model's own passes, through weights in float64."""
    if isinstance(model, MiniLM):
        return list(MiniLM(double, model._tokenizer).prompted(prepared, count))
    found = []
    for start in range(0, len(prepared), vit.PASS):
        rows = slice(start, start + vit.PASS)
        pixels = normalise(torch.from_numpy(np.stack(prepared[rows]))).double()
        found.append((rows, lambda prompts, pixels=pixels: double.forward_prompted(pixels, prompts)))
    return found


@pytest.mark.parametrize("kind", ["minilm", "vit"])
def test_a_gradient_equals_finite_differences_in_float64(kind: str, text_model: MiniLM, image_model: ViT) -> None:
    model: MiniLM | ViT = text_model if kind == "minilm" else image_model
    prepared = text_model.prepare(TEXTS[:3]) if kind == "minilm" else image_model.prepare([png(p) for p in images(2)])
    random = np.random.default_rng(1)
    labels = torch.from_numpy(random.integers(0, 3, len(prepared)))
    head = torch.from_numpy(5 * random.standard_normal((3, 384)))
    start = torch.from_numpy(random.standard_normal((3, 384)))
    double = copy.deepcopy(model.bert if isinstance(model, MiniLM) else model.transformer).double()

    def loss(prompts: Tensor) -> Tensor:
        return torch.stack(
            [cross_entropy(encode(prompts), head, labels[rows]) for rows, encode in passes(model, double, prepared, 3)]
        ).sum()

    leaf = start.clone().requires_grad_()
    (exact,) = torch.autograd.grad(loss(leaf), leaf)
    for seed in range(3):
        direction = torch.from_numpy(np.random.default_rng(seed).standard_normal(start.shape))
        with torch.no_grad():
            numeric = (loss(start + 1e-5 * direction) - loss(start - 1e-5 * direction)) / 2e-5
        assert float(numeric) == pytest.approx(float((exact * direction).sum()), rel=1e-6, abs=1e-8)
    # What the model gives out in float32 is that gradient.
    given, embeddings = model.prompt_gradient(
        prepared, start.numpy().astype(np.float32), head.numpy().astype(np.float32), labels.numpy()
    )
    assert np.abs(given - exact.numpy()).max() < 1e-4 * float(exact.abs().max())
    assert np.array_equal(embeddings, model.forward_prompted(prepared, start.numpy().astype(np.float32)))


def test_a_gradient_is_the_sum_over_the_inputs(text_model: MiniLM) -> None:
    prepared, prompts, head = text_model.prepare(TEXTS), drawn(2), drawn(4, 1)
    labels = np.array([0, 3, 1, 2, 2])
    together, _ = text_model.prompt_gradient(prepared, prompts, head, labels)
    parts = [text_model.prompt_gradient([one], prompts, head, labels[i : i + 1])[0] for i, one in enumerate(prepared)]
    assert np.abs(np.sum(parts, axis=0) - together).max() < 1e-5 * np.abs(together).max()


def test_a_model_without_prompts_says_so() -> None:
    with pytest.raises(VeilfedError, match="the model tiny takes no prompt tokens") as caught:
        TinyModel().forward_prompted([np.zeros(2, np.uint8)], np.zeros((1, 3), np.float32))
    assert caught.value.code is Code.INPUT_INVALID
