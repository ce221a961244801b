"""The vectors of benchmarks.secagg, the same for both systems; needs NumPy alone."""

import numpy as np

__all__ = ["SHAPES", "vector"]

# Elements of an update: a classifier of 10 classes, and the triangle of R, both at d = 768.
SHAPES = {"10x768": 10 * 768, "R768": 768 * 769 // 2}


def vector(shape: str, client: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Normal deviates between -7 and 7; of the classifier rounded to float32, as it travels."""
    values = np.clip(np.random.default_rng([len(shape), client]).standard_normal(SHAPES[shape]), -7, 7)
    return values.astype(np.float32).astype(np.float64) if shape == "10x768" else values
