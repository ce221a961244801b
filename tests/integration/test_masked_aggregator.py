"""Masked rounds of a real aggregator with institutions that a test scripts: what is wrong, late or sent twice."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from client_agent.secagg import Participant
from tests.support.aggregators import Aggregator, job_spec, running_aggregator
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.scripted_agent import ScriptedAgent, answer, trained
from veilfed.identity.material import load_credentials
from veilfed.jobs import JobSpec
from veilfed.secagg import Context, Words
from veilfed.secagg.encoding import MASKED, encoding_for
from veilfed.v1.aggregator_pb2 import TASK_KIND_TRAIN, Task
from veilfed.v1.secagg_pb2 import MaskAnswer, MaskRefusal, MaskRequest
from veilfed.wire.tensors import digest, to_map

INSTITUTIONS = ["north", "south", "east", "west"]
# What an institution makes of a right answer; none where it sends nothing.
Change = Callable[[MaskAnswer], list[MaskAnswer]]


@pytest.fixture(scope="module")
def aggregator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregator]:
    federation = make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)
    with running_aggregator(federation, tmp_path_factory.mktemp("aggregator")) as started:
        yield started


def unchanged(right: MaskAnswer) -> list[MaskAnswer]:
    return [right]


class Institution:
    """One that is right but for `change`."""

    def __init__(self, federation: Federation, agent: ScriptedAgent, change: Change) -> None:
        self.agent, self._change = agent, change
        self._credentials = load_credentials(federation.agents[agent.identity.institution])
        self._disk: list[bytes] = []
        self.trained: NDArray[np.float32] | None = None
        self.evaluated: NDArray[np.float32] | None = None
        self._spec_json = ""

    async def work(self) -> None:
        while True:
            response = await self.agent.next(60)
            kind = response.WhichOneof("body")
            if kind == "task":
                await self._train(response.task)
            elif kind == "mask":
                for one in self._change(self._right(response.mask)):
                    await self.agent.send(mask=one)

    async def _train(self, task: Task) -> None:
        model = await self.agent.model(task)
        if task.kind == TASK_KIND_TRAIN:
            self._spec_json = task.spec_json
            self.trained = trained(task, model, self.agent.identity.institution)
        else:
            self.evaluated = model
        await self.agent.send(update=answer(task, weight=0.0))

    def _right(self, request: MaskRequest) -> MaskAnswer:
        spec = JobSpec.model_validate_json(self._spec_json)
        encoding = encoding_for(spec, request.round)
        context = Context(
            request.job_id, request.round, request.attempt, digest(self._spec_json.encode()), encoding.form
        )
        participant = Participant.begin(
            context,
            self._credentials,
            allowed=INSTITUTIONS,
            least=3,
            keep=self._disk.append,
            kept=self._disk[-1] if self._disk else None,
        )
        made = MaskAnswer(job_id=request.job_id, round=request.round, attempt=request.attempt)
        kind = request.WhichOneof("body")
        if kind == "start":
            made.advertisement.CopyFrom(participant.advertise())
        elif kind == "cohort":
            made.shares.CopyFrom(participant.share(request.cohort))
        elif kind == "delivery":
            assert self.trained is not None
            vector: Words = encoding.encode({"classifier": self.trained}, 1.0)
            made.tensors.CopyFrom(to_map({MASKED: participant.mask(request.delivery, vector)}))
        elif kind == "survivors":
            made.confirmation.CopyFrom(participant.confirm(request.survivors))
        else:
            made.reveal.CopyFrom(participant.reveal(request.confirmations))
        return made


@asynccontextmanager
async def working(aggregator: Aggregator, change: Change) -> AsyncIterator[dict[str, Institution]]:
    """All institutions; the answers of west are changed."""
    federation = aggregator.federation
    async with AsyncExitStack() as stack:
        found = {}
        for name in INSTITUTIONS:
            scripted = ScriptedAgent(federation.agents[name], aggregator.address, federation.aggregator_id)
            agent = await stack.enter_async_context(scripted)
            found[name] = Institution(federation, agent, change if name == "west" else unchanged)
        tasks = [asyncio.create_task(one.work()) for one in found.values()]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def run(aggregator: Aggregator, change: Change, phase_seconds: float = 60) -> dict[str, tuple[str, str]]:
    """State and code of each institution in a job of one round, whose model is the mean of those in the sum."""
    document = job_spec(INSTITUTIONS, rounds=1, quorum=3, secure_aggregation={"phase_seconds": phase_seconds})
    async with aggregator.admin() as admin, working(aggregator, change) as institutions:
        job = await admin.ended(await admin.submit(document))
    assert job.summary.state == "done", job.summary.error
    states = {client.institution: (client.state, client.code) for client in job.rounds[0].clients}
    vectors = [institutions[name].trained for name, (state, _) in states.items() if state == "done"]
    mean = np.mean([np.asarray(vector, np.float64) for vector in vectors], axis=0)
    model = institutions["north"].evaluated
    assert model is not None
    np.testing.assert_allclose(model, mean, atol=1e-6)
    return states


def spoiled(field: str, spoil: Callable[[MaskAnswer], None]) -> Change:
    def change(right: MaskAnswer) -> list[MaskAnswer]:
        if right.WhichOneof("body") == field:
            spoil(right)
        return [right]

    return change


def _other_signature(one: MaskAnswer) -> None:
    one.advertisement.mask_key = bytes(31) + b"\x01"


def _fewer_shares(one: MaskAnswer) -> None:
    del one.shares.shares[0]


def _other_form(one: MaskAnswer) -> None:
    one.tensors.CopyFrom(to_map({MASKED: np.zeros(3, np.uint64)}))


def _other_confirmation(one: MaskAnswer) -> None:
    one.confirmation.signature = b"signed"


def _refuses(one: MaskAnswer) -> None:
    one.refusal.CopyFrom(MaskRefusal(code="NO_SUCH_CODE", reason="no"))


LEFT_OUT = [
    ("advertisement", _other_signature, "COHORT_INVALID"),
    ("shares", _fewer_shares, "PROTOCOL_VIOLATION"),
    ("tensors", _other_form, "UPDATE_INVALID"),
    ("shares", _refuses, "PROTOCOL_VIOLATION"),
]


@pytest.mark.parametrize(("field", "spoil", "code"), LEFT_OUT, ids=[f"{field}-{code}" for field, _, code in LEFT_OUT])
@asynchronous
async def test_who_answers_wrongly_is_left_out_by_name(
    aggregator: Aggregator, field: str, spoil: Callable[[MaskAnswer], None], code: str
) -> None:
    states = await run(aggregator, spoiled(field, spoil))
    assert states == {**dict.fromkeys(INSTITUTIONS[:3], ("done", "")), "west": ("excluded", code)}


@pytest.mark.parametrize(("field", "state"), [("tensors", ("excluded", "TIMEOUT")), ("reveal", ("done", ""))])
@asynchronous
async def test_who_falls_silent(aggregator: Aggregator, field: str, state: tuple[str, str]) -> None:
    """Before its values have come it is left out by name; after that it is in the sum."""

    def change(right: MaskAnswer) -> list[MaskAnswer]:
        return [] if right.WhichOneof("body") == field else [right]

    states = await run(aggregator, change, phase_seconds=4)
    assert states == {**dict.fromkeys(INSTITUTIONS[:3], ("done", "")), "west": state}


@asynchronous
async def test_whose_values_have_come_is_in_the_sum_whatever_it_says_later(aggregator: Aggregator) -> None:
    states = await run(aggregator, spoiled("confirmation", _other_confirmation))
    assert states == dict.fromkeys(INSTITUTIONS, ("done", ""))


@asynchronous
async def test_what_is_late_or_sent_twice_changes_nothing(aggregator: Aggregator) -> None:
    earlier: list[MaskAnswer] = []

    def change(right: MaskAnswer) -> list[MaskAnswer]:
        others = []
        for values in ({"attempt": 9}, {"round": 7}, {"job_id": "unknown"}):
            other = MaskAnswer.FromString(right.SerializeToString())
            for name, value in values.items():
                setattr(other, name, value)
            others.append(other)
        empty = MaskAnswer(job_id=right.job_id, round=right.round, attempt=right.attempt)
        late = list(earlier)
        earlier.append(right)
        return [*others, *late, right, right, *late, empty]

    states = await run(aggregator, change)
    assert states == dict.fromkeys(INSTITUTIONS, ("done", ""))
