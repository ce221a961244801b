"""The one door through which everything leaves an institution.

Each outgoing message is checked by type against the allow-list (client_agent.egress.rules), the policy and what its
job may send, before it is serialised, and becomes one record of the ledger, passed or refused. The gate stops
mistakes and greedy servers, not hostile code in its own process.
"""

import hashlib
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import grpc
import numpy as np
from google.protobuf.message import Message
from numpy.typing import DTypeLike

from client_agent.egress import content, flow
from client_agent.egress.content import Allowed, Content
from client_agent.egress.flow import Flow
from client_agent.egress.policy import EgressPolicy, Purpose
from client_agent.egress.receipts import ReceiptKeeper
from client_agent.egress.rules import Refused, check_form, find_rule, role_for
from client_agent.egress.spending import CHARGE, PrivacySpent, Spent
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Identity, Role
from veilfed.ledger import Audit, Head, Ledger, Record, read, receipts_path
from veilfed.privacy import Release
from veilfed.v1.aggregator_pb2 import LedgerHead, Receipt, WorkRequest
from veilfed.v1.tensor_pb2 import Artifact
from veilfed.wire import tensors

__all__ = ["Destination", "EgressGate"]

Sent = TypeVar("Sent", bound=Message)

# As many rounds as the protocol can number.
ANY_ROUND = 2**32 - 1

# Records of these purposes reach the disk before their message leaves: the aggregator may countersign the head.
_DURABLE = frozenset({Purpose.UPDATE, Purpose.EVALUATION, Purpose.EMBED, Purpose.PROMPT_GRADIENT})


@dataclass(frozen=True)
class Destination:
    """A server, and whether it is of the institution's own zone (its channel trusts the zone's root alone)."""

    server: Identity
    own_zone: bool = False


@dataclass(frozen=True)
class _Ahead:
    """A message that was admitted for a call of this kind, and is kept so that no other gets its id()."""

    message: Message
    call: Flow

    def allows(self, call: Flow) -> bool:
        return (call.destination, call.method, call.metadata) == (self.call.destination, self.call.method, False)


