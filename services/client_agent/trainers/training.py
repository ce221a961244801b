"""One institution's training: Adam on the mean cross entropy of batches, of any method.

A round's result depends on its arguments alone, bit for bit, on one machine with one number of threads; the process
sets that number once (torch.set_num_threads).
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_agent.trainers import adam
from client_agent.trainers.inputs import Float, Labels, check_labels, normalised
from client_agent.trainers.method import Stepwise, Tensors, array_of
from client_agent.trainers.state import State
from veilfed.errors import Code, VeilfedError
from veilfed.wire.tensors import Arrays

__all__ = ["Trainer", "batches", "generator"]


class Trainer:
    """The training split of one institution in one job.

    `features` float32 [n, d] as the oracle gave them, `labels` int64 [n] in [0, K). Raises VeilfedError(DATA_INVALID)
    where they do not fit the method or an embedding is not finite or zero. `min_class_samples` is the policy's.
    """

    def __init__(
        self,
        method: Stepwise[Any],
        features: Float,
        labels: Labels,
        *,
        seed: int,
        institution: str,
        min_class_samples: int = 5,
    ) -> None:
        check_labels(labels, len(features), len(method.strategy.classes))
        self.method = method
        self._h = normalised(features, method.strategy.dimension)
        self._labels = torch.from_numpy(np.array(labels))
        self._seed = seed
        self._institution = institution
        self._least = min_class_samples

    def initial_state(self, model: Arrays) -> State:
        """The state before the first round, which starts from this model."""
        private = self.method.first_private(model, self._random("start"))
        return replace(self.method.zero_state(), tensors=private)

    def train(
        self, model: Arrays, state: State, round_number: int, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[Arrays, State]:
        """Trains for E epochs; returns what is sent and the new state, and leaves the arguments as they were.

        `cancelled` is asked before each batch. Raises VeilfedError: TASK_INVALID if the state has this round or a
        later one in it already, INPUT_INVALID for tensors that are not the method's, CANCELLED, and UPDATE_INVALID
        if the result is not finite.
        """
        if round_number <= state.last_round:
            raise VeilfedError(
                Code.TASK_INVALID,
                f"round {round_number} cannot be trained on a state that has round {state.last_round} in it",
            )
        method = self.method
        tensors = method.tensors(model, state)
        parameters = {
            name: adam.Parameter(
                tensors[name].requires_grad_(), rate, _copy(state.means[name]), _copy(state.squares[name])
            )
            for name, rate in method.rates.items()
        }
        values = [parameter.value for parameter in parameters.values()]
        count = state.steps
        for rows in self._batches(round_number):
            if cancelled():
                raise VeilfedError(Code.CANCELLED, f"training of round {round_number} was stopped")
            count += 1
            adam.step(list(parameters.values()), self._gradients(tensors, values, rows), count)
        if not all(torch.isfinite(value).all() for value in values):
            raise VeilfedError(
                Code.UPDATE_INVALID, f"training of round {round_number} diverged", "Submit the job with lower rates."
            )
        new = State(
            tensors={name: array_of(tensors[name]) for name in method.private_shapes},
            means={name: array_of(parameter.mean) for name, parameter in parameters.items()},
            squares={name: array_of(parameter.square) for name, parameter in parameters.items()},
            steps=count,
            last_round=round_number,
        )
        with torch.no_grad():
            return method.update(tensors, self._h, self._labels, self._least), new

    def _gradients(self, tensors: Tensors, values: list[Tensor], rows: Tensor) -> Sequence[Tensor]:
        """Of the mean cross entropy of these rows, with respect to `values`, which are among `tensors`."""
        loss = torch.nn.functional.cross_entropy(self.method.logits(tensors, self._h[rows]), self._labels[rows])
        return torch.autograd.grad(loss, values)

    def _batches(self, round_number: int) -> Iterable[Tensor]:
        """The rows of each batch of the round: E permutations, the same whenever the round is trained again."""
        strategy = self.method.strategy
        return batches(self._random(round_number), len(self._labels), strategy.epochs, strategy.batch_size)

    def _random(self, purpose: int | str) -> np.random.Generator:
        return generator(self._seed, self._institution, purpose)


def batches(random: np.random.Generator, samples: int, epochs: int, batch_size: int) -> list[Tensor]:
    """The rows of each batch of so many passes over the samples, each in an order of its own."""
    orders = [torch.from_numpy(random.permutation(samples)) for _ in range(epochs)]
    return [batch for order in orders for batch in torch.split(order, batch_size)]


def generator(seed: int, institution: str, purpose: int | str) -> np.random.Generator:
    """The same for the same job's seed, institution, and purpose: a round, or another word."""
    name = f"{seed}:{institution}:{purpose}"
    return np.random.default_rng(list(hashlib.sha256(name.encode()).digest()))


def _copy(array: Any) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))
