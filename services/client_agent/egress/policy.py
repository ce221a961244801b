"""What an institution lets out: the section `policy` of the agent's configuration."""

from enum import StrEnum
from typing import Literal

from pydantic import Field

from veilfed.config import Strict
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import JobSpec, StrategyName

__all__ = ["ACTIVITIES", "EgressPolicy", "PrivacyPolicy", "Purpose"]

# What a heartbeat may say. A closed list, so that it cannot carry anything else.
ACTIVITIES = frozenset(
    {"", "idle", "waiting", "waiting for consent", "embedding", "training", "evaluating", "sending", "stopping"}
)


class Purpose(StrEnum):
    """Why a message leaves."""

    JOIN = "join"
    HEARTBEAT = "heartbeat"
    REFUSAL = "refusal"
    UPDATE = "update"
    EVALUATION = "evaluation"
    # Keys, shares and signatures of secure aggregation; the masked values themselves are an update.
    MASKING = "masking"
    UPLOAD = "upload"
    DOWNLOAD = "download"
    DESCRIBE = "describe"
    EMBED = "embed"
    PROMPT_GRADIENT = "prompt_gradient"
    # To the model owner's service on ciphertexts: keys with which nothing can be read, and what is under them.
    EVALUATION_KEYS = "evaluation_keys"
    CIPHERTEXTS = "ciphertexts"


class PrivacyPolicy(Strict):
    """What the institution asks of jobs that it trains for, and what they may spend: epsilon at `delta`."""

    required: bool = Field(False, description="jobs without privacy are refused")
    min_noise_multiplier: float = Field(0, ge=0, description="jobs with less noise are refused")
    min_colluders: int = Field(
        1, ge=0, description="jobs that divide noise and count on fewer institutions telling theirs are refused"
    )
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta at which epsilon is counted")
    max_epsilon_per_job: float | None = Field(None, gt=0, description="of one job; no limit if absent")
    max_epsilon: float | None = Field(None, gt=0, description="of all jobs ever, together; no limit if absent")

    def check_job(self, spec: JobSpec) -> None:
        """Raises VeilfedError(POLICY_DENIED) for a job with less privacy than the institution asks for."""
        privacy = spec.privacy
        if privacy is None:
            if self.required:
                raise VeilfedError(Code.POLICY_DENIED, "jobs without privacy are not allowed here")
            return
        if privacy.noise_multiplier < self.min_noise_multiplier:
            raise VeilfedError(
                Code.POLICY_DENIED,
                f"a noise multiplier of {privacy.noise_multiplier:g}; this institution asks for"
                f" {self.min_noise_multiplier:g}",
            )
        if spec.noise_parties > max(1, spec.quorum - self.min_colluders):
            raise VeilfedError(
                Code.POLICY_DENIED,
                f"noise divided among {spec.noise_parties} of {spec.quorum} institutions; this one counts on"
                f" {self.min_colluders} telling theirs",
            )


class EgressPolicy(Strict):
    """The institution's own rules. Jobs and servers cannot change them."""

    consent: Literal["ask", "allow"] = Field(
        "ask", description="ask: each job needs `veilfed agent approve`; allow: jobs of the listed strategies run"
    )
    strategies: list[StrategyName] = Field(
        ["fedot"], description="jobs of other strategies are refused, approved or not"
    )
    purposes: list[Purpose] = Field(list(Purpose), description="messages of other purposes are refused")
    min_evaluation_samples: int = Field(20, ge=1, description="counts and sums over fewer samples are not given out")
    min_class_samples: int = Field(5, ge=1, description="of a class with fewer samples no mean or sum is given out")
    max_tensor_elements: int = Field(50_000_000, ge=1, description="of all tensors of one update together")
    max_answers_per_round: int = Field(
        3, ge=1, description="an aggregator that lost its history asks again with another model; a greedy one, too"
    )
    max_bytes_per_job: int | None = Field(None, ge=1, description="all that may leave for one job; no limit if absent")
    max_embeddings: int | None = Field(None, ge=1, description="raw inputs ever sent to oracles; no limit if absent")
    raw_data_to_other_zone: bool = Field(
        False, description="lets raw data out to an oracle that is not of the institution's own zone"
    )
    privacy: PrivacyPolicy = PrivacyPolicy()

    def check_job(self, strategy: str, approved: bool) -> None:
        """Raises VeilfedError: POLICY_DENIED for a strategy that is not listed, CONSENT_MISSING without approval."""
        if strategy not in self.strategies:
            raise VeilfedError(Code.POLICY_DENIED, f"jobs of strategy {strategy!r} are not allowed here")
        if self.consent == "ask" and not approved:
            raise VeilfedError(Code.CONSENT_MISSING, "this institution approves each job, and has not approved this")

    def releases_count(self, samples: int) -> bool:
        """Whether right answers over so many samples may be given out."""
        return samples >= self.min_evaluation_samples and Purpose.EVALUATION in self.purposes
