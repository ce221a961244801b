"""Chooses the rates, r and the number of rounds of a task on a validation part of the training splits.

    python -m benchmarks.select_rates search vader --folds 4     cross-validation: prints the grid and the choice
    python -m benchmarks.select_rates report vader               the task's settings on the test splits

Both print JSON on standard output and progress on standard error. `search` never sees a test sample: each
institution's training split is cut into folds by group, and each fold is evaluated by models that were trained on the
others, with one domain left out at a time as in the study. The baseline is the same job with the identity as
transform, at the same classifier rate and rounds.
"""

import argparse
import hashlib
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.local_fedot import Domain, Part, Settings, leave_one_out, load_domains, study_parts
from veilfed.demo.study import Figures, Transform
from veilfed.demo.tasks import TASKS, Task
from veilfed.packages import default_folder

SEEDS = (50, 77, 98)
CLOSE = 0.002  # settings whose C differs by no more cannot be told apart: the one with fewest rounds is taken

Scores = dict[int, dict[str, float]]  # rounds -> G, P, C


def fold_numbers(part: Part, folds: int, seed: int) -> NDArray[np.intp]:
    """The fold of each row of `part.train`: by group, so that near-copies stay together, and even within a class."""
    groups = [part.domain.samples.groups[row] for row in part.train]
    labels = part.domain.labels[part.train]
    numbers = np.empty(len(groups), np.intp)
    for label in np.unique(labels):
        rows = np.flatnonzero(labels == label)
        names = sorted(
            {groups[row] for row in rows},
            key=lambda name: hashlib.sha256(f"validation:{seed}:{name}".encode()).digest(),
        )
        place = {name: position % folds for position, name in enumerate(names)}
        numbers[rows] = [place[groups[row]] for row in rows]
    return numbers


def validation_parts(
    task: Task, domains: Mapping[str, Domain], seed: int, folds: int, used: int
) -> Iterator[dict[str, Part]]:
    """For each of the first `used` folds, the training splits without it and it alone. Test rows appear nowhere."""
    whole = study_parts(task, domains, seed)
    numbers = {name: fold_numbers(part, folds, seed) for name, part in whole.items()}
    for fold in range(used):
        yield {
            name: Part(part.domain, part.train[numbers[name] != fold], part.train[numbers[name] == fold])
            for name, part in whole.items()
        }


def scores(matrices: Sequence[Mapping[int, NDArray[np.float64]]]) -> Scores:
    """G, P and C at each mark of the mean of the matrices."""
    found = {}
    for mark in matrices[0]:
        figures = Figures(np.mean([matrix[mark] for matrix in matrices], axis=0))
        found[mark] = {
            "G": round(figures.generalisation, 4),
            "P": round(figures.personalisation, 4),
            "C": round(figures.comprehensive, 4),
        }
    return found


def validate(task: Task, domains: Mapping[str, Domain], transform: Transform, options: argparse.Namespace) -> Scores:
    """Cross-validated G, P and C after each number of rounds, mean over the seeds."""
    return scores(
        [
            leave_one_out(task, parts, seed, transform, options.rounds)
            for seed in options.seeds
            for parts in validation_parts(task, domains, seed, options.folds, options.used or options.folds)
        ]
    )


def search(task: Task, domains: Mapping[str, Domain], options: argparse.Namespace) -> dict[str, Any]:
    """The grid, and the choice: see `choose`."""
    grid: list[dict[str, Any]] = []
    baselines: dict[float, Scores] = {}
    for rate in options.classifier_rates:
        plain = Settings(rate, task.transform_rate, task.blocks).of(task)
        baselines[rate] = validate(plain, domains, "identity", options)
        progress(f"baseline {rate}: {baselines[rate]}")
    for setting in itertools.starmap(
        Settings, itertools.product(options.classifier_rates, options.transform_rates, options.blocks)
    ):
        found = validate(setting.of(task), domains, "orthogonal", options)
        progress(f"{setting}: {found}")
        grid += [
            {**vars(setting), "rounds": rounds, "fedot": row, "baseline": baselines[setting.classifier_rate][rounds]}
            for rounds, row in found.items()
        ]
    return {
        "task": task.name,
        "seeds": options.seeds,
        "folds": options.folds,
        "folds_used": options.used or options.folds,
        "grid": grid,
        "chosen": choose(grid),
    }


def choose(grid: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of those above the baseline in P and C and close to the largest C: fewest rounds, then the largest C."""
    better = [row for row in grid if all(row["fedot"][name] > row["baseline"][name] for name in ("P", "C"))]
    if not better:
        raise SystemExit("no setting is above the baseline in P and C")
    least = max(row["fedot"]["C"] for row in better) - CLOSE - 1e-9
    near = [row for row in better if row["fedot"]["C"] >= least]
    return min(near, key=lambda row: (row["rounds"], -row["fedot"]["C"], -row["blocks"]))


def report(task: Task, domains: Mapping[str, Domain], options: argparse.Namespace) -> dict[str, Any]:
    """The task's settings on the test splits, per seed and in the mean, with the baseline."""
    methods: dict[str, Any] = {}
    transforms: dict[str, Transform] = {"fedot": "orthogonal", "baseline": "identity"}
    for method, transform in transforms.items():
        matrices = {
            seed: leave_one_out(task, study_parts(task, domains, seed), seed, transform, [task.rounds])
            for seed in options.seeds
        }
        methods[method] = {
            "mean": scores(list(matrices.values()))[task.rounds],
            "seeds": {seed: scores([matrix])[task.rounds] for seed, matrix in matrices.items()},
            "matrix": np.mean([matrix[task.rounds] for matrix in matrices.values()], axis=0).round(4).tolist(),
        }
    settings = {"blocks": task.blocks, "classifier_rate": task.classifier_rate, "transform_rate": task.transform_rate}
    return {"task": task.name, "rounds": task.rounds, **settings, "domains": list(task.domains), **methods}


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _numbers(kind: type[Any]) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["search", "report"])
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--seeds", type=_numbers(int), default=list(SEEDS))
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--used", type=int, help="evaluate the first so many folds only")
    parser.add_argument("--classifier-rates", type=_numbers(float), default=[2e-3, 5e-3])
    parser.add_argument("--transform-rates", type=_numbers(float), default=[5e-4, 1e-3])
    parser.add_argument("--blocks", type=_numbers(int), default=[12, 24, 48])
    parser.add_argument("--rounds", type=_numbers(int), default=[4, 8, 12])
    parser.add_argument("--packages", type=Path, default=default_folder(), help="folder of models and data")
    parser.add_argument("--features", type=Path, default=Path(tempfile.gettempdir()) / "veilfed-features")
    options = parser.parse_args()
    torch.set_num_threads(1)
    task = TASKS[options.task]
    domains = load_domains(task, options.packages, options.features)
    command = search if options.command == "search" else report
    print(json.dumps(command(task, domains, options), indent=1))


if __name__ == "__main__":
    main()
