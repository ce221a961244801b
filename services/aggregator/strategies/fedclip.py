"""FedCLIP (Lu et al., 2023) at the coordinator: the attention is averaged, and the classifier if it is trained."""

import numpy as np

from aggregator.strategies.averaging import Averaging
from veilfed.jobs import ATTENTION_IN, ATTENTION_OUT
from veilfed.wire.tensors import Array, Arrays

__all__ = ["Fedclip"]


class Fedclip(Averaging):
    """W1 starts at random, W2 at zero: then all features weigh alike, and the first model is its classifier alone.

    W1's elements have variance 1: an embedding has length 1, so the hidden layer sees deviates of that size.
    """

    def initial(self, class_vectors: Array | None = None) -> Arrays:
        shapes = self.spec.strategy.model_shapes
        random = np.random.default_rng([self.spec.seed, 1])
        return {
            **super().initial(class_vectors),
            ATTENTION_IN: random.standard_normal(shapes[ATTENTION_IN]).astype(np.float32),
            ATTENTION_OUT: np.zeros(shapes[ATTENTION_OUT], np.float32),
        }
