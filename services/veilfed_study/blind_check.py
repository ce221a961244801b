"""A job on encrypted blocks beside the same job in the clear: what the encryption has changed of what it predicts.

The features that the agents decrypted are read from their state; those in the clear are computed from the student, in
the engine's own arithmetic. Both go through all rounds of the job, with the real strategies and trainers.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from client_agent.cache import key_of
from client_agent.config import AgentConfig
from client_agent.data.source import Samples, class_indices, load
from client_agent.encrypted.inputs import Inputs, load_inputs
from client_agent.encrypted.outputs import OutputStore
from client_agent.trainers import method_for
from fm_oracle.distill.export import plain_streams
from fm_oracle.distill.package import StudentPackage
from fm_oracle.distill.probe import fit_probe
from fm_oracle.distill.teacher import Batch
from fm_oracle.models.base import Model
from veilfed.config import load_config
from veilfed.errors import Code, VeilfedError
from veilfed.jobs import BlindfedStrategy, JobSpec, parse_job
from veilfed.wire.tensors import digest, map_bytes
from veilfed_study.parts import Domain, Parts, split_parts
from veilfed_study.simulation import last_model

__all__ = ["compared"]

# Samples that are computed in the clear at a time.
PIECE = 64


def compared(
    student_file: Path, spec_file: Path, agents: Mapping[str, Path], teacher: Model[Any] | None = None
) -> dict[str, Any]:
    """What `veilfed study blind-check` prints; `agents` are the institutions' configurations by name.

    With the student's `teacher` there is a probe on its embeddings too.

    `model_sha256` is of the published model's bytes as they follow from the decrypted features. Raises VeilfedError.
    """
    spec = parse_job(spec_file.read_text(), str(spec_file))
    strategy = spec.strategy
    if not isinstance(strategy, BlindfedStrategy):
        raise VeilfedError(Code.JOB_INVALID, f"{spec_file}: not a job on encrypted blocks")
    student, version = StudentPackage.load(student_file), digest(student_file.read_bytes())
    embedded = {}
    blind, plain, largest, span = {}, {}, 0.0, 0.0
    for name, path in agents.items():
        config = load_config(AgentConfig, path)
        if config.encrypted is None:
            raise VeilfedError(Code.CONFIG_INVALID, f"{path}: it has no `encrypted`")
        samples = load(config.data, config.packages_folder)
        keys = [key_of(value).hex() for value in samples.inputs]
        inputs_sha256 = digest(config.encrypted.inputs.read_bytes())
        store = OutputStore(config.state / "encrypted" / "outputs", version, inputs_sha256, strategy)
        decrypted = store.features(keys)
        clear = _in_the_clear(student, load_inputs(config.encrypted.inputs), samples, strategy)
        span = max(span, float(np.abs(clear).max()))
        largest = max(largest, float(np.abs(decrypted - clear).max()))
        labels = class_indices(samples.labels, strategy.classes)
        if teacher is not None:
            embedded[name] = Domain(samples, teacher.embed(list(samples.inputs)), labels)
        blind[name], plain[name] = Domain(samples, decrypted, labels), Domain(samples, clear, labels)
    pooled = {name: _pooled(domain, strategy.dimension) for name, domain in plain.items()}
    found = {**_agreement(spec, blind, plain), "acc_linear_probe": _probed(spec, pooled)}
    if teacher is not None:
        found["acc_teacher"] = _probed(spec, embedded)
    return {**found, "largest_difference": largest, "range": span}


def _pooled(domain: Domain, dimension: int) -> Domain:
    """The mean over tokens of the last released output, in the place of all outputs."""
    mask, last = domain.features[..., :1], domain.features[..., -dimension:]
    return replace(domain, features=(last * mask).sum(axis=1) / mask.sum(axis=1))


def _probed(spec: JobSpec, domains: Mapping[str, Domain]) -> float:
    """Held-out accuracy of one linear classifier on all institutions' training rows together."""
    parts = split_parts(domains, spec.strategy.classes, spec.seed).values()
    features, labels = (np.concatenate(one) for one in zip(*(part.training for part in parts), strict=True))
    held, truth = (np.concatenate(one) for one in zip(*(part.evaluation for part in parts), strict=True))
    return fit_probe(features, labels, len(spec.strategy.classes)).accuracy(held, truth)


def _agreement(spec: JobSpec, blind: Mapping[str, Domain], plain: Mapping[str, Domain]) -> dict[str, Any]:
    """Classes that both models give the held-out samples, each on its own features."""
    method = method_for(spec.strategy)
    guesses, accuracies, models = [], [], []
    parts: Parts = {}
    truths: list[NDArray[np.int64]] = []
    for domains in (blind, plain):
        parts = split_parts(domains, spec.strategy.classes, spec.seed)
        model = last_model(spec, parts)
        models.append(digest(map_bytes(model)))
        held = [method.probabilities(model, None, part.evaluation[0]).argmax(axis=1) for part in parts.values()]
        truth = [part.evaluation[1] for part in parts.values()]
        accuracies.append([float((a == b).mean()) for a, b in zip(held, truth, strict=True)])
        guesses.append(np.concatenate(held))
        truths = truth
    return {
        "agree_top1": float((guesses[0] == guesses[1]).mean()),
        "held_out": len(guesses[0]),
        "acc_blind": float((guesses[0] == np.concatenate(truths)).mean()),
        "acc_plain_losa": float((guesses[1] == np.concatenate(truths)).mean()),
        "accuracy_blind": dict(zip(parts, accuracies[0], strict=True)),
        "accuracy_plain": dict(zip(parts, accuracies[1], strict=True)),
        "model_sha256": models[0],
    }


def _in_the_clear(student: StudentPackage, inputs: Inputs, samples: Samples, strategy: BlindfedStrategy) -> Any:
    """Features float32 [n, t, 1 + R d] by the engine's arithmetic."""
    out = np.zeros((len(samples), strategy.tokens, strategy.width), np.float32)
    for first in range(0, len(samples), PIECE):
        some = inputs.features(list(samples.inputs[first : first + PIECE]))
        longest = max(len(one) for one in some)
        features, mask = np.zeros((len(some), longest, some[0].shape[1])), np.zeros((len(some), longest))
        for row, one in enumerate(some):
            features[row, : len(one)], mask[row, : len(one)] = one, 1
        streams = plain_streams(student, Batch(torch.from_numpy(features).float(), torch.from_numpy(mask).float()))
        rows = slice(first, first + len(some))
        out[rows, :longest, 0] = mask
        chosen = np.concatenate([streams[block - 1] for block in strategy.released], axis=2)
        out[rows, :longest, 1:] = chosen * mask[..., None]
    return out
