"""The update gate: what an update must be to count. All or nothing, and every refusal says what was wrong.

Its tensors are checked by veilfed.updates.
"""

import re

from veilfed import updates
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec
from veilfed.v1.aggregator_pb2 import Evaluation, LedgerHead, Update

__all__ = [
    "EVALUATIONS",
    "check_evaluations",
    "check_head",
    "check_weight",
]

EVALUATIONS = ("personal", "global")
MAX_TOTAL = 2**53  # counts stay exact as float64 and as signed 64-bit integers
_SHA256 = re.compile(r"[0-9a-f]{64}")


def _refuse(message: str) -> VeilfedError:
    return VeilfedError(Code.UPDATE_INVALID, message)


def check_weight(weight: float, trains: bool, spec: JobSpec) -> None:
    """The weight in the average; 0 where no tensors are sent. Raises VeilfedError(UPDATE_INVALID)."""
    if not trains or not spec.sends_plain:
        if weight != 0:
            raise _refuse("weight: without parameters it is 0")
        return
    updates.check_weight(weight, spec)


def check_evaluations(update: Update) -> list[Evaluation]:
    """The counts: known names, each once, correct at most total. Raises VeilfedError(UPDATE_INVALID)."""
    if len(update.evaluations) > len(EVALUATIONS):
        raise _refuse(
            f"evaluations: {len(update.evaluations)}; at most {len(EVALUATIONS)}, each with a name of its own"
        )
    names = [evaluation.name for evaluation in update.evaluations]
    if any(name not in EVALUATIONS for name in names) or len(set(names)) != len(names):
        raise _refuse(f"evaluations: the names must be of {list(EVALUATIONS)}, each at most once")
    for evaluation in update.evaluations:
        if not 0 < evaluation.total <= MAX_TOTAL:
            raise _refuse(f"evaluations: {evaluation.name} has no samples, or too many")
        if evaluation.correct > evaluation.total:
            raise _refuse(f"evaluations: {evaluation.name} has more right answers than samples")
    return list(update.evaluations)


def check_head(head: LedgerHead) -> None:
    """The ledger head that will be countersigned. Raises VeilfedError(PROTOCOL_VIOLATION)."""
    if not _SHA256.fullmatch(head.sha256) or head.records > MAX_TOTAL:
        raise VeilfedError(Code.PROTOCOL_VIOLATION, "ledger_head: expected a number of records and a SHA-256")
