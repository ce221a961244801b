"""The egress gate on real channels to a real server that keeps every byte that it gets."""

import asyncio
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from client_agent.egress import EgressGate, EgressPolicy, Purpose
from client_agent.egress.rules import BLOCKS, COORDINATOR, ORACLE, RULES
from tests.support.countersign import AGGREGATOR, Countersigner, unsupported_certificate
from tests.support.egress_bench import (
    AGENT,
    CLASSIFIER,
    JOB,
    JOIN,
    ORACLE_ID,
    SHAPES,
    TEXT,
    VENDOR,
    Bench,
    denied,
    heartbeat,
    run,
    serialize,
    stream,
    texts,
    update,
)
from veilfed.errors import Code
from veilfed.identity.names import Identity
from veilfed.ledger import Head, read, receipts_path, verify
from veilfed.v1 import aggregator_pb2, blocks_pb2, enrollment_pb2, oracle_pb2
from veilfed.v1.aggregator_pb2 import (
    Evaluation,
    FetchRequest,
    FetchResponse,
    Heartbeat,
    JoinRequest,
    JoinResponse,
    PushHeader,
    PushRequest,
    StatRequest,
    StatResponse,
    TaskRefusal,
    Update,
    WorkRequest,
    WorkResponse,
)
from veilfed.v1.blocks_pb2 import (
    ForwardRequest,
    ForwardResponse,
    ForwardStart,
    OpenSessionRequest,
    OpenSessionResponse,
    SessionStart,
)
from veilfed.v1.encrypted_pb2 import CiphertextBatch, EvaluationKeyDigit
from veilfed.v1.oracle_pb2 import (
    DescribeRequest,
    DescribeResponse,
    EmbedRequest,
    Images,
    PromptGradientRequest,
    PromptGradientResponse,
    Texts,
)
from veilfed.v1.secagg_pb2 import Advertisement, MaskAnswer
from veilfed.wire import tensors

MASKED_JOB = "job-2"


@pytest.fixture(scope="module")
def signer() -> Countersigner:
    return Countersigner()


def test_every_listed_message_passes_once_and_is_recorded(tmp_path: Path, signer: Countersigner) -> None:
    data = tensors.map_bytes({"classifier": CLASSIFIER})

    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES, max_weight=40)
        bench.gate.expect(MASKED_JOB, {"masked": ((4,), "uint64")}, masked=True)
        artifact = bench.gate.approve_artifact(JOB, data)
        aggregator, oracle = bench.channel(), bench.channel(ORACLE_ID, own_zone=True)
        await aggregator.unary_unary(COORDINATOR + "Join", serialize, JoinResponse.FromString)(JOIN)
        stat = StatRequest(session="s", job_id=JOB, sha256=artifact.sha256)
        await aggregator.unary_unary(COORDINATOR + "Stat", serialize, StatResponse.FromString)(stat)
        fetch = FetchRequest(job_id=JOB, sha256="0" * 64, offset=3)
        call = aggregator.unary_stream(COORDINATOR + "Fetch", serialize, FetchResponse.FromString)(fetch)
        assert len([response async for response in call]) == 1
        header = PushHeader(session="s", job_id=JOB, artifact=artifact, offset=10)
        await bench.push(PushRequest(header=header), PushRequest(chunk=data[10:30]), PushRequest(chunk=data[30:]))
        await oracle.unary_unary(ORACLE + "Describe", serialize, DescribeResponse.FromString)(DescribeRequest())
        images = EmbedRequest(batch=2, images=Images(values=[b"png", b"jpg"]))
        assert len(await bench.work(texts(3), images, to=ORACLE_ID, own_zone=True)) == 2
        slope = PromptGradientRequest(texts=Texts(values=["one"]), labels=[1])
        await oracle.unary_unary(ORACLE + "PromptGradient", serialize, PromptGradientResponse.FromString)(slope)
        keys = [OpenSessionRequest(start=SessionStart(keys="0" * 64)), OpenSessionRequest(digit=EvaluationKeyDigit())]
        blocks = bench.channel(VENDOR)
        await blocks.stream_unary(BLOCKS + "OpenSession", serialize, OpenSessionResponse.FromString)(iter(keys))
        inputs = [ForwardRequest(start=ForwardStart(pass_id="0" * 32)), ForwardRequest(mask=CiphertextBatch(count=1))]
        assert len([one async for one in stream(blocks, BLOCKS + "Forward", ForwardResponse)(iter(inputs))]) == 2
        refusal = TaskRefusal(job_id=JOB, round=1, token="t", code="POLICY_DENIED", reason="not here")
        counts = [Evaluation(name="personal", correct=30, total=40), Evaluation(name="global", correct=20, total=40)]
        evaluation = WorkRequest(session="s", update=Update(job_id=JOB, round=2, token="t", evaluations=counts))
        responses = await bench.work(
            heartbeat(),
            WorkRequest(session="s", refusal=refusal),
            update(evaluations=counts),
            update(tensors=None, artifact=artifact, weight=40.0),
            evaluation,
            WorkRequest(session="s", mask=MaskAnswer(job_id=MASKED_JOB, advertisement=Advertisement(mask_key=b"k"))),
        )
        assert len(responses) == 6
        got = bench.server.got
        recorded = [(record["method"], record["digest"], record["bytes"]) for record in bench.records()]
        assert sorted(recorded) == sorted((name, hashlib.sha256(raw).hexdigest(), len(raw)) for name, raw in got)
        assert bench.gate.inputs_sent == 6
        assert sum(bench.gate.bytes_out.values()) == sum(len(raw) for _, raw in got)

    records = run(tmp_path, signer, scenario)
    assert {record["purpose"] for record in records} == set(Purpose)
    assert {record["decision"] for record in records} == {"passed"}
    sent = next(record for record in records if "tensors" in record)
    assert sent["tensors"] == [{"name": "classifier", "shape": [2, 3], "dtype": "float32"}]
    assert (sent["job"], sent["round"], sent["evaluations"]) == (JOB, 2, 2)


