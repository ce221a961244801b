"""Secure aggregation in the agent: answers what the aggregator asks of a round that this institution has trained."""

import asyncio
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from client_agent.config import AgentConfig, SecureAggregationConfig
from client_agent.coordinator_client import Session
from client_agent.egress import EgressGate
from client_agent.secagg import Participant
from client_agent.startup import load_agent_credentials
from client_agent.state import Finished, JobFolder, StateFolder
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.logs import get_logger
from veilfed.secagg import Context, Words
from veilfed.secagg.encoding import MASKED, encoding_for
from veilfed.updates import check_update, check_weight
from veilfed.v1.secagg_pb2 import MaskAnswer, MaskRefusal, MaskRequest
from veilfed.wire.tensors import map_bytes, parse_map, to_map

__all__ = ["Masker", "check_secure", "expectation"]

log = get_logger("agent.masking")

# What the aggregator is told; the message itself stays in the institution's own log.
REASONS = {
    Code.COHORT_INVALID: "the institution does not accept what it was shown of the other members",
    Code.POLICY_DENIED: "the institution's policy does not allow this",
    Code.TASK_INVALID: "the round or the attempt is past",
    Code.STATE_CORRUPT: "the institution's state of this job is damaged",
    Code.UPDATE_INVALID: "training diverged",
}
# The session has ended, or the disk is full.
TRANSIENT = frozenset({Code.UNREACHABLE, Code.TIMEOUT, Code.FILE_UNUSABLE})
OTHER_REASON = "the institution could not take part in the masked sum"
# Rounds that are in memory; what others need is made again from their files.
MAX_ROUNDS = 8


def expectation(spec: JobSpec, number: int) -> dict[str, tuple[tuple[int, ...], DTypeLike]]:
    """The tensors that leave in a training round: name -> (shape, dtype)."""
    if spec.secure_aggregation is not None:
        return {MASKED: ((encoding_for(spec, number).form.words,), np.uint64)}
    shapes = spec.strategy.round_shapes(number)
    return {name: (shape, spec.strategy.dtype(name)) for name, shape in shapes.items()}


def check_secure(spec: JobSpec, own: SecureAggregationConfig | None, institution: str) -> frozenset[str]:
    """The institutions whose values may be added to this one's: those of the job that are on its roster, and itself.

    None for a job without secure aggregation. Raises VeilfedError(POLICY_DENIED) for a job that this institution's
    configuration does not let it take part in.
    """
    if spec.secure_aggregation is None:
        if own is not None and own.required and spec.sends_plain:
            raise VeilfedError(Code.POLICY_DENIED, "jobs without secure aggregation are not allowed here")
        return frozenset()
    if own is None:
        raise VeilfedError(Code.POLICY_DENIED, "secure aggregation needs a roster in the agent's configuration")
    allowed = frozenset(spec.cohort.train) & {*own.roster, institution}
    if len(allowed) < own.min_cohort:
        raise VeilfedError(
            Code.POLICY_DENIED,
            f"{len(allowed)} institutions of the job are on the roster; at least {own.min_cohort} must take part",
        )
    return allowed


@dataclass(frozen=True)
class _Round:
    """What of this institution a masked round needs."""

    spec: JobSpec
    finished: Finished
    participant: Participant


