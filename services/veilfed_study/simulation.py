"""All rounds of one job: the aggregator's strategy and the institutions' trainers take turns."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from aggregator.strategies import strategy_for
from client_agent.privacy.gaussian import seeded
from client_agent.privacy.mechanisms import Noise
from client_agent.trainers import Method, State, Trains, method_for, trainer_for
from client_agent.trainers.fedopal import Fedopal
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import Array, Arrays
from veilfed_study.backbone import Backbone
from veilfed_study.parts import Part, Parts
from veilfed_study.prompted import Prompted

__all__ = ["LEAST", "Snapshot", "last_model", "rounds"]

LEAST = 5  # the default of the agents' policy


@dataclass(frozen=True)
class Snapshot:
    """A round: the model and the private states that it starts from, and the updates that it brings.

    `states` are of the institutions that train and have one; the others have the model alone. `updates` is empty in
    the closing round, which evaluates only.
    """

    round: int
    model: Arrays
    states: dict[str, State]
    updates: dict[str, Arrays]


def rounds(
    spec: JobSpec,
    parts: Parts,
    class_vectors: Array | None = None,
    min_class_samples: int = LEAST,
    backbone: Backbone | None = None,
    noise_parties: int = 1,
) -> Iterator[Snapshot]:
    """Rounds 0 to spec.rounds of a job, as over the services; but the noise of a job with privacy is the seed's.

    `parts` has the institutions of the cohort; `min_class_samples` is their policy's; `backbone` embeds for methods
    with prompts; each of `noise_parties` adds a share of the noise. Raises VeilfedError: JOB_INVALID, DATA_INVALID,
    UPDATE_INVALID for training that diverged, and INPUT_INVALID for a method with prompts without a backbone.
    """
    strategy, method = strategy_for(spec), method_for(spec.strategy)
    model = strategy.initial(class_vectors)
    trainers = {
        name: _trainer(spec, method, parts[name], name, min_class_samples, backbone, noise_parties)
        for name in spec.cohort.train
    }
    states = _there({name: trainer.initial_state(model) for name, trainer in trainers.items()})
    for number in range(spec.rounds):
        trained = {name: trainer.train(model, states.get(name), number) for name, trainer in trainers.items()}
        updates = {name: update for name, (update, _) in trained.items()}
        yield Snapshot(number, model, states, updates)
        states = _there({name: state for name, (_, state) in trained.items()})
        model = strategy.fold(_weighted(method, parts, updates), partial(dict, model))
    yield Snapshot(spec.rounds, model, states, {})


def _trainer(
    spec: JobSpec, method: Method[Any], part: Part, name: str, least: int, backbone: Backbone | None, parties: int
) -> Trains:
    if not isinstance(method, Fedopal):
        noise = None
        if spec.privacy is not None:
            noise = Noise(spec.privacy, spec.fold.fraction_bits, parties, seeded([spec.seed, *name.encode()]))
        return trainer_for(
            method,
            *part.training,
            seed=spec.seed,
            institution=name,
            rounds=spec.rounds,
            min_class_samples=least,
            noise=noise,
        )
    if backbone is None:
        raise VeilfedError(Code.INPUT_INVALID, "fedopal needs a model that takes prompts")
    return Prompted(method, part, spec.seed, name, least, backbone)


def _there(states: dict[str, State | None]) -> dict[str, State]:
    return {name: state for name, state in states.items() if state is not None}


def _weighted(method: Method[Any], parts: Parts, updates: dict[str, Arrays]) -> list[tuple[float, Arrays]]:
    return [(method.update_weight(len(parts[name].train)), update) for name, update in updates.items()]


def last_model(spec: JobSpec, parts: Parts, class_vectors: Array | None = None) -> Arrays:
    """The model after all rounds."""
    *_, last = rounds(spec, parts, class_vectors)
    return last.model
