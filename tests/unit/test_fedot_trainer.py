"""One institution's round: against the formulas in double precision, its repeatability and its refusals."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from client_agent.trainers import State, Trainer
from tests.support import dense, methods
from tests.support.methods import data, stepwise
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import FedotStrategy
from veilfed.wire.tensors import Arrays

Float = NDArray[np.float32]


def strategy(**changes: Any) -> FedotStrategy:
    made = methods.strategy("fedot", **{"blocks": 3, "transform_rate": 1e-2, **changes})
    assert isinstance(made, FedotStrategy)
    return made


def model(classifier: Any) -> Arrays:
    return {"classifier": classifier}


def classifier_of(arrays: Arrays) -> Float:
    return np.asarray(arrays["classifier"], np.float32)


def first_classifier(seed: int = 1) -> Float:
    return (0.1 * np.random.default_rng(seed).normal(size=(3, 12))).astype(np.float32)


def trainer(spec: FedotStrategy | None = None, seed: int = 50, institution: str = "one") -> Trainer:
    return methods.trainer(spec or strategy(), seed, institution)


def initial(spec: FedotStrategy | None = None) -> State:
    return trainer(spec).initial_state(model(first_classifier()))


def train(rounds: int, spec: FedotStrategy | None = None, **options: Any) -> tuple[Float, State]:
    spec = spec or strategy()
    shared, state = model(first_classifier()), initial(spec)
    for number in range(rounds):
        shared, state = trainer(spec, **options).train(shared, state, number)
    return classifier_of(shared), state


def evaluate(classifier: Float, state: State | None, *split: Any) -> tuple[int, int]:
    return stepwise(strategy()).evaluate(model(classifier), state, *split)


def accuracy(classifier: Float, state: State) -> float:
    correct, total = evaluate(classifier, state, *data(seed=7))
    return correct / total


def test_one_step_is_adam_on_the_papers_loss() -> None:
    """A round of one batch against autograd through the formed transform in double precision and torch's own Adam."""
    spec = strategy(batch_size=64)
    features, labels = data()
    rng = np.random.default_rng(3)
    x0 = rng.normal(0, 0.5, spec.transform_shape).astype(np.float32)
    start = replace(initial(spec), tensors={"transform": x0})
    trained, state = trainer(spec).train(model(first_classifier()), start, 0)

    w = torch.from_numpy(first_classifier()).double().requires_grad_()
    x = torch.from_numpy(x0).double().requires_grad_()
    h = torch.from_numpy(features).double()
    picked = dense.classify(w, x, h, spec.temperature)[torch.arange(len(labels)), torch.from_numpy(labels)]
    (-picked.log()).mean().backward()  # type: ignore[no-untyped-call]
    torch.optim.Adam([{"params": [w], "lr": spec.classifier_rate}, {"params": [x], "lr": spec.transform_rate}]).step()
    np.testing.assert_allclose(classifier_of(trained), w.detach().numpy(), atol=1e-5)
    # Symmetric parts of X have no gradient but rounding, which Adam blows up; only the skew part is defined.
    np.testing.assert_allclose(skew(state.tensors["transform"]), skew(x.detach().numpy()), atol=1e-4)


def skew(x: NDArray[Any]) -> NDArray[Any]:
    return np.asarray((x - x.transpose(0, 2, 1)) / 2)


def test_training_learns_and_keeps_the_transform_orthogonal() -> None:
    spec = strategy(epochs=5)
    before = accuracy(first_classifier(), initial(spec))
    classifier, state = train(20, spec)
    assert accuracy(classifier, state) > max(0.9, before)
    w = dense.transform(torch.from_numpy(state.tensors["transform"]).double())
    assert not torch.allclose(w, torch.eye(12, dtype=w.dtype), atol=1e-2)
    torch.testing.assert_close(w @ w.T, torch.eye(12, dtype=w.dtype))
    assert torch.linalg.det(w).item() == pytest.approx(1.0)


def test_the_private_transform_undoes_a_rotation_that_the_classifier_cannot_know() -> None:
    """The classifier is right for others; this institution's embeddings are rotated; only X can adapt to that."""
    spec = strategy(blocks=1, classifier_rate=1e-9, epochs=20, classes=["a", "b", "c"])
    features, labels = data(200)
    turned = (features @ np.linalg.qr(np.random.default_rng(8).normal(size=(12, 12)))[0]).astype(np.float32)
    shared = np.eye(3, 12, dtype=np.float32)
    method = stepwise(spec)
    _, state = Trainer(method, turned, labels, seed=1, institution="one").train(model(shared), initial(spec), 0)
    alone, total = method.evaluate(model(shared), None, turned, labels)
    adapted, _ = method.evaluate(model(shared), state, turned, labels)
    assert alone < 0.7 * total
    assert adapted > 0.9 * total


def test_a_round_gives_the_same_bits_again() -> None:
    first, second = train(3), train(3)
    assert first[0].tobytes() == second[0].tobytes()
    assert first[1].to_bytes() == second[1].to_bytes()


def test_a_round_goes_on_from_saved_state_bit_for_bit() -> None:
    spec = strategy()
    classifier, state = train(2)
    revived = stepwise(spec).read_state(state.to_bytes())
    one = trainer().train(model(classifier), state, 2)
    two = trainer().train(model(classifier), revived, 2)
    assert one[0]["classifier"].tobytes() == two[0]["classifier"].tobytes()
    assert one[1].to_bytes() == two[1].to_bytes()


