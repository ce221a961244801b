"""What an institution trains, on its cached embeddings alone: no data, no network and no foundation model in here.

FedotTrainer(strategy, features, labels, *, seed, institution)
    .train(classifier, state, round_number, cancelled=...) -> (classifier, state)
FedotState      .initial(strategy), .to_bytes(), .from_bytes(data, strategy), .save(path), .load(path, strategy);
                .transform is X [r, m, m], .last_round the round that was trained last
evaluate(classifier, transform, features, labels) -> (correct, total)
probabilities(classifier, transform, features, temperature) -> [n, K]
update_weight(strategy, samples) -> float
"""

from client_agent.trainers.fedot import FedotTrainer, evaluate, probabilities, update_weight
from client_agent.trainers.state import FedotState

__all__ = ["FedotState", "FedotTrainer", "evaluate", "probabilities", "update_weight"]
