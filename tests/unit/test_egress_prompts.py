"""Prompts, heads and labels at the egress gate: for an oracle of the own zone only, bounded, and in the ledger."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from client_agent.egress.rules import ORACLE
from tests.support.countersign import Countersigner
from tests.support.egress_bench import ORACLE_ID, TEXT, VENDOR, Bench, denied, run, texts
from veilfed.v1.oracle_pb2 import EmbedRequest, PromptGradientRequest, Texts
from veilfed.v1.tensor_pb2 import DTYPE_FLOAT32, Tensor
from veilfed.wire.tensors import to_tensor

PROMPTS = np.arange(6, dtype=np.float32).reshape(2, 3)
HEAD = np.ones((4, 5), np.float32)


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


def prompted(prompts: Tensor | None = None) -> EmbedRequest:
    return EmbedRequest(batch=1, texts=Texts(values=[TEXT]), prompts=prompts or to_tensor(PROMPTS))


def slope(**fields: Any) -> PromptGradientRequest:
    values: dict[str, Any] = {"prompts": to_tensor(PROMPTS), "head": to_tensor(HEAD), "labels": [3, 0]} | fields
    return PromptGradientRequest(texts=Texts(values=[TEXT, TEXT]), **values)


def admit(bench: Bench, message: Message, to: Any = ORACLE_ID, own_zone: bool = True) -> None:
    method = ORACLE + ("Embed" if isinstance(message, EmbedRequest) else "PromptGradient")
    bench.gate.admit_ahead(to, method, message, own_zone=own_zone)


def test_what_leaves_for_the_own_zone_is_in_the_ledger_by_shape_and_number(
    tmp_path: Path, signer: Countersigner
) -> None:
    async def scenario(bench: Bench) -> None:
        admit(bench, prompted())
        admit(bench, slope())
        assert bench.gate.inputs_sent == 3

    embed, gradient = run(tmp_path, signer, scenario)
    prompts = {"name": "prompts", "shape": [2, 3], "dtype": "float32"}
    assert (embed["purpose"], embed["inputs"], embed["tensors"]) == ("embed", 1, [prompts])
    assert "labels" not in embed
    assert (gradient["purpose"], gradient["inputs"], gradient["labels"]) == ("prompt_gradient", 2, 2)
    assert gradient["tensors"] == [prompts, {"name": "head", "shape": [4, 5], "dtype": "float32"}]
    assert TEXT not in (tmp_path / "ledger").read_text()


OTHERS = {
    "prompts": (prompted(), "raw data may go"),
    "a gradient": (slope(), "raw data may go"),
}


@pytest.mark.parametrize("case", OTHERS)
@pytest.mark.parametrize("to", [ORACLE_ID, VENDOR], ids=["not pinned", "vendor"])
def test_nothing_of_it_goes_to_another_zone(tmp_path: Path, signer: Countersigner, case: str, to: Any) -> None:
    message, reason = OTHERS[case]

    async def scenario(bench: Bench) -> None:
        with denied(reason):
            admit(bench, message, to, own_zone=False)

    run(tmp_path, signer, scenario)


def test_an_override_for_raw_data_is_none_for_prompts_and_labels(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        admit(bench, texts(), VENDOR, own_zone=False)
        bare = PromptGradientRequest(texts=Texts(values=[TEXT]), labels=[1])
        for message in (prompted(), slope(), bare):
            with denied("prompts, heads and labels may go to an oracle of the own zone only"):
                admit(bench, message, VENDOR, own_zone=False)

    records = run(tmp_path, signer, scenario, raw_data_to_other_zone=True)
    assert [record["decision"] for record in records] == ["passed", "refused", "refused", "refused"]


WRONG = {
    "float64": (to_tensor(PROMPTS.astype(np.float64)), "prompts is .* float64; it must be float32"),
    "three axes": (to_tensor(PROMPTS[None]), "of two axes"),
    "too many": (to_tensor(np.zeros((65, 3), np.float32)), "65 prompts; at most 64"),
    "too large": (to_tensor(np.zeros((2, 400), np.float32)), "800 tensor elements; the policy allows 500"),
    "cut": (Tensor(dtype=DTYPE_FLOAT32, shape=[2, 3], data=b"1234"), "needs 24 bytes"),
}


@pytest.mark.parametrize("case", WRONG)
def test_other_forms_are_refused(tmp_path: Path, signer: Countersigner, case: str) -> None:
    prompts, reason = WRONG[case]

    async def scenario(bench: Bench) -> None:
        for message in (prompted(prompts), slope(prompts=prompts)):
            with denied(reason):
                admit(bench, message)
        if case == "float64":
            with denied("head is .* float64"):
                admit(bench, slope(head=prompts))

    run(tmp_path, signer, scenario, max_tensor_elements=500)


def test_inputs_of_gradients_count_in_the_budget_and_the_purpose_can_be_left_out(
    tmp_path: Path, signer: Countersigner
) -> None:
    async def budget(bench: Bench) -> None:
        admit(bench, prompted())
        admit(bench, slope())
        with denied("more than the 4 inputs"):
            admit(bench, slope())

    async def purpose(bench: Bench) -> None:
        admit(bench, prompted())
        with denied("the policy does not list the purpose prompt_gradient"):
            admit(bench, slope())

    run(tmp_path / "budget", signer, budget, max_embeddings=4)
    run(tmp_path / "purpose", signer, purpose, purposes=["embed"])