class EgressGate:
    """Checks and records what one institution sends. Safe to use from several threads."""

    def __init__(
        self,
        policy: EgressPolicy,
        identity: Identity,
        ledger: Path,
        aggregator: Identity,
        bundle_pem: bytes,
        beside: Sequence[Path] = (),
    ) -> None:
        """Opens the ledger and the file of receipts beside it, and records the policy in force.

        `identity` is the institution's own; `aggregator` is the only one that may be talked to, whose receipts must
        be signed with a certificate under the roots `bundle_pem`. `beside` are other ledgers of the institution, whose
        inputs count in `max_embeddings` as well. Raises VeilfedError(LEDGER_BROKEN), or
        FILE_UNUSABLE also when another process has the ledger open.
        """
        self.policy = policy
        self.identity = identity
        self.aggregator = aggregator
        self._spent = Spent()
        self._privacy = PrivacySpent(policy.privacy)
        # What others have sent, as of this start.
        self._inputs_beside = _inputs(beside) if policy.max_embeddings is not None else 0
        self._allowed: dict[str, Allowed] = {}
        # Messages that were admitted and are not sent yet, by their id().
        self._ahead: dict[int, _Ahead] = {}
        self._lock = threading.RLock()
        audit, receipts = Audit(ledger), list[Record]()

        def replayed(record: Record) -> None:
            self._spent.add(record)
            self._privacy.add(record)
            audit.take(record)

        self._receipts = Ledger.open(receipts_path(ledger), receipts.append)
        try:
            self._ledger = Ledger.open(ledger, replayed)
        except BaseException:
            self._receipts.close()
            raise
        try:
            audit.compare(receipts, receipts)
            if self._spent.identity not in {None, str(identity)}:
                raise VeilfedError(
                    Code.FILE_UNUSABLE, f"{ledger}: the ledger of {self._spent.identity}", "Name another file."
                )
            self._keeper = ReceiptKeeper(self._ledger, self._receipts, identity, aggregator, bundle_pem)
            start = {"kind": "start", "identity": str(identity), "policy": policy.model_dump(mode="json")}
            self._ledger.append(start)
            if policy.raw_data_to_other_zone:
                self._ledger.append({"kind": "override", "text": "raw data may go to an oracle of another zone"})
            self._ledger.sync()
        except BaseException:
            self.close()
            raise

    @property
    def head(self) -> Head:
        return self._ledger.head

    @property
    def bytes_out(self) -> dict[tuple[str, str], int]:
        """Bytes passed so far by (destination, purpose), over all runs of the agent."""
        with self._lock:
            return dict(self._spent.bytes_out)

    @property
    def inputs_sent(self) -> int:
        """Raw inputs passed to oracles so far, over all runs of the agent."""
        return self._spent.inputs

    def interceptors(self, server: Identity, *, own_zone: bool = False) -> list[grpc.aio.ClientInterceptor]:
        """The interceptors of a channel to `server`. They must be the last of the channel's list.

        `own_zone` says that the channel trusts the institution's own zone root alone. In a stream, a refused message
        cancels the call, and reading its responses raises the refusal; `admit_ahead` tells before.
        """
        return flow.interceptors(self, self._destination(server, own_zone))

    def _destination(self, server: Identity, own_zone: bool) -> Destination:
        if own_zone and server.institution != self.identity.institution:
            raise VeilfedError(Code.POLICY_DENIED, f"{server} is not of the zone of {self.identity.institution}")
        if server.role is Role.AGGREGATOR and server != self.aggregator:
            raise VeilfedError(Code.POLICY_DENIED, f"{server} is not the aggregator of the configuration")
        return Destination(server, own_zone)

    def expect(
        self,
        job: str,
        arrays: Mapping[str, tuple[tuple[int, ...], DTypeLike]],
        *,
        rounds: int = ANY_ROUND,
        last_round: int | None = None,
        max_weight: float = 1.0,
        private: bool = False,
        masked: bool = False,
    ) -> None:
        """A consented job may send updates of exactly these tensors: name -> (shape, dtype).

        In `rounds` rounds and a closing evaluation, in turns of these up to `last_round` (by default one turn), with
        weights up to `max_weight`. Without tensors, it may send evaluations alone; of a `private` job, only tensors
        that were charged. With `masked` these tensors leave in messages of secure aggregation alone, and only then do
        such messages leave: what is under the masks is checked by `check_masked`. Jobs that are not expected may send
        refusals alone.
        """
        shapes = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in arrays.items()}
        with self._lock:
            charged = self._privacy.digests(job) if private and not masked else None
            last = rounds if last_round is None else last_round
            allowed = Allowed(shapes, rounds, last, max_weight, masked=masked, charged=charged)
            known = self._allowed.get(job)
            if known is None or known != replace(allowed, artifacts=known.artifacts):
                self._allowed[job] = allowed

    def forget(self, job: str) -> None:
        """The job has ended or its consent was taken back: nothing may leave for it any more."""
        with self._lock:
            self._allowed.pop(job, None)

    def check_privacy(self, job: str, release: Release, rounds: int) -> None:
        """Raises VeilfedError(POLICY_DENIED) unless the budgets suffice for what is left of a job of so many rounds."""
        with self._lock:
            self._privacy.check_plan(job, release, rounds)

    def charge(self, job: str, charge: str, release: Release, sha256: str) -> None:
        """Charges a job for a noisy result, before that is kept; waits for the disk: call it off the event loop.

        `sha256` is of the result as a TensorMap in canonical form; it alone may then leave. The name `charge` is the
        same again where the result was not kept after all. Raises VeilfedError: POLICY_DENIED beyond a budget, or
        FILE_UNUSABLE.
        """
        with self._lock:
            try:
                record = self._privacy.charge(job, charge, release, sha256)
            except VeilfedError as error:
                self._ledger.append({"kind": CHARGE, "decision": "refused", "job": job, "reason": error.message})
                raise
            self._ledger.append(record)
            self._privacy.add(record)
        self._ledger.sync()

    def check_masked(
        self, job: str, arrays: Mapping[str, tuple[tuple[int, ...], DTypeLike]], data: bytes, private: bool
    ) -> None:
        """Checks an update that is about to be masked like one that leaves as it is: its tensors, and that it was
        charged. `data` is a TensorMap in canonical form. Raises VeilfedError(POLICY_DENIED).
        """
        shapes = {name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in arrays.items()}
        with self._lock:
            charged = self._privacy.digests(job) if private else None
        allowed = Allowed(shapes, ANY_ROUND, ANY_ROUND, 0.0, charged=charged)
        try:
            content.check_artifact(allowed, data, self.policy)
        except Refused as refused:
            raise VeilfedError(Code.POLICY_DENIED, f"the values to be masked of job {job}: {refused}") from None

    def approve_artifact(self, job: str, data: bytes) -> Artifact:
        """Checks an update that is too long for a message; only its exact bytes may then be pushed.

        `data` is a serialised TensorMap in canonical form. They are kept until `forget`. Raises
        VeilfedError(POLICY_DENIED).
        """
        artifact = Artifact(sha256=tensors.digest(data), size=len(data))
        try:
            # Outside the lock: it takes long, and messages need not wait for it.
            allowed = content.check_artifact(self._allowed.get(job), data, self.policy)
            allowed.artifacts = {artifact.sha256: memoryview(data)}
        except Refused as refused:
            record = {"kind": "artifact", "job": job, "bytes": len(data), "digest": artifact.sha256}
            self._ledger.append({**record, "decision": "refused", "reason": str(refused)})
            raise VeilfedError(Code.POLICY_DENIED, f"the artifact for job {job}: {refused}") from None
        return artifact

    def admit_ahead(self, server: Identity, method: str, message: Sent, *, own_zone: bool = False) -> Sent:
        """Admits a message before it is queued for its call, which would end if the message were refused in it.

        What this returns passes the interceptors once. Errors as `admit`.
        """
        call = Flow(self._destination(server, own_zone), method)
        admitted = self.admit(call, message)
        self._ahead[id(admitted)] = _Ahead(admitted, call)
        return admitted

    def withdraw(self, admitted: Message) -> None:
        """A message that was admitted ahead will not be sent: the call that it was queued for has ended.

        A note says so in the ledger, where it is recorded as passed. It counts in the budgets all the same.
        """
        if self._ahead.pop(id(admitted), None) is not None:
            digest = hashlib.sha256(admitted.SerializeToString(deterministic=True)).hexdigest()
            with suppress(VeilfedError):  # a full disk; then the ledger says that more has left than did
                self.note("withdrawn", f"the message with the digest {digest} did not leave: its call has ended")

    def open(self, call: Flow) -> None:
        """Checks a call before it is started: a stream's method and metadata leave before its first message.

        Records it if it is refused. Raises VeilfedError(POLICY_DENIED).
        """
        try:
            self._check_call(call)
        except Refused as refused:
            with self._lock:
                raise self._refuse(_envelope(call, "", b""), refused) from None

    def admit(self, call: Flow, message: Sent) -> Sent:
        """Checks and records one message of a call; returns the private copy of it that is sent.

        May wait for the disk: not in a thread, as to wake one up and to be woken by it takes longer. An update gets
        the ledger's head before its own record. Raises VeilfedError: POLICY_DENIED, or FILE_UNUSABLE when it cannot
        be recorded; then it does not leave either.
        """
        ahead = self._ahead.get(id(message))
        if ahead is not None and ahead.allows(call):
            del self._ahead[id(message)]
            return message
        if not isinstance(message, Message):
            raise self._refuse(_envelope(call, type(message).__name__, b""), Refused("it is not a message"))
        # What was checked must be what is sent, even if the caller changes the message meanwhile.
        copy = type(message)()
        copy.CopyFrom(message)
        with self._lock:
            if isinstance(copy, WorkRequest) and copy.HasField("update"):
                head = self._ledger.head
                copy.update.ledger_head.CopyFrom(LedgerHead(records=head.records, sha256=head.sha256))
            record, refusal = self._examine(call, copy)
            if refusal is not None:
                raise self._refuse(record, refusal)
            self._ledger.append({**record, "decision": "passed"})
            self._spent.add({**record, "decision": "passed"})
        if record["purpose"] in _DURABLE:
            self._ledger.sync()
        return copy

    def _refuse(self, record: Record, refused: Refused) -> VeilfedError:
        self._ledger.append({**record, "decision": "refused", "reason": str(refused)})
        return VeilfedError(
            Code.POLICY_DENIED, f"a message to {record['destination']} by {record['method']} does not leave: {refused}"
        )

    def _examine(self, call: Flow, message: Message) -> tuple[Record, Refused | None]:
        """The record of a message, and why it may not leave (None if it may)."""
        data = message.SerializeToString(deterministic=True)
        record = _envelope(call, message.DESCRIPTOR.full_name, data)
        try:
            rule = find_rule(call.method, message)
            record["purpose"] = rule.purpose.value
            found = content.describe(call, message)
            record |= found.fields()
            if rule.purpose is Purpose.UPDATE and self._privacy.digests(found.job):
                record["privacy"] = self._privacy.told(found.job)
            self._check_call(call)
            check_form(rule, message)
            self._check_policy(call, rule.purpose, found)
            self._check_budgets(found, len(data))
            content.check(call, message, self._allowed.get(found.job), self.policy, self.identity)
        except Refused as refused:
            return record, refused
        return record, None

    def _check_call(self, call: Flow) -> None:
        role = role_for(call.method)
        if role is not call.destination.server.role:
            raise Refused(f"it may go to the {role.value} only")
        if call.metadata:
            raise Refused("the call has metadata")
        if call.destination.server.federation != self.identity.federation:
            raise Refused("the server is of another federation")

    def _check_policy(self, call: Flow, purpose: Purpose, found: Content) -> None:
        if purpose not in self.policy.purposes:
            raise Refused(f"the policy does not list the purpose {purpose.value}")
        if found.inputs and not (call.destination.own_zone or self.policy.raw_data_to_other_zone):
            raise Refused("raw data may go to an oracle of the own zone only")

    def _check_budgets(self, found: Content, size: int) -> None:
        limit = self.policy.max_bytes_per_job
        if found.job and limit is not None and self._spent.job_bytes[found.job] + size > limit:
            raise Refused(f"more than the {limit} bytes that one job may send")
        limit = self.policy.max_embeddings
        if found.inputs and limit is not None and self._inputs_beside + self._spent.inputs + found.inputs > limit:
            raise Refused(f"more than the {limit} inputs that may be sent to oracles")

    def record_receipts(self, receipts: Sequence[Receipt]) -> list[VeilfedError | None]:
        """Keeps countersigned heads, beside the ledger and in it; waits for the disk: call it off the event loop.

        Returns for each receipt None, or a PROTOCOL_VIOLATION when the signature is not the aggregator's or the head
        is not this ledger's past; that is recorded too. Raises VeilfedError(FILE_UNUSABLE).
        """
        return self._keeper.record(receipts)

    def note(self, kind: str, text: str) -> None:
        """Records an event that is no message, such as an approval; nothing private."""
        self._ledger.append({"kind": "note", "note": kind, "text": text})

    def close(self) -> None:
        """Lets go of the ledger. Nothing can leave afterwards."""
        self._ledger.close()
        self._receipts.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _inputs(ledgers: Sequence[Path]) -> int:
    """Raw inputs that passed by these ledgers, of those that are there."""
    spent = Spent()
    for ledger in ledgers:
        if ledger.exists():
            for record in read(ledger):
                spent.add(record)
    return spent.inputs


def _envelope(call: Flow, kind: str, data: bytes) -> Record:
    """The part of a message's record that every message has."""
    return {
        "kind": "message",
        "purpose": "unlisted",
        "destination": str(call.destination.server),
        "own_zone": call.destination.own_zone,
        "method": call.method[:200],
        "type": kind,
        "bytes": len(data),
        "digest": hashlib.sha256(data).hexdigest(),
    }
