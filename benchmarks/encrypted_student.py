"""A distilled student on ciphertexts against its arithmetic in plain: errors after each block, and the same classes?

    python -m benchmarks.encrypted_student --student FILE --fm minilm|vit --data FILE|FOLDER --json FILE

Needs the extra `encrypted`. The samples are of those that the student was not trained on. A linear probe on the plain
arithmetic's embeddings of `--train` training examples says the classes. The agent is a process of its own.
"""

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.encrypted_agent import RemoteAgent, Setting, peak_mb
from benchmarks.result import tell
from fm_oracle.distill.examples import read_examples
from fm_oracle.distill.export import PARAMETERS, engine_inputs, layout, model_of, plain_streams, pooled, taken
from fm_oracle.distill.package import StudentPackage
from fm_oracle.distill.probe import LinearProbe, fit_probe
from fm_oracle.distill.teacher import Batch, Teacher, teacher_of
from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.models import registry
from fm_oracle.models.vit import PATCH
from veilfed.ckks.basis import Basis
from veilfed.memory import keep_all_memory
from veilfed.packages import default_folder

Real = NDArray[np.float64]

# Samples of the plain arithmetic at a time.
TOGETHER = 32


def plain(student: StudentPackage, teacher: Teacher, prepared: list[Any]) -> Real:
    """Embeddings [n, d] by the engine's arithmetic."""
    parts = []
    for start in range(0, len(prepared), TOGETHER):
        batch = teacher.batch(prepared[start : start + TOGETHER])
        parts.append(pooled(student, plain_streams(student, batch)[-1], batch.mask.double().numpy()))
    return np.concatenate(parts)


def encrypted(student: StudentPackage, batch: Batch, diagonals: Diagonals, basis: Basis) -> tuple[list[Real], Any]:
    """The streams [n, t, d] after each block, and what was measured."""
    count, tokens = batch.mask.shape
    inputs = engine_inputs(student, batch, diagonals)
    with RemoteAgent(Setting(PARAMETERS, diagonals.steps, os.cpu_count() or 1), basis) as agent:
        keys, public_key = agent.keys()
        evaluator = Evaluator(basis, keys, public_key, agent.refresh)
        started = time.perf_counter()
        features, mask, padding = (Ciphertexts(agent.encrypt(slots, scale), scale) for slots, scale in inputs)
        streams = []
        for stream in model_of(student, diagonals)(features, mask, padding, evaluator):
            streams.append(taken(agent.decrypt(stream.values, stream.scale), diagonals, count, tokens))
        measured = {"seconds": time.perf_counter() - started, "client_peak_mb": agent.peak_mb()}
    return streams, measured


def compared(
    student: StudentPackage, teacher: Teacher, prepared: list[Any], probe: LinearProbe, basis: Basis
) -> dict[str, Any]:
    """Errors and classes of some samples."""
    diagonals = layout(student.shape.tokens, PARAMETERS.slots)
    errors, spans, same, seconds, peak = [0.0] * student.shape.blocks, [0.0] * student.shape.blocks, 0, 0.0, 0.0
    for start in range(0, len(prepared), diagonals.samples):
        some = prepared[start : start + diagonals.samples]
        batch = teacher.batch(some)
        streams, measured = encrypted(student, batch, diagonals, basis)
        expected = plain_streams(student, batch)
        real = batch.mask.numpy() > 0
        for number, (ours, theirs) in enumerate(zip(streams, expected, strict=True)):
            reference = theirs[real]
            errors[number] = max(errors[number], float(np.abs(ours[real] - reference).max()))
            spans[number] = max(spans[number], float(np.abs(reference).max()))
        mask = batch.mask.double().numpy()
        classes = [
            probe.logits(torch.from_numpy(pooled(student, stream, mask)).float()).argmax(dim=1)
            for stream in (streams[-1], expected[-1])
        ]
        same += int((classes[0] == classes[1]).sum())
        seconds, peak = seconds + measured["seconds"], max(peak, measured["client_peak_mb"])
    return {
        "samples": len(prepared),
        "max_error_of_range": [error / span for error, span in zip(errors, spans, strict=True)],
        "agree_top1": same / len(prepared),
        "seconds": seconds,
        "client_peak_mb": peak,
        "server_peak_mb": peak_mb(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--student", type=Path, required=True)
    parser.add_argument("--fm", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--train", type=int, default=512)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    keep_all_memory()
    student = StudentPackage.load(arguments.student)
    model = registry.load(arguments.fm, default_folder())
    side = PATCH * int(student.shape.tokens**0.5)
    teacher = teacher_of(model, student.shape.tokens, side)
    examples = read_examples(arguments.data, model.card.modality)
    random = np.random.default_rng(0)
    train = random.permutation(np.flatnonzero(~examples.test))[: arguments.train]
    test = random.permutation(np.flatnonzero(examples.test))[: arguments.samples]
    known = plain(student, teacher, teacher.prepare([examples.inputs[row] for row in train]))
    probe = fit_probe(known.astype(np.float32), examples.labels[train], len(examples.classes))
    prepared = teacher.prepare([examples.inputs[row] for row in test])
    basis = Basis(PARAMETERS, threads=os.cpu_count() or 1)
    found = compared(student, teacher, prepared, probe, basis)
    tell(found, arguments.json)


if __name__ == "__main__":
    main()
