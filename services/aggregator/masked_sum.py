"""A masked round made again from what is kept of it, and its fold. Blocks: call it off the event loop."""

from collections.abc import Sequence
from typing import Any

from google.protobuf.message import Message

from aggregator.artifacts import Artifacts
from aggregator.rounds.book import Job
from aggregator.rounds.masked import KeptAnswer, MaskedRound
from aggregator.secagg import Phase, SecureSum
from aggregator.strategies import Report
from veilfed.errors import Code, VeilfedError
from veilfed.secagg import Context, Words
from veilfed.secagg.cohort import last_valid
from veilfed.secagg.encoding import MASKED, encoding_for
from veilfed.v1.secagg_pb2 import Advertisement, Confirmation, Reveal, Shares
from veilfed.wire.tensors import Arrays, digest, parse_map

__all__ = ["check_vector", "fold_masked", "parsed", "replayed"]

_KEPT: dict[Phase, type[Message]] = {
    Phase.ADVERTISE: Advertisement,
    Phase.SHARE: Shares,
    Phase.CONFIRM: Confirmation,
    Phase.REVEAL: Reveal,
}


def replayed(
    job: Job, stands: MaskedRound, answers: Sequence[KeptAnswer], federation: str, bundle_pem: bytes
) -> SecureSum:
    """What the aggregator knew when it kept the last of the answers. Errors as SecureSum.

    COHORT_INVALID too where a certificate has ended before all institutions have accepted the cohort.
    """
    spec_sha256, form = digest(job.spec_json.encode()), encoding_for(job.spec, stands.round).form
    context = Context(job.id, stands.round, stands.attempt, spec_sha256, form)
    at = None
    if stands.phase > Phase.SHARE:
        at = last_valid(_keys(answer) for answer in answers if answer.phase == Phase.ADVERTISE)
    made = SecureSum(context, job.spec.cohort.train, job.spec.quorum, federation, bundle_pem, at)
    for answer in answers:
        while made.phase < answer.phase:
            made.advance()
        if answer.phase == Phase.MASK:
            made.take_masked(answer.institution)
        else:
            made.take(answer.institution, _KEPT[Phase(answer.phase)].FromString(answer.message))
    while made.phase < stands.phase:
        made.advance()
    return made


def _keys(answer: KeptAnswer) -> Advertisement:
    return Advertisement.FromString(answer.message)


def fold_masked(
    artifacts: Artifacts, job: Job, made: SecureSum, answers: Sequence[KeptAnswer], start: str
) -> tuple[Arrays, Report]:
    """The next model, from the kept vectors of the survivors; `start` is the SHA-256 of the model before.

    Raises VeilfedError: JOB_FAILED where the masks cannot be removed or a vector is damaged, and what
    `Strategy.fold_sum` raises.
    """
    context = made.context
    vectors = {answer.institution: answer for answer in answers if answer.phase == Phase.MASK}
    total = context.form.zeros()
    for institution in made.survivors:
        context.form.add(total, _vector(artifacts, context, vectors[institution]))
    made.unmask(total)
    arrays, report = job.strategy.fold_sum(
        total, len(made.survivors), context.round, lambda: parse_map(artifacts.model(start))
    )
    return arrays, {**report, "secure_aggregation": _told(made)}


def _vector(artifacts: Artifacts, context: Context, answer: KeptAnswer) -> Words:
    data = answer.message
    try:
        if answer.sha256:
            data = artifacts.update(context.job_id, context.round, answer.institution, answer.sha256)
        return check_vector(parsed(data), context)
    except VeilfedError as error:
        if error.code is Code.FILE_UNUSABLE:
            raise
        # The others' masks are in the sum: it is of no use without this one.
        raise VeilfedError(Code.JOB_FAILED, f"the masked values of {answer.institution} are damaged") from None


def parsed(data: bytes) -> Arrays:
    """Raises VeilfedError(UPDATE_INVALID)."""
    try:
        return parse_map(data)
    except VeilfedError as error:
        raise VeilfedError(Code.UPDATE_INVALID, f"{MASKED}: {error.message}") from None


def check_vector(arrays: Arrays, context: Context) -> Words:
    """All that a masked vector shows: its form. Raises VeilfedError(UPDATE_INVALID)."""
    vector: Any = arrays.get(MASKED)
    try:
        if len(arrays) != 1 or vector is None:
            raise VeilfedError(Code.UPDATE_INVALID, "expected one tensor")
        context.form.check(vector)
    except VeilfedError as error:
        raise VeilfedError(Code.UPDATE_INVALID, f"{MASKED}: {error.message}") from None
    words: Words = vector
    return words


def _told(made: SecureSum) -> dict[str, Any]:
    """What the report of a job says of a masked round."""
    return {
        "institutions_in_the_sum": len(made.survivors),
        "attempt": made.context.attempt + 1,
        "checked": "the sum as a whole",
        "not_checked": "the update of any single institution: it checks its own before it masks it",
    }
