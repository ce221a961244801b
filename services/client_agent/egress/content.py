"""What a listed message carries, and whether its job and the policy allow these contents."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import Message

from client_agent.egress.flow import Flow
from client_agent.egress.policy import EgressPolicy
from client_agent.egress.rules import Refused
from veilfed import protocol
from veilfed.errors import VeilfedError
from veilfed.identity.names import Identity
from veilfed.jobs import COUNTS
from veilfed.v1.aggregator_pb2 import (
    Evaluation,
    FetchRequest,
    JoinRequest,
    PushHeader,
    PushRequest,
    StatRequest,
    Update,
    WorkRequest,
)
from veilfed.v1.oracle_pb2 import EmbedRequest, PromptGradientRequest
from veilfed.v1.secagg_pb2 import MaskAnswer
from veilfed.v1.tensor_pb2 import Artifact, DType, Tensor, TensorMap
from veilfed.wire import tensors

__all__ = ["Allowed", "Content", "check", "check_artifact", "describe"]

# More tensors than this are counted, not listed, in a record of the ledger.
MAX_LISTED = 64

Shapes = Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]


@dataclass
class Allowed:
    """What a consented job may send: exactly these tensors, and artifacts by digest that were checked before."""

    shapes: Shapes
    # Training rounds of a turn; the round after them is its closing evaluation. And the last round of the last turn.
    rounds: int
    last_round: int
    max_weight: float
    # Of a job with privacy, the SHA-256 of the tensors that were charged: others do not leave.
    charged: Set[str] | None = None
    # What is trained leaves under masks alone: `shapes` are those of the masked vector.
    masked: bool = False
    artifacts: dict[str, memoryview] = field(default_factory=dict)


@dataclass(frozen=True)
class Content:
    """What a message carries, in the words of the ledger."""

    job: str = ""
    round: int | None = None
    inputs: int = 0
    labels: int = 0
    tensors: Sequence[tuple[str, list[int], str]] = ()
    evaluations: int = 0
    # Which message of secure aggregation it is.
    masking: str = ""

    def fields(self) -> dict[str, Any]:
        """The parts that are there, as JSON values."""
        found: dict[str, Any] = {}
        if self.job:
            found["job"] = self.job[:128]
        if self.round is not None:
            found["round"] = self.round
        if self.masking:
            found["masking"] = self.masking
        if self.inputs:
            found["inputs"] = self.inputs
        if self.labels:
            found["labels"] = self.labels
        if self.evaluations:
            found["evaluations"] = self.evaluations
        if self.tensors:
            listed = self.tensors[:MAX_LISTED]
            found["tensors"] = [
                {"name": name[:64], "shape": shape[:8], "dtype": dtype} for name, shape, dtype in listed
            ]
            found["tensors_in_all"] = len(self.tensors)
        return found


def describe(call: Flow, message: Message) -> Content:
    """What a message carries, whether it may leave or not."""
    if isinstance(message, EmbedRequest | PromptGradientRequest):
        return Content(
            inputs=len(message.texts.values) + len(message.images.values),
            labels=len(message.labels) if isinstance(message, PromptGradientRequest) else 0,
            tensors=[(name, list(tensor.shape), _dtype_name(tensor.dtype)) for name, tensor in _given(message).items()],
        )
    if isinstance(message, PushRequest):
        return Content(job=message.header.job_id if message.HasField("header") else call.job)
    if isinstance(message, StatRequest | FetchRequest):
        return Content(job=message.job_id)
    return _describe_work(message) if isinstance(message, WorkRequest) else Content()


def _describe_work(message: WorkRequest) -> Content:
    kind = message.WhichOneof("body")
    if kind == "refusal":
        return Content(job=message.refusal.job_id, round=message.refusal.round)
    if kind == "mask":
        mask = message.mask
        masking = mask.WhichOneof("body") or ""
        return Content(job=mask.job_id, round=mask.round, tensors=_shapes(mask.tensors), masking=masking)
    if kind == "update":
        update = message.update
        shapes = _shapes(update.tensors)
        return Content(job=update.job_id, round=update.round, tensors=shapes, evaluations=len(update.evaluations))
    return Content()


def _shapes(message: TensorMap) -> list[tuple[str, list[int], str]]:
    return [(entry.name, list(entry.tensor.shape), _dtype_name(entry.tensor.dtype)) for entry in message.tensors]


def _given(message: EmbedRequest | PromptGradientRequest) -> dict[str, Tensor]:
    """The tensors of a request to the oracle: what the institution has trained."""
    given = {"prompts": message.prompts} if message.HasField("prompts") else {}
    if isinstance(message, PromptGradientRequest) and message.HasField("head"):
        given["head"] = message.head
    return given


def _dtype_name(number: DType.ValueType) -> str:
    return DType.Name(number).removeprefix("DTYPE_").lower() if number in DType.values() else str(number)


def check(call: Flow, message: Message, allowed: Allowed | None, policy: EgressPolicy, identity: Identity) -> None:
    """Raises Refused when the contents of a message of the right form may not leave."""
    if isinstance(message, JoinRequest):
        if message.identity != str(identity):
            raise Refused("the identity is not the institution's own")
    elif isinstance(message, FetchRequest):
        _consented(allowed)
    elif isinstance(message, StatRequest):
        _approved(allowed, message.sha256)
    elif isinstance(message, PushRequest):
        _check_push(call, message, allowed)
    elif isinstance(message, EmbedRequest | PromptGradientRequest):
        _check_request(call, message, policy)
    elif isinstance(message, WorkRequest) and message.HasField("update"):
        _check_update(message.update, allowed, policy)
    elif isinstance(message, WorkRequest) and message.HasField("mask"):
        _check_mask(message.mask, allowed, policy)


def _check_request(call: Flow, message: EmbedRequest | PromptGradientRequest, policy: EgressPolicy) -> None:
    """What was trained on data, and labels, are for the own zone alone: `raw_data_to_other_zone` is about inputs."""
    given = _given(message)
    labels = message.labels if isinstance(message, PromptGradientRequest) else ()
    if (given or labels) and not call.destination.own_zone:
        raise Refused("prompts, heads and labels may go to an oracle of the own zone only")
    for name, tensor in given.items():
        try:
            array = tensors.from_tensor(tensor)
        except VeilfedError as error:
            raise Refused(error.message) from None
        if array.ndim != 2 or array.dtype != np.float32:
            raise Refused(f"the tensor {name} is {_form(array)}; it must be float32 of two axes")
        if array.size > policy.max_tensor_elements:
            raise Refused(f"{array.size} tensor elements; the policy allows {policy.max_tensor_elements}")
        if name == "prompts" and len(array) > protocol.MAX_PROMPTS:
            raise Refused(f"{len(array)} prompts; at most {protocol.MAX_PROMPTS} may leave")


def _consented(allowed: Allowed | None) -> Allowed:
    if allowed is None:
        raise Refused("the job is not one that this institution consented to")
    return allowed


def _approved(allowed: Allowed | None, sha256: str) -> memoryview:
    """The bytes of an artifact that was checked before."""
    data = _consented(allowed).artifacts.get(sha256)
    if data is None:
        raise Refused("the artifact was not checked before")
    return data


def _check_update(update: Update, allowed: Allowed | None, policy: EgressPolicy) -> None:
    allowed = _consented(allowed)
    parameters = update.WhichOneof("parameters")
    if update.round > allowed.last_round:
        raise Refused(f"round {update.round} of a job of {allowed.last_round} rounds")
    if parameters and update.round % (allowed.rounds + 1) == allowed.rounds:
        raise Refused("the closing evaluation has no parameters")
    if parameters and allowed.masked:
        raise Refused("the job says that what is trained leaves under masks alone")
    if parameters == "tensors":
        arrays = _unpacked(update.tensors)
        _check_arrays(arrays, allowed, policy)
        _check_charged(tensors.digest(tensors.map_bytes(arrays)), allowed)
    elif parameters == "artifact":
        _check_reference(update.artifact, allowed)
    elif update.weight != 0:
        raise Refused("an evaluation has no weight")
    _check_weight(update.weight, allowed, policy)
    _check_evaluations(update.evaluations, policy)


def _check_mask(mask: MaskAnswer, allowed: Allowed | None, policy: EgressPolicy) -> None:
    """Messages of secure aggregation, in training rounds of a job that says so. Refusals are always allowed."""
    kind = mask.WhichOneof("body")
    if kind == "refusal":
        return
    allowed = _consented(allowed)
    if not allowed.masked:
        raise Refused("the job does not say that what is trained is masked")
    if mask.round >= allowed.rounds:
        raise Refused(f"round {mask.round} of a job of {allowed.rounds} training rounds")
    if kind == "tensors":
        _check_arrays(_unpacked(mask.tensors), allowed, policy)
    elif kind == "artifact":
        _check_reference(mask.artifact, allowed)


def _unpacked(message: TensorMap) -> tensors.Arrays:
    try:
        return tensors.unpack_map(message)
    except VeilfedError as error:
        raise Refused(error.message) from None


def _check_reference(artifact: Artifact, allowed: Allowed) -> None:
    if _approved(allowed, artifact.sha256).nbytes != artifact.size:
        raise Refused("the artifact has another size")


def _check_charged(sha256: str, allowed: Allowed) -> None:
    if allowed.charged is not None and sha256 not in allowed.charged:
        raise Refused("the job has privacy, and this was not charged to it")


def _check_arrays(arrays: tensors.Arrays, allowed: Allowed, policy: EgressPolicy) -> None:
    shapes = allowed.shapes
    if not shapes:
        raise Refused("the job may send evaluations alone")
    if extra := sorted(arrays.keys() - shapes.keys()):
        raise Refused(f"{len(extra)} tensors that the job does not say")
    if missing := sorted(shapes.keys() - arrays.keys()):
        raise Refused(f"the tensor {missing[0]} is missing")
    for name, (shape, dtype) in shapes.items():
        if arrays[name].shape != shape or arrays[name].dtype != dtype:
            raise Refused(f"the tensor {name} is {_form(arrays[name])}; the job says {list(shape)} {dtype}")
    elements = sum(array.size for array in arrays.values())
    if elements > policy.max_tensor_elements:
        raise Refused(f"{elements} tensor elements; the policy allows {policy.max_tensor_elements}")
    # With privacy the counts are noisy, and every sample is protected.
    if COUNTS in shapes and allowed.charged is None:
        _check_counts(arrays[COUNTS], policy)


def _check_counts(counts: np.ndarray[Any, np.dtype[Any]], policy: EgressPolicy) -> None:
    """Sums over samples leave with the number of samples of each class, which must be enough or none."""
    if ((counts != 0) & (counts < policy.min_class_samples)).any():
        raise Refused(f"sums over fewer than {policy.min_class_samples} samples of a class are not given out")
    if counts.any() and counts.sum() < policy.min_evaluation_samples:
        raise Refused(f"sums over fewer than {policy.min_evaluation_samples} samples are not given out")


def _form(array: np.ndarray[Any, np.dtype[Any]]) -> str:
    return f"{list(array.shape)} {array.dtype}"


def _check_weight(weight: float, allowed: Allowed, policy: EgressPolicy) -> None:
    """A weight is 0, 1 or, where the job weights, a number of samples; of few samples it is not given out."""
    if weight in {0, 1}:
        return
    if not (weight > 0 and float(weight).is_integer()):
        raise Refused("the weight is not a number of samples")
    if weight < policy.min_evaluation_samples:
        raise Refused(f"a count of fewer than {policy.min_evaluation_samples} samples is not given out")
    if weight > allowed.max_weight:
        raise Refused(f"a weight beyond {allowed.max_weight:g}, which the job says")


def _check_evaluations(evaluations: Sequence[Evaluation], policy: EgressPolicy) -> None:
    names = [evaluation.name for evaluation in evaluations]
    if len(set(names)) != len(names):
        raise Refused("an evaluation is named twice")
    for evaluation in evaluations:
        if evaluation.correct > evaluation.total:
            raise Refused("more right answers than samples")
        if not policy.releases_count(evaluation.total):
            raise Refused(
                f"counts over fewer than {policy.min_evaluation_samples} samples, or any if the policy does not list"
                " evaluations, are not given out"
            )


def check_artifact(allowed: Allowed | None, data: bytes, policy: EgressPolicy) -> Allowed:
    """Raises Refused unless `data` is the canonical form of exactly the tensors that the job says; returns those."""
    allowed = _consented(allowed)
    try:
        arrays = tensors.parse_map(data)
    except VeilfedError as error:
        raise Refused(error.message) from None
    _check_arrays(arrays, allowed, policy)
    _check_charged(tensors.digest(data), allowed)
    # Another encoding of the same tensors could carry more than they do.
    if tensors.map_bytes(arrays) != data:
        raise Refused("the bytes are not in canonical form")
    return allowed


def _check_push(call: Flow, message: PushRequest, allowed: Allowed | None) -> None:
    if message.HasField("header"):
        _start_push(call, message.header, allowed)
        return
    # The consent may have been taken back in the middle.
    if call.artifact is None or allowed is None:
        raise Refused("a chunk without the header of its artifact")
    chunk = message.chunk  # once: each time makes a copy
    end = call.position + len(chunk)
    # As bytes: a memoryview is compared element by element.
    if bytes(call.artifact[call.position : end]) != chunk:
        raise Refused("a chunk that is not of the artifact that was checked")
    call.position = end


def _start_push(call: Flow, header: PushHeader, allowed: Allowed | None) -> None:
    if call.artifact is not None:
        raise Refused("a second header in one upload")
    data = _approved(allowed, header.artifact.sha256)
    if data.nbytes != header.artifact.size:
        raise Refused("the artifact has another size")
    if header.offset > data.nbytes:
        raise Refused("an offset beyond the end of the artifact")
    call.job, call.artifact, call.position = header.job_id, data, header.offset
