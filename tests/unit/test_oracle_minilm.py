"""MiniLM against an implementation of its own in NumPy, float64, written from the BERT paper."""

from collections.abc import Mapping
from math import erf, sqrt
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from numpy.typing import NDArray

from fm_oracle.models import registry
from fm_oracle.models.minilm import MAX_TOKENS, WEIGHTS, MiniLM
from fm_oracle.models.texts import MAX_CHARACTERS
from tests.support.models import published
from veilfed.errors import Code, VeilfedError
from veilfed.packages import locate

Array = NDArray[np.float64]

TEXTS = [
    "A happy person laughs.",
    "The quarterly report, which nobody had expected to be this long, was read by all of the board's members twice.",
    "no",
    "",
    "Ünïcödé, 漢字 and [PAD] inside",
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return published("minilm")


@pytest.fixture(scope="module")
def model(folder: Path) -> MiniLM:
    torch.set_num_threads(1)
    return MiniLM.load(folder)


class Reference:
    """BERT for one text without padding, from the published names of the weights."""

    def __init__(self, weights: Mapping[str, NDArray[np.generic]]) -> None:
        self.weights = {name: array.astype(np.float64) for name, array in weights.items() if "position_ids" not in name}

    def linear(self, name: str, x: Array) -> Array:
        return x @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, x: Array) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return np.asarray(scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"])

    def attention(self, layer: str, x: Array) -> Array:
        q, k, v = (self.linear(f"{layer}.attention.self.{part}", x) for part in ("query", "key", "value"))
        heads = []
        for start in range(0, 384, 32):
            part = slice(start, start + 32)
            scores = np.exp(q[:, part] @ k[:, part].T / sqrt(32))
            heads.append(scores / scores.sum(axis=-1, keepdims=True) @ v[:, part])
        return self.linear(f"{layer}.attention.output.dense", np.concatenate(heads, axis=-1))

    def embed(self, tokens: NDArray[np.int64]) -> Array:
        words, positions = (self.weights[f"embeddings.{kind}_embeddings.weight"] for kind in ("word", "position"))
        first = self.weights["embeddings.token_type_embeddings.weight"][0]
        x = self.norm("embeddings.LayerNorm", words[tokens] + positions[: len(tokens)] + first)
        for index in range(6):
            layer = f"encoder.layer.{index}"
            x = self.norm(f"{layer}.attention.output.LayerNorm", x + self.attention(layer, x))
            up = self.linear(f"{layer}.intermediate.dense", x)
            gelu = up * (1 + np.vectorize(erf)(up / sqrt(2))) / 2
            x = self.norm(f"{layer}.output.LayerNorm", x + self.linear(f"{layer}.output.dense", gelu))
        return np.asarray(x.mean(axis=0))


def test_equals_an_independent_implementation(model: MiniLM, folder: Path) -> None:
    reference = Reference(safetensors.numpy.load(locate(WEIGHTS, folder).read_bytes()))
    prepared = model.prepare(TEXTS)
    expected = np.stack([reference.embed(tokens) for tokens in prepared])
    assert np.abs(model.forward(prepared) - expected).max() < 1e-5


def test_an_embedding_does_not_depend_on_its_neighbours(model: MiniLM) -> None:
    prepared = model.prepare([*TEXTS, "a long text " * 100])
    together = model.forward(prepared)
    alone = np.concatenate([model.forward([tokens]) for tokens in prepared])
    assert np.abs(together - alone).max() < 1e-4


def test_the_order_of_the_inputs_is_kept(model: MiniLM) -> None:
    texts = [f"{'word ' * (1 + 37 * i % 50)}{i}" for i in range(60)]
    order = np.random.default_rng(0).permutation(60)
    straight = model.forward(model.prepare(texts))
    shuffled = model.forward(model.prepare([texts[i] for i in order]))
    assert np.abs(shuffled - straight[order]).max() < 1e-4


def test_similar_texts_are_closer(model: MiniLM) -> None:
    # The example on the page of sentence-transformers/all-MiniLM-L6-v2, with the similarities shown there.
    texts = ["That is a happy person", "That is a happy dog", "That is a very happy person", "Today is a sunny day"]
    vectors = model.forward(model.prepare(texts))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    assert vectors[1:] @ vectors[0] == pytest.approx([0.695, 0.943, 0.257], abs=0.002)


def test_blocks_one_at_a_time(model: MiniLM) -> None:
    (tokens,) = model.prepare(["one block after the other"])
    with torch.inference_mode():
        x = model.bert.embed_tokens(torch.from_numpy(tokens)[None])
        for index in range(model.card.blocks):
            x = model.bert.block(index, x)
        pooled = model.bert.pool(x).numpy()
    assert np.abs(pooled - model.forward([tokens])).max() < 1e-6


def test_tokens_are_the_published_ones(model: MiniLM) -> None:
    (tokens,) = model.prepare(["Hello World"])
    assert tokens.tolist() == [101, 7592, 2088, 102]


def test_long_texts_are_truncated(model: MiniLM) -> None:
    (tokens,) = model.prepare(["word " * 1000])
    assert len(tokens) == MAX_TOKENS == model.card.max_tokens
    assert tokens[-1] == 102


def test_absurdly_long_texts_are_refused(model: MiniLM) -> None:
    with pytest.raises(VeilfedError, match="text 1 of the batch") as caught:
        model.prepare(["fine", "x" * (MAX_CHARACTERS + 1)])
    assert caught.value.code is Code.INPUT_INVALID


def test_the_version_is_over_weights_and_preprocessing(model: MiniLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MiniLM(model.bert, model._tokenizer).card.version == model.card.version
    monkeypatch.setattr("fm_oracle.models.minilm.MAX_TOKENS", 128)
    assert MiniLM(model.bert, model._tokenizer).card.version != model.card.version


def test_embed_in_process(model: MiniLM, folder: Path) -> None:
    vectors = registry.embed("minilm", ["one", "two"], folder)
    assert vectors.dtype == np.float32
    assert np.abs(vectors - model.forward(model.prepare(["one", "two"]))).max() < 1e-4


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(VeilfedError, match=r"model\.safetensors") as caught:
        MiniLM.load(tmp_path)
    assert caught.value.code is Code.MODEL_MISSING


def test_a_changed_model_is_refused(folder: Path, tmp_path: Path) -> None:
    found = locate(WEIGHTS, folder)
    copy = tmp_path / found.relative_to(folder)
    copy.parent.mkdir(parents=True)
    copy.write_bytes(found.read_bytes()[:-1] + b"!")
    with pytest.raises(VeilfedError, match=r"model\.safetensors") as caught:
        MiniLM.load(tmp_path)
    assert caught.value.code is Code.STATE_CORRUPT


def test_an_unknown_model_is_refused_with_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(VeilfedError, match="minilm, onnx, open_clip, timm, transformers, vit") as caught:
        registry.load("gpt", tmp_path)
    assert caught.value.code is Code.INPUT_INVALID
