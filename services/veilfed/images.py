"""Encoded images -> pixels, with a limit on everything before it is allocated."""

import io
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from veilfed.errors import Code, VeilfedError

__all__ = ["MAX_PIXELS", "decode", "square"]

FORMATS = ("PNG", "JPEG", "WEBP")
MAX_PIXELS = 16_000_000  # 64 MB as RGBA; a small file could claim much more (a decompression bomb)


def decode(data: bytes, position: int) -> Image.Image:
    """An RGB image, transparency laid on white.

    Raises VeilfedError(INPUT_INVALID) that names the `position` in the batch.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own warning of bombs starts above our limit
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                width, height = image.size
                if width * height > MAX_PIXELS:
                    raise VeilfedError(
                        Code.INPUT_INVALID,
                        f"image {position} of the batch has {width} x {height} pixels; "
                        f"at most {MAX_PIXELS} are allowed",
                    )
                rgba = image.convert("RGBA")
    except VeilfedError:
        raise
    except Image.DecompressionBombError:
        raise VeilfedError(
            Code.INPUT_INVALID, f"image {position} of the batch has more than {MAX_PIXELS} pixels"
        ) from None
    except Exception:  # decoders raise whatever a broken file makes them raise
        raise VeilfedError(
            Code.INPUT_INVALID, f"image {position} of the batch is not a readable PNG, JPEG or WebP image"
        ) from None
    return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")


def square(image: Image.Image, side: int) -> NDArray[np.uint8]:
    """The image's middle square, resized: uint8 [side, side, 3]. Resizing is bicubic with antialiasing."""
    if image.size != (side, side):
        width, height = image.size
        edge = min(width, height)
        left, top = (width - edge) / 2, (height - edge) / 2
        image = image.resize((side, side), Image.Resampling.BICUBIC, box=(left, top, left + edge, top + edge))
    return np.asarray(image)
