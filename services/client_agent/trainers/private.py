"""Training with differential privacy: of whole updates, and of single samples (DP-SGD).

Of samples (Abadi et al., 2016, algorithm 1), in each step on FEDOT's w_g and X together:

    every sample takes part with probability q, by itself (Poisson sampling)
    g_i <- g_i min(1, clip / ||g_i||)          of the cross entropy of sample i, over (w_g, X) jointly
    g   <- sum_i g_i + N(0, (z clip)^2)

and g is what Adam gets, whose steps do not depend on the scale of the gradients: no number of samples is divided by,
which would itself tell. X stays with the institution, but what is sent later depends on it: it is noised as well.
Randomness is the operating system's: who knows the seed of a job would know who takes part.

The gradients of single samples are never formed. With (I - R) z = h, y = 2 z - h (client_agent.trainers.cayley), the
residual e = softmax(tau w_g y) - onehot and (I - R)^T u = 2 tau w_g^T e they are outer products,

    d/dw_g = tau e y^T,   d/dX = (u z^T - z u^T) / 2 of each block

with squared norms tau^2 |e|^2 |y|^2 and (|u|^2 |z|^2 - (u z)^2) / 2, and the sum of scaled ones is a product of two
matrices.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from client_agent.privacy.gaussian import bernoulli, discrete_gaussian
from client_agent.privacy.mechanisms import Noise, noisy_update, share, symmetric_noise
from client_agent.trainers.cayley import solved
from client_agent.trainers.inputs import Float, Labels
from client_agent.trainers.method import Stepwise, Tensors, Trains
from client_agent.trainers.state import State
from client_agent.trainers.training import Trainer
from veilfed.jobs import CLASSIFIER, TRANSFORM, SamplePrivacy, UpdatePrivacy
from veilfed.wire.tensors import Arrays

__all__ = ["NoisyUpdates", "SampleTrainer", "clipped_sum"]

# Of a sum of clipped gradients, in units of the clip.
GRADIENT_BITS = 32
# What rounding of the sum to the grid, and floating point, may add to what one sample moves it by, as a part of it:
# 2^-32 for each of 2^24 elements or fewer is 2^-20 in norm; sums of 2^12 terms in float64 are nearer than that.
ROUNDING = 2.0**-16
# Rows whose gradients are summed at a time.
BATCH = 2**12


class NoisyUpdates:
    """A trainer whose updates are clipped and noised; its private state stays as it is."""

    def __init__(self, trainer: Trains, noise: Noise) -> None:
        self._trainer = trainer
        self._noise = noise

    def initial_state(self, model: Arrays) -> State | None:
        return self._trainer.initial_state(model)

    def train(
        self, model: Arrays, state: State | None, round_number: int, cancelled: Callable[[], bool] = lambda: False
    ) -> tuple[Arrays, State | None]:
        """As the trainer's own, and then the noise."""
        privacy = self._noise.privacy
        assert isinstance(privacy, UpdatePrivacy)  # noqa: S101  for mypy: trainer_for sees to it
        update, new = self._trainer.train(model, state, round_number, cancelled)
        return noisy_update(model, update, privacy, self._noise), new


class SampleTrainer(Trainer):
    """DP-SGD of FEDOT. A round that is trained again is another one: it is kept before anything of it leaves."""

    def __init__(
        self, method: Stepwise[Any], features: Float, labels: Labels, noise: Noise, *, seed: int, institution: str
    ) -> None:
        assert isinstance(noise.privacy, SamplePrivacy)  # noqa: S101  for mypy: trainer_for sees to it
        super().__init__(method, features, labels, seed=seed, institution=institution)
        self._noise = noise
        self._privacy = noise.privacy

    def _batches(self, round_number: int) -> Iterable[Tensor]:
        """The rows that take part in each step; in some there may be none."""
        for _ in range(self._privacy.steps(self.method.strategy.epochs)):
            taken = bernoulli(self._privacy.sampling_rate, len(self._labels), self._noise.source)
            yield torch.from_numpy(np.flatnonzero(taken))

    def _gradients(self, tensors: Tensors, values: list[Tensor], rows: Tensor) -> Sequence[Tensor]:
        w, x = tensors[CLASSIFIER].detach().double(), tensors.get(TRANSFORM)
        x = None if x is None else x.detach().double()
        total = [torch.zeros_like(tensor) for tensor in (w, x) if tensor is not None]
        for part in torch.split(rows, BATCH):
            found = clipped_sum(
                w, x, self._h[part].double(), self._labels[part], self.method.strategy.temperature, self._privacy.clip
            )
            total = [sums + more for sums, more in zip(total, found, strict=True)]
        return [self._noised(sums, skew=place > 0).to(values[0].dtype) for place, sums in enumerate(total)]

    def _noised(self, sums: Tensor, skew: bool) -> Tensor:
        """The sum in units of the clip, on the grid, with noise."""
        deviation = self._privacy.noise_multiplier * (1 + ROUNDING) * 2.0**GRADIENT_BITS
        variance = share(int(deviation**2) + 1, self._noise.parties)
        units = np.rint(sums.numpy() * (2.0**GRADIENT_BITS / self._privacy.clip))
        source = self._noise.source
        if skew:
            noise = symmetric_noise(variance, units.shape, source, sign=-1)
        else:
            noise = discrete_gaussian(variance, units.size, source).reshape(units.shape)
        return torch.from_numpy((units + noise) * 2.0**-GRADIENT_BITS)


def clipped_sum(
    w: Tensor, x: Tensor | None, h: Tensor, labels: Tensor, temperature: float, clip: float
) -> list[Tensor]:
    """The sum of the samples' clipped gradients, for w_g [K, d] and, where there is one, X [r, m, m]; float64.

    `h` [n, d] are embeddings of length 1, `labels` [n] their classes.
    """
    if x is None:
        y, z = h, None
    else:
        blocks = h.reshape(len(h), x.shape[0], x.shape[1]).permute(1, 2, 0)
        z, transposed = solved(x, blocks)
        y = (2 * z - blocks).permute(2, 0, 1).reshape(h.shape)
    e = torch.softmax(temperature * (y @ w.T), dim=1)
    e[torch.arange(len(h)), labels] -= 1
    e *= temperature
    squares = e.square().sum(dim=1) * y.square().sum(dim=1)
    if x is None or z is None:
        return [(e * _factors(squares, clip)).T @ y]
    g = (e @ w).reshape(len(h), x.shape[0], x.shape[1]).permute(1, 2, 0)
    u = transposed(2 * g)
    across = u.square().sum(dim=1) * z.square().sum(dim=1) - (u * z).sum(dim=1).square()
    factors = _factors(squares + across.clamp(min=0).sum(dim=0) / 2, clip)
    outer = (u * factors[:, 0]) @ z.mT
    return [(e * factors).T @ y, (outer - outer.mT) / 2]


def _factors(squares: Tensor, clip: float) -> Tensor:
    """min(1, clip / norm) of each sample [n, 1]."""
    return (clip / torch.sqrt(squares).clamp(min=clip))[:, None]
