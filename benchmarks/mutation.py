"""Mutation testing: small faults are put into the parts that nobody may get wrong, and the tests must notice.

`make mutation` runs it with cosmic-ray from an environment of its own. The tree is copied first, so the working tree
is never changed; each part runs against the few quick test files that cover it (TARGETS). `--sample N` takes N mutants
of each module, drawn with `--seed`; 0 takes all. The annotations' `|` is left alone: such mutants say nothing.
docs/explanation/mutation-testing.md holds the scores and the survivors.
"""

import argparse
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MUTANT_SECONDS = 60.0  # a mutant that runs longer is killed: the tests would hang

FOLD = ["tests/unit/test_ring.py", "tests/unit/test_aggregator_fold.py"]
METHODS = ["tests/unit/test_aggregator_fold.py", "tests/unit/test_strategies.py"]
ROUNDS = [
    "tests/unit/test_aggregator_rounds_apart.py",
    "tests/unit/test_aggregator_sessions.py",
    "tests/unit/test_aggregator_rounds.py",
]
EGRESS = [
    "tests/unit/test_egress_contents.py",
    "tests/unit/test_egress_limits.py",
    "tests/unit/test_egress_gate.py",
]
TARGETS: dict[str, list[str]] = {
    "services/veilfed/ring.py": FOLD,
    "services/aggregator/strategies/averaging.py": METHODS,
    "services/aggregator/strategies/base.py": METHODS,
    "services/aggregator/strategies/fedgh.py": ["tests/unit/test_strategies.py"],
    "services/aggregator/gate.py": FOLD,
    "services/veilfed/updates.py": FOLD,
    "services/aggregator/rounds/machine.py": ROUNDS,
    "services/aggregator/rounds/answers.py": ROUNDS,
    "services/aggregator/rounds/closing.py": ROUNDS,
    "services/aggregator/rounds/sessions.py": ROUNDS,
    "services/client_agent/egress/gate.py": EGRESS,
    "services/client_agent/egress/content.py": EGRESS,
    "services/client_agent/egress/rules.py": EGRESS,
    "services/veilfed/ledger/chain.py": ["tests/unit/test_ledger.py"],
}

CONFIG = """
[cosmic-ray]
module-path = "{module}"
timeout = {timeout}
excluded-modules = []
test-command = "{command}"
[cosmic-ray.distributor]
name = "local"
"""

SURVIVORS = """
SELECT operator_name, operator_args, start_pos_row, diff FROM mutation_specs
JOIN work_results USING (job_id) WHERE test_outcome = 'SURVIVED' ORDER BY start_pos_row
"""


def copy_tree(folder: Path) -> None:
    """What the tests need of this tree, in `folder`."""
    for name in ("services", "tests", "benchmarks", "protos", "docs", "deploy", "README.md", "pyproject.toml"):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        elif source.exists():
            shutil.copy(source, folder / name)


def run(arguments: Sequence[str | Path], folder: Path) -> None:
    """A command in the copy, whose `services` come first on the path; without caches of compiled mutants."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder / "services"),
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
    }
    subprocess.run([str(item) for item in arguments], cwd=folder, env=environment, check=True)


def take_sample(session: Path, sample: int, seed: int) -> int:
    """Leaves `sample` mutants in the session (0: all) and returns how many there were."""
    with closing(sqlite3.connect(session)) as database, database:
        database.execute(
            "DELETE FROM work_items WHERE job_id IN "
            "(SELECT job_id FROM mutation_specs WHERE operator_name LIKE '%BinaryOperator_BitOr%')"
        )
        database.execute("DELETE FROM mutation_specs WHERE job_id NOT IN (SELECT job_id FROM work_items)")
        # The ids are random, so the order is that of the places.
        order = "operator_name, start_pos_row, start_pos_col, occurrence, operator_args"
        found = [row[0] for row in database.execute(f"SELECT job_id FROM mutation_specs ORDER BY {order}")]  # noqa: S608
        keep = set(random.Random(seed).sample(found, min(sample, len(found))) if sample else found)
        for job in found:
            if job not in keep:
                database.execute("DELETE FROM mutation_specs WHERE job_id = ?", (job,))
                database.execute("DELETE FROM work_items WHERE job_id = ?", (job,))
        return len(found)


def report(session: Path) -> tuple[int, list[dict[str, Any]]]:
    """The number of mutants that ran, and the survivors."""
    with closing(sqlite3.connect(session)) as database:
        tried = int(database.execute("SELECT COUNT(*) FROM work_results").fetchone()[0])
        rows = database.execute(SURVIVORS).fetchall()
    changed = ("-", "+")
    return tried, [
        {
            "operator": operator.removeprefix("core/"),
            "line": line,
            "diff": [text for text in diff.splitlines()[2:] if text.startswith(changed)],
        }
        for operator, _, line, diff in rows
    ]


def mutate(module: str, tests: list[str], cosmic_ray: Path, folder: Path, sample: int, seed: int) -> dict[str, Any]:
    """Runs the mutants of one module in the copy."""
    pytest = f"{sys.executable} -m pytest -q -x -p no:cacheprovider {' '.join(tests)}"
    name = module.removeprefix("services/").replace("/", "-")
    config, session = folder / f"{name}.toml", folder / f"{name}.sqlite"
    config.write_text(CONFIG.format(module=module, timeout=MUTANT_SECONDS, command=pytest))
    run([cosmic_ray, "init", config, session], folder)
    mutants = take_sample(session, sample, seed)
    run([cosmic_ray, "baseline", config], folder)
    run([cosmic_ray, "exec", config, session], folder)
    tried, survivors = report(session)
    return {"module": module, "mutants": mutants, "tried": tried, "survived": len(survivors), "survivors": survivors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--cosmic-ray", type=Path, required=True, help="the command, in its own environment")
    parser.add_argument("--sample", type=int, default=40, help="mutants of each module; 0 for all")
    parser.add_argument("--seed", type=int, default=50, help="of the sample")
    parser.add_argument("--only", help="a part of a module's path")
    parser.add_argument("--json", type=Path, help="where the result goes, after each module")
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="mutation-") as place:
        folder = Path(place)
        copy_tree(folder)
        for module, tests in TARGETS.items():
            if options.only and options.only not in module:
                continue
            result = mutate(module, tests, options.cosmic_ray.absolute(), folder, options.sample, options.seed)
            results.append(result)
            print(f"{module}: {result['tried'] - result['survived']} of {result['tried']} killed", flush=True)
            for survivor in result["survivors"]:
                print(f"  line {survivor['line']}, {survivor['operator']}: " + " / ".join(survivor["diff"]), flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
