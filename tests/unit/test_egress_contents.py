"""What the egress gate lets out of an update, a join, an upload, and within which budgets."""

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.egress import EgressGate, EgressPolicy
from client_agent.egress.rules import COORDINATOR, ORACLE
from tests.support.countersign import AGGREGATOR, Countersigner
from tests.support.egress_bench import (
    AGENT,
    CLASSIFIER,
    JOB,
    JOIN,
    ORACLE_ID,
    SHAPES,
    TEXT,
    Bench,
    denied,
    heartbeat,
    run,
    serialize,
    texts,
    update,
)
from veilfed.config import parse_yaml, validate
from veilfed.errors import Code
from veilfed.v1.aggregator_pb2 import (
    Evaluation,
    FetchRequest,
    JoinRequest,
    JoinResponse,
    PushHeader,
    PushRequest,
    StatRequest,
    TaskRefusal,
    Update,
    WorkRequest,
)
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire import tensors


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


WRONG = np.zeros((2, 4), np.float32)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tensors": tensors.to_map({"classifier": CLASSIFIER, "transform": CLASSIFIER})}, "1 tensors that the job"),
        ({"tensors": tensors.to_map({"other": CLASSIFIER})}, "tensors that the job does not say"),
        ({"tensors": tensors.to_map({})}, "the tensor classifier is missing"),
        ({"tensors": tensors.to_map({"classifier": WRONG})}, r"is \[2, 4\] float32; the job says \[2, 3\]"),
        ({"tensors": tensors.to_map({"classifier": CLASSIFIER.astype(np.float64)})}, "float64; the job says"),
        ({"job_id": "job-2"}, "not one that this institution consented to"),
        ({"weight": 19.0}, "fewer than 20 samples"),
        ({"weight": 40.5}, "not a number of samples"),
        ({"weight": float("nan")}, "not a number of samples"),
        ({"weight": 101.0}, "a weight beyond 100, which the job says"),
        ({"round": 3}, "the closing evaluation has no parameters"),
        ({"round": 4}, "round 4 of a job of 3 rounds"),
        ({"round": 4, "tensors": None, "weight": 0.0}, "round 4 of a job of 3 rounds"),
        ({"tensors": None}, "an evaluation has no weight"),
        ({"tensors": None, "weight": -1.0}, "an evaluation has no weight"),
        ({"tensors": None, "artifact": Artifact(sha256="0" * 64, size=9)}, "was not checked before"),
        ({"evaluations": [Evaluation(name="personal", correct=1, total=19)]}, "fewer than 20 samples"),
        ({"evaluations": [Evaluation(name="personal", correct=41, total=40)]}, "more right answers than samples"),
        ({"evaluations": [Evaluation(name="global", total=40)] * 2}, "named twice"),
        ({"evaluations": [Evaluation(name="private words", total=40)]}, "evaluations.name does not have its form"),
        ({"token": "two words"}, "update.token does not have its form"),
    ],
)
def test_contents_of_an_update(tmp_path: Path, signer: Countersigner, fields: dict[str, Any], reason: str) -> None:
    message = update()
    for name, value in fields.items():
        message.update.ClearField(name)  # type: ignore[arg-type]
        message.MergeFrom(WorkRequest(update=Update(**{name: value})))

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES, rounds=3, max_weight=100)
        with denied(reason):
            bench.gate.admit_ahead(AGGREGATOR, COORDINATOR + "Work", message)
        with denied(reason):
            await bench.work(message)
        assert bench.server.got == []
        await bench.work(update())
        assert len(bench.server.got) == 1

    assert [record["decision"] for record in run(tmp_path, signer, scenario)] == ["refused", "refused", "passed"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (heartbeat(TEXT), "activity does not have its form"),
        (WorkRequest(session="s"), "kind of message is not on the allow-list"),
        (WorkRequest(refusal=TaskRefusal(code=TEXT)), "code does not have its form"),
        (WorkRequest(refusal=TaskRefusal(reason="x" * 501)), "reason does not have its form"),
    ],
)
def test_forms_of_other_work(tmp_path: Path, signer: Countersigner, message: WorkRequest, reason: str) -> None:
    async def scenario(bench: Bench) -> None:
        with denied(reason):
            await bench.work(message)
        assert bench.server.got == []

    run(tmp_path, signer, scenario)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("identity", "spiffe://test.veilfed/agent/south/main", "not the institution's own"),
        ("protocol_version", 9, "protocol_version is not this software's"),
        ("software_version", TEXT, "software_version does not have its form"),
    ],
)
def test_forms_of_join(tmp_path: Path, signer: Countersigner, field: str, value: Any, reason: str) -> None:
    message = JoinRequest()
    message.CopyFrom(JOIN)
    setattr(message, field, value)

    async def scenario(bench: Bench) -> None:
        with denied(reason):
            await bench.channel().unary_unary(COORDINATOR + "Join", serialize, JoinResponse.FromString)(message)
        assert bench.server.got == []

    run(tmp_path, signer, scenario)


