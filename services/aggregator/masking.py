"""Masked rounds of the running aggregator: what institutions are asked for, what they answer, when a phase is over.

What was answered and which phase a round is in is in the database before anything that follows from it is sent; the
rest (aggregator.secagg.SecureSum) is made again from that. Event loop only; work that blocks is in threads.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from aggregator.hub import Stream
from aggregator.masked_sum import check_vector, fold_masked, parsed, replayed
from aggregator.rounds.book import Job
from aggregator.rounds.masked import KeptAnswer, MaskedRound
from aggregator.rounds.records import MaskOffer, Refused, RoundState
from aggregator.secagg import Phase, SecureSum
from aggregator.strategies import Report
from aggregator.words import printable
from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger
from veilfed.v1.aggregator_pb2 import WorkResponse
from veilfed.v1.secagg_pb2 import MaskAnswer, MaskRequest
from veilfed.wire.tensors import Arrays, map_bytes, unpack_map

if TYPE_CHECKING:
    from aggregator.engine import Engine

__all__ = ["Masking"]

log = get_logger("aggregator.masking")

# Attempts at a round of which nothing was revealed yet.
MAX_ATTEMPTS = 3
MAX_REASON = 300
# Longest masked vector that is kept in its row.
ROW_BYTES = 64 * 1024

# Answers by the field that they are in.
_PHASES = {
    "advertisement": Phase.ADVERTISE,
    "shares": Phase.SHARE,
    "tensors": Phase.MASK,
    "artifact": Phase.MASK,
    "confirmation": Phase.CONFIRM,
    "reveal": Phase.REVEAL,
}
_REQUESTS = {
    Phase.SHARE: "cohort",
    Phase.MASK: "delivery",
    Phase.CONFIRM: "survivors",
    Phase.REVEAL: "confirmations",
}

Key = tuple[str, int]


@dataclass
class _Live:
    """A round that is masking, in memory."""

    job: Job
    round: int
    attempt: int
    sum: SecureSum
    # Those who are not left out.
    trained: set[str]

    @property
    def key(self) -> Key:
        return self.job.id, self.round

    @property
    def pending(self) -> set[str]:
        """Whose answers the phase waits for."""
        return self.trained & self.sum.asked - self.sum.answered


class Masking:
    """`bundle_pem` are the roots under which the institutions' certificates must be."""

    def __init__(self, engine: "Engine", federation: str, bundle_pem: bytes) -> None:
        self._engine = engine
        self._federation, self._bundle = federation, bundle_pem
        self._rounds: dict[Key, _Live] = {}
        self._locks: defaultdict[Key, asyncio.Lock] = defaultdict(asyncio.Lock)

    # What is asked.

    async def begin(self, key: Key) -> None:
        """A new attempt: asks all who have trained."""
        async with self._locks[key]:
            live = await self._live(key)
            if live is not None:
                log.info("masking", job=live.job.id, round=live.round, attempt=live.attempt)
                self._ask(live)

    async def offer(self, stream: Stream) -> None:
        """Tells a new stream what rounds wait for from its institution."""
        institution = stream.identity.institution
        rounds = await self._engine.run(partial(self._engine.machine.masking, institution=institution))
        for one in rounds:
            stream.send(MaskOffer(one.job_id, one.round))

    async def request(self, offer: MaskOffer, institution: str) -> WorkResponse | None:
        """The message of an offer; None if the round waits for nothing from the institution any more."""
        key = offer.job_id, offer.round
        async with self._locks[key]:
            live = await self._live(key)
            if live is None or institution not in live.pending:
                return None
            request = MaskRequest(job_id=offer.job_id, round=offer.round, attempt=live.attempt)
            body = live.sum.request(institution)
            if body is None:
                request.start.SetInParent()
            else:
                getattr(request, _REQUESTS[live.sum.phase]).CopyFrom(body)
            return WorkResponse(mask=request)

    def _ask(self, live: _Live) -> None:
        for institution in sorted(live.pending):
            self._engine.hub.send_to(institution, MaskOffer(*live.key))

    # What comes.

    async def answer(self, stream: Stream, answer: MaskAnswer) -> None:
        """Takes an answer into its phase. What comes late, or twice, is of no consequence."""
        key, institution = (answer.job_id, answer.round), stream.identity.institution
        find = partial(self._engine.machine.masked_round, job_id=answer.job_id, number=answer.round)
        if await self._engine.run(find) is None:
            return  # before anything is made for it: an agent can name any number of rounds
        async with self._locks[key]:
            live = await self._live(key)
            kind = answer.WhichOneof("body")
            late = live is not None and kind != "refusal" and _PHASES.get(kind or "") is not live.sum.phase
            if live is None or answer.attempt != live.attempt or institution not in live.pending or late:
                log.info("late answer", job=answer.job_id, round=answer.round, institution=institution, kind=kind)
                return
            try:
                if kind == "refusal":
                    await self._refused(live, institution, answer)
                else:
                    await self._take(live, institution, answer, kind or "")
                await self._settle(live)
            except BaseException:
                self._rounds.pop(key, None)  # it may be ahead of the database
                raise

    async def _refused(self, live: _Live, institution: str, answer: MaskAnswer) -> None:
        code = answer.refusal.code if answer.refusal.code in Code.__members__ else Code.PROTOCOL_VIOLATION.name
        await self._leave_out(live, institution, Refused(code, printable(answer.refusal.reason, MAX_REASON)))

    async def _take(self, live: _Live, institution: str, answer: MaskAnswer, kind: str) -> None:
        """Keeps an answer that is right; who sends another is left out."""
        try:
            kept = await asyncio.to_thread(self._taken, live, institution, answer, kind)
        except VeilfedError as error:
            if error.code is Code.ARTIFACT_INVALID:  # the upload can be sent again
                self._engine.hub.send_to(institution, MaskOffer(*live.key))
                return
            if error.code is Code.FILE_UNUSABLE:
                log.error("an answer cannot be kept", job=live.job.id, round=live.round, error=error.message)
                raise VeilfedError(Code.INTERNAL, "the aggregator cannot keep updates at the moment") from None
            await self._leave_out(live, institution, Refused(error.code.name, error.message))
            return
        keep = partial(
            self._engine.machine.keep_answers,
            job_id=live.job.id,
            number=live.round,
            attempt=live.attempt,
            kept=[kept],
        )
        if not await self._engine.run(keep):
            self._rounds.pop(live.key, None)
        if kind == "artifact":
            await asyncio.to_thread(
                self._engine.artifacts.drop_upload, live.job.id, institution, answer.artifact.sha256
            )

    def _taken(self, live: _Live, institution: str, answer: MaskAnswer, kind: str) -> KeptAnswer:
        phase = live.sum.phase
        if phase is Phase.MASK:
            kept = self._keep_vector(live, institution, answer, kind)
            live.sum.take_masked(institution)
            return kept
        message: Message = getattr(answer, kind)
        live.sum.take(institution, message)
        return KeptAnswer(phase, institution, message.SerializeToString(deterministic=True))

    def _keep_vector(self, live: _Live, institution: str, answer: MaskAnswer, kind: str) -> KeptAnswer:
        artifacts, sha256 = self._engine.artifacts, answer.artifact.sha256
        if kind == "artifact":
            arrays = parsed(artifacts.uploaded(live.job.id, institution, sha256))
        else:
            arrays = unpack_map(answer.tensors)
        check_vector(arrays, live.sum.context)
        if kind == "artifact":
            artifacts.keep_upload(live.job.id, live.round, institution, sha256)
            return KeptAnswer(Phase.MASK, institution, b"", sha256)
        data = map_bytes(arrays)
        if len(data) <= ROW_BYTES:
            return KeptAnswer(Phase.MASK, institution, data)
        sha256 = artifacts.put_update(live.job.id, live.round, institution, data)
        return KeptAnswer(Phase.MASK, institution, b"", sha256)

    async def _leave_out(self, live: _Live, institution: str, refused: Refused) -> None:
        """The phase waits for it no more. Once its vector is in the sum it stays in the sum, and in the round."""
        told = {"institution": institution, "code": refused.code, "reason": refused.reason}
        log.warning("masking without an institution", job=live.job.id, round=live.round, **told)
        machine = self._engine.machine
        if live.sum.phase <= Phase.MASK:
            leave = partial(machine.leave_out, job_id=live.job.id, number=live.round)
            await self._engine.change(partial(leave, institution=institution, refused=refused))
        live.trained.discard(institution)

    # Time, and what follows.

    async def tick(self) -> None:
        """Closes the phases that are over."""
        now = self._engine.clock()
        for one in await self._engine.run(self._engine.machine.masking):
            key = one.job_id, one.round
            if one.due_ms > now or self._locks[key].locked():
                continue
            async with self._locks[key]:
                live = await self._live(key)
                if live is not None and (live.attempt, live.sum.phase) == (one.attempt, one.phase):
                    await self._close(live)

    async def _settle(self, live: _Live) -> None:
        if not live.pending:
            await self._close(live)

    async def _close(self, live: _Live) -> None:
        """Ends the phase. The next one is in the database before anybody is asked."""
        machine, phase = self._engine.machine, live.sum.phase
        if phase is Phase.REVEAL:
            self._rounds.pop(live.key, None)
            await self._engine.change(
                partial(
                    machine.fold_masked,
                    job_id=live.job.id,
                    number=live.round,
                    attempt=live.attempt,
                    survivors=live.sum.survivors,
                )
            )
            return
        try:
            await asyncio.to_thread(live.sum.advance)
        except VeilfedError as error:
            await self._again(live.job, live.round, live.attempt, len(live.trained), error.message)
            return
        move = partial(machine.next_phase, job=live.job, number=live.round, attempt=live.attempt, phase=phase)
        if not await self._engine.run(move):
            self._rounds.pop(live.key, None)
            return
        self._ask(live)

    async def _again(self, job: Job, number: int, attempt: int, left: int, why: str) -> None:
        """Nothing was revealed yet: another attempt, unless too few are `left` or it was the last."""
        machine = self._engine.machine
        self._rounds.pop((job.id, number), None)
        log.warning("masking failed", job=job.id, round=number, attempt=attempt, reason=why)
        if attempt + 1 < MAX_ATTEMPTS and left >= job.spec.quorum:
            await self._engine.change(partial(machine.next_attempt, job=job, number=number, attempt=attempt))
        else:
            await self._fail(job, number, why)

    async def _fail(self, job: Job, number: int, why: str) -> None:
        fail = partial(self._engine.machine.fail_masking, job=job, number=number)
        await self._engine.change(partial(fail, message=f"secure aggregation: {why}"))

    def forget(self, job_id: str) -> None:
        """The job has ended."""
        for key in [key for key in self._rounds if key[0] == job_id]:
            del self._rounds[key]
        for key in [key for key, lock in self._locks.items() if key[0] == job_id and not lock.locked()]:
            del self._locks[key]

    # What is in memory follows from the database.

    async def _live(self, key: Key) -> _Live | None:
        """The round, if it is masking. Made again where it is not in memory, or not as in the database."""
        engine, (job_id, number) = self._engine, key
        stands = await engine.run(partial(engine.machine.masked_round, job_id=job_id, number=number))
        if stands is None or stands.state != RoundState.MASKING:
            self._rounds.pop(key, None)
            return None
        live = self._rounds.get(key)
        if live is not None and (live.attempt, live.sum.phase) == (stands.attempt, stands.phase):
            return live
        job = await engine.job(job_id)
        answers = await engine.run(partial(engine.machine.answers, job_id=job_id, number=number))
        trained = await engine.run(partial(engine.machine.trained, job_id=job_id, number=number))
        try:
            made = await asyncio.to_thread(replayed, job, stands, answers, self._federation, self._bundle)
        except VeilfedError as error:  # such as a certificate that ended while the aggregator was stopped
            if stands.phase < Phase.REVEAL:
                await self._again(job, number, stands.attempt, len(trained), error.message)
            else:
                await self._fail(job, number, error.message)
            return None
        self._rounds[key] = _Live(job, number, stands.attempt, made, set(trained))
        return self._rounds[key]

    # The fold.

    async def fold(self, job: Job, number: int) -> tuple[Arrays, Report] | None:
        """The next model, from the sum of what is kept; None if the round is not folded (any more).

        Errors as `fold_masked`.
        """
        engine = self._engine
        stands = await engine.run(partial(engine.machine.masked_round, job_id=job.id, number=number))
        if stands is None or stands.state != RoundState.FOLDING:
            return None
        answers = await engine.run(partial(engine.machine.answers, job_id=job.id, number=number))
        start = (await engine.run(partial(engine.machine.inputs, job_id=job.id, number=number))).start
        return await asyncio.to_thread(self._folded, job, stands, answers, start)

    def _folded(
        self, job: Job, stands: MaskedRound, answers: Sequence[KeptAnswer], start: str
    ) -> tuple[Arrays, Report]:
        made = replayed(job, stands, answers, self._federation, self._bundle)
        return fold_masked(self._engine.artifacts, job, made, answers, start)
