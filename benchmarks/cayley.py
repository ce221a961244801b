"""One training step of FEDOT: the trainer's own, against autograd through a formed w_l. Both in one run.

    python -m benchmarks.cayley [--json FILE]

d = 768, batches of 64, 10 classes, one thread, float32; r = 1, 8 and 96 blocks. A step is loss, gradients and Adam on
(w_g, X). The formed w_l is computed in the two ways that people write it, (I + R) inv(I - R) and solve(I - R, I + R).
Adam is torch's fused operator for all of them: ours as the trainer calls it, theirs by torch.optim.Adam(fused=True).
Times are the process's own on a processor, which for one thread on a quiet machine are those on the wall; the
contenders take turns, so that a busy machine disturbs all of them, and the fastest step of each counts. `ratio` is the
faster of the two formed ways over ours, at r = 1.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from client_agent.trainers import adam
from client_agent.trainers.cayley import rotate

DIMENSION, BATCH, CLASSES, TEMPERATURE = 768, 64, 10, 20.0
BLOCKS = (1, 8, 96)
RATES = (5e-3, 5e-4)
TURNS = {1: 100, 8: 400, 96: 800}
# Steps of a contender in a row: its arrays are in the cache then, as in a training.
IN_A_ROW = 5

Step = Callable[[], None]


def start(blocks: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings h [B, d], their classes, w_g [K, d] and X [r, m, m] somewhere in the middle of a training."""
    rng, side = torch.Generator().manual_seed(7), DIMENSION // blocks
    h = torch.nn.functional.normalize(torch.randn(BATCH, DIMENSION, generator=rng))
    labels = torch.randint(0, CLASSES, (BATCH,), generator=rng)
    classifier = 0.1 * torch.nn.functional.normalize(torch.randn(CLASSES, DIMENSION, generator=rng))
    return h, labels, classifier, 0.01 * torch.randn(blocks, side, side, generator=rng)


def ours(blocks: int) -> Step:
    h, labels, *values = start(blocks)
    parameters = [
        adam.Parameter(value.requires_grad_(), rate, torch.zeros_like(value), torch.zeros_like(value))
        for value, rate in zip(values, RATES, strict=True)
    ]
    classifier, x = values
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        loss = torch.nn.functional.cross_entropy(TEMPERATURE * (rotate(x, h) @ classifier.T), labels)
        adam.step(parameters, torch.autograd.grad(loss, values), count)

    return step


def by_inverse(x: Tensor) -> Tensor:
    skew, identity = (x - x.mT) / 2, torch.eye(x.shape[-1])
    inverse: Tensor = torch.linalg.inv(identity - skew)
    return (identity + skew) @ inverse


def by_solve(x: Tensor) -> Tensor:
    """The factors commute."""
    skew, identity = (x - x.mT) / 2, torch.eye(x.shape[-1])
    solved: Tensor = torch.linalg.solve(identity - skew, identity + skew)
    return solved


def formed(blocks: int, form: Callable[[Tensor], Tensor]) -> Step:
    h, labels, classifier, x = start(blocks)
    groups = [{"params": [p.requires_grad_()], "lr": rate} for p, rate in zip((classifier, x), RATES, strict=True)]
    optimizer = torch.optim.Adam(groups, fused=True)

    def step() -> None:
        # The blocks of w_l one by one: a dense w_l of many blocks would cost more.
        z = torch.einsum("nrm,rkm->nrk", h.view(BATCH, blocks, -1), form(x)).reshape(BATCH, DIMENSION)
        z = z / z.norm(dim=1, keepdim=True)
        loss = torch.nn.functional.cross_entropy(TEMPERATURE * (z @ classifier.T), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def measure(contenders: dict[str, Step], turns: int) -> dict[str, float]:
    """Processor milliseconds of the fastest step of each."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(turns):
        for name, step in contenders.items():
            for _ in range(IN_A_ROW):
                began = time.process_time()
                step()
                best[name] = min(best[name], time.process_time() - began)
    return {name: round(1000 * seconds, 3) for name, seconds in best.items()}


def row(blocks: int) -> dict[str, Any]:
    contenders = {
        "ours_ms": ours(blocks),
        "inverse_ms": formed(blocks, by_inverse),
        "solve_ms": formed(blocks, by_solve),
    }
    found = measure(contenders, TURNS[blocks] // IN_A_ROW)
    return {
        "blocks": blocks,
        **found,
        "ratio": round(min(found["inverse_ms"], found["solve_ms"]) / found["ours_ms"], 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row(blocks) for blocks in BLOCKS]
    for line in rows:
        print(line, file=sys.stderr)
    document = {"dimension": DIMENSION, "batch": BATCH, "threads": 1, "ratio": rows[0]["ratio"], "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))


if __name__ == "__main__":
    main()