def every_method() -> list[tuple[str, Any]]:
    """(full name, descriptor) of every RPC of the protocol."""
    files = (aggregator_pb2, oracle_pb2, blocks_pb2, enrollment_pb2)
    services = [service for file in files for service in file.DESCRIPTOR.services_by_name.values()]
    return [(f"/{service.full_name}/{method.name}", method) for service in services for method in service.methods]


def test_every_other_rpc_is_refused(tmp_path: Path, signer: Countersigner) -> None:
    listed = {method for method, _ in RULES}
    others = [(name, method) for name, method in every_method() if name not in listed]
    assert len(others) >= 6  # JobService and Enrollment

    async def scenario(bench: Bench) -> None:
        for name, method in others:
            request = GetMessageClass(method.input_type)()
            with denied("this RPC is not on the allow-list"):
                await bench.channel().unary_unary(name, serialize, JoinResponse.FromString)(request)
            with denied("this RPC is not on the allow-list"):
                await anext(aiter(stream(bench.channel(), name, JoinResponse)(iter([request]))))
        assert bench.server.got == []

    records = run(tmp_path, signer, scenario)
    assert [record["decision"] for record in records] == ["refused"] * 2 * len(others)
    assert {record["purpose"] for record in records} == {"unlisted"}


def test_every_other_type_of_message_is_refused(tmp_path: Path, signer: Countersigner) -> None:
    methods = [(name, method.input_type) for name, method in every_method()]
    kinds = [GetMessageClass(kind)() for _, kind in methods]

    async def scenario(bench: Bench) -> None:
        for name in sorted({method for method, _ in RULES}):
            right = dict(methods)[name]
            to = AGGREGATOR if name.startswith(COORDINATOR) else ORACLE_ID
            for message in kinds:
                if message.DESCRIPTOR is not right:
                    with denied("type of message is not on the allow-list"):
                        bench.gate.admit_ahead(to, name, message)

    run(tmp_path, signer, scenario)


def test_the_allow_list_knows_every_field() -> None:
    """A field that is added to a request must be listed, or left out here with a reason."""

    def paths(descriptor: Any, prefix: str = "") -> Iterator[str]:
        for field in descriptor.fields:
            yield prefix + field.name
            if field.message_type is not None:
                yield from paths(field.message_type, f"{prefix}{field.name}.")

    for name, method in every_method():
        rules = [rule for (listed, _), rule in RULES.items() if listed == name]
        if rules:
            assert set(paths(method.input_type)) == set().union(*(rule.fields for rule in rules)), name


