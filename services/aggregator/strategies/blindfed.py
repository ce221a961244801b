"""BlindFed (ICCV 2025, arXiv 2502.01289) at the coordinator: adapters and classifier are averaged."""

import numpy as np

from aggregator.strategies.averaging import Averaging
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import ADAPTER_DOWN, ADAPTER_UP
from veilfed.wire.tensors import Array, Arrays

__all__ = ["Blindfed"]


class Blindfed(Averaging):
    """Both matrices of an adapter start at random, with variance 1 / (its inputs); the classifier at zero.

    Adapters often start with W_u = 0. Here all that the classifier sees comes from W_u: with it at zero, too, no tensor
    but the classifier's bias would have a gradient.
    """

    def initial(self, class_vectors: Array | None = None) -> Arrays:
        if class_vectors is not None:
            raise VeilfedError(Code.JOB_INVALID, "job: blindfed takes no class vectors")
        shapes = self.spec.strategy.model_shapes
        model: Arrays = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
        for number, name in enumerate((ADAPTER_DOWN, ADAPTER_UP)):
            random = np.random.default_rng([self.spec.seed, number])
            deviates = random.standard_normal(shapes[name]) / np.sqrt(shapes[name][-1])
            model[name] = deviates.astype(np.float32)
        return model
