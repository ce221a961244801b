"""What every method is at an institution: which tensors stay private, how it transforms embeddings and classifies them.

    p = softmax(tau w_g z),   z = f(h) / ||f(h)||

with a classifier w_g [K, d] and a transformation f of the embedding h that is the method's own.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from client_agent.trainers.inputs import Float, Labels, check_labels, checked, normalised
from client_agent.trainers.state import State
from veilfed.jobs import CLASSIFIER, Shapes, StrategySpec, TrainedSpec
from veilfed.wire.tensors import Arrays

__all__ = ["Method", "Spec", "Stepwise", "Tensors", "Trains", "array_of"]

Spec = TypeVar("Spec", bound=StrategySpec)
TrainedSpecs = TypeVar("TrainedSpecs", bound=TrainedSpec)
Tensors = Mapping[str, Tensor]

_CHUNK = 1024  # rows evaluated at once: bounds memory


class Method(Generic[Spec]):
    """One method with a job's parameters. In the base f is the identity, and nothing is private."""

    # Whether the model that a round starts from is evaluated before it is trained.
    evaluates_first = True
    # Whether a job gets one update from an institution: asked again, it sends the same, whatever its data are by then.
    sends_once = False

    def __init__(self, strategy: Spec) -> None:
        self.strategy = strategy

    # What a method says.

    @property
    def private_shapes(self) -> Shapes:
        """Name and shape of each tensor that stays with the institution; it goes before one of the model."""
        return {}

    def transformed(self, tensors: Tensors, h: Tensor) -> Tensor:
        """z [n, d] of rows h of length 1. Of a newcomer, `tensors` has no private ones."""
        return h

    def prompts(self, model: Arrays, state: State | None) -> Float | None:
        """The prompt tokens [M, D] that inputs are embedded with; None for none. Without a state as a newcomer."""
        return None

    def linear_map(self, tensors: Tensors) -> Tensor | None:
        """f as a matrix [d, d] in float64; None if it is not linear."""
        return torch.eye(self.strategy.dimension, dtype=torch.float64)

    # What follows from that.

    def logits(self, tensors: Tensors, h: Tensor) -> Tensor:
        """tau w_g z: [n, K]."""
        return self.strategy.temperature * (self.transformed(tensors, h) @ tensors[CLASSIFIER].T)

    def evaluate(self, model: Arrays, state: State | None, features: Float, labels: Labels) -> tuple[int, int]:
        """(right answers, samples). Without a state as a newcomer: with the model alone.

        Raises VeilfedError(DATA_INVALID or INPUT_INVALID) for what does not fit together.
        """
        check_labels(labels, len(features), len(self.strategy.classes))
        guesses = self._all_logits(model, state, features).argmax(dim=1).numpy()
        return int((guesses == labels).sum()), len(labels)

    def probabilities(self, model: Arrays, state: State | None, features: Float) -> Float:
        """The probability of each class for each row of `features`: [n, K]. Errors as in `evaluate`."""
        return array_of(torch.softmax(self._all_logits(model, state, features), dim=1))

    @torch.no_grad()
    def _all_logits(self, model: Arrays, state: State | None, features: Float) -> Tensor:
        tensors = self.tensors(model, state)
        h = normalised(features, self.strategy.dimension)
        return torch.cat([self.logits(tensors, chunk) for chunk in torch.split(h, _CHUNK)])

    def tensors(self, model: Arrays, state: State | None) -> dict[str, Tensor]:
        """Copies of the model's tensors, with the private ones before them. Raises VeilfedError(INPUT_INVALID)."""
        arrays = dict(checked(model, self.strategy.model_shapes, self.strategy.dtype))
        if state is not None:
            arrays |= checked(state.tensors, self.private_shapes)
        return {name: torch.from_numpy(np.array(array, order="C")) for name, array in arrays.items()}

    def condition_number(self, model: Arrays, state: State | None) -> float | None:
        """Largest over smallest singular value of f, a linear one; None otherwise. For whoever holds the state."""
        formed = self.linear_map(self.tensors(model, state))
        return None if formed is None else float(torch.linalg.cond(formed))

    def read_state(self, data: bytes, where: str = "state") -> State | None:
        """The state of its bytes; None for a method without any. Raises VeilfedError(STATE_CORRUPT)."""
        return None

    def update_weight(self, samples: int) -> float:
        """The weight of an update that was trained on so many samples; 0 if it has no tensors."""
        if not self.strategy.update_shapes:
            return 0.0
        return float(samples) if self.strategy.weighting == "samples" else 1.0


class Stepwise(Method[TrainedSpecs]):
    """A method that is trained by steps of Adam. The base is plain averaging."""

    @property
    def rates(self) -> Mapping[str, float]:
        """Adam's rate of each tensor that is trained; others of the model stay as they are."""
        return {CLASSIFIER: self.strategy.classifier_rate}

    def first_private(self, model: Arrays, random: np.random.Generator) -> Arrays:
        """The private tensors of an institution that has trained no round."""
        return _zeros(self.private_shapes)

    def update(self, tensors: Tensors, h: Tensor, labels: Tensor, least: int) -> Arrays:
        """What is sent after a round: of all tensors as trained, and of the training split.

        Of a class with fewer than `least` samples nothing is told that is about its samples alone.
        """
        return {name: array_of(tensors[name]) for name in self.strategy.update_shapes}

    def zero_state(self) -> State:
        """A state with the names and shapes of the method's."""
        shapes = {**self.strategy.model_shapes, **self.private_shapes}
        return State.zeros(self.private_shapes, {name: shapes[name] for name in self.rates})

    def read_state(self, data: bytes, where: str = "state") -> State:
        """The state of `State.to_bytes`. Raises VeilfedError(STATE_CORRUPT), which names `where`."""
        return State.from_bytes(data, self.zero_state(), where)


class Trains(Protocol):
    """What computes an institution's updates."""

    def initial_state(self, model: Arrays) -> State | None:
        """The private state before the first round; None where there is never one."""

    def train(
        self, model: Arrays, state: Any, round_number: int, cancelled: Callable[[], bool] = ...
    ) -> tuple[Arrays, State | None]:
        """What is sent, and the new state."""


def _zeros(shapes: Shapes) -> Arrays:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def array_of(tensor: Tensor) -> Float:
    """The array of a tensor, which shares its memory."""
    array: Float = tensor.detach().numpy()
    return array
