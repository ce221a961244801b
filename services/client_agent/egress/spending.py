"""What has left so far, and what of privacy it has spent: kept in the ledger, and counted again from it at each start.

A job with privacy is charged for each noisy result before it is kept or sent, with the digest of its bytes; what was
not charged does not leave. All modes are added up together: what protects all that an institution trains on protects
each of its training samples.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from client_agent.egress.policy import PrivacyPolicy
from veilfed.errors import Code, VeilfedError
from veilfed.privacy import Release, epsilon

__all__ = ["CHARGE", "PrivacySpent", "Spent"]

CHARGE = "privacy"


@dataclass
class Spent:
    """Bytes and inputs that have left."""

    job_bytes: Counter[str] = field(default_factory=Counter)
    bytes_out: Counter[tuple[str, str]] = field(default_factory=Counter)
    inputs: int = 0
    # Whose ledger it is.
    identity: str | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        """One more record of the ledger."""
        if record.get("kind") == "start":
            self.identity = record["identity"]
        if record.get("kind") != "message" or record.get("decision") != "passed":
            return
        self.bytes_out[record["destination"], record["purpose"]] += record["bytes"]
        self.inputs += record.get("inputs", 0)
        if record.get("job"):
            self.job_bytes[record["job"]] += record["bytes"]


class PrivacySpent:
    """The charges of all jobs."""

    def __init__(self, policy: PrivacyPolicy) -> None:
        self._policy = policy
        # By job and by the name of the charge.
        self._releases: dict[str, dict[str, Release]] = {}
        # By job, the SHA-256 of what may leave.
        self._digests: dict[str, set[str]] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """One more record of the ledger."""
        if record.get("kind") == CHARGE and record.get("decision") == "passed":
            release = Release(record["noise_multiplier"], record["sampling_rate"], record["steps"])
            self._releases.setdefault(record["job"], {})[record["charge"]] = release
            self.digests(record["job"]).add(record["digest"])

    def digests(self, job: str) -> set[str]:
        """The SHA-256 of the results of a job that were charged; it grows with them."""
        return self._digests.setdefault(job, set())

    def told(self, job: str) -> dict[str, float]:
        """What a job has spent, as JSON values."""
        delta = self._policy.delta
        return {"epsilon": round(epsilon(self._releases.get(job, {}).values(), delta), 6), "delta": delta}

    def check_plan(self, job: str, release: Release, rounds: int) -> None:
        """Raises VeilfedError(POLICY_DENIED) unless the budgets suffice for the rest of a job of so many rounds."""
        charged = list(self._releases.get(job, {}).values())
        self._check(job, [*charged, *[release] * (rounds - len(charged))])

    def charge(self, job: str, charge: str, release: Release, sha256: str) -> dict[str, Any]:
        """The record that charges a job for a result, to be added when it is written.

        A charge of the same name, which was interrupted before its result was kept, is replaced. Raises
        VeilfedError(POLICY_DENIED) where a budget does not suffice.
        """
        releases = list({**self._releases.get(job, {}), charge: release}.values())
        self._check(job, releases)
        delta = self._policy.delta
        return {
            "kind": CHARGE,
            "decision": "passed",
            "job": job,
            "charge": charge,
            "digest": sha256,
            "noise_multiplier": release.noise_multiplier,
            "sampling_rate": release.sampling_rate,
            "steps": release.steps,
            "epsilon": round(epsilon(releases, delta), 6),
            "epsilon_all_jobs": round(epsilon(self._with(job, releases), delta), 6),
            "delta": delta,
        }

    def _with(self, job: str, releases: Iterable[Release]) -> list[Release]:
        """Those of all jobs, with these for one of them."""
        others = [release for name, kept in self._releases.items() if name != job for release in kept.values()]
        return [*others, *releases]

    def _check(self, job: str, releases: list[Release]) -> None:
        policy = self._policy
        for limit, asked, what in (
            (policy.max_epsilon_per_job, releases, "one job"),
            (policy.max_epsilon, self._with(job, releases), "all jobs together"),
        ):
            if limit is not None and (needed := epsilon(asked, policy.delta)) > limit:
                raise VeilfedError(
                    Code.POLICY_DENIED,
                    f"job {job} would bring the epsilon of {what} to {needed:.4g} at delta {policy.delta:g}; the policy"
                    f" allows {limit:g}",
                )
