"""From a decoded image to the pixels that a model of another library takes, as that library does it.

The libraries transform with Pillow too, so the pixels are the same; doing it here makes the parameters part of the
version, bounds the work, and needs no torchvision.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from veilfed.errors import Code, VeilfedError
from veilfed.images import MAX_PIXELS, decode

__all__ = ["MAX_SIDE", "Preprocessing", "from_huggingface", "from_open_clip", "from_timm", "unsupported"]

PASS = 16  # images of one pass: more is not faster on a CPU, and takes memory
MAX_SIDE = 2048  # pixels; a configuration that asks for more is a mistake

Triple = tuple[float, float, float]


def unsupported(where: str, what: str) -> VeilfedError:
    """The error of a model that an oracle cannot serve."""
    return VeilfedError(Code.INPUT_INVALID, f"{where}: {what} is not supported")


@dataclass(frozen=True)
class Preprocessing:
    """Resizes, takes the middle and normalises.

    `size` is (height, width) of the model's input. `resize` is (height, width), or one length for the shorter side;
    the longer side is rounded down. `floor` says to which side the middle moves by half a pixel: torchvision rounds to
    the even pixel, transformers down. `mean` and `deviation` are of RGB values in [0, 1].
    """

    size: tuple[int, int]
    resize: int | tuple[int, int]
    interpolation: str
    mean: Triple
    deviation: Triple
    floor: bool = False

    def check(self, where: str) -> "Preprocessing":
        """Itself. Raises VeilfedError(INPUT_INVALID) for what no model could use."""
        sides = (self.size, (self.resize, self.resize) if isinstance(self.resize, int) else self.resize)
        if not all(1 <= size <= limit for size, limit in zip(self.size, sides[1], strict=True)):
            raise unsupported(where, "an input size that is larger than the resized image")
        if max(sides[1]) > MAX_SIDE:
            raise unsupported(where, f"an image of more than {MAX_SIDE} pixels a side")
        if self.interpolation.upper() not in Image.Resampling.__members__:
            raise unsupported(where, f"interpolation {self.interpolation!r}")
        if not np.isfinite([*self.mean, *self.deviation]).all() or not all(self.deviation):
            raise unsupported(where, "a mean or deviation that is not finite, or a deviation of zero")
        return self

    @property
    def parameters(self) -> dict[str, object]:
        """What belongs into the model's version."""
        return {**dataclasses.asdict(self), "background": "white"}

    def prepare(self, inputs: Sequence[bytes]) -> list[NDArray[Any]]:
        """Encoded images -> uint8 [h, w, 3] each: a quarter of what float32 would hold in the queue.

        Raises VeilfedError(INPUT_INVALID) naming the position of an image that cannot be decoded or is too long.
        """
        return [self._pixels(decode(data, position), position) for position, data in enumerate(inputs)]

    def _pixels(self, image: Image.Image, position: int) -> NDArray[np.uint8]:
        if isinstance(self.resize, int):
            shorter = min(image.size)
            width, height = (self.resize * side // shorter for side in image.size)
        else:
            height, width = self.resize
        if width * height > MAX_PIXELS:  # a small file could ask for any amount of memory
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"image {position} of the batch has {image.width} x {image.height} pixels, too long for the model",
            )
        image = image.resize((width, height), Image.Resampling[self.interpolation.upper()])
        top, left = (self._start(whole - part) for whole, part in zip((height, width), self.size, strict=True))
        return np.asarray(image.crop((left, top, left + self.size[1], top + self.size[0])))

    def _start(self, rest: int) -> int:
        return rest // 2 if self.floor else round(rest / 2)

    def dimension(self, encode: Callable[[Tensor], Tensor], where: str) -> int:
        """Length d of the embeddings that `encode` gives. Raises VeilfedError(INPUT_INVALID) if it gives no vectors."""
        shape = self.forward([np.zeros((*self.size, 3), np.uint8)], encode).shape
        if len(shape) != 2:
            raise unsupported(where, f"an output of the shape {list(shape)}, not [images, d],")
        return int(shape[1])

    def forward(self, prepared: Sequence[NDArray[Any]], encode: Callable[[Tensor], Tensor]) -> NDArray[np.float32]:
        """`encode` takes float32 [n, 3, h, w] to [n, d]; called for a bounded number of images at a time."""
        parts = []
        for start in range(0, len(prepared), PASS):
            pixels = torch.from_numpy(np.stack(prepared[start : start + PASS]))
            scaled = (pixels.float() / 255 - torch.tensor(self.mean)) / torch.tensor(self.deviation)
            with torch.inference_mode():
                parts.append(encode(scaled.permute(0, 3, 1, 2).contiguous()).float().numpy())
        return np.concatenate(parts)


def _triple(values: Any, where: str) -> Triple:
    if isinstance(values, int | float):
        values = [values] * 3
    if not isinstance(values, list | tuple) or len(values) != 3 or not all(isinstance(v, int | float) for v in values):
        raise unsupported(where, "a mean or deviation that is not of three channels")
    return float(values[0]), float(values[1]), float(values[2])


def _pair(value: Any, where: str) -> tuple[int, int]:
    """(height, width) from one side or two."""
    pair = (value, value) if isinstance(value, int) else tuple(value) if isinstance(value, list | tuple) else ()
    if len(pair) != 2 or not all(isinstance(side, int) for side in pair):
        raise unsupported(where, f"the image size {value!r}")
    return pair


