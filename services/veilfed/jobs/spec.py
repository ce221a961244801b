"""The parts of a job that all methods share: cohort, rounds, the limits of the fold."""

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from veilfed.config import Strict, validate
from veilfed.errors import Code
from veilfed.identity.names import LABEL
from veilfed.jobs.analytic import AnalyticSpec, RidgeSpec
from veilfed.jobs.base import TrainedSpec
from veilfed.jobs.privacy import Privacy, StatisticsPrivacy, UpdatePrivacy
from veilfed.jobs.strategies import Strategy, StrategyName
from veilfed.privacy import MAX_DEVIATION, Release

__all__ = ["PRIVACY_MODES", "Cohort", "Fold", "JobSpec", "SecureAggregation", "parse_job"]

# The strategies that can be had with each mode of privacy. Others send something that its noise does not cover.
PRIVACY_MODES: dict[str, tuple[StrategyName, ...]] = {
    "update": ("fedot", "all-global", "fedlt", "fedadapter", "fedclip", "blindfed"),
    "statistics": ("afl", "fedcgs"),
    "sample": ("fedot",),
}

MAX_COHORT = 10_000
# With secure aggregation: of a sum of two, each of the two knows the other's part; and the keys of all are one message.
LEAST_MASKED = 3
MAX_MASKED = 2000

Name = Annotated[str, Field(pattern=rf"^{LABEL}$")]


class Cohort(Strict):
    """Which institutions take part. Those of `evaluate` only evaluate and give out counts alone."""

    train: list[Name] = Field(min_length=1, max_length=MAX_COHORT)
    evaluate: list[Name] = Field(default_factory=list, max_length=MAX_COHORT)

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = self.train + self.evaluate
        if len(names) > MAX_COHORT:
            raise ValueError(f"at most {MAX_COHORT} institutions in all")
        if len(set(names)) != len(names):
            raise ValueError("an institution may be named once only, in train or in evaluate")
        return self


class Fold(Strict):
    """The ring format of the average and the limits of the update gate."""

    fraction_bits: int = Field(32, ge=8, le=48, description="fixed point: 2^-fraction_bits is the resolution")
    max_abs: float = Field(1e3, gt=0, le=1e9, description="largest magnitude of one element")
    max_norm: float = Field(1e4, gt=0, le=1e12, description="largest Frobenius norm of one tensor")
    max_weight: float = Field(1.0, ge=1, le=1e9, description="largest weight of one update")


class SecureAggregation(Strict):
    """Institutions mask what they send, and the aggregator learns the sum alone."""

    phase_seconds: float = Field(
        60, gt=0, le=86_400, description="who is silent for longer in one of the phases is left out of the round"
    )


