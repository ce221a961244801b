"""Secure aggregation at the egress gate: what is trained leaves under masks alone, and only where the job says so."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from client_agent.egress.rules import COORDINATOR
from tests.support.countersign import AGGREGATOR, Countersigner
from tests.support.egress_bench import CLASSIFIER, JOB, Bench, denied, run, update
from veilfed.v1.aggregator_pb2 import WorkRequest
from veilfed.v1.secagg_pb2 import Advertisement, Confirmation, MaskAnswer, MaskRefusal, OpenShare, Reveal, Shares
from veilfed.wire import tensors

WORDS = np.arange(8, dtype=np.uint64)
MASKED = {"masked": ((8,), "uint64")}
VECTOR = tensors.to_map({"masked": WORDS})


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


def answer(job: str = JOB, number: int = 0, **body: Any) -> WorkRequest:
    return WorkRequest(session="s", mask=MaskAnswer(job_id=job, round=number, **body))


MESSAGES: dict[str, dict[str, Any]] = {
    "advertisement": {"advertisement": Advertisement(mask_key=b"k", signature=b"s", certificate_pem=b"c")},
    "shares": {"shares": Shares(commitment=b"c")},
    "tensors": {"tensors": VECTOR},
    "confirmation": {"confirmation": Confirmation(signature=b"s")},
    "reveal": {"reveal": Reveal(self_masks=[OpenShare(member=1, share=b"s")])},
}


def test_each_message_passes_and_is_named(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, MASKED, rounds=3, masked=True)
        await bench.work(*(answer(**body) for body in MESSAGES.values()))
        await bench.work(answer("unknown", refusal=MaskRefusal(code="COHORT_INVALID", reason="strangers")))

    records = run(tmp_path, signer, scenario)
    assert [record["masking"] for record in records] == [*MESSAGES, "refusal"]
    purposes = ["masking", "masking", "update", "masking", "masking", "refusal"]
    assert [record["purpose"] for record in records] == purposes
    assert records[2]["tensors"] == [{"name": "masked", "shape": [8], "dtype": "uint64"}]


def test_an_upload_of_a_masked_vector(tmp_path: Path, signer: Countersigner) -> None:
    data = tensors.map_bytes({"masked": WORDS})

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, MASKED, rounds=3, masked=True)
        artifact = bench.gate.approve_artifact(JOB, data)
        await bench.work(answer(artifact=artifact))
        artifact.size += 1
        with denied("another size"):
            await bench.work(answer(artifact=artifact))

    assert [record["decision"] for record in run(tmp_path, signer, scenario)] == ["passed", "refused"]


WRONG = [
    (MASKED, True, update(), "under masks alone"),
    (MASKED, True, answer("job-2", tensors=VECTOR), "not one that this institution consented to"),
    (MASKED, True, answer(number=3, tensors=VECTOR), "round 3 of a job of 3 training rounds"),
    (MASKED, True, answer(tensors=tensors.to_map({"classifier": CLASSIFIER})), "that the job does not say"),
    (MASKED, True, answer(tensors=tensors.to_map({"masked": WORDS[1:]})), "the job says"),
    (MASKED, True, answer(tensors=tensors.to_map({"masked": WORDS.astype(np.float64)})), "the job says"),
    ({"classifier": ((2, 3), "float32")}, False, answer(tensors=VECTOR), "does not say that what is trained is masked"),
    ({"classifier": ((2, 3), "float32")}, False, answer(**MESSAGES["reveal"]), "does not say that what is trained"),
    (MASKED, True, answer(refusal=MaskRefusal(code="NO_CODE")), "code does not have its form"),
    (MASKED, True, answer(), "not on the allow-list"),
]


@pytest.mark.parametrize(("shapes", "masked", "message", "reason"), WRONG, ids=range(len(WRONG)))
def test_what_does_not_leave(
    tmp_path: Path, signer: Countersigner, shapes: Any, masked: bool, message: WorkRequest, reason: str
) -> None:
    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, shapes, rounds=3, masked=masked)
        with denied(reason):
            bench.gate.admit_ahead(AGGREGATOR, COORDINATOR + "Work", message)
        assert bench.server.got == []

    assert [record["decision"] for record in run(tmp_path, signer, scenario)] == ["refused"]
