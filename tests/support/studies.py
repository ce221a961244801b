"""Small made-up subjects for studies: domains that are rotations of each other."""

import numpy as np
import torch
from numpy.typing import NDArray

from client_agent.data.source import Samples
from veilfed.errors import Code, VeilfedError
from veilfed_study.parts import Domain
from veilfed_study.subjects import Subject

__all__ = ["CLASSES", "NAMES", "made_up"]

# As the commands have: threads that wait for each other take longer than such small sums.
torch.set_num_threads(1)

NAMES = ("one", "two", "three")
CLASSES = ("a", "b", "c")


def rotation(angle: float) -> NDArray[np.float64]:
    """Turns the first axis towards the second, and so on, inside the first of two blocks."""
    turn = np.eye(8)
    turn[:2, :2] = turn[2:4, 2:4] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return turn


def domain(name: str, angle: float, classes: int = 3) -> Domain:
    """Classes are directions 0, 1 and 2, turned by `angle`; 90 groups of two equal-class samples."""
    rng = np.random.default_rng(abs(int(1000 * angle)))
    labels = np.arange(180) // 2 % classes
    features = (np.eye(3, 8)[labels] + rng.normal(0, 0.25, (180, 8))) @ rotation(angle).T
    groups = [f"{name}:{row // 2}" for row in range(180)]
    samples = Samples("text", [""] * 180, [CLASSES[label] for label in labels], groups)
    return Domain(samples, features.astype(np.float32), labels.astype(np.int64))


def made_up(classes: int = 3, text_tower: bool = True, missing: str = "") -> Subject:
    """Three domains of `classes` classes; the domain `missing` has one class less. Class vectors are its directions."""

    def vectors() -> NDArray[np.float32]:
        if not text_tower:
            raise VeilfedError(Code.INPUT_INVALID, "no text tower")
        return np.eye(classes, 8, dtype=np.float32)

    domains = {
        name: domain(name, angle, classes - (name == missing))
        for name, angle in zip(NAMES, (-0.9, 0.0, 0.9), strict=True)
    }
    return Subject("made-up", "rotations", "none", "0" * 64, CLASSES[:classes], 8, domains, text_tower, vectors)
