"""One pass: a student's blocks on an institution's ciphertexts, from where it stands on disk to its end."""

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from fm_oracle.blocks.exchange import Exchange
from fm_oracle.blocks.passes import PassFolder
from fm_oracle.blocks.sessions import Keys
from fm_oracle.distill.export import PADDING_SCALE, PARAMETERS, layout, model_of
from fm_oracle.distill.package import StudentPackage
from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.block import STREAM_LEVELS
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.encrypted.masks import flood
from fm_oracle.encrypted.model import EncryptedModel
from veilfed.ckks.basis import Basis
from veilfed.ckks.messages import Expected
from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger
from veilfed.v1.blocks_pb2 import ForwardResponse, InputsWanted, PassDone
from veilfed.wire.tensors import digest

__all__ = ["Served", "run_pass"]

log = get_logger("oracle.blocks")


@dataclass(frozen=True)
class Served:
    """A student with what computing it needs."""

    student: StudentPackage
    version: str
    basis: Basis

    @classmethod
    def load(cls, path: Path, threads: int) -> "Served":
        """Raises VeilfedError: FILE_UNUSABLE, STATE_CORRUPT."""
        student = StudentPackage.load(path)
        return cls(student, digest(path.read_bytes()), Basis(PARAMETERS, threads))

    @cached_property
    def diagonals(self) -> Diagonals:
        return layout(self.student.shape.tokens, PARAMETERS.slots)

    @cached_property
    def model(self) -> EncryptedModel:
        return model_of(self.student, self.diagonals)

    @property
    def channels(self) -> int:
        """Ciphertexts of features: of pixels one for each token besides."""
        shape = self.student.shape
        return shape.features + (0 if self.student.embedding is None else shape.tokens)

    @property
    def range(self) -> float:
        """The largest value that an output can have: a normalised one has length sqrt(d) at most."""
        shape = self.student.shape
        return math.sqrt(shape.dimension) if shape.post else max(ranges.stream for ranges in self.student.ranges)


class _Told(Evaluator):
    """Says what it does, and stops there once nobody listens."""

    def __init__(self, basis: Basis, keys: Keys, exchange: Exchange, total: int) -> None:
        super().__init__(basis, keys.evaluation, keys.public, exchange.refresh)
        self._exchange, self._total = exchange, total
        self.done = 0

    def phase(self, name: str) -> None:
        self._exchange.tell(f"block {self.done // 2 + 1}: {name}", self.done, self._total)


def run_pass(served: Served, keys: Keys, folder: PassFolder, have: Collection[int], exchange: Exchange) -> None:
    """Computes what is left of a pass, and sends the released outputs that the client does not have.

    Runs in a thread. Raises VeilfedError: what the exchange says, FILE_UNUSABLE, STATE_CORRUPT.
    """
    total, dimension = 2 * served.student.shape.blocks, served.student.shape.dimension
    evaluator = _Told(served.basis, keys, exchange, total)
    sent = set(have)

    def release() -> None:
        """Sends the outputs that are there."""
        for block in folder.released:
            if block not in sent and (kept := folder.messages(block)):
                exchange.output(block, kept)
                sent.add(block)

    release()
    if folder.halves is None:
        _take_inputs(served, folder, evaluator, exchange)
    done = folder.halves or 0
    if done < total:
        mask, padding = folder.read("mask", 1), folder.read("padding", 1)
        x = folder.read(f"stream-{done}", dimension)
        for half in range(done, total):
            evaluator.done = half
            x = served.model.half(half, x, mask, padding, evaluator)
            block, ends = half // 2 + 1, half % 2 == 1
            if ends and block in folder.released and not folder.messages(block):
                fresh = evaluator.refresh(x.at(served.model.blocks[half // 2].lowest), served.range, 0)
                folder.keep(f"output-{block}", flood(fresh, served.basis))
            # Before the output leaves: whoever goes away then does not get it computed and flooded once more.
            folder.keep_stream(half + 1, x if half + 1 < total else None)
            release()
            log.info("half of a block", folder=folder.path.name[:8], done=half + 1, of=total)
    exchange.send(ForwardResponse(done=PassDone(released=folder.released)))


def _take_inputs(served: Served, folder: PassFolder, evaluator: _Told, exchange: Exchange) -> None:
    """Asks for the inputs, and keeps them with the first stream."""
    exchange.send(ForwardResponse(inputs=InputsWanted()))
    limbs = PARAMETERS.limbs
    scales = {"features": PARAMETERS.scale, "mask": PARAMETERS.scale, "padding": PADDING_SCALE}
    found = {}
    for name, scale in scales.items():
        count = served.channels if name == "features" else 1
        values, told = exchange.received(name, Expected(count, limbs, seeded=True))
        if told != scale:
            raise VeilfedError(Code.INPUT_INVALID, f"the {name} have a scale of {told:g}, expected {scale:g}")
        found[name] = Ciphertexts(values, told)
    for name in ("mask", "padding"):
        folder.keep(name, found[name])
    first = served.model.start(found["features"], evaluator)
    lowest = served.model.blocks[0].lowest
    folder.keep_stream(0, first.at(min(first.limbs, lowest + STREAM_LEVELS)))