def test_only_an_artifact_that_was_checked_is_pushed(tmp_path: Path, signer: Countersigner) -> None:
    data = tensors.map_bytes({"classifier": CLASSIFIER})

    async def scenario(bench: Bench) -> None:
        with denied("not one that this institution consented to"):
            bench.gate.approve_artifact(JOB, data)
        bench.gate.expect(JOB, SHAPES)
        with denied("tensors that the job does not say"):
            bench.gate.approve_artifact(JOB, tensors.map_bytes({"raw": CLASSIFIER}))
        for stray in (data + b"\xfa\x3f\x03abc", b"\x08\x01" + data):  # sorted after and before the canonical bytes
            with denied("canonical"):
                bench.gate.approve_artifact(JOB, stray)
        artifact = bench.gate.approve_artifact(JOB, data)
        header = PushRequest(header=PushHeader(session="s", job_id=JOB, artifact=artifact, offset=4))
        unknown = PushRequest(header=PushHeader(job_id=JOB, artifact=Artifact(sha256="0" * 64, size=4)))
        with denied("was not checked before"):
            await bench.push(unknown, PushRequest(chunk=data))
        with denied("without the header"):
            await bench.push(PushRequest(chunk=data))
        with denied("not of the artifact that was checked"):
            await bench.push(header, PushRequest(chunk=data))
        with denied("not of the artifact that was checked"):
            await bench.push(header, PushRequest(chunk=data[4:]), PushRequest(chunk=b"more"))
        with denied("a second header"):
            await bench.push(header, header)
        chunks = [PushRequest.FromString(raw).chunk for raw in bench.server.messages(COORDINATOR + "Push")]
        assert set(chunks) <= {b"", data[4:]}
        bench.gate.forget(JOB)
        with denied("not one that this institution consented to"):
            await bench.push(header)

    run(tmp_path, signer, scenario)


def test_purposes_and_small_counts_follow_the_policy(tmp_path: Path, signer: Countersigner) -> None:
    counts = [Evaluation(name="personal", correct=30, total=40)]

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        with denied("does not list the purpose heartbeat"):
            await bench.work(heartbeat())
        with denied("if the policy does not list evaluations"):
            await bench.work(update(evaluations=counts))
        await bench.work(update())
        assert not bench.gate.policy.releases_count(40)

    run(tmp_path, signer, scenario, purposes=["update"])


def test_an_evaluating_institution_sends_no_tensors(tmp_path: Path, signer: Countersigner) -> None:
    counts = [Evaluation(name="global", correct=30, total=40)]

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, {})
        with denied("the job may send evaluations alone"):
            await bench.work(update())
        await bench.work(WorkRequest(session="s", update=Update(job_id=JOB, token="t", evaluations=counts)))

    run(tmp_path, signer, scenario)