class JobSpec(Strict):
    """A whole job. Validated on submission, and again by each agent."""

    name: Name
    strategy: Strategy
    cohort: Cohort
    rounds: int = Field(ge=0, le=100_000, description="training rounds; with none, the first model is evaluated")
    quorum: int = Field(ge=1, description="updates without which a round fails")
    deadline_seconds: float = Field(3600, gt=0, le=30 * 86_400, description="a round closes at the latest after this")
    grace_seconds: float = Field(60, ge=0, le=30 * 86_400, description="wait for the others after the quorum")
    seed: int = Field(50, ge=0, lt=2**31)
    fold: Fold = Fold()
    privacy: Privacy | None = Field(None, description="noise that the institutions add; without it, none")
    secure_aggregation: SecureAggregation | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.quorum > len(self.cohort.train):
            raise ValueError(
                f"quorum ({self.quorum}) is more than the training institutions ({len(self.cohort.train)})"
            )
        if isinstance(self.strategy, AnalyticSpec) and self.rounds != self.strategy.rounds_needed:
            raise ValueError(f"rounds must be {self.strategy.rounds_needed} for {self.strategy.name}")
        if self.strategy.weighting == "uniform" and self.fold.max_weight != 1:
            raise ValueError("fold.max_weight must be 1 where weighting is uniform")
        # Integers, and one more for the rounding of each term: at the very edge floating point would round it away.
        term = int(self.fold.max_weight * max(self.fold.max_abs, 1.0) * 2.0**self.fold.fraction_bits) + 1
        if len(self.cohort.train) * term >= 2**63:
            raise ValueError(
                "the ring could overflow: clients x max_weight x max_abs x 2^fraction_bits must stay below 2^63"
            )
        if self.secure_aggregation is not None:
            self._check_masked()
        elif self.strategy.masked_only:
            raise ValueError(
                f"{self.strategy.name} needs secure_aggregation: whoever plants values in what an institution "
                "trains on could read them from its update"
            )
        return self

    @model_validator(mode="after")
    def _check_privacy(self) -> Self:
        privacy = self.privacy
        if privacy is None:
            return self
        if self.strategy.name not in PRIVACY_MODES[privacy.mode]:
            raise ValueError(f"privacy.mode {privacy.mode} is not for {self.strategy.name}")
        if self.strategy.weighting != "uniform":
            raise ValueError("with privacy weighting must be uniform: a number of samples is not noised")
        if isinstance(self.strategy, RidgeSpec) and self.strategy.ridge == "gcv":
            raise ValueError("with privacy ridge must be a number: gcv takes noise for samples")
        if isinstance(privacy, UpdatePrivacy):
            self._check_noise(privacy)
        return self

    def _check_noise(self, privacy: UpdatePrivacy) -> None:
        """The noise must fit the grid, and pass the update gate."""
        if math.isqrt(privacy.variance(self.fold.fraction_bits)) >= MAX_DEVIATION:
            raise ValueError("the noise is too large for the ring: lower fold.fraction_bits")
        deviation = 2 * privacy.noise_multiplier * privacy.clip
        elements = sum(math.prod(shape) for shape in self.strategy.update_shapes.values())
        if 10 * deviation > self.fold.max_abs or 2 * deviation * math.sqrt(elements) > self.fold.max_norm:
            raise ValueError(f"noise of deviation {deviation:g} would not pass fold.max_abs or fold.max_norm")

    @property
    def release(self) -> Release | None:
        """What one update of an institution spends of its privacy; None without."""
        epochs = self.strategy.epochs if isinstance(self.strategy, TrainedSpec) else 1
        return None if self.privacy is None else self.privacy.release(epochs)

    def _check_masked(self) -> None:
        if not self.strategy.sums:
            raise ValueError(f"secure_aggregation: {self.strategy.name} needs more than a sum of the updates")
        if self.quorum < LEAST_MASKED:
            raise ValueError(f"secure_aggregation: quorum must be at least {LEAST_MASKED}")
        if len(self.cohort.train) > MAX_MASKED:
            raise ValueError(f"secure_aggregation: at most {MAX_MASKED} training institutions")

    @property
    def sends_plain(self) -> bool:
        """Whether updates have tensors in them; with secure aggregation what is trained follows under masks."""
        return bool(self.strategy.update_shapes) and self.secure_aggregation is None

    @property
    def changes(self) -> int:
        """How often the job may be changed after its end: two sums over other institutions would tell their parts."""
        return 0 if self.secure_aggregation is not None else self.strategy.changes

    @property
    def noise_parties(self) -> int:
        """Institutions among which the noise of one release is divided.

        Where the sum is all that is seen, it has the noise of `quorum` institutions at least, of which the colluders
        know theirs. Only statistics are divided: they are masked on the grid of their noise, without rounding.
        """
        if self.secure_aggregation is None or not isinstance(self.privacy, StatisticsPrivacy):
            return 1
        return max(1, self.quorum - self.privacy.colluders)

    @property
    def last_round(self) -> int:
        """The last round that there may ever be.

        Training rounds 0 to rounds - 1 and a closing evaluation are one turn of rounds + 1. A job that has ended may be
        changed so often as its strategy says; each change is one more turn.
        """
        return (self.changes + 1) * (self.rounds + 1) - 1

    def closes(self, number: int) -> bool:
        """Whether a round is the closing evaluation of its turn."""
        return number % (self.rounds + 1) == self.rounds


def parse_job(text: str, where: str = "job") -> JobSpec:
    """A job specification from YAML or JSON. Raises VeilfedError(JOB_INVALID) with line and key."""
    return validate(JobSpec, text, where, Code.JOB_INVALID)
