"""The limits of the egress gate themselves: the last value that passes, and what is counted and kept of it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.egress.rules import COORDINATOR
from tests.support.countersign import AGGREGATOR, Countersigner
from tests.support.egress_bench import (
    CLASSIFIER,
    JOB,
    ORACLE_ID,
    SHAPES,
    Bench,
    denied,
    heartbeat,
    run,
    texts,
    update,
)
from veilfed.v1.aggregator_pb2 import Evaluation, PushHeader, PushRequest, WorkRequest
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire import tensors


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


def test_as_many_samples_as_the_policy_asks_for_are_enough(tmp_path: Path, signer: Countersigner) -> None:
    counts = [Evaluation(name="personal", correct=20, total=20), Evaluation(name="global", correct=0, total=20)]

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES, max_weight=20)
        await bench.work(update(weight=20.0, evaluations=counts))

    (record,) = run(tmp_path, signer, scenario, max_tensor_elements=CLASSIFIER.size)
    assert (record["decision"], record["evaluations"]) == ("passed", 2)


def test_a_job_that_says_no_limits(tmp_path: Path, signer: Countersigner) -> None:
    last = 2**32 - 1  # the largest number of a round: the closing evaluation of a job of so many

    def at(number: int, **fields: Any) -> WorkRequest:
        message = update(**fields)
        message.update.round = number
        return message

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        await bench.work(at(last - 1))
        with denied("the closing evaluation has no parameters"):
            await bench.work(at(last))
        await bench.work(at(last, tensors=None, weight=0.0))
        with denied("a weight beyond 1, which the job says"):
            await bench.work(at(0, weight=2.0))

    run(tmp_path, signer, scenario, min_evaluation_samples=1)


def test_long_names_are_cut_in_the_ledger(tmp_path: Path, signer: Countersigner) -> None:
    """What is refused is recorded too, whatever it is: a record stays short, and says how much there was."""
    arrays = {f"{number:02}" + "x" * 98: np.zeros([1] * 8 + [2], np.float32) for number in range(70)}
    message = update(tensors=tensors.to_map(arrays))
    message.update.job_id = "j" * 200

    async def scenario(bench: Bench) -> None:
        with denied("job_id does not have its form"):
            await bench.work(message)
        with denied("this RPC is not on the allow-list"):
            bench.gate.admit_ahead(AGGREGATOR, COORDINATOR + "y" * 300, heartbeat())

    record, other = run(tmp_path, signer, scenario)
    assert record["job"] == "j" * 128
    assert record["tensors"] == [
        {"name": f"{number:02}" + "x" * 62, "shape": [1] * 8, "dtype": "float32"} for number in range(64)
    ]
    assert record["tensors_in_all"] == 70
    assert other["method"] == (COORDINATOR + "y" * 300)[:200]


def test_unknown_types_of_elements_are_recorded_by_number(tmp_path: Path, signer: Countersigner) -> None:
    message = update()
    message.update.tensors.tensors[0].tensor.dtype = 77  # type: ignore[assignment]

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        with denied("unknown element type 77"):
            await bench.work(message)

    (record,) = run(tmp_path, signer, scenario)
    assert record["tensors"][0]["dtype"] == "77"


def test_the_size_and_the_offset_of_an_upload(tmp_path: Path, signer: Countersigner) -> None:
    data = tensors.map_bytes({"classifier": CLASSIFIER})

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        right = bench.gate.approve_artifact(JOB, data)
        for size in (len(data) - 1, len(data) + 1):
            wrong = Artifact(sha256=right.sha256, size=size)
            with denied("the artifact has another size"):
                await bench.work(update(tensors=None, artifact=wrong))
            with denied("the artifact has another size"):
                await bench.push(PushRequest(header=PushHeader(session="s", job_id=JOB, artifact=wrong)))
        beyond = PushHeader(session="s", job_id=JOB, artifact=right, offset=len(data) + 1)
        with denied("an offset beyond the end"):
            await bench.push(PushRequest(header=beyond))
        assert bench.server.got == []
        whole = PushHeader(session="s", job_id=JOB, artifact=right, offset=len(data))
        await bench.push(PushRequest(header=whole))
        pushed = PushHeader(session="s", job_id=JOB, artifact=right)
        await bench.push(PushRequest(header=pushed), PushRequest(chunk=data[:1]), PushRequest(chunk=data[1:]))
        bench.gate.expect(JOB, SHAPES)  # the same again: what was approved stays so
        await bench.work(update(tensors=None, artifact=right))
        bench.gate.expect(JOB, SHAPES, rounds=3)
        with denied("was not checked before"):
            await bench.work(update(tensors=None, artifact=right))

    run(tmp_path, signer, scenario)


def test_what_was_refused_is_not_spent(tmp_path: Path, signer: Countersigner) -> None:
    size = len(update(ledger_head={"records": 1, "sha256": "0" * 64}).SerializeToString())

    async def first(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        for _ in range(3):
            with denied("raw data may go to"):
                await bench.work(texts(2), to=ORACLE_ID)
            with denied("not a number of samples"):
                await bench.work(update(weight=0.5))
            with denied("the tensor classifier is missing"):
                bench.gate.approve_artifact(JOB, tensors.map_bytes({}))
        assert (bench.gate.bytes_out, bench.gate.inputs_sent) == ({}, 0)

    async def second(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        assert (bench.gate.bytes_out, bench.gate.inputs_sent) == ({}, 0)
        await bench.work(texts(4), to=ORACLE_ID, own_zone=True)
        await bench.work(update())
        assert bench.gate.bytes_out[str(AGGREGATOR), "update"] == size

    budgets = {"max_bytes_per_job": size, "max_embeddings": 4}
    run(tmp_path, signer, first, **budgets)
    run(tmp_path, signer, second, **budgets)
