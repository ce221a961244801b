"""The pixels that models of other libraries take; tests/encoders compares with the libraries themselves."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fm_oracle.models.preprocessing import Preprocessing, from_huggingface, from_open_clip, from_timm
from tests.support.models import png
from veilfed.errors import Code, VeilfedError

MEAN, STD = (0.1, 0.2, 0.3), (0.4, 0.5, 0.6)
CLIP = {"size": 32, "mode": "RGB", "mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "shortest"}
TIMM = {
    "input_size": (3, 32, 32),
    "interpolation": "bilinear",
    "mean": MEAN,
    "std": STD,
    "crop_pct": 0.9,
    "crop_mode": "center",
}
VIT: dict[str, Any] = {"size": {"height": 32, "width": 24}, "resample": 2, "image_mean": MEAN, "image_std": STD}
BIT: dict[str, Any] = {
    "size": {"shortest_edge": 40},
    "crop_size": {"height": 32, "width": 32},
    "do_center_crop": True,
    "resample": 3,
    "image_mean": list(MEAN),
    "image_std": list(STD),
    "image_processor_type": "BitImageProcessor",
}


def test_what_the_libraries_say_is_read() -> None:
    assert from_open_clip(CLIP, "x") == Preprocessing((32, 32), 32, "bicubic", MEAN, STD)
    squash = {**CLIP, "resize_mode": "squash", "size": (32, 24)}
    assert from_open_clip(squash, "x") == Preprocessing((32, 24), (32, 24), "bicubic", MEAN, STD)
    assert from_timm(TIMM, "x") == Preprocessing((32, 32), 35, "bilinear", MEAN, STD)
    assert from_timm({**TIMM, "crop_mode": "squash"}, "x").resize == (35, 35)
    assert from_huggingface(VIT, "x") == Preprocessing((32, 24), (32, 24), "bilinear", MEAN, STD, floor=True)
    assert from_huggingface(BIT, "x") == Preprocessing((32, 32), 40, "bicubic", MEAN, STD, floor=True)


def test_a_bare_size_is_a_square_or_the_shorter_side_before_a_crop() -> None:
    old = {"size": 40, "resample": 3, "image_mean": MEAN, "image_std": STD}
    assert from_huggingface(old, "x").resize == (40, 40)
    cropped = from_huggingface({**old, "crop_size": 32, "do_center_crop": True}, "x")
    assert (cropped.resize, cropped.size) == (40, (32, 32))


def test_convnext_takes_the_middle_of_small_images_and_squashes_large_ones() -> None:
    config = {**VIT, "size": {"shortest_edge": 224}, "crop_pct": 0.875}
    assert (from_huggingface(config, "x").resize, from_huggingface(config, "x").size) == (256, (224, 224))
    large = from_huggingface({**config, "size": {"shortest_edge": 384}}, "x")
    assert (large.resize, large.size) == ((384, 384), (384, 384))


def test_without_normalisation_values_stay_between_0_and_1() -> None:
    assert from_huggingface({**VIT, "do_normalize": False}, "x").deviation == (1, 1, 1)


REFUSED = {
    "longest": lambda: from_open_clip({**CLIP, "resize_mode": "longest"}, "x"),
    "oblong": lambda: from_open_clip({**CLIP, "size": (32, 24)}, "x"),
    "two means": lambda: from_open_clip({**CLIP, "mean": (0.1, 0.2)}, "x"),
    "zero deviation": lambda: from_open_clip({**CLIP, "std": (0.1, 0.2, 0)}, "x"),
    "random": lambda: from_open_clip({**CLIP, "interpolation": "random"}, "x"),
    "huge": lambda: from_open_clip({**CLIP, "size": 4096}, "x"),
    "border": lambda: from_timm({**TIMM, "crop_mode": "border"}, "x"),
    "padding": lambda: from_timm({**TIMM, "crop_pct": 2.0}, "x"),
    "unknown key": lambda: from_huggingface({**VIT, "do_pad": True}, "x"),
    "no resample": lambda: from_huggingface({**VIT, "resample": None}, "x"),
    "scale": lambda: from_huggingface({**VIT, "rescale_factor": 1 / 127.5}, "x"),
    "no scale": lambda: from_huggingface({**VIT, "do_rescale": False}, "x"),
    "no resize": lambda: from_huggingface({**VIT, "do_resize": False}, "x"),
    "no crop": lambda: from_huggingface({**VIT, "size": {"shortest_edge": 32}}, "x"),
    "longest edge": lambda: from_huggingface({**VIT, "size": {"longest_edge": 32}}, "x"),
    "no crop size": lambda: from_huggingface({**BIT, "crop_size": None}, "x"),
    "resample": lambda: from_huggingface({**VIT, "resample": 17}, "x"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_exactly_is_refused(name: str) -> None:
    with pytest.raises(VeilfedError, match="not supported") as caught:
        REFUSED[name]()
    assert caught.value.code is Code.INPUT_INVALID


@given(
    height=st.integers(1, 90),
    width=st.integers(1, 90),
    size=st.integers(1, 32),
    more=st.integers(0, 9),
    squash=st.booleans(),
)
def test_every_image_gets_the_model_s_shape(height: int, width: int, size: int, more: int, squash: bool) -> None:
    side = size + more
    preprocessing = Preprocessing((size, size), (side, side) if squash else side, "bicubic", MEAN, STD)
    (pixels,) = preprocessing.prepare([png(np.zeros((height, width, 3), np.uint8))])
    assert pixels.shape == (size, size, 3)
    assert pixels.dtype == np.uint8


def test_the_middle_is_taken_to_the_named_side() -> None:
    image = np.arange(5, dtype=np.uint8)[None, :, None].repeat(2, 0).repeat(3, 2)  # 2 x 5, columns 0 to 4
    for floor, column in ((True, 1), (False, 2)):  # 1.5 columns are left over on each side
        taken = Preprocessing((2, 2), 2, "nearest", MEAN, STD, floor).prepare([png(image)])[0]
        assert taken[0, :, 0].tolist() == [column, column + 1]


def test_normalisation_and_passes() -> None:
    preprocessing = Preprocessing((2, 2), (2, 2), "nearest", MEAN, STD)
    images = [np.full((2, 2, 3), value, np.uint8) for value in range(40)]
    sizes: list[int] = []

    def encode(pixels: torch.Tensor) -> torch.Tensor:
        sizes.append(len(pixels))
        return pixels[:, :, 0, 0]

    expected = (np.arange(40)[:, None] / 255 - np.array(MEAN)) / np.array(STD)
    assert np.abs(preprocessing.forward(images, encode) - expected).max() < 1e-6
    assert (sum(sizes), max(sizes)) == (40, 16)


def test_transparency_is_laid_on_white() -> None:
    clear = png(np.zeros((4, 4, 4), np.uint8))
    assert Preprocessing((4, 4), 4, "bicubic", MEAN, STD).prepare([clear])[0].min() == 255


def test_a_bad_image_is_named_by_its_position() -> None:
    with pytest.raises(VeilfedError, match="image 1 of the batch"):
        Preprocessing((4, 4), 4, "bicubic", MEAN, STD).prepare([png(np.zeros((4, 4, 3), np.uint8)), b"no image"])


def test_an_image_that_would_become_very_long_is_refused() -> None:
    line = png(np.zeros((1, 80_000, 3), np.uint8))  # 4.6 billion pixels at a height of 240
    with pytest.raises(VeilfedError, match="image 0 of the batch has 80000 x 1 pixels") as caught:
        Preprocessing((224, 224), 240, "bicubic", MEAN, STD).prepare([line])
    assert caught.value.code is Code.INPUT_INVALID
    assert Preprocessing((8, 8), (8, 8), "bicubic", MEAN, STD).prepare([line])[0].shape == (8, 8, 3)


def test_the_parameters_are_those_of_json_and_all_of_them() -> None:
    parameters = Preprocessing((4, 4), 4, "bicubic", MEAN, STD).parameters
    assert set(parameters) == {"size", "resize", "interpolation", "mean", "deviation", "floor", "background"}
    json.dumps(parameters)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 400) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["height", "width", "shortest_edge"]), inner)
    ),
    max_leaves=4,
)
KEYS = [
    "size",
    "crop_size",
    "resample",
    "image_mean",
    "image_std",
    "do_center_crop",
    "crop_pct",
    "rescale_factor",
    "do_resize",
]


@settings(max_examples=300)
@given(st.sampled_from([VIT, BIT]), st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3))
def test_any_values_are_read_or_refused(config: dict[str, Any], values: dict[str, object]) -> None:
    try:
        preprocessing = from_huggingface({**config, **values}, "x")
    except VeilfedError as error:
        assert error.code is Code.INPUT_INVALID  # noqa: PT017  either outcome is right
        return
    (pixels,) = preprocessing.prepare([png(np.zeros((3, 5, 3), np.uint8))])
    assert pixels.shape == (*preprocessing.size, 3)