@pytest.mark.parametrize(
    ("to", "method", "message"),
    [
        (ORACLE_ID, COORDINATOR + "Join", JOIN),
        (ORACLE_ID, COORDINATOR + "Work", heartbeat()),
        (AGGREGATOR, ORACLE + "Describe", DescribeRequest()),
        (AGGREGATOR, ORACLE + "Embed", texts()),
    ],
)
def test_the_wrong_destination_is_refused(
    tmp_path: Path, signer: Countersigner, to: Identity, method: str, message: Message
) -> None:
    async def scenario(bench: Bench) -> None:
        with denied("it may go to the (aggregator|oracle) only"):
            await anext(aiter(stream(bench.channel(to), method, JoinResponse)(iter([message]))))
        assert bench.server.got == []

    assert run(tmp_path, signer, scenario)[0]["decision"] == "refused"


def test_other_servers_are_refused(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        bench.channel(Identity.parse(str(AGGREGATOR)))
        with denied("is not the aggregator of the configuration"):
            bench.channel(Identity.parse("spiffe://test.veilfed/aggregator/other/main"))
        with denied("is not of the zone of north"):
            bench.channel(VENDOR, own_zone=True)
        with denied("of another federation"):
            bench.gate.admit_ahead(
                Identity.parse("spiffe://other/oracle/north/main"), ORACLE + "Describe", DescribeRequest()
            )

    run(tmp_path, signer, scenario)


@pytest.mark.parametrize("to", [ORACLE_ID, VENDOR])
def test_raw_data_stays_in_the_own_zone(tmp_path: Path, signer: Countersigner, to: Identity) -> None:
    images = EmbedRequest(images=Images(values=[b"png"]))

    async def scenario(bench: Bench) -> None:
        for message in (texts(), images):
            with denied("raw data may go to an oracle of the own zone only"):
                await bench.work(message, to=to)
        assert bench.server.got == []
        assert bench.gate.inputs_sent == 0

    records = run(tmp_path, signer, scenario)
    assert [(record["decision"], record["inputs"]) for record in records] == [("refused", 1), ("refused", 1)]
    assert TEXT.encode() not in (tmp_path / "ledger").read_bytes()


def test_the_override_is_on_the_ledger(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        await bench.work(texts(), to=VENDOR)
        assert len(bench.server.got) == 1

    run(tmp_path, signer, scenario, raw_data_to_other_zone=True)
    start, override = list(read(tmp_path / "ledger"))[:2]
    assert start["policy"]["raw_data_to_other_zone"] is True
    assert override["kind"] == "override"


def test_fields_outside_the_protocol_are_refused(tmp_path: Path, signer: Countersigner) -> None:
    stray = b"\xfa\x3f\x03abc"  # field 1023, three bytes
    inner = JOIN.SerializeToString() + stray
    deep = WorkRequest(session="s", heartbeat=Heartbeat.FromString(stray))

    async def scenario(bench: Bench) -> None:
        with denied("not in the protocol"):
            bench.gate.admit_ahead(AGGREGATOR, COORDINATOR + "Join", JoinRequest.FromString(inner))
        with denied("not in the protocol"):
            await bench.work(deep)
        assert bench.server.got == []

    run(tmp_path, signer, scenario)


def test_metadata_is_refused(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        call = bench.channel().unary_unary(COORDINATOR + "Join", serialize, JoinResponse.FromString)
        with denied("the call has metadata"):
            await call(JOIN, metadata=(("x-note", TEXT),))
        assert bench.server.got == []

    run(tmp_path, signer, scenario)


@pytest.mark.parametrize(
    ("method", "metadata", "reason"),
    [
        (COORDINATOR + "Work", (("x-note", TEXT),), "the call has metadata"),
        (COORDINATOR + "Push", (("x-note", TEXT),), "the call has metadata"),
        (COORDINATOR + "Other", None, "this RPC is not on the allow-list"),
        (ORACLE + "Embed", None, "it may go to the oracle only"),
    ],
)
def test_a_stream_that_may_not_leave_is_not_even_opened(
    tmp_path: Path, signer: Countersigner, method: str, metadata: Any, reason: str
) -> None:
    async def scenario(bench: Bench) -> None:
        with denied(reason):  # method and metadata leave before the first message, and there may be none
            await anext(aiter(stream(bench.channel(), method, WorkResponse)(iter([]), metadata=metadata)))
        with denied(reason):
            await bench.channel().stream_unary(method, serialize, WorkResponse.FromString)(iter([]), metadata=metadata)
        assert bench.server.calls == []

    assert [record["decision"] for record in run(tmp_path, signer, scenario)] == ["refused"] * 2


def test_a_refusal_ends_a_stream_after_what_passed(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        call = stream(bench.channel(), COORDINATOR + "Work", WorkResponse)()
        await call.write(heartbeat())
        assert await call.read() == WorkResponse()
        with suppress(asyncio.InvalidStateError):  # the call may have ended before write has returned
            await call.write(heartbeat(TEXT))
        with denied("activity does not have its form"):
            await call.read()
        assert bench.server.messages(COORDINATOR + "Work") == [heartbeat().SerializeToString()]

    run(tmp_path, signer, scenario)


def test_an_error_of_the_caller_is_not_hidden(tmp_path: Path, signer: Countersigner) -> None:
    async def requests() -> AsyncIterator[WorkRequest]:
        yield heartbeat()
        raise LookupError("the caller's own")

    async def scenario(bench: Bench) -> None:
        call = stream(bench.channel(), COORDINATOR + "Work", WorkResponse)(requests())
        with pytest.raises(LookupError, match="the caller's own"):
            async for _ in call:
                pass

    run(tmp_path, signer, scenario)


def test_what_was_checked_is_what_is_sent(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        message = heartbeat()
        call = stream(bench.channel(), COORDINATOR + "Work", WorkResponse)()
        await call.write(message)
        admitted = bench.gate.admit(flow_to_work(bench), message)
        message.heartbeat.activity = TEXT
        assert admitted == heartbeat()
        await call.read()
        call.cancel()

    run(tmp_path, signer, scenario)


def test_what_is_admitted_ahead_passes_once_and_there_alone(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        work = COORDINATOR + "Work"
        admitted = bench.gate.admit_ahead(AGGREGATOR, work, heartbeat())
        records = bench.gate.head.records
        with denied("may go to the aggregator only"):
            bench.gate.admit_ahead(ORACLE_ID, work, admitted, own_zone=True)
        assert bench.gate.head.records == records + 1
        assert bench.gate.admit(flow_to_work(bench), admitted) is admitted
        assert bench.gate.head.records == records + 1
        assert bench.gate.admit(flow_to_work(bench), admitted) is not admitted
        assert bench.gate.head.records == records + 2
        again = bench.gate.admit_ahead(AGGREGATOR, work, heartbeat())
        bench.gate.withdraw(again)
        bench.gate.withdraw(admitted)  # has left
        *_, passed, note = read(tmp_path / "ledger")
        assert (note["note"], passed["digest"] in note["text"]) == ("withdrawn", True)
        assert bench.gate.admit(flow_to_work(bench), again) is not again

    run(tmp_path, signer, scenario)


def flow_to_work(bench: Bench) -> Any:
    return bench.gate.interceptors(AGGREGATOR)[3]._flow(  # type: ignore[attr-defined]
        grpc.aio.ClientCallDetails(COORDINATOR + "Work", None, None, None, None)
    )


def test_bytes_instead_of_a_message_are_refused(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        call: Any = bench.channel().unary_unary(COORDINATOR + "Join", None, None)
        with denied("it is not a message"):
            await call(TEXT.encode())
        assert bench.server.got == []

    assert [record["type"] for record in run(tmp_path, signer, scenario)] == ["bytes"]


def test_a_ledger_is_of_one_identity(tmp_path: Path, signer: Countersigner) -> None:
    other = Identity.parse("spiffe://test.veilfed/agent/south/main")
    EgressGate(EgressPolicy(), AGENT, tmp_path / "ledger", AGGREGATOR, signer.bundle).close()
    with denied("the ledger of spiffe://test.veilfed/agent/north/main", Code.FILE_UNUSABLE):
        EgressGate(EgressPolicy(), other, tmp_path / "ledger", AGGREGATOR, signer.bundle)


def test_an_update_carries_the_head_before_it(tmp_path: Path, signer: Countersigner) -> None:
    async def scenario(bench: Bench) -> None:
        bench.gate.expect(JOB, SHAPES)
        head = bench.gate.head
        await bench.work(update())
        sent = WorkRequest.FromString(bench.server.messages(COORDINATOR + "Work")[0]).update
        assert (sent.ledger_head.records, sent.ledger_head.sha256) == (head.records, head.sha256)
        receipt = signer.receipt(AGENT, JOB, 2, head)
        assert bench.gate.record_receipts([receipt]) == [None]

    run(tmp_path, signer, scenario)
    summary = verify(tmp_path / "ledger", bundle_pem=signer.bundle)
    assert (summary.receipts, summary.countersigned) == (1, 1)
    assert len(list(read(receipts_path(tmp_path / "ledger")))) == 1


@pytest.mark.parametrize("cut", ["ledger", "ledger.receipts"])
def test_nothing_leaves_after_the_ledger_was_cut(tmp_path: Path, signer: Countersigner, cut: str) -> None:
    with EgressGate(EgressPolicy(), AGENT, tmp_path / "ledger", AGGREGATOR, signer.bundle) as gate:
        gate.note("some", "event")
        assert gate.record_receipts([signer.receipt(AGENT, JOB, 2, gate.head)]) == [None]
    path = tmp_path / cut
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))
    before = {name: (tmp_path / name).read_bytes() for name in ("ledger", "ledger.receipts")}
    with denied("receipt of round 2 of job job-1", Code.LEDGER_BROKEN):
        EgressGate(EgressPolicy(), AGENT, tmp_path / "ledger", AGGREGATOR, signer.bundle)
    assert {name: (tmp_path / name).read_bytes() for name in before} == before


def test_wrong_receipts_are_refused_and_recorded(tmp_path: Path, signer: Countersigner) -> None:
    other = Countersigner(Identity.parse("spiffe://test.veilfed/aggregator/other/main"))

    async def scenario(bench: Bench) -> None:
        head = bench.gate.head
        wrong_round = signer.receipt(AGENT, JOB, 2, head)
        wrong_round.round = 3
        unsigned = signer.receipt(AGENT, JOB, 2, head)
        unsigned.certificate_pem = b"-----"
        strange, odd = signer.receipt(AGENT, JOB, 2, head), signer.receipt(AGENT, JOB, 2, head)
        strange.certificate_pem += b"\xff"  # could not be read back from the ledger
        odd.certificate_pem = unsupported_certificate()
        long = signer.receipt(AGENT, JOB, 2, head)
        long.certificate_pem += b"\n" * 100_000
        unknown = Head(head.records, "0" * 64)
        wrong = {
            "signature is wrong": wrong_round,
            "never stood at": signer.receipt(AGENT, JOB, 2, unknown),
            "the ledger never": signer.receipt(AGENT, JOB, 2, Head(99, head.sha256)),
            "under the bundle's roots": Countersigner().receipt(AGENT, JOB, 2, head),
            "no readable certificate": unsigned,
            "no readable .ertificate": strange,
            "certificate is not an aggregator's": odd,
            "no .eadable certificate": long,
        }
        *errors, kept = bench.gate.record_receipts([*wrong.values(), signer.receipt(AGENT, JOB, 2, head)])
        for reason, error in zip(wrong, errors, strict=True):
            assert error is not None
            assert error.code is Code.PROTOCOL_VIOLATION
            assert re.search(reason, error.message)
        assert kept is None

    run(tmp_path, signer, scenario)
    refused = [record for record in read(tmp_path / "ledger") if record["kind"] == "receipt_refused"]
    assert len(refused) == 8
    assert len(list(read(receipts_path(tmp_path / "ledger")))) == 1
    with EgressGate(EgressPolicy(), AGENT, tmp_path / "ledger", AGGREGATOR, other.bundle) as gate:
        (error,) = gate.record_receipts([other.receipt(AGENT, JOB, 1, gate.head)])
    assert error is not None
    assert re.search("signed by .*other/main, not by", error.message)
