"""Every method at an institution: against its formula in double precision, and what it keeps and sends."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from aggregator.strategies import STRATEGIES, strategy_for
from client_agent.trainers import METHODS, State, Trainer
from tests.support import dense, methods
from tests.support.methods import ANALYTIC, DIMENSION, data, first_model, job, stepwise, strategy, trainer
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import Strategy
from veilfed.wire.tensors import Arrays

# By the name of the test: the strategy's parameters.
CASES: dict[str, dict[str, Any]] = {
    "fedot": {"name": "fedot", "blocks": 3},
    "averaging": {"name": "fedot", "transform": "identity"},
    "all-global": {"name": "all-global", "blocks": 2},
    "all-local": {"name": "all-local", "blocks": 2},
    "fedlt": {"name": "fedlt"},
    "fedadapter": {"name": "fedadapter", "hidden": 5},
    "fedclip": {"name": "fedclip", "hidden": 7},
    "fedgh": {"name": "fedgh", "blocks": 3, "header_steps": 30, "header_rate": 0.05},
}
RATES = {
    "classifier_rate": 2e-2,
    "transform_rate": 1e-2,
    "adapter_rate": 1e-2,
    "attention_rate": 1e-2,
}
Tensors = dict[str, Tensor]


def spec(case: str, **changes: Any) -> Strategy:
    values = CASES[case] | changes
    fields = METHODS_FIELDS[values["name"]]
    return strategy(**{name: rate for name, rate in RATES.items() if name in fields} | values)


METHODS_FIELDS = {name: set(type(strategy(name)).model_fields) for name in METHODS}


def test_every_method_has_both_sides() -> None:
    assert (
        METHODS.keys() == STRATEGIES.keys() == {*ANALYTIC, "blindfed", *(values["name"] for values in CASES.values())}
    )


def run(made: Strategy, rounds: int, institutions: tuple[str, ...] = ("one", "two")) -> tuple[Arrays, State]:
    """A whole job without services: the model, and the state of the first institution."""
    strategy_, method = strategy_for(job(made)), stepwise(made)
    model = strategy_.initial()
    trainers = [Trainer(method, *data(seed=place), seed=1, institution=name) for place, name in enumerate(institutions)]
    states = [one.initial_state(model) for one in trainers]
    for number in range(rounds):
        done = [one.train(model, state, number) for one, state in zip(trainers, states, strict=True)]
        states = [state for _, state in done]
        model = strategy_.fold([(1.0, update) for update, _ in done], lambda model=model: model)  # type: ignore[misc]
    return model, states[0]


@pytest.mark.parametrize("case", CASES)
def test_it_learns(case: str) -> None:
    made = spec(case)
    method, (model, state) = stepwise(made), run(made, 12)
    split = data(400, seed=9)
    first = method.evaluate(first_model(made), None, *split)[0] / 400
    personal = method.evaluate(model, state, *split)[0] / 400
    newcomer = method.evaluate(model, None, *split)[0] / 400
    assert personal > max(0.9, first)
    if case == "all-local":
        assert newcomer == first, "nothing was shared"
    else:
        assert newcomer > 0.85


@pytest.mark.parametrize("case", CASES)
def test_before_the_first_round_it_is_the_classifier_alone(case: str) -> None:
    made = spec(case)
    method, model = stepwise(made), first_model(made)
    h = torch.from_numpy(data()[0])
    h = h / h.norm(dim=1, keepdim=True)
    plain = torch.softmax(20.0 * h @ torch.from_numpy(np.asarray(model["classifier"], np.float32)).T, dim=1)
    for state in (None, trainer(made).initial_state(model)):
        found = method.probabilities(model, state, data()[0])
        np.testing.assert_allclose(found, plain.numpy(), atol=2e-6)


@pytest.mark.parametrize("case", CASES)
def test_a_round_gives_the_same_bits_again_and_leaves_its_arguments_alone(case: str) -> None:
    made = spec(case)
    model, state = run(made, 1)
    for array in (*model.values(), *state.tensors.values(), *state.means.values(), *state.squares.values()):
        array.flags.writeable = False
    revived = stepwise(made).read_state(state.to_bytes())
    before = state.to_bytes()
    one, two = trainer(made).train(model, state, 1), trainer(made).train(model, revived, 1)
    assert state.to_bytes() == before
    assert one[1].to_bytes() == two[1].to_bytes() != before
    assert {name: array.tobytes() for name, array in one[0].items()} == {
        name: array.tobytes() for name, array in two[0].items()
    }


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_what_the_job_says_and_nothing_private_is_in_it(case: str) -> None:
    made = spec(case)
    update, state = trainer(made).train(first_model(made), trainer(made).initial_state(first_model(made)), 0)
    assert {name: array.shape for name, array in update.items()} == dict(made.update_shapes)
    assert {array.dtype for array in update.values()} <= {np.dtype(np.float32)}
    assert not update.keys() & state.tensors.keys()
    assert all(not np.shares_memory(sent, kept) for sent in update.values() for kept in state.tensors.values())


# One step against the formula as it is printed, in double precision, and torch's own Adam.


def _orthogonal(t: Tensors, h: Tensor) -> Tensor:
    return h @ dense.transform(t["transform"]).T


FORMULAS: dict[str, Callable[[Tensors, Tensor], Tensor]] = {
    "fedot": _orthogonal,
    "averaging": lambda t, h: h,
    "all-global": _orthogonal,
    "all-local": _orthogonal,
    "fedlt": lambda t, h: h @ t["transform"].T,
    "fedadapter": lambda t, h: h + torch.relu(h @ t["adapter_down"].T + t["adapter_bias"]) @ t["adapter_up"].T,
    "fedclip": lambda t, h: h * torch.softmax(torch.tanh(h @ t["attention_in"].T) @ t["attention_out"].T, dim=1),
    "fedgh": _orthogonal,
}


def somewhere(made: Strategy, seed: int = 3) -> tuple[Arrays, State]:
    """A model and a state of random tensors: at the first ones, gradients may be zero."""
    rng = np.random.default_rng(seed)

    def filled(shapes: Any) -> Arrays:
        return {name: rng.normal(0, 0.4, shape).astype(np.float32) for name, shape in shapes.items()}

    zero = stepwise(made).zero_state()
    state = State(filled({name: array.shape for name, array in zero.tensors.items()}), zero.means, zero.squares, 0, -1)
    return filled(made.model_shapes), state


@pytest.mark.parametrize("case", CASES)
def test_one_step_is_adam_on_the_printed_loss(case: str) -> None:
    made = spec(case, batch_size=64)
    method, (model, state) = stepwise(made), somewhere(made)
    trained = trainer(made).train(model, state, 0)
    after: Arrays = {**trained[0], **trained[1].tensors}
    features, labels = data()
    t = {name: torch.from_numpy(array.astype(np.float64)) for name, array in {**model, **state.tensors}.items()}
    parameters = [{"params": [t[name].requires_grad_()], "lr": rate} for name, rate in method.rates.items()]
    h = torch.from_numpy(features).double()
    z = FORMULAS[case](t, h / h.norm(dim=1, keepdim=True))
    logits = made.temperature * (z / z.norm(dim=1, keepdim=True)) @ t["classifier"].T
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(labels)).backward()  # type: ignore[no-untyped-call]
    torch.optim.Adam(parameters).step()
    for name in method.rates:
        if name in after:
            found, expected = np.asarray(after[name], np.float64), t[name].detach().numpy()
            if name == "transform" and case != "fedlt":  # only the skew part of X is defined
                found, expected = found - found.transpose(0, 2, 1), expected - expected.transpose(0, 2, 1)
            np.testing.assert_allclose(found, expected, atol=2e-4)
            assert np.abs(found - np.asarray({**model, **state.tensors}[name])).max() > 1e-3 or name == "transform"


def test_probabilities_are_those_of_the_formula() -> None:
    for case, formula in FORMULAS.items():
        made = spec(case)
        model, state = somewhere(made)
        t = {name: torch.from_numpy(array.astype(np.float64)) for name, array in {**model, **state.tensors}.items()}
        h = torch.from_numpy(data()[0]).double()
        z = formula(t, h / h.norm(dim=1, keepdim=True))
        expected = torch.softmax(20.0 * (z / z.norm(dim=1, keepdim=True)) @ t["classifier"].T, dim=1)
        found = stepwise(made).probabilities(model, state, data()[0])
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-4)


# What is special about one method.


@pytest.mark.parametrize("case", CASES)
def test_condition_numbers_are_those_of_the_formed_map(case: str) -> None:
    made = spec(case)
    model, state = somewhere(made)
    t = {name: torch.from_numpy(array.astype(np.float64)) for name, array in {**model, **state.tensors}.items()}
    found = stepwise(made).condition_number(model, state)
    if case in {"fedadapter", "fedclip"}:
        assert found is None
        return
    assert found is not None
    formed = FORMULAS[case](t, torch.eye(DIMENSION, dtype=torch.float64)).T
    assert found == pytest.approx(np.linalg.cond(formed.numpy()), rel=1e-9)
    if case == "fedlt":
        assert found > 5
    else:
        assert found == pytest.approx(1.0, abs=1e-9)
    newcomer = stepwise(made).condition_number(model, None)
    assert newcomer == pytest.approx(1.0)


def test_all_local_starts_from_the_first_model_and_goes_its_own_way() -> None:
    made = spec("all-local")
    model, state = first_model(made), trainer(made).initial_state(first_model(made))
    np.testing.assert_array_equal(state.tensors["classifier"], model["classifier"])
    update, after = trainer(made).train(model, state, 0)
    assert update == {}
    assert stepwise(made).update_weight(100) == 0.0
    assert not np.array_equal(after.tensors["classifier"], model["classifier"])
    # The job's model plays no part any more.
    other = {"classifier": np.ones_like(model["classifier"])}
    one, two = trainer(made).train(model, after, 1)[1], trainer(made).train(other, after, 1)[1]
    assert one.to_bytes() == two.to_bytes()


def test_all_global_gives_everybody_the_same_transform() -> None:
    model, state = run(spec("all-global"), 3)
    method = stepwise(spec("all-global"))
    assert np.abs(np.asarray(model["transform"], np.float32)).max() > 1e-3
    features, _ = data(seed=5)
    np.testing.assert_array_equal(
        method.probabilities(model, state, features), method.probabilities(model, None, features)
    )


def test_fedclip_on_fixed_class_vectors_trains_the_attention_alone() -> None:
    made = spec("fedclip", train_classifier=False, initial="class_vectors")
    coordinator = strategy_for(job(made))
    vectors = np.eye(3, DIMENSION, dtype=np.float32)[::-1].copy()  # right for no class but one
    model = coordinator.initial(vectors)
    update, _ = trainer(made).train(model, trainer(made).initial_state(model), 0)
    assert update.keys() == {"attention_in", "attention_out"}
    folded = coordinator.fold([(1.0, update)], lambda: model)
    assert folded.keys() == model.keys()
    np.testing.assert_array_equal(folded["classifier"], model["classifier"])
    assert not np.array_equal(folded["attention_out"], model["attention_out"])


def test_the_private_networks_of_two_institutions_start_differently_and_the_same_each_time() -> None:
    made = spec("fedadapter")
    model = first_model(made)
    one, again, two = (trainer(made, institution=name).initial_state(model) for name in ("one", "one", "two"))
    assert one.to_bytes() == again.to_bytes()
    assert not np.array_equal(one.tensors["adapter_down"], two.tensors["adapter_down"])


def fedgh_means(features: Any, labels: Any, least: int = 5, **changes: Any) -> Any:
    made = spec("fedgh", transform="identity", **changes)
    one = Trainer(stepwise(made), features, labels, seed=1, institution="one", min_class_samples=least)
    return one.train(first_model(made), one.initial_state(first_model(made)), 0)[0]["means"]


def test_fedgh_sends_the_means_of_the_classes() -> None:
    features, labels = data()
    h = features / np.linalg.norm(features, axis=1, keepdims=True)
    expected = np.array([h[labels == label].mean(axis=0) for label in range(3)])
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(fedgh_means(features, labels), expected, atol=1e-6)


def test_fedgh_sends_zeros_for_a_class_of_few_samples_or_none() -> None:
    features, labels = data()
    count = int((labels == 1).sum())
    few = np.concatenate([np.flatnonzero(labels != 1), np.flatnonzero(labels == 1)[: count - 1]])
    assert fedgh_means(features[few], labels[few], least=count - 1)[1].any()
    means = fedgh_means(features[few], labels[few], least=count)
    assert not means[1].any()
    assert means[0].any()
    absent = labels != 2
    assert not fedgh_means(features[absent], labels[absent], least=1)[2].any()


def test_fedgh_means_are_of_transformed_embeddings() -> None:
    made = spec("fedgh")
    model, state = somewhere(made)
    update, after = trainer(made).train(model, state, 0)
    sent = np.asarray(update["means"], np.float64)
    features, labels = data()
    h = torch.from_numpy(features / np.linalg.norm(features, axis=1, keepdims=True)).double()
    z = (h @ dense.transform(torch.from_numpy(after.tensors["transform"].astype(np.float64))).T).numpy()
    expected = np.array([z[labels == label].mean(axis=0) for label in range(3)])
    np.testing.assert_allclose(sent, expected / np.linalg.norm(expected, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case != "averaging"])
def test_an_institution_without_a_class_trains_on_what_it_has(case: str) -> None:
    made = spec(case)
    features, labels = data(200)
    kept = labels != 2
    one = Trainer(stepwise(made), features[kept], labels[kept], seed=1, institution="one")
    model = first_model(made)
    state = one.initial_state(model)
    _, state = one.train(model, state, 0)
    assert state.last_round == 0


@pytest.mark.parametrize("case", CASES)
def test_the_state_of_another_method_is_refused(case: str) -> None:
    data_ = trainer(spec(case)).initial_state(first_model(spec(case))).to_bytes()
    for other in CASES:
        if stepwise(spec(other)).zero_state().to_bytes() != stepwise(spec(case)).zero_state().to_bytes():
            with pytest.raises(VeilfedError) as refused:
                stepwise(spec(other)).read_state(data_)
            assert refused.value.code is Code.STATE_CORRUPT


def test_divergence_is_an_error_in_every_method() -> None:
    for case in CASES:
        made = spec(case)
        model, state = somewhere(made)
        bad = {**model, "classifier": np.full_like(model["classifier"], 3e38)}
        if case == "all-local":
            state.tensors["classifier"] = bad["classifier"]
        with pytest.raises(VeilfedError) as refused:
            methods.trainer(made).train(bad, state, 0)
        assert refused.value.code is Code.UPDATE_INVALID
