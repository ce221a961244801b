"""FedOPAL (arXiv 2607.08368) at one institution, after its prompts are tuned (client_agent.trainers.prompts).

The features that come in here were made with prompts already: with the institution's own for its statistics and for
itself, with the mean prompt for a newcomer.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from client_agent.trainers.analytic import Analytic, Summer
from client_agent.trainers.evolution import Subspace
from client_agent.trainers.inputs import Float, Labels
from client_agent.trainers.prompts import TuningSpec
from client_agent.trainers.state import State
from veilfed.jobs import COUNTS, PROMPTS, FedopalStrategy, Shapes
from veilfed.wire.tensors import Arrays

__all__ = ["Fedopal", "Tuned"]


class Fedopal(Analytic[FedopalStrategy]):
    """What an institution has of its own is its prompts; it sends them, and keeps them to classify with."""

    # A turn may have two rounds, whose updates differ.
    sends_once = False

    @property
    def private_shapes(self) -> Shapes:
        return {PROMPTS: self.strategy.prompts_shape}

    def prompts(self, model: Arrays, state: State | None) -> Float | None:
        return (model if state is None else state.tensors)[PROMPTS].astype(np.float32)

    def read_state(self, data: bytes, where: str = "state") -> State:
        return State.from_bytes(data, self.zero_state(), where)

    def zero_state(self) -> State:
        return State.zeros(self.private_shapes, {})

    def tuning(self, seed: int, institution: str) -> TuningSpec:
        """The parameters of an institution's tuning in a job."""
        strategy = self.strategy
        return TuningSpec(
            classes=len(strategy.classes),
            dimension=strategy.dimension,
            temperature=strategy.temperature,
            mu=strategy.mu,
            epochs=strategy.epochs,
            batch_size=strategy.batch_size,
            prompt_rate=strategy.eta,
            head_rate=strategy.head_rate,
            perturbation=None if strategy.tuning == "gradients" else strategy.perturbation,
            seed=seed,
            institution=institution,
            subspace=Subspace(strategy.subspace, strategy.population) if strategy.tuning == "cma-es" else None,
        )


class Tuned:
    """What an institution sends in one round: the counterpart of Trainer, after the work at the oracle is done.

    `features` float32 [n, d] of the samples that may be told about, with the labels `labels` [n]; None where the round
    is about prompts alone. `prompts` are those that were tuned in this round; None where none were.
    """

    def __init__(self, method: Fedopal, features: Float | None, labels: Labels, prompts: Float | None) -> None:
        self._method = method
        self._summer = None if features is None else Summer(method, features, labels, min_class_samples=1)
        self._counts = np.bincount(labels, minlength=len(method.strategy.classes)).astype(np.int64)
        self._prompts = prompts

    def initial_state(self, model: Arrays) -> None:
        """There is none before prompts are tuned."""

    def train(
        self,
        model: Arrays,
        state: State | None,
        round_number: int,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> tuple[Arrays, State | None]:
        """The update, and the state with the institution's own prompts. Raises VeilfedError as Summer.train."""
        arrays: Arrays = {COUNTS: self._counts}
        if self._summer is not None:
            arrays, _ = self._summer.train(model, None, round_number, cancelled)
        if self._prompts is None:
            return arrays, state
        own = replace(self._method.zero_state(), tensors={PROMPTS: self._prompts}, last_round=round_number)
        return {**arrays, PROMPTS: self._prompts}, own
