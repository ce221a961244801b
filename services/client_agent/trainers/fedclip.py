"""FedCLIP (Lu et al., 2023) at one institution: an attention over the features, which all share.

z = a / ||a||,   a = h * softmax(W2 tanh(W1 h))
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from client_agent.trainers.inputs import unit
from client_agent.trainers.method import Stepwise, Tensors
from veilfed.jobs import ATTENTION_IN, ATTENTION_OUT, FedclipStrategy

__all__ = ["Fedclip"]


class Fedclip(Stepwise[FedclipStrategy]):
    """Nothing is private: the attention comes with the model, for newcomers too."""

    @property
    def rates(self) -> Mapping[str, float]:
        attention = dict.fromkeys(self.strategy.attention_shapes, self.strategy.attention_rate)
        return {**super().rates, **attention} if self.strategy.train_classifier else attention

    def transformed(self, tensors: Tensors, h: Tensor) -> Tensor:
        attention = torch.softmax(torch.tanh(h @ tensors[ATTENTION_IN].T) @ tensors[ATTENTION_OUT].T, dim=1)
        return unit(h * attention)

    def linear_map(self, tensors: Tensors) -> Tensor | None:
        return None
