"""What agents answer: updates through the gate into the round, with a countersigned receipt, or typed refusals."""

import asyncio
from collections.abc import Callable
from functools import partial

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from aggregator import gate
from aggregator.answers import AnswerQueue
from aggregator.engine import Engine
from aggregator.hub import Stream
from aggregator.rounds.answers import Claim, Found, Taken
from aggregator.rounds.book import Job
from aggregator.rounds.records import Offer, Refused
from aggregator.words import printable
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import load_key
from veilfed.identity.material import Credentials
from veilfed.ledger import Head, head_statement
from veilfed.logs import get_logger
from veilfed.v1.aggregator_pb2 import Receipt, Rejection, TaskRefusal, Update, WorkResponse
from veilfed.wire.tensors import Arrays, digest, map_bytes, parse_map, unpack_map

__all__ = ["Intake"]

log = get_logger("aggregator.intake")

MAX_REASON = 300
# Longest parameters that are kept in their row: a file of their own would cost more than they do. All those of a round
# are in memory while it is folded.
ROW_BYTES = 64 * 1024


class Intake:
    """Takes the answers of all streams."""

    def __init__(self, engine: Engine, credentials: Credentials) -> None:
        self._engine = engine
        self._answers = AnswerQueue(engine)
        self._key = load_key(credentials.key_pem, "key")
        self._certificate_pem = credentials.certificate_pem

    async def update(self, stream: Stream, update: Update) -> None:
        """Answers with a Receipt or a Rejection on the stream. An upload that was taken, or will never be, is removed.

        Raises VeilfedError(INTERNAL) when the aggregator cannot keep the update: the stream must end, so that the
        agent comes back and sends it again.
        """
        claim = Claim(stream.identity, stream.session, update.job_id, update.round, update.token)
        engine = self._engine
        try:
            task: Offer | Found | None = stream.offered(claim.job_id, claim.round, claim.token)
            if task is None:  # what this stream was not just offered is looked up before anything is done for it
                task = await engine.run(partial(engine.machine.find, claim=claim))
            gate.check_head(update.ledger_head)
            job = await engine.job(task.job_id)
            gated = partial(self._gated, job, claim, update, task.trains)
            # A short one is gated sooner than a thread wakes up.
            taken = gated() if _short(update) and not job.strategy.sealed else await asyncio.to_thread(gated)
            receipt = self._receipt(claim, update)
            # The receipt goes first: what follows may be the next task.
            await self._answers.accept(claim, taken, first=partial(stream.owe, receipt))
        except VeilfedError as error:
            await self._refused(stream, claim, error)
            if error.code is not Code.UPDATE_INVALID:  # else the upload can be named again
                return
        if update.WhichOneof("parameters") == "artifact":
            await asyncio.to_thread(
                engine.artifacts.drop_upload, claim.job_id, claim.identity.institution, update.artifact.sha256
            )

    async def _refused(self, stream: Stream, claim: Claim, error: VeilfedError) -> None:
        """Answers with a rejection; bad content excludes the institution from the round."""
        if error.code is Code.FILE_UNUSABLE:
            error = await self._own_fault(claim, error)
        reply = partial(stream.send, _rejection(claim, error))
        if error.code is not Code.UPDATE_INVALID:
            reply()
            return
        try:
            await self._exclude(claim, Refused(error.code.name, error.message), reply)
        except VeilfedError as newer:  # such as a round that has closed meanwhile
            stream.send(_rejection(claim, newer))

    async def _own_fault(self, claim: Claim, error: VeilfedError) -> VeilfedError:
        """Why an update could not be kept: its round has closed and its folder is gone, or the disk fails."""
        try:
            await self._engine.run(partial(self._engine.machine.find, claim=claim))
        except VeilfedError as closed:
            return closed
        log.error("an update cannot be kept", job=claim.job_id, round=claim.round, error=error.message)
        raise VeilfedError(Code.INTERNAL, "the aggregator cannot keep updates at the moment") from None

    async def _exclude(self, claim: Claim, refused: Refused, first: Callable[[], None] | None = None) -> None:
        engine = self._engine
        await engine.change(partial(engine.machine.exclude, claim=claim, refused=refused), first=first)

    def _gated(self, job: Job, claim: Claim, update: Update, trains: bool) -> Taken:
        """Runs the gate and keeps the parameters.

        Raises VeilfedError: UPDATE_INVALID for content that excludes; others, such as ARTIFACT_INVALID for an upload
        that is not whole, exclude nobody.
        """
        gate.check_weight(update.weight, trains, job.spec)
        evaluations = gate.check_evaluations(update)
        institution, sha256, data = claim.identity.institution, "", None
        arrays = self._parameters(job, institution, update)
        if trains and job.spec.sends_plain:
            if arrays is None:
                raise VeilfedError(Code.UPDATE_INVALID, "the trained parameters are missing")
            job.strategy.check(arrays, claim.round)
            if job.strategy.sealed:
                sha256 = self._keep(job.id, None, institution, update, arrays)
            elif _short(update):
                data = map_bytes(arrays)
                sha256 = digest(data)
            else:
                sha256 = self._keep(job.id, claim.round, institution, update, arrays)
        elif arrays is not None:
            raise VeilfedError(Code.UPDATE_INVALID, "parameters: this task asks for none")
        return Taken(sha256, update.weight, evaluations, update.ledger_head, data)

    def _keep(self, job_id: str, number: int | None, institution: str, update: Update, arrays: Arrays) -> str:
        """Keeps the parameters until their round is folded, or sealed; returns the SHA-256 of what is kept."""
        artifacts = self._engine.artifacts
        if update.WhichOneof("parameters") != "artifact":
            return artifacts.put_update(job_id, number, institution, map_bytes(arrays))
        artifacts.keep_upload(job_id, number, institution, update.artifact.sha256)
        return update.artifact.sha256

    def _parameters(self, job: Job, institution: str, update: Update) -> Arrays | None:
        kind = update.WhichOneof("parameters")
        if kind is None:
            return None
        data = b""
        if kind == "artifact":
            data = self._engine.artifacts.uploaded(job.id, institution, update.artifact.sha256)
        try:
            return parse_map(data) if kind == "artifact" else unpack_map(update.tensors)
        except VeilfedError as error:
            raise VeilfedError(Code.UPDATE_INVALID, f"parameters: {error.message}") from None

    def _receipt(self, claim: Claim, update: Update) -> Receipt:
        head = Head(update.ledger_head.records, update.ledger_head.sha256)
        statement = head_statement(claim.identity, claim.job_id, claim.round, head)
        return Receipt(
            job_id=claim.job_id,
            round=claim.round,
            token=claim.token,
            ledger_head=update.ledger_head,
            signature=self._key.sign(statement, ec.ECDSA(SHA256())),
            certificate_pem=self._certificate_pem,
        )

    async def refusal(self, stream: Stream, refusal: TaskRefusal) -> None:
        """Excludes the institution from the round, as it asks."""
        claim = Claim(stream.identity, stream.session, refusal.job_id, refusal.round, refusal.token)
        code = refusal.code if refusal.code in Code.__members__ else Code.PROTOCOL_VIOLATION.name
        try:
            await self._exclude(claim, Refused(code, printable(refusal.reason, MAX_REASON)))
        except VeilfedError as error:
            stream.send(_rejection(claim, error))


def _short(update: Update) -> bool:
    """Whether the update has no parameters, or such that are kept in the database with the rest of it."""
    return update.WhichOneof("parameters") != "artifact" and update.ByteSize() <= ROW_BYTES


def _rejection(claim: Claim, error: VeilfedError) -> WorkResponse:
    return WorkResponse(
        rejection=Rejection(
            job_id=claim.job_id,
            round=claim.round,
            token=claim.token,
            code=error.code.name,
            message=error.message,
            hint=error.hint,
        )
    )
