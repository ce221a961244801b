"""The specification of a job: what an administrator submits, the aggregator runs and an agent consents to.

    parse_job(text) -> JobSpec
    spec.strategy      one class of veilfed.jobs.strategies for each method, told apart by `name`

The classes of the methods also say which tensors a model and an update have: the aggregator and the agents must agree.
"""

from veilfed.jobs.analytic import BIAS, COUNTS, CROSS, GRAM, AflStrategy, AnalyticSpec, FedcgsStrategy, RidgeSpec
from veilfed.jobs.base import CLASSIFIER, FLOAT32, Shapes, StrategySpec, TrainedSpec, payload_bytes
from veilfed.jobs.blindfed import ADAPTER_DOWN, ADAPTER_UP, CLASSIFIER_BIAS, BlindfedStrategy
from veilfed.jobs.fedopal import FIRST_PROMPTS, PROMPTS, FedopalStrategy
from veilfed.jobs.privacy import Privacy, SamplePrivacy, StatisticsPrivacy, UpdatePrivacy
from veilfed.jobs.spec import PRIVACY_MODES, Cohort, Fold, JobSpec, SecureAggregation, parse_job
from veilfed.jobs.strategies import (
    ATTENTION_IN,
    ATTENTION_OUT,
    MEANS,
    TRANSFORM,
    AllGlobalStrategy,
    AllLocalStrategy,
    FedadapterStrategy,
    FedclipStrategy,
    FedghStrategy,
    FedltStrategy,
    FedotStrategy,
    OrthogonalSpec,
    Strategy,
    StrategyName,
)

__all__ = [
    "ADAPTER_DOWN",
    "ADAPTER_UP",
    "ATTENTION_IN",
    "ATTENTION_OUT",
    "BIAS",
    "CLASSIFIER",
    "CLASSIFIER_BIAS",
    "COUNTS",
    "CROSS",
    "FIRST_PROMPTS",
    "FLOAT32",
    "GRAM",
    "MEANS",
    "PRIVACY_MODES",
    "PROMPTS",
    "TRANSFORM",
    "AflStrategy",
    "AllGlobalStrategy",
    "AllLocalStrategy",
    "AnalyticSpec",
    "BlindfedStrategy",
    "Cohort",
    "FedadapterStrategy",
    "FedcgsStrategy",
    "FedclipStrategy",
    "FedghStrategy",
    "FedltStrategy",
    "FedopalStrategy",
    "FedotStrategy",
    "Fold",
    "JobSpec",
    "OrthogonalSpec",
    "Privacy",
    "RidgeSpec",
    "SamplePrivacy",
    "SecureAggregation",
    "Shapes",
    "StatisticsPrivacy",
    "Strategy",
    "StrategyName",
    "StrategySpec",
    "TrainedSpec",
    "UpdatePrivacy",
    "parse_job",
    "payload_bytes",
]
