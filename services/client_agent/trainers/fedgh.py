"""FedGH (Yi et al., 2023) at one institution: it sends the means of its classes, and the aggregator trains w_g on them.

The black box is frozen, so what an institution trains in front of the classifier is FEDOT's private transform, with a
copy of w_g that is thrown away. The means are of z, and scaled to length 1 as z is.
"""

import torch
from torch import Tensor

from client_agent.trainers.inputs import unit
from client_agent.trainers.method import Tensors, array_of
from client_agent.trainers.orthogonal import PrivateTransform
from veilfed.jobs import MEANS, FedghStrategy
from veilfed.wire.tensors import Arrays

__all__ = ["Fedgh"]


class Fedgh(PrivateTransform[FedghStrategy]):
    """With `transform: identity` the means are of the embeddings, the same in each round."""

    def update(self, tensors: Tensors, h: Tensor, labels: Tensor, least: int) -> Arrays:
        """The means [K, d]; zeros for a class of fewer than `least` samples."""
        z, classes = self.transformed(tensors, h), len(self.strategy.classes)
        sums = torch.zeros(classes, z.shape[1]).index_add_(0, labels, z)
        lengths = torch.linalg.vector_norm(sums, dim=1)
        given = (torch.bincount(labels, minlength=classes) >= least) & (lengths > 0)
        means = torch.zeros_like(sums)
        means[given] = unit(sums[given])
        return {MEANS: array_of(means)}
