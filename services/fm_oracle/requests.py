"""What may be in a request to the oracle: inputs of its kind and number, prompts and a head that fit the model."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fm_oracle.models.base import Card
from veilfed import protocol
from veilfed.errors import Code, VeilfedError
from veilfed.v1.oracle_pb2 import EmbedRequest, PromptGradientRequest
from veilfed.v1.tensor_pb2 import Tensor
from veilfed.wire.tensors import from_tensor

__all__ = ["FIELDS", "check_labels", "read_head", "read_inputs", "read_prompts"]

FIELDS = {"text": "texts", "image": "images"}  # of the oneof `inputs`

Float = NDArray[np.float32]


def read_inputs(
    request: EmbedRequest | PromptGradientRequest, where: str, card: Card, most: int
) -> tuple[str, Sequence[Any]]:
    """The field of a request's inputs, and the inputs. Raises VeilfedError(INPUT_INVALID) for the wrong kind or number.

    Prompt tokens go with inputs of the model's own modality alone, not with those of a text tower.
    """
    given = request.WhichOneof("inputs")
    if given is None:
        raise VeilfedError(Code.INPUT_INVALID, f"{where} has no inputs")
    tower = given == FIELDS["text"] and card.text_tower and not request.HasField("prompts")
    if given != FIELDS[card.modality] and not tower:
        raise VeilfedError(Code.INPUT_INVALID, f"{where} holds {given}; this oracle embeds {FIELDS[card.modality]}")
    values: Sequence[Any] = getattr(request, given).values
    if not 1 <= len(values) <= most:
        raise VeilfedError(Code.INPUT_INVALID, f"{where} holds {len(values)} inputs; from 1 to {most} are allowed")
    return given, values


def read_prompts(tensor: Tensor, where: str, width: int) -> Float:
    """Prompt tokens float32 [M, D]. Raises VeilfedError(INPUT_INVALID); PROTOCOL_VIOLATION for a malformed tensor."""
    if not width:
        raise VeilfedError(Code.INPUT_INVALID, f"{where} has prompt tokens; this oracle takes none")
    prompts = _float32(tensor, f"{where}: prompts")
    if prompts.ndim != 2 or prompts.shape[1] != width or not 1 <= len(prompts) <= protocol.MAX_PROMPTS:
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"{where}: prompts of the shape {list(prompts.shape)}; [1 to {protocol.MAX_PROMPTS}, {width}] is needed",
        )
    return prompts


def read_head(tensor: Tensor, where: str, dimension: int) -> Float:
    """A linear classifier float32 [K, d]. Errors as `read_prompts`."""
    head = _float32(tensor, f"{where}: head")
    if head.ndim != 2 or head.shape[1] != dimension or len(head) < 2:
        raise VeilfedError(
            Code.INPUT_INVALID, f"{where}: a head of the shape {list(head.shape)}; [2 or more, {dimension}] is needed"
        )
    return head


def check_labels(labels: Sequence[int], where: str, inputs: int, classes: int) -> NDArray[np.int64]:
    """One row of the head for each input. Raises VeilfedError(INPUT_INVALID)."""
    if len(labels) != inputs or max(labels) >= classes:
        raise VeilfedError(
            Code.INPUT_INVALID, f"{where}: a label below {classes} is needed for each of the {inputs} inputs"
        )
    return np.array(labels, np.int64)


def _float32(tensor: Tensor, what: str) -> Float:
    array = from_tensor(tensor)
    if array.dtype != np.float32:
        raise VeilfedError(Code.INPUT_INVALID, f"{what} of {array.dtype}; float32 is needed")
    found: Float = array.astype(np.float32)  # a copy that may be written to: torch wants that
    if not np.isfinite(found).all():
        raise VeilfedError(Code.INPUT_INVALID, f"{what} that are not finite")
    return found
