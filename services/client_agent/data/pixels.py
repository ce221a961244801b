"""Raw pixels as encoded images."""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

__all__ = ["png"]


def png(pixels: NDArray[np.uint8]) -> bytes:
    """uint8 [h, w] or [h, w, 3] as a PNG, which loses nothing."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()
