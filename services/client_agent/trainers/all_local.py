"""FEDOT without aggregation ("all local" in the paper's comparison): classifier and X are private, nothing is sent."""

import numpy as np

from client_agent.trainers.orthogonal import Orthogonal
from veilfed.jobs import CLASSIFIER, TRANSFORM, AllLocalStrategy, Shapes
from veilfed.wire.tensors import Arrays

__all__ = ["AllLocal"]


class AllLocal(Orthogonal[AllLocalStrategy]):
    """The institution's own classifier starts as the job's first model. A newcomer has that model alone."""

    @property
    def private_shapes(self) -> Shapes:
        return {CLASSIFIER: self.strategy.classifier_shape, TRANSFORM: self.strategy.transform_shape}

    def first_private(self, model: Arrays, random: np.random.Generator) -> Arrays:
        return {**super().first_private(model, random), CLASSIFIER: model[CLASSIFIER]}