def test_tensor_elements_are_limited(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        with denied("6 tensor elements; the policy allows 5"):
            await bench.work(update())

    run(tmp_path, signer, scenario, max_tensor_elements=5)


def test_budgets_outlive_the_process(tmp_path: Path, signer: Countersigner) -> None:
    size = len(update(ledger_head={"records": 1, "sha256": "0" * 64}).SerializeToString())

    async def first(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        await bench.work(update())
        await bench.work(texts(3), to=ORACLE_ID, own_zone=True)

    async def second(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        bench.gate.expect("job-2", SHAPES)
        with denied("bytes that one job may send"):
            await bench.work(update())
        other = update()
        other.update.job_id = "job-2"
        await bench.work(other)
        with denied("more than the 4 inputs"):
            await bench.work(texts(2), to=ORACLE_ID, own_zone=True)
        await bench.work(texts(1), to=ORACLE_ID, own_zone=True)

    budgets = {"max_bytes_per_job": size + 10, "max_embeddings": 4}
    run(tmp_path, signer, first, **budgets)
    run(tmp_path, signer, second, **budgets)


def test_inputs_by_another_ledger_of_the_institution_count(tmp_path: Path, signer: Countersigner) -> None:
    async def first(bench: Bench) -> None:
        await bench.work(texts(3), to=ORACLE_ID, own_zone=True)

    run(tmp_path, signer, first)
    policy = EgressPolicy(max_embeddings=4)
    beside = [tmp_path / "ledger", tmp_path / "not-there"]
    with EgressGate(policy, AGENT, tmp_path / "other", AGGREGATOR, signer.bundle, beside) as gate:
        gate.admit_ahead(ORACLE_ID, ORACLE + "Embed", texts(1), own_zone=True)
        with denied("more than the 4 inputs"):
            gate.admit_ahead(ORACLE_ID, ORACLE + "Embed", texts(2), own_zone=True)


def test_a_budget_that_is_used_up_stops_what_it_is_for_alone(tmp_path: Path, signer: Countersigner) -> None:
    async def first(bench: Bench) -> None:
        await bench.work(texts(3), to=ORACLE_ID, own_zone=True)

    async def second(bench: Bench) -> None:
        with denied("more than the 2 inputs"):
            await bench.work(texts(1), to=ORACLE_ID, own_zone=True)
        await bench.work(heartbeat())

    run(tmp_path, signer, first)
    run(tmp_path, signer, second, max_embeddings=2)


def test_nothing_but_refusals_leaves_for_a_job_without_consent(tmp_path: Path, signer: Countersigner) -> None:
    fetch = FetchRequest(job_id=JOB, sha256="0" * 64)
    stat = StatRequest(session="s", job_id=JOB, sha256="0" * 64)
    evaluation = WorkRequest(session="s", update=Update(job_id=JOB, token="t"))
    refusal = WorkRequest(session="s", refusal=TaskRefusal(job_id=JOB, token="t", code="POLICY_DENIED"))

    async def scenario(bench: Bench) -> None:
        for name, message in (("Fetch", fetch), ("Stat", stat), ("Work", evaluation), ("Work", update())):
            with denied("not one that this institution consented to"):
                bench.gate.admit_ahead(AGGREGATOR, COORDINATOR + name, message)
        await bench.work(refusal)

    run(tmp_path, signer, scenario)


def test_what_cannot_be_recorded_does_not_leave(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        call = bench.channel().unary_unary(COORDINATOR + "Join", serialize, JoinResponse.FromString)
        bench.gate.close()
        with denied("the ledger is closed", Code.FILE_UNUSABLE):
            await call(JOIN)
        assert bench.server.got == []

    run(tmp_path, signer, scenario)


def test_consent() -> None:
    asks, allows = EgressPolicy(), EgressPolicy(consent="allow")
    with denied("approves each job", Code.CONSENT_MISSING):
        asks.check_job("fedot", approved=False)
    asks.check_job("fedot", approved=True)
    allows.check_job("fedot", approved=False)
    with denied("strategy 'other' are not allowed"):
        allows.check_job("other", approved=True)


def test_the_documented_policy_is_the_default() -> None:
    text = (Path(__file__).parents[2] / "docs/explanation/egress.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\npolicy:\n(.*?)```", text, re.DOTALL)
    assert validate(EgressPolicy, textwrap.dedent(block), "egress.md") == EgressPolicy()
    assert set(parse_yaml(textwrap.dedent(block), "egress.md")) == set(EgressPolicy.model_fields)


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ([4, 50], "fewer than 5 samples of a class"),
        ([50, -1], "fewer than 5 samples of a class"),
        ([9, 10], "sums over fewer than 20 samples"),
        ([0, 0], None),
        ([0, 20], None),
        ([5, 15], None),
    ],
)
def test_sums_leave_with_counts_of_enough_samples_or_none(
    tmp_path: Path, signer: Countersigner, counts: list[int], reason: str | None
) -> None:
    arrays: tensors.Arrays = {"counts": np.array(counts), "gram": np.ones(3)}
    message = update(tensors=tensors.to_map(arrays))

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, {name: (array.shape, array.dtype) for name, array in arrays.items()})
        if reason is None:
            await bench.work(message)
            bench.gate.approve_artifact(JOB, tensors.map_bytes(arrays))
            return
        with denied(reason):
            await bench.work(message)
        with denied(reason):
            bench.gate.approve_artifact(JOB, tensors.map_bytes(arrays))
        assert bench.server.got == []

    run(tmp_path, signer, scenario)


def test_a_job_of_several_turns_sends_parameters_in_their_training_rounds_alone(
    tmp_path: Path, signer: Countersigner
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES, rounds=1, last_round=5)
        for number in range(7):
            message = update()
            message.update.round = number
            if number > 5:
                with denied("of a job of 5 rounds"):
                    await bench.work(message)
            elif number % 2:
                with denied("closing evaluation has no parameters"):
                    await bench.work(message)
            else:
                await bench.work(message)
        assert len(bench.server.got) == 3

    run(tmp_path, signer, scenario)
