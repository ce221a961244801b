"""What an administrator is told of a job's privacy with each published model."""

from typing import Any

from veilfed.jobs import JobSpec
from veilfed.privacy import epsilon

__all__ = ["privacy_report"]

PROTECTED = {
    "update": "all that an institution trains on",
    "statistics": "one training sample, added or removed",
    "sample": "one training sample, added or removed",
}


def privacy_report(spec: JobSpec, number: int) -> dict[str, Any]:
    """What each institution has spent after this round, by the specification; its own ledger has its own figures.

    An institution that was asked for a round more than once has spent more.
    """
    privacy, release = spec.privacy, spec.release
    assert privacy is not None and release is not None  # noqa: S101, PT018  for mypy
    updates = min(number % (spec.rounds + 1) + 1, spec.rounds)
    return {
        **privacy.model_dump(),
        "protected": PROTECTED[privacy.mode],
        "updates": updates,
        "epsilon": float(f"{epsilon([release] * updates, privacy.delta):.6g}"),
    }
