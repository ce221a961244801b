"""What a study of BlindFed is about: block outputs of a distilled student on examples, and embeddings to compare with.

Block outputs are computed in the clear, in the engine's own arithmetic (fm_oracle.distill.export.plain_streams): what
an institution would decrypt, but for the noise of encryption.
"""

import hashlib
import io
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.data.samples import Samples, content_group
from fm_oracle.distill.examples import Examples, read_examples
from fm_oracle.distill.export import plain_streams, pooled
from fm_oracle.distill.package import StudentPackage
from fm_oracle.distill.teacher import Teacher, teacher_of
from fm_oracle.models import registry
from fm_oracle.models.vit import PATCH
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed_study.parts import Domain
from veilfed_study.store import key_of

__all__ = ["BlindSubject", "Progress", "students_of", "subject_of"]

Float = NDArray[np.float32]
Rows = NDArray[np.intp]
Progress = Callable[[str, int, int], None]  # what, done, of how many

# Changes when block outputs are computed in another way.
FORM = 1
# Examples that are computed together.
PIECE = 64


@dataclass(frozen=True)
class BlindSubject:
    """`lengths` [n] tokens of each example; `streams` [N, L, d] block outputs of all tokens, one example after another.

    `embeddings` are by name, [n, d] each: `student`, `teacher` and, of texts, `table`: the mean of the first stream,
    which an institution makes itself of the published token table. `digest` is of everything that was read.
    """

    label: str
    samples: Samples
    labels: NDArray[np.int64]
    classes: tuple[str, ...]
    lengths: NDArray[np.int64]
    streams: Float
    embeddings: Mapping[str, Float]
    about: Mapping[str, Any]
    digest: str

    @property
    def blocks(self) -> int:
        return int(self.streams.shape[1])

    @property
    def dimension(self) -> int:
        return int(self.streams.shape[2])

    @property
    def tokens(self) -> int:
        """Of the longest example."""
        return int(self.lengths.max())

    def features(self, rows: Rows, released: Sequence[int]) -> Float:
        """What an institution trains with, see client_agent.trainers.blindfed: [n, t, 1 + R d]."""
        found = np.zeros((len(rows), self.tokens, 1 + len(released) * self.dimension), np.float32)
        ends, blocks = np.cumsum(self.lengths), [block - 1 for block in released]
        for place, row in enumerate(rows):
            length = int(self.lengths[row])
            outputs = self.streams[ends[row] - length : ends[row], blocks]
            found[place, :length, 0] = 1
            found[place, :length, 1:] = outputs.reshape(length, -1)
        return found

    def pooled(self, block: int) -> Float:
        """The mean of a block's outputs over the tokens of each example: [n, d]."""
        starts = np.cumsum(self.lengths) - self.lengths
        sums = np.add.reduceat(self.streams[:, block - 1].astype(np.float64), starts, axis=0)
        return np.asarray(sums / self.lengths[:, None], np.float32)

    def domain(self, features: Float) -> Domain:
        """The examples with embeddings [n, d]."""
        return Domain(self.samples, features, self.labels)


def students_of(said: Sequence[str]) -> dict[str, Path]:
    """The files of LABEL=FILE, by label. Raises VeilfedError(INPUT_INVALID)."""
    found = {label: Path(path) for label, _, path in (one.partition("=") for one in said)}
    if len(found) < len(said) or not all(re.fullmatch(r"[\w.-]+=.+", one) for one in said):
        raise VeilfedError(
            Code.INPUT_INVALID, "--student is LABEL=FILE, with distinct labels of letters, digits, '.', '-' and '_'"
        )
    return found


def subject_of(
    label: str,
    student: Path,
    data: Path,
    rows: int | None,
    packages: Path,
    cache: Path,
    progress: Progress = lambda what, done, total: None,
) -> BlindSubject:
    """So many of the examples of a file, as `veilfed oracle distill` takes it, drawn at random; None for all.

    What is computed is kept in the folder `cache`. Raises VeilfedError: FILE_UNUSABLE, STATE_CORRUPT for what is no
    student, DATA_INVALID, MODEL_MISSING, and INPUT_INVALID for a student of another model than the one that is here.
    """
    package = StudentPackage.load(student)
    shape = package.shape
    model = registry.load(shape.kind, packages)
    if model.card.version != package.teacher_version:
        raise VeilfedError(Code.INPUT_INVALID, f"{student}: its teacher is another version of {shape.kind}")
    examples = _some(read_examples(data, model.card.modality), rows)
    inputs = [item if isinstance(item, bytes) else item.encode(errors="surrogatepass") for item in examples.inputs]
    said = [hashlib.sha256(item).hexdigest() for item in inputs]
    digest = key_of(FORM, hashlib.sha256(student.read_bytes()).hexdigest(), said, examples.labels.tolist())
    kept = cache / f"{label}-{digest[:12]}.npz"
    arrays = _read(kept)
    if arrays is None:
        teacher = teacher_of(model, shape.tokens, PATCH * round((shape.tokens - 1) ** 0.5))
        arrays = {
            **_outputs(package, teacher, examples.inputs, lambda done, total: progress(label, done, total)),
            "teacher": model.embed(examples.inputs),
        }
        _write(kept, arrays)
    return BlindSubject(
        label=label,
        samples=Samples(
            model.card.modality,
            examples.inputs,
            [examples.classes[number] for number in examples.labels],
            [content_group(item) for item in examples.inputs],
        ),
        labels=examples.labels,
        classes=examples.classes,
        lengths=arrays.pop("lengths"),
        streams=arrays.pop("streams"),
        embeddings=arrays,
        about={"fm": shape.kind, "blocks": shape.blocks, **asdict(package.figures)},
        digest=digest,
    )


def _some(examples: Examples, rows: int | None) -> Examples:
    count = len(examples.inputs)
    if rows is None or rows >= count:
        return examples
    drawn = np.sort(np.random.default_rng(0).permutation(count)[:rows])
    inputs = [examples.inputs[row] for row in drawn]
    return Examples(inputs, examples.labels[drawn], examples.classes, examples.test[drawn])


def _outputs(
    student: StudentPackage, teacher: Teacher, inputs: Sequence[Any], progress: Callable[[int, int], None]
) -> dict[str, Any]:
    prepared = teacher.prepare(inputs)
    lengths, streams, embeddings, tables = [], [], [], []
    for start in range(0, len(prepared), PIECE):
        batch = teacher.batch(prepared[start : start + PIECE])
        mask = batch.mask.double().numpy()
        there = mask > 0
        found = plain_streams(student, batch)
        lengths.append(there.sum(axis=1))
        streams.append(np.stack([stream[there] for stream in found], axis=1).astype(np.float32))
        embeddings.append(pooled(student, found[-1], mask).astype(np.float32))
        if student.embedding is None:
            first = batch.features.double().numpy() * mask[..., None]
            tables.append((first.sum(axis=1) / mask.sum(axis=1, keepdims=True)).astype(np.float32))
        progress(min(start + PIECE, len(prepared)), len(prepared))
    arrays = {"lengths": np.concatenate(lengths), "streams": np.concatenate(streams)}
    arrays["student"] = np.concatenate(embeddings)
    return arrays | ({"table": np.concatenate(tables)} if tables else {})


def _read(path: Path) -> dict[str, Any] | None:
    """Raises VeilfedError(STATE_CORRUPT)."""
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except (OSError, ValueError, zipfile.BadZipFile):
        raise VeilfedError(
            Code.STATE_CORRUPT, f"{path}: not block outputs", "Remove the file; it is computed anew."
        ) from None


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    write_atomic(path, buffer.getvalue())
