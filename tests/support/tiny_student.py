"""A student of a few channels, and an oracle process that computes it on ciphertexts: real, and done in seconds."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers
import torch
import yaml
from numpy.typing import NDArray

from fm_oracle.distill.export import plain_streams
from fm_oracle.distill.model import Shape, Student
from fm_oracle.distill.package import Figures, StudentPackage, package
from fm_oracle.distill.student import Seen
from fm_oracle.distill.teacher import Batch
from tests.support.identities import Federation
from tests.support.parties import Party
from tests.support.processes import veilfed

__all__ = ["BLOCKS", "TINY", "TOKENS", "expected_outputs", "seen_texts", "tiny_config", "tiny_oracle", "write_tiny"]

DIMENSION, BLOCKS, TOKENS = 16, 4, 8
TINY = Shape("minilm", True, DIMENSION, 2, 32, BLOCKS, DIMENSION, TOKENS, 1e-12)
LETTERS = "abcdefghijklmnopqrstuvwxyz "
EPSILON = 1e-12


def write_tiny(folder: Path) -> tuple[Path, Path]:
    """The student and the file of its inputs: texts of letters, each one a token."""
    torch.manual_seed(3)
    student = Student(TINY)
    words = np.random.default_rng(4).standard_normal((len(LETTERS), DIMENSION)).astype(np.float32)
    positions = np.random.default_rng(5).standard_normal((TOKENS, DIMENSION)).astype(np.float32) / 4
    vocabulary = {letter: number for number, letter in enumerate(LETTERS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    about = {
        "format": "veilfed inputs 1",
        "modality": "text",
        "tokens": TOKENS,
        "epsilon": EPSILON,
        "tokenizer": tokenizer.to_str(),
    }
    folder.mkdir(parents=True, exist_ok=True)
    inputs = folder / "inputs.safetensors"
    arrays: dict[str, NDArray[Any]] = {"words": words, "positions": positions}
    inputs.write_bytes(safetensors.numpy.save(arrays, {"inputs": json.dumps(about)}))

    texts = seen_texts()
    seen = [Seen() for _ in range(BLOCKS)]
    with torch.no_grad():
        student(_batch(texts, words, positions), seen)
    figures = Figures(len(texts), 0, 0.0, 0.0, 0.0)
    made = package(student, [one.ranges() for one in seen], "0" * 64, figures)
    path = folder / "student.safetensors"
    made.save(path)
    return path, inputs


def seen_texts() -> list[str]:
    """Those that the student's ranges were taken from: on others polynomials may leave them."""
    random = np.random.default_rng(6)
    return ["".join(random.choice(list(LETTERS), random.integers(2, TOKENS + 1))) for _ in range(400)]


def _batch(texts: Sequence[str], words: NDArray[Any], positions: NDArray[Any]) -> Batch:
    features, mask = np.zeros((len(texts), TOKENS, DIMENSION)), np.zeros((len(texts), TOKENS))
    for row, text in enumerate(texts):
        ids = [LETTERS.index(letter) for letter in text[:TOKENS]]
        if len(text) > TOKENS:
            ids[-1] = LETTERS.index(text[-1])
        x = words[ids].astype(np.float64) + positions[: len(ids)]
        x -= x.mean(axis=1, keepdims=True)
        features[row, : len(ids)] = x / np.sqrt((x * x).mean(axis=1, keepdims=True) + EPSILON)
        mask[row, : len(ids)] = 1
    return Batch(torch.from_numpy(features).float(), torch.from_numpy(mask).float())


def expected_outputs(folder: Path, texts: Sequence[str]) -> list[NDArray[np.float64]]:
    """The streams [n, t, d] after each block in the clear, 0 for padding."""
    arrays = safetensors.numpy.load_file(folder / "inputs.safetensors")
    batch = _batch(texts, arrays["words"], arrays["positions"])
    mask = batch.mask.numpy()[..., None]
    return [stream * mask for stream in plain_streams(StudentPackage.load(folder / "student.safetensors"), batch)]


def tiny_config(federation: Federation, folder: Path, address: str, **settings: Any) -> Path:
    """The configuration of the vendor's oracle; its certificate is of the federation."""
    vendor = federation.oracle_id("vendor")
    files = federation.make(vendor, folder / "identity")
    student, inputs = write_tiny(folder)
    document = {
        "identity": {name: str(path) for name, path in files},
        "listen": address,
        "state": str(folder / "state"),
        "encrypted": {"student": str(student), "inputs": str(inputs), **settings.pop("encrypted", {})},
        **settings,
    }
    config = folder / "oracle.yaml"
    config.write_text(yaml.safe_dump(document))
    return config


def tiny_oracle(config: Path) -> Party:
    return Party(veilfed("oracle", "serve", "--config", config), config.parent / "oracle")
