"""ViT against the package's own ONNX graph, run by ONNX Runtime and cut after block 11."""

import struct
import zlib
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray

from fm_oracle.models.vit import IMAGE_SIZE, WEIGHTS, ViT, normalise
from tests.support.models import png, published
from veilfed.errors import Code, VeilfedError
from veilfed.images import decode, square
from veilfed.packages import locate

BLOCK_11 = "/backbone/encoder/layer.10/Add_1_output_0"


@pytest.fixture(scope="module")
def folder() -> Path:
    return published("vit")


@pytest.fixture(scope="module")
def model(folder: Path) -> ViT:
    torch.set_num_threads(1)
    return ViT.load(folder)


@pytest.fixture(scope="module")
def graph(folder: Path) -> onnxruntime.InferenceSession:
    loaded = onnx.load(locate(WEIGHTS, folder))
    for axis in loaded.graph.input[0].type.tensor_type.shape.dim[2:]:
        axis.dim_param = "side"  # the declared 224 is an example: the graph takes any multiple of 14
    del loaded.graph.output[:]
    loaded.graph.output.append(onnx.helper.make_tensor_value_info(BLOCK_11, onnx.TensorProto.FLOAT, None))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(loaded.SerializeToString(), options, providers=["CPUExecutionProvider"])


def images(count: int, side: int = IMAGE_SIZE) -> NDArray[np.uint8]:
    """Smooth random pictures [n, side, side, 3]: closer to what the model was trained on than noise."""
    coarse = np.random.default_rng(count).random((count, 3, 6, 6), dtype=np.float32)
    smooth = torch.nn.functional.interpolate(torch.from_numpy(coarse), size=(side, side), mode="bilinear")
    return (smooth.permute(0, 2, 3, 1).numpy() * 255).astype(np.uint8)


@pytest.mark.parametrize("side", [112, 98, 224])
def test_equals_the_onnx_graph_at_block_11(model: ViT, graph: onnxruntime.InferenceSession, side: int) -> None:
    pixels = normalise(torch.from_numpy(images(2, side)))
    (expected,) = graph.run([BLOCK_11], {"input_image": pixels.numpy()})
    with torch.inference_mode():
        x = model.transformer.embed_tokens(pixels)
        for index in range(model.card.blocks):
            x = model.transformer.block(index, x)
    assert x.shape == (2, 1 + (side // 14) ** 2, 384)
    assert np.abs(x.numpy() - expected).max() < 1e-4
    with torch.inference_mode():
        assert np.abs(model.transformer(pixels).numpy() - expected[:, 0]).max() < 1e-4


def test_an_embedding_does_not_depend_on_its_neighbours(model: ViT) -> None:
    prepared = model.prepare([png(image) for image in images(35)])
    together = model.forward(prepared)
    alone = np.concatenate([model.forward(prepared[i : i + 1]) for i in (0, 31, 32, 34)])
    assert np.abs(together[[0, 31, 32, 34]] - alone).max() < 1e-4


def test_pixels_of_the_right_size_are_not_changed(model: ViT) -> None:
    image = images(1)[0]
    (prepared,) = model.prepare([png(image)])
    assert np.array_equal(prepared, image)


def test_transparency_is_laid_on_white(model: ViT) -> None:
    (prepared,) = model.prepare([png(np.zeros((112, 112, 4), dtype=np.uint8))])
    assert (prepared == 255).all()


@pytest.mark.parametrize("image_format", ["PNG", "JPEG", "WEBP"])
def test_formats_and_sizes(model: ViT, image_format: str) -> None:
    (prepared,) = model.prepare([png(images(1, 70)[0], image_format)])
    assert prepared.shape == (112, 112, 3)
    assert prepared.dtype == np.uint8


def test_grey_images(model: ViT) -> None:
    (prepared,) = model.prepare([png(np.full((112, 112), 7, dtype=np.uint8))])
    assert (prepared == 7).all()


def test_the_middle_square_is_taken() -> None:
    picture = np.zeros((20, 60, 3), dtype=np.uint8)
    picture[:, 20:40] = 200
    assert (square(decode(png(picture), 0), 20) == 200).all()


def _claimed(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims to have this many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a readable"),
        (b"certainly not an image", "not a readable"),
        (png(np.zeros((50, 50, 3), dtype=np.uint8))[:60], "not a readable"),
        (b"GIF89a" + bytes(20), "not a readable"),
        (_claimed(5000, 5000), "5000 x 5000 pixels"),
        (_claimed(60000, 60000), "pixels"),
        (_claimed(100, 100), "not a readable"),
    ],
    ids=["empty", "text", "truncated", "another format", "large", "bomb", "missing pixels"],
)
def test_bad_images_are_refused_by_position(model: ViT, data: bytes, message: str) -> None:
    with pytest.raises(VeilfedError, match=f"image 1 of the batch.*{message}") as caught:
        model.prepare([png(np.zeros((14, 14, 3), dtype=np.uint8)), data])
    assert caught.value.code is Code.INPUT_INVALID
