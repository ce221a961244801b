"""What an institution computes, on its cached embeddings alone: no data, no network and no foundation model in here.

method_for(strategy) -> Method           the method that a job names (client_agent.trainers.method)
    .trainer(features, labels, seed=, institution=) -> Trainer
        .initial_state(model) -> State                                  before the first round
        .train(model, state, round_number, cancelled) -> (update, state)
    .evaluate(model, state, features, labels) -> (right answers, samples)     state: None for a newcomer
    .probabilities(model, state, features) -> [n, K]
    .condition_number(model, state) -> float | None
    .read_state(data, where) -> State                                   of state.to_bytes()
    .update_weight(samples) -> float

`model` and `update` are named float32 arrays as on the wire: strategy.model_shapes and strategy.update_shapes.
"""

from typing import Any

from client_agent.trainers.all_global import AllGlobal
from client_agent.trainers.all_local import AllLocal
from client_agent.trainers.fedadapter import Fedadapter
from client_agent.trainers.fedclip import Fedclip
from client_agent.trainers.fedgh import Fedgh
from client_agent.trainers.fedlt import Fedlt
from client_agent.trainers.fedot import Fedot
from client_agent.trainers.method import Method
from client_agent.trainers.state import State
from client_agent.trainers.training import Trainer
from veilfed.jobs import Strategy, StrategyName

__all__ = ["METHODS", "Method", "State", "Trainer", "method_for"]

METHODS: dict[StrategyName, type[Method[Any]]] = {
    "fedot": Fedot,
    "all-global": AllGlobal,
    "all-local": AllLocal,
    "fedlt": Fedlt,
    "fedadapter": Fedadapter,
    "fedclip": Fedclip,
    "fedgh": Fedgh,
}


def method_for(strategy: Strategy) -> Method[Any]:
    """The method that a job names."""
    return METHODS[strategy.name](strategy)
