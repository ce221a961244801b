"""The file with which institutions prepare what they encrypt: of texts the token table, of images how they are cut.

It is published. Of MiniLM it has the token table and the positions, none of the blocks.
"""

import json
from typing import Any

import numpy as np
import safetensors.numpy

from fm_oracle.distill.teacher import ImageTeacher, Teacher, TextTeacher
from fm_oracle.models.vit import DEVIATION, MEAN, PATCH
from veilfed.errors import Code, VeilfedError
from veilfed.protocol import INPUTS_FORMAT

__all__ = ["published_inputs"]


def published_inputs(teacher: Teacher) -> bytes:
    """A safetensors file. Raises VeilfedError(INPUT_INVALID) for a teacher of neither texts nor images."""
    about: dict[str, Any] = {"format": INPUTS_FORMAT}
    arrays = {"none": np.zeros(1, np.float32)}  # a file without tensors is none
    if isinstance(teacher, TextTeacher):
        bert = teacher.bert
        positions = bert.positions.weight[: teacher.tokens] + bert.types.weight[0]
        arrays = {"words": bert.words.weight.detach().numpy(), "positions": positions.detach().numpy()}
        about |= {"modality": "text", "tokens": teacher.tokens, "epsilon": teacher.epsilon}
        about["tokenizer"] = teacher.tokenizer
    elif isinstance(teacher, ImageTeacher):
        about |= {"modality": "image", "side": teacher.side, "patch": PATCH, "mean": MEAN, "deviation": DEVIATION}
    else:
        raise VeilfedError(Code.INPUT_INVALID, "only teachers of texts and images have inputs to publish")
    return safetensors.numpy.save(arrays, {"inputs": json.dumps(about)})