class Masker:
    """Answers one request after the other. What it must remember is in the job's folder before an answer leaves."""

    def __init__(self, config: AgentConfig, folder: StateFolder, gate: EgressGate) -> None:
        self._config, self._folder, self._gate = config, folder, gate
        # The newest attempt, by job: what was verified once need not be again.
        self._rounds: dict[str, tuple[Context, _Round]] = {}
        self._lock = asyncio.Lock()

    async def answer(self, session: Session, request: MaskRequest) -> None:
        """Sends the answer, or a refusal; nothing where another agent of the institution has trained the round."""
        job = self._folder.job(request.job_id)
        async with self._lock:
            try:
                answer = await self._answer(session, job, request)
                if answer is not None:
                    session.send_mask(answer)
            except VeilfedError as error:
                told = {"code": error.code.name, "message": error.message}
                log.error("masking refused", job=job.job_id, round=request.round, **told)
                if error.code in TRANSIENT:
                    return  # asked again, with the next session
                refusal = MaskRefusal(code=error.code.name, reason=REASONS.get(error.code, OTHER_REASON))
                answer = _empty(request)
                answer.refusal.CopyFrom(refusal)
                session.send_mask(answer)

    async def _answer(self, session: Session, job: JobFolder, request: MaskRequest) -> MaskAnswer | None:
        kind = request.WhichOneof("body")
        found = await asyncio.to_thread(self._round, job, request)
        if found is None:
            log.info("masking of a round that is not this agent's", job=job.job_id, round=request.round)
            return None
        log.info("masking", job=job.job_id, round=request.round, attempt=request.attempt, phase=kind)
        self._expect(job, found.spec, request.round)
        answer = _empty(request)
        if kind == "delivery":
            vector = await asyncio.to_thread(self._masked, found, request)
            await self._put(session, job, answer, vector)
            return answer
        await asyncio.to_thread(_step, found.participant, request, answer)
        if kind == "confirmations":
            self._rounds.pop(job.job_id, None)
        return answer

    def _expect(self, job: JobFolder, spec: JobSpec, number: int) -> None:
        self._gate.expect(
            job.job_id,
            expectation(spec, number),
            rounds=spec.rounds,
            last_round=spec.last_round,
            max_weight=spec.fold.max_weight,
            masked=True,
        )

    def _round(self, job: JobFolder, request: MaskRequest) -> _Round | None:
        """Reads files. None if this agent has not trained the round."""
        finished = job.finished(request.round) if request.round in job.rounds() else None
        if finished is None or not finished.trained:
            return None
        spec = job.spec()
        form = encoding_for(spec, request.round).form
        context = Context(job.job_id, request.round, request.attempt, job.spec_sha256, form)
        known = self._rounds.get(job.job_id)
        if known is not None and known[0] == context:
            return known[1]
        self._gate.policy.check_job(spec.strategy.name, job.approved)
        credentials, own = load_agent_credentials(self._config), self._config.secure_aggregation
        allowed = check_secure(spec, own, credentials.identity.institution)
        if own is None or not allowed:
            raise VeilfedError(Code.TASK_INVALID, "the job has no secure aggregation")
        participant = Participant.begin(
            context,
            credentials,
            allowed=allowed,
            # A share of the noise protects in a sum of as many as the specification counts on.
            least=max(own.min_cohort, spec.quorum if spec.noise_parties > 1 else 0),
            keep=job.keep_masking,
            kept=job.masking(),
        )
        found = _Round(spec, finished, participant)
        self._rounds.pop(job.job_id, None)
        while len(self._rounds) >= MAX_ROUNDS:  # such as of jobs that were cancelled in the middle
            del self._rounds[next(iter(self._rounds))]
        self._rounds[job.job_id] = context, found
        return found

    def _masked(self, found: _Round, request: MaskRequest) -> Words:
        """Checks the update as an aggregator that saw it would, and as the egress gate would; then masks it."""
        spec, number = found.spec, request.round
        arrays, weight = parse_map(found.finished.update), found.finished.weight
        check_update(arrays, spec, number)
        check_weight(weight, spec)
        plain = {name: (shape, spec.strategy.dtype(name)) for name, shape in spec.strategy.round_shapes(number).items()}
        self._gate.check_masked(request.job_id, plain, found.finished.update, private=spec.privacy is not None)
        return found.participant.mask(request.delivery, encoding_for(spec, number).encode(arrays, weight))

    async def _put(self, session: Session, job: JobFolder, answer: MaskAnswer, vector: Words) -> None:
        """Into the answer, or by an upload if it is too long for a message."""
        if vector.nbytes + 256 > session.inline_limit:
            data = await asyncio.to_thread(map_bytes, {MASKED: vector})
            answer.artifact.CopyFrom(await session.upload(job.job_id, data))
        else:
            answer.tensors.CopyFrom(to_map({MASKED: vector}))


def _empty(request: MaskRequest) -> MaskAnswer:
    return MaskAnswer(job_id=request.job_id, round=request.round, attempt=request.attempt)


def _step(participant: Participant, request: MaskRequest, answer: MaskAnswer) -> None:
    """The steps without values. Raises VeilfedError."""
    kind = request.WhichOneof("body")
    if kind == "start":
        answer.advertisement.CopyFrom(participant.advertise())
    elif kind == "cohort":
        answer.shares.CopyFrom(participant.share(request.cohort))
    elif kind == "survivors":
        answer.confirmation.CopyFrom(participant.confirm(request.survivors))
    elif kind == "confirmations":
        answer.reveal.CopyFrom(participant.reveal(request.confirmations))
    else:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "a request of secure aggregation of an unknown kind")
