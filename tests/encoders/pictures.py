"""Pictures that show differences of preprocessing: many shapes, sharp edges."""

import io

import numpy as np
from PIL import Image

from tests.support.models import png

__all__ = ["PICTURES", "opened"]

SHAPES = [(64, 64), (61, 97), (97, 61), (233, 300), (300, 233), (500, 31)]  # height, width

PICTURES = [png(np.random.default_rng(row).integers(0, 256, (*shape, 3), np.uint8)) for row, shape in enumerate(SHAPES)]


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")
