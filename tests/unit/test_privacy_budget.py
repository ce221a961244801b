"""What jobs with privacy may spend: charged in the ledger before anything is kept, and refused beyond the budget."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.data.source import Samples
from client_agent.egress import EgressGate, EgressPolicy
from client_agent.state import Finished, JobFolder
from client_agent.work import Order, Prepared, perform, prepare
from tests.support.countersign import AGGREGATOR, Countersigner
from tests.support.egress_bench import AGENT, Bench, denied, run, update
from veilfed.errors import Code
from veilfed.jobs import JobSpec
from veilfed.ledger import Record, read
from veilfed.privacy import Release, epsilon
from veilfed.v1.tensor_pb2 import TensorMap
from veilfed.wire import tensors

D, JOB = 6, "job-1"
Z = 4.0
ONE, TWO = epsilon([Release(Z)], 1e-5), epsilon([Release(Z)] * 2, 1e-5)


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


def opened(folder: Path, signer: Countersigner, **privacy: Any) -> EgressGate:
    policy = EgressPolicy(consent="allow", min_evaluation_samples=5, privacy=privacy)
    return EgressGate(policy, AGENT, folder / "ledger", AGGREGATOR, signer.bundle)


def charges(folder: Path) -> list[Record]:
    return [record for record in read(folder / "ledger") if record["kind"] == "privacy"]


def test_a_budget_is_counted_again_from_the_ledger(tmp_path: Path, signer: Countersigner) -> None:
    with opened(tmp_path, signer, max_epsilon_per_job=(ONE + TWO) / 2) as gate:
        gate.check_privacy(JOB, Release(Z), 1)
        gate.charge(JOB, "first", Release(Z), "a" * 64)
        with denied("would bring the epsilon of one job"):
            gate.check_privacy(JOB, Release(Z), 2)
    with opened(tmp_path, signer, max_epsilon_per_job=(ONE + TWO) / 2) as gate:
        gate.check_privacy(JOB, Release(Z), 1)  # what is charged is not asked for again
        with denied("would bring the epsilon of one job"):
            gate.charge(JOB, "second", Release(Z), "b" * 64)
        gate.charge("job-2", "first", Release(Z), "c" * 64)
    first, refused, other = charges(tmp_path)
    assert (first["decision"], first["epsilon"], first["delta"]) == ("passed", round(ONE, 6), 1e-5)
    assert (refused["decision"], refused["job"]) == ("refused", JOB)
    assert (other["epsilon"], other["epsilon_all_jobs"]) == (round(ONE, 6), round(TWO, 6))


def test_all_jobs_have_one_budget_together(tmp_path: Path, signer: Countersigner) -> None:
    with opened(tmp_path, signer, max_epsilon=(ONE + TWO) / 2) as gate:
        gate.charge(JOB, "first", Release(Z), "a" * 64)
        with denied("the epsilon of all jobs together"):
            gate.check_privacy("job-2", Release(Z), 1)
        with denied("the epsilon of all jobs together"):
            gate.charge("job-2", "first", Release(Z), "b" * 64)


def test_a_charge_that_was_interrupted_is_not_charged_twice(tmp_path: Path, signer: Countersigner) -> None:
    for sha256 in ("a" * 64, "b" * 64):
        with opened(tmp_path, signer, max_epsilon_per_job=(ONE + TWO) / 2) as gate:
            gate.charge(JOB, "first", Release(Z), sha256)
    assert [record["epsilon"] for record in charges(tmp_path)] == [round(ONE, 6)] * 2


def test_what_was_not_charged_does_not_leave(tmp_path: Path, signer: Countersigner) -> None:
    noisy = {"classifier": np.full((2, 3), 0.5, np.float32)}
    exact = {"classifier": np.full((2, 3), 0.25, np.float32)}
    shapes = {"classifier": ((2, 3), "float32")}

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, shapes, private=True)
        bench.gate.charge(JOB, "first", Release(Z), tensors.digest(tensors.map_bytes(noisy)))
        await bench.work(update(tensors=tensors.to_map(noisy)))
        with denied("has privacy, and this was not charged"):
            await bench.work(update(tensors=tensors.to_map(exact)))
        with denied("has privacy, and this was not charged"):
            bench.gate.approve_artifact(JOB, tensors.map_bytes(exact))
        bench.gate.approve_artifact(JOB, tensors.map_bytes(noisy))
        bench.gate.expect("job-2", shapes, private=True)
        other = update(tensors=tensors.to_map(noisy))
        other.update.job_id = "job-2"
        with denied("has privacy, and this was not charged"):
            await bench.work(other)

    passed, *refused = run(tmp_path, signer, scenario)
    assert passed["privacy"] == {"epsilon": round(ONE, 6), "delta": 1e-5}
    assert {record["decision"] for record in refused} == {"refused"}


def test_noisy_counts_need_not_be_large(tmp_path: Path, signer: Countersigner) -> None:
    """A negative count, or one of a few, is noise: every sample is protected, so no threshold is kept."""
    arrays = {"counts": np.array([-3, 2, 4], np.int64)}

    async def scenario(bench: Bench) -> None:
        for private in (True, False):
            bench.gate.expect(JOB, {"counts": ((3,), "int64")}, private=private)
            if private:
                bench.gate.charge(JOB, "first", Release(Z), tensors.digest(tensors.map_bytes(arrays)))
                await bench.work(update(tensors=tensors.to_map(arrays)))
            else:
                with denied("sums over fewer than 5 samples"):
                    await bench.work(update(tensors=tensors.to_map(arrays)))

    run(tmp_path, signer, scenario)


@pytest.mark.parametrize(
    ("policy", "privacy", "words"),
    [
        ({"required": True}, None, "without privacy are not allowed"),
        ({"min_noise_multiplier": 4.1}, {"mode": "update", "noise_multiplier": Z, "clip": 1}, "asks for 4.1"),
        ({"min_noise_multiplier": 4.0}, {"mode": "update", "noise_multiplier": Z, "clip": 1}, None),
        ({}, None, None),
    ],
)
def test_a_job_with_less_noise_than_the_institution_asks_for_is_refused(
    policy: dict[str, Any], privacy: Any, words: str | None
) -> None:
    rules = EgressPolicy(privacy=policy).privacy
    spec = job(privacy)
    if words is None:
        rules.check_job(spec)
    else:
        with denied(words):
            rules.check_job(spec)


@pytest.mark.parametrize(
    ("least", "colluders", "words"), [(3, 2, "counts on 3 telling"), (3, 3, None), (9, 3, "counts on 9"), (9, 4, None)]
)
def test_who_trusts_fewer_than_a_job_counts_on_refuses_its_divided_noise(
    least: int, colluders: int, words: str | None
) -> None:
    """Of five institutions; with four that collude the noise is not divided."""
    rules = EgressPolicy(privacy={"min_colluders": least}).privacy
    spec = JobSpec.model_validate(
        {
            "name": "divided",
            "strategy": {"name": "afl", "classes": ["a", "b"], "dimension": D, "ridge": 1.0},
            "cohort": {"train": ["north", "south", "east", "west", "middle"]},
            "rounds": 1,
            "quorum": 5,
            "privacy": {"mode": "statistics", "noise_multiplier": Z, "colluders": colluders},
            "secure_aggregation": {},
        }
    )
    if words is None:
        rules.check_job(spec)
    else:
        with denied(words):
            rules.check_job(spec)


# A whole round on the disk.


def job(privacy: Any, **strategy: Any) -> JobSpec:
    document = {
        "name": "small",
        "strategy": {"name": "fedot", "classes": ["a", "b"], "dimension": D, "blocks": 2, **strategy},
        "cohort": {"train": ["north"]},
        "rounds": 1 if strategy else 3,
        "quorum": 1,
        "privacy": privacy,
    }
    if strategy:
        document["strategy"] = {"classes": ["a", "b"], "dimension": D, **strategy}
    return JobSpec.model_validate(document)


def prepared(spec: JobSpec) -> Prepared:
    rng = np.random.default_rng(0)
    names = [str(n) for n in range(40)]
    features = rng.standard_normal((40, D)).astype(np.float32)
    samples = Samples("text", names, ["a", "b"] * 20, names)
    return prepare(spec, "north", samples, features, 0.4, EgressPolicy(min_evaluation_samples=5))


MODES = {
    "update": job({"mode": "update", "noise_multiplier": Z, "clip": 0.1}),
    "sample": job({"mode": "sample", "noise_multiplier": Z, "clip": 1.0, "sampling_rate": 0.5}),
    "statistics": job({"mode": "statistics", "noise_multiplier": Z}, name="afl"),
}


def order(spec: JobSpec, number: int = 0, seed: int = 0) -> Order:
    rng, strategy = np.random.default_rng(seed), spec.strategy
    arrays = {
        name: rng.standard_normal(shape).astype(strategy.dtype(name)) for name, shape in strategy.model_shapes.items()
    }
    model = tensors.map_bytes(arrays)
    return Order(number, True, model, tensors.digest(model))


def performed(gate: EgressGate, spec: JobSpec, folder: JobFolder, asked: Order) -> Finished:
    release = spec.release
    assert release is not None

    def charge(name: str, sha256: str) -> None:
        gate.charge(JOB, name, release, sha256)

    return perform(prepared(spec), folder, asked, gate.policy, lambda: False, charge)


@pytest.mark.parametrize("mode", MODES)
def test_a_round_is_charged_once_however_often_it_is_asked_for(
    mode: str, tmp_path: Path, signer: Countersigner
) -> None:
    spec, folder = MODES[mode], JobFolder(tmp_path / "job")
    for _ in range(2):
        with opened(tmp_path, signer) as gate:
            first = performed(gate, spec, folder, order(spec))
            assert performed(gate, spec, folder, order(spec)) == first
    (charged,) = charges(tmp_path)
    assert charged["digest"] == tensors.digest(first.update)
    assert (charged["noise_multiplier"], charged["steps"]) == (Z, 2 if mode == "sample" else 1)
    with opened(tmp_path, signer) as gate:
        again = performed(gate, spec, folder, order(spec, seed=1))
    # Another model: training again spends again. Statistics do not depend on it, and are the same ones.
    assert (again.update == first.update) is (mode == "statistics")
    assert len(charges(tmp_path)) == (1 if mode == "statistics" else 2)


def test_after_a_purge_what_is_made_is_new_and_charged(tmp_path: Path, signer: Countersigner) -> None:
    spec, folder = MODES["statistics"], JobFolder(tmp_path / "jobs" / "job")
    with opened(tmp_path, signer) as gate:
        one = performed(gate, spec, folder, order(spec))
        folder.purge()
        other = performed(gate, spec, folder, order(spec))
    assert one.update != other.update
    assert [record["epsilon"] for record in charges(tmp_path)] == [round(ONE, 6), round(TWO, 6)]


def test_a_kill_between_the_charge_and_the_result_costs_nothing_more(tmp_path: Path, signer: Countersigner) -> None:
    spec, folder = MODES["update"], JobFolder(tmp_path / "job")

    class Killed(BaseException):
        pass

    with opened(tmp_path, signer, max_epsilon_per_job=(ONE + TWO) / 2) as gate:

        def charge_and_die(name: str, sha256: str) -> None:
            gate.charge(JOB, name, Release(Z), sha256)
            raise Killed

        with pytest.raises(Killed):
            perform(prepared(spec), folder, order(spec), gate.policy, lambda: False, charge_and_die)
    assert folder.finished(0) is None
    with opened(tmp_path, signer, max_epsilon_per_job=(ONE + TWO) / 2) as gate:
        done = performed(gate, spec, folder, order(spec))
    first, second = charges(tmp_path)
    assert first["charge"] == second["charge"]
    assert second["digest"] == tensors.digest(done.update) != first["digest"]


def test_beyond_the_budget_nothing_is_kept(tmp_path: Path, signer: Countersigner) -> None:
    spec, folder = MODES["sample"], JobFolder(tmp_path / "job")
    with opened(tmp_path, signer, max_epsilon_per_job=0.1) as gate, denied("the policy allows 0.1"):
        performed(gate, spec, folder, order(spec))
    assert folder.finished(0) is None
    assert [record["decision"] for record in charges(tmp_path)] == ["refused"]


def test_a_private_state_that_is_not_noised_is_not_told_about(tmp_path: Path, signer: Countersigner) -> None:
    for mode, names in (("update", ["global"]), ("sample", ["personal", "global"])):
        with opened(tmp_path / mode, signer) as gate:
            done = performed(gate, MODES[mode], JobFolder(tmp_path / mode / "job"), order(MODES[mode]))
        assert [counts.name for counts in done.evaluations] == names


def test_a_job_with_privacy_is_not_done_without_an_account(tmp_path: Path) -> None:
    spec = MODES["update"]
    with denied("nobody to charge", Code.INTERNAL):
        perform(prepared(spec), JobFolder(tmp_path / "job"), order(spec), EgressPolicy(), lambda: False)


def test_a_damaged_name_of_a_charge_is_named(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path / "job")
    name = folder.charge(0, 1)
    assert folder.charge(0, 1) == name
    assert folder.charge(0, 2) != name
    (folder.path / "charge.json").write_bytes(b"[]")
    with denied("charge.json: not a charge", Code.STATE_CORRUPT):
        folder.charge(0, 1)


def test_noise_leaves_in_the_form_of_the_method(tmp_path: Path, signer: Countersigner) -> None:
    for mode, spec in MODES.items():
        with opened(tmp_path / mode, signer) as gate:
            done = performed(gate, spec, JobFolder(tmp_path / mode / "job"), order(spec))
        found = tensors.unpack_map(TensorMap.FromString(done.update))
        assert {name: array.shape for name, array in found.items()} == dict(spec.strategy.update_shapes)
        assert all(array.dtype == spec.strategy.dtype(name) for name, array in found.items())
