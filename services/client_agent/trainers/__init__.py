"""What an institution computes, on its cached embeddings alone: no data, no network and no foundation model in here.

method_for(strategy) -> Method           the method that a job names (client_agent.trainers.method)
    .evaluate(model, state, features, labels) -> (right answers, samples)     state: None for a newcomer
    .probabilities(model, state, features) -> [n, K]
    .condition_number(model, state) -> float | None
    .read_state(data, where) -> State                                   of state.to_bytes()
    .update_weight(samples) -> float
    .prompts(model, state) -> [M, D] | None                             what inputs are embedded with
trainer_for(method, features, labels, seed=, institution=, rounds=) -> Trains
    .initial_state(model) -> State | None                               before the first round; None for no state
    .train(model, state, round_number, cancelled) -> (update, state)

`model` and `update` are named arrays as on the wire: strategy.model_shapes, strategy.update_shapes, strategy.dtype.
"""

from typing import Any

from client_agent.privacy.mechanisms import Noise
from client_agent.trainers.all_global import AllGlobal
from client_agent.trainers.all_local import AllLocal
from client_agent.trainers.analytic import Analytic, Summer
from client_agent.trainers.blindfed import AdapterTrainer, Blindfed
from client_agent.trainers.fedadapter import Fedadapter
from client_agent.trainers.fedclip import Fedclip
from client_agent.trainers.fedgh import Fedgh
from client_agent.trainers.fedlt import Fedlt
from client_agent.trainers.fedopal import Fedopal
from client_agent.trainers.fedot import Fedot
from client_agent.trainers.inputs import Float, Labels
from client_agent.trainers.method import Method, Stepwise, Trains
from client_agent.trainers.private import NoisyUpdates, SampleTrainer
from client_agent.trainers.state import State
from client_agent.trainers.training import Trainer
from veilfed.jobs import SamplePrivacy, Strategy, StrategyName

__all__ = ["METHODS", "Method", "State", "Stepwise", "Trainer", "Trains", "method_for", "trainer_for"]

METHODS: dict[StrategyName, type[Method[Any]]] = {
    "fedot": Fedot,
    "all-global": AllGlobal,
    "all-local": AllLocal,
    "fedlt": Fedlt,
    "fedadapter": Fedadapter,
    "fedclip": Fedclip,
    "fedgh": Fedgh,
    "afl": Analytic,
    "fedcgs": Analytic,
    "fedopal": Fedopal,
    "blindfed": Blindfed,
}


def method_for(strategy: Strategy) -> Method[Any]:
    """The method that a job names."""
    return METHODS[strategy.name](strategy)


def trainer_for(
    method: Method[Any],
    features: Float,
    labels: Labels,
    *,
    seed: int,
    institution: str,
    rounds: int,
    min_class_samples: int = 5,
    min_samples: int = 1,
    noise: Noise | None = None,
) -> Trains:
    """Of the training split of one institution: embeddings float32 [n, d] as the oracle gave them, labels int64 [n];
    of `blindfed` block outputs, see AdapterTrainer. `rounds` is how many the job has.

    The policy's limits: `min_class_samples` of a class, or nothing is told about it alone; `min_samples` in all, or
    sums over them are not given out. `noise` is that of a job with privacy. Raises VeilfedError(DATA_INVALID).
    """
    trainer: Trains
    if isinstance(method, Blindfed):
        trainer = AdapterTrainer(method, features, labels, seed=seed, institution=institution, rounds=rounds)
        return trainer if noise is None else NoisyUpdates(trainer, noise)
    if not isinstance(method, Stepwise):
        return Summer(
            method, features, labels, min_class_samples=min_class_samples, min_samples=min_samples, noise=noise
        )
    if noise is not None and isinstance(noise.privacy, SamplePrivacy):
        return SampleTrainer(method, features, labels, noise, seed=seed, institution=institution)
    trainer = Trainer(method, features, labels, seed=seed, institution=institution, min_class_samples=min_class_samples)
    return trainer if noise is None else NoisyUpdates(trainer, noise)