def test_the_order_of_batches_follows_from_seed_institution_and_round() -> None:
    base = train(1)[0]
    assert train(1, seed=51)[0].tobytes() != base.tobytes()
    assert train(1, institution="two")[0].tobytes() != base.tobytes()
    other = trainer().train(model(first_classifier()), initial(), 1)[0]["classifier"]
    assert other.tobytes() != base.tobytes()


def test_training_leaves_its_arguments_as_they_were() -> None:
    classifier, state = first_classifier(), initial()
    classifier.flags.writeable = False  # as arrays from the wire are
    before = classifier.tobytes(), state.to_bytes()
    trained, new = trainer().train(model(classifier), state, 0)
    assert (classifier.tobytes(), state.to_bytes()) == before
    assert trained["classifier"].tobytes() != before[0]
    assert new.last_round == 0
    assert new.steps == 4  # 50 samples in batches of 16


def test_the_identity_has_no_transform_and_equals_a_transform_that_does_not_move() -> None:
    spec = strategy(transform="identity")
    plain, state = train(3, spec)
    assert state.tensors == {}
    frozen, _ = train(3, strategy(transform_rate=1e-30))
    np.testing.assert_allclose(plain, frozen, atol=1e-6)
    assert stepwise(spec).evaluate(model(plain), state, *data()) == evaluate(plain, None, *data())


def test_the_length_of_an_embedding_does_not_matter() -> None:
    features, labels = data()
    scaled = (features * np.linspace(0.5, 50, len(features), dtype=np.float32)[:, None]).astype(np.float32)
    one, two = (
        Trainer(stepwise(strategy()), rows, labels, seed=1, institution="a").train(
            model(first_classifier()), initial(), 0
        )[0]
        for rows in (features, scaled)
    )
    np.testing.assert_allclose(classifier_of(one), classifier_of(two), atol=1e-4)


def test_probabilities_and_counts_are_those_of_the_formula() -> None:
    classifier, state = train(5)
    features, labels = data(3000, seed=9)  # more than is evaluated at once
    expected = dense.classify(
        torch.from_numpy(classifier).double(),
        torch.from_numpy(state.tensors["transform"]).double(),
        torch.from_numpy(features).double(),
        20.0,
    ).numpy()
    got = stepwise(strategy()).probabilities(model(classifier), state, features)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    np.testing.assert_allclose(got.sum(axis=1), 1.0, atol=1e-5)
    correct, total = evaluate(classifier, state, features, labels)
    assert total == 3000
    assert correct == int((expected.argmax(axis=1) == labels).sum())


def test_a_round_is_not_trained_on_top_of_itself() -> None:
    classifier, state = train(2)
    for number in (0, 1):
        with pytest.raises(VeilfedError, match="has round 1 in it") as refused:
            trainer().train(model(classifier), state, number)
        assert refused.value.code is Code.TASK_INVALID
    trainer().train(model(classifier), state, 5)  # rounds may be missed


def test_training_stops_when_it_is_told_to() -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) == 3

    with pytest.raises(VeilfedError) as refused:
        trainer().train(model(first_classifier()), initial(), 0, cancelled)
    assert refused.value.code is Code.CANCELLED
    assert len(asked) == 3


def test_divergence_is_an_error() -> None:
    classifier = np.full((3, 12), 3e38, np.float32)
    with pytest.raises(VeilfedError) as refused:
        trainer().train(model(classifier), initial(), 0)
    assert refused.value.code is Code.UPDATE_INVALID


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
def test_a_useless_embedding_is_named_by_its_row(value: float) -> None:
    features, labels = data()
    features[17] = value
    with pytest.raises(VeilfedError, match="embedding 17 ") as refused:
        Trainer(stepwise(strategy()), features, labels, seed=1, institution="a")
    assert refused.value.code is Code.DATA_INVALID


def test_data_that_does_not_fit_the_job_is_refused() -> None:
    features, labels = data()

    def refuse(features: Any, labels: Any) -> None:
        with pytest.raises(VeilfedError) as refused:
            Trainer(stepwise(strategy()), features, labels, seed=1, institution="a")
        assert refused.value.code is Code.DATA_INVALID

    refuse(features[:, :8], labels)
    refuse(features[:0], labels[:0])
    refuse(features, labels[:-1])
    refuse(features, labels + 1)
    refuse(features, labels - 1)
    refuse(features, labels.astype(np.float64))


def test_models_that_do_not_fit_the_job_are_refused() -> None:
    features, labels = data()
    bad: list[Any] = [first_classifier()[:2], first_classifier()[:, :8], first_classifier().astype(np.float64)]
    models: list[Arrays] = [*map(model, bad), {}, {"classifier": first_classifier(), "other": first_classifier()}]
    for arrays in models:
        with pytest.raises(VeilfedError) as refused:
            trainer().train(arrays, initial(), 0)
        assert refused.value.code is Code.INPUT_INVALID
    with pytest.raises(VeilfedError, match="transform"):
        trainer().train(model(first_classifier()), initial(strategy(blocks=2)), 0)
    with pytest.raises(VeilfedError, match="transform"):
        evaluate(first_classifier(), initial(strategy(blocks=2)), features, labels)


def test_the_weight_is_one_or_the_number_of_samples() -> None:
    assert stepwise(strategy()).update_weight(123) == 1.0
    assert stepwise(strategy(weighting="samples")).update_weight(123) == 123.0