def from_open_clip(config: Mapping[str, Any], where: str) -> Preprocessing:
    """Of open_clip's `PreprocessCfg`. Raises VeilfedError(INPUT_INVALID)."""
    size, mode = _pair(config["size"], where), config["resize_mode"]
    if mode not in {"shortest", "squash"} or (mode == "shortest" and size[0] != size[1]):
        raise unsupported(where, f"resize mode {mode!r} for {size[0]} x {size[1]} pixels")
    resize = size[0] if mode == "shortest" else size
    mean, deviation = _triple(config["mean"], where), _triple(config["std"], where)
    return Preprocessing(size, resize, config["interpolation"], mean, deviation).check(where)


def from_timm(config: Mapping[str, Any], where: str) -> Preprocessing:
    """Of timm's resolved data configuration. Raises VeilfedError(INPUT_INVALID)."""
    size, mode = _pair(config["input_size"][-2:], where), config["crop_mode"]
    height, width = (int(side / config["crop_pct"]) for side in size)
    if mode not in {"center", "squash"} or (mode == "center" and height != width):
        raise unsupported(where, f"crop mode {mode!r} for {size[0]} x {size[1]} pixels")
    resize = height if mode == "center" else (height, width)
    mean, deviation = _triple(config["mean"], where), _triple(config["std"], where)
    return Preprocessing(size, resize, config["interpolation"], mean, deviation).check(where)


# What a preprocessor_config.json may say; another key could change the pixels in a way that is not known here.
KNOWN = {
    "crop_pct",
    "crop_size",
    "data_format",
    "default_to_square",
    "device",
    "do_center_crop",
    "do_convert_rgb",
    "do_normalize",
    "do_rescale",
    "do_resize",
    "feature_extractor_type",
    "image_mean",
    "image_processor_type",
    "image_std",
    "input_data_format",
    "processor_class",
    "resample",
    "rescale_factor",
    "return_tensors",
    "size",
}


def from_huggingface(config: Mapping[str, Any], where: str) -> Preprocessing:
    """Of a preprocessor_config.json: resize, centre crop, rescale, normalise. Raises VeilfedError(INPUT_INVALID)."""
    _check_keys(config, where)
    crops = bool(config.get("do_center_crop", "crop_size" in config))
    resize = _length_or_pair(config["size"], where, is_length=crops)
    if crops:
        size = _square(_length_or_pair(config["crop_size"], where, is_length=False))
    elif config.get("crop_pct") is not None:
        size, resize = _convnext(resize, config["crop_pct"], where)
    elif isinstance(resize, int):
        raise unsupported(where, "images that are not cropped to one shape")
    else:
        size = resize
    normalised = config.get("do_normalize", True)
    mean = _triple(config["image_mean"] if normalised else 0.0, where)
    deviation = _triple(config["image_std"] if normalised else 1.0, where)
    names = {member.value: member.name.lower() for member in Image.Resampling}
    interpolation = names.get(config["resample"] if isinstance(config["resample"], int) else -1, "unknown")
    return Preprocessing(size, resize, interpolation, mean, deviation, floor=True).check(where)


def _check_keys(config: Mapping[str, Any], where: str) -> None:
    """Refuses what is not known here, and what the libraries' classes would fill in by defaults of their own."""
    unknown = sorted(key for key, value in config.items() if key not in KNOWN and value is not None)
    if unknown:
        raise unsupported(where, f"the key {unknown[0]!r}")
    missing = [key for key in ("size", "resample", "image_mean", "image_std") if config.get(key) is None]
    if config.get("do_center_crop") and config.get("crop_size") is None:
        missing.append("crop_size")
    if missing:
        raise unsupported(where, f"preprocessing without the key {missing[0]!r}")
    scale = config.get("rescale_factor", 1 / 255)
    if not config.get("do_rescale", True) or not isinstance(scale, int | float) or not abs(scale * 255 - 1) < 1e-6:
        raise unsupported(where, "another scale than 1/255")
    if not config.get("do_resize", True):
        raise unsupported(where, "preprocessing without a resize")


def _length_or_pair(value: Any, where: str, is_length: bool) -> int | tuple[int, int]:
    """The length of the shorter side, or (height, width); a bare number is the former if a crop follows."""
    if isinstance(value, dict):
        sides = {key: side for key, side in value.items() if side is not None}
        if sides.keys() == {"shortest_edge"} and isinstance(sides["shortest_edge"], int):
            return int(sides["shortest_edge"])
        if sides.keys() == {"height", "width"}:
            return _pair([sides["height"], sides["width"]], where)
        raise unsupported(where, f"the image size with the keys {', '.join(map(str, sides))}")
    return value if is_length and isinstance(value, int) else _pair(value, where)


def _square(side: int | tuple[int, int]) -> tuple[int, int]:
    return (side, side) if isinstance(side, int) else side


def _convnext(side: int | tuple[int, int], share: float, where: str) -> tuple[tuple[int, int], int | tuple[int, int]]:
    """(size, resize) of ConvNeXT: below 384 pixels a middle part, above the whole image squashed."""
    if not isinstance(side, int) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise unsupported(where, "crop_pct with this size")
    return _square(side), int(side / share) if side < 384 else _square(side)
