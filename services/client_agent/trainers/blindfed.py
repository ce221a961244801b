"""BlindFed (ICCV 2025, arXiv 2502.01289) at one institution: adapters on block outputs, trained by SGD.

veilfed.jobs.blindfed has the formulas. Nothing is private, and nothing is kept between rounds.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, gelu

from client_agent.trainers.inputs import Float, Labels, check_labels
from client_agent.trainers.method import Method, Tensors, array_of
from client_agent.trainers.state import State
from client_agent.trainers.training import batches, generator
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import ADAPTER_DOWN, ADAPTER_UP, CLASSIFIER, CLASSIFIER_BIAS, BlindfedStrategy
from veilfed.wire.tensors import Arrays

__all__ = ["AdapterTrainer", "Blindfed"]

# Tokens, padding included, that are looked at together: bounds memory, as outputs of several blocks are long.
CHUNK = 2**13


class Blindfed(Method[BlindfedStrategy]):
    """`features` are float32 [n, t, 1 + R d]: 1 for a token or 0 for padding, then b_l of the R released blocks."""

    def logits(self, tensors: Tensors, h: Tensor) -> Tensor:
        """tau (W h + b) of block outputs [n, t, 1 + R d]: [n, K]."""
        scores = self.pooled(tensors, h) @ tensors[CLASSIFIER].T + tensors[CLASSIFIER_BIAS]
        return self.strategy.temperature * scores

    def pooled(self, tensors: Tensors, outputs: Tensor) -> Tensor:
        """The mean of h_L over the tokens of each sample: [n, d]. Padding is left out, so it costs nothing."""
        strategy, there = self.strategy, outputs[..., 0] > 0
        tokens = outputs[there][:, 1:]
        released = dict(zip(strategy.released, torch.split(tokens, strategy.dimension, dim=1), strict=True))
        h = tokens.new_zeros(len(tokens), strategy.dimension)
        for number in range(strategy.released[0], strategy.blocks + 1):
            down, up = tensors[ADAPTER_DOWN][number - 1], tensors[ADAPTER_UP][number - 1]
            z = h + released[number] if number in released else h
            h = torch.addmm(h, strategy.alpha * gelu(z @ down.T), up.T)
        sums = h.new_zeros(len(outputs), strategy.dimension).index_add(0, there.nonzero()[:, 0], h)
        return sums / there.sum(dim=1, keepdim=True)

    def linear_map(self, tensors: Tensors) -> None:
        return None

    @torch.no_grad()
    def _all_logits(self, model: Arrays, state: State | None, features: Float) -> Tensor:
        tensors = self.tensors(model, state)
        self.check(features)
        rows = max(1, CHUNK // self.strategy.tokens)
        starts = range(0, len(features), rows)
        return torch.cat(
            [self.logits(tensors, torch.from_numpy(np.array(features[start : start + rows]))) for start in starts]
        )

    def check(self, features: Float) -> None:
        """Raises VeilfedError(DATA_INVALID), which names the first bad sample."""
        strategy = self.strategy
        wanted = (len(features), strategy.tokens, strategy.width)
        if features.shape != wanted or features.dtype != np.float32 or not len(features):
            raise VeilfedError(
                Code.DATA_INVALID,
                f"block outputs are {features.dtype} {list(features.shape)}; the job needs float32 "
                f"[n, {strategy.tokens}, {strategy.width}], n > 0",
            )
        rows = max(1, CHUNK // strategy.tokens)
        for start in range(0, len(features), rows):
            part = features[start : start + rows]
            mask = part[..., 0]
            good = np.isfinite(part).all(axis=(1, 2)) & ((mask == 0) | (mask == 1)).all(axis=1) & mask.any(axis=1)
            if not good.all():
                raise VeilfedError(
                    Code.DATA_INVALID,
                    f"block outputs of sample {start + int(np.argmin(good))}: not finite, a mask that is not 0 or 1, "
                    "or no token",
                )


class AdapterTrainer:
    """The training split of one institution in a job of `rounds` rounds: SGD on the mean cross entropy of batches.

    `features` as of Blindfed, `labels` int64 [n] in [0, K). Raises VeilfedError(DATA_INVALID) where they do not fit. An
    update depends on the model, the round, and what is given here alone, as in client_agent.trainers.training.
    """

    def __init__(
        self, method: Blindfed, features: Float, labels: Labels, *, seed: int, institution: str, rounds: int
    ) -> None:
        check_labels(labels, len(features), len(method.strategy.classes))
        method.check(features)
        self.method = method
        self._features, self._labels = features, labels
        self._seed, self._institution, self._rounds = seed, institution, rounds

    def initial_state(self, model: Arrays) -> None:
        """There is none."""

    def train(
        self, model: Arrays, state: None, round_number: int, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[Arrays, None]:
        """Trains for E epochs, and leaves the model as it was. `cancelled` is asked before each batch.

        Raises VeilfedError: INPUT_INVALID for tensors that are not the method's, CANCELLED, and UPDATE_INVALID if the
        result is not finite.
        """
        strategy = self.method.strategy
        tensors = self.method.tensors(model, None)
        values = [tensor.requires_grad_() for tensor in tensors.values()]
        rate = strategy.rate_of(round_number, self._rounds)
        random = generator(self._seed, self._institution, round_number)
        for rows in batches(random, len(self._labels), strategy.epochs, strategy.batch_size):
            if cancelled():
                raise VeilfedError(Code.CANCELLED, f"training of round {round_number} was stopped")
            taken = rows.numpy()
            logits = self.method.logits(tensors, torch.from_numpy(self._features[taken]))
            gradients = torch.autograd.grad(cross_entropy(logits, torch.from_numpy(self._labels[taken])), values)
            with torch.no_grad():
                for value, gradient in zip(values, gradients, strict=True):
                    value.sub_(gradient, alpha=rate)
        if not all(torch.isfinite(value).all() for value in values):
            raise VeilfedError(
                Code.UPDATE_INVALID, f"training of round {round_number} diverged", "Submit the job with a lower rate."
            )
        return {name: array_of(tensors[name]) for name in strategy.update_shapes}, None
