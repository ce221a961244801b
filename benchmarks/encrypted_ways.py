"""Other ways to compute an encrypted block: what threads, rings, primes and baby steps change.

    python -m benchmarks.encrypted_ways --json FILE

Needs the extra `encrypted`. A block with 128 channels and 2 heads of 64, each head as with 768 channels and 12 heads;
each way is its seconds for a real token of a block, and their ratio to the oracle's own way.
A way that the engine refuses has its words instead. `mod_down`: the part of a key switch's seconds that its division by
the special prime takes, on one core. Deferring it until rotated products are summed would save this part of the
rotations, at most.
"""

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.encrypted import WARM_UP, Size, Way, measured
from benchmarks.result import tell
from fm_oracle.distill.export import PARAMETERS
from fm_oracle.encrypted import switching
from veilfed.ckks.basis import Basis
from veilfed.ckks.parameters import Parameters
from veilfed.errors import VeilfedError
from veilfed.memory import keep_all_memory

SIZE = Size(128, 2)
KEYS, LIMBS, TIMES = 8, 5, 20


def ways(cores: int) -> dict[str, Way]:
    own = Way(cores)
    return {
        "own": own,
        "one thread": replace(own, cores=1),
        "8 baby steps": replace(own, baby=8),
        "32 baby steps": replace(own, baby=32),
        "ring 2^15": replace(own, parameters=replace(PARAMETERS, log_n=15)),
        # Fewer bits for a prime are more precision lost at a rescale, and no fewer limbs.
        "primes of 32 bits": replace(own, parameters=Parameters(14, (48, *[32] * 10), 48, 32)),
        "primes of 45 bits": replace(own, parameters=Parameters(14, (48, *[45] * 7), 48, 45)),
    }


def mod_down_part() -> float:
    """Of one ciphertext that is switched by several keys."""
    basis = Basis(PARAMETERS, threads=1)
    random, n = np.random.default_rng(0), basis.n
    tables, q, p = basis.tables, basis.q, basis.p
    values = np.rint(random.uniform(-(2.0**34), 2.0**34, (LIMBS, n)))
    keys = np.rint(random.uniform(-(2.0**34), 2.0**34, (KEYS, 2, basis.special, basis.special + 1, n)))
    digits, sums = np.empty((1, LIMBS, LIMBS + 1, n)), np.empty((1, KEYS, 2, LIMBS + 1, n))
    order, out, rest = np.arange(n, dtype=np.int32), np.empty((LIMBS, n)), np.zeros((LIMBS, n))
    which = np.arange(KEYS)
    terms = switching.fit(max(prime.bit_length() for prime in basis.primes))

    def before() -> None:
        for i in range(LIMBS):
            switching.decompose(values, i, digits[0, i], tables, q, p)
        for j, k in enumerate([*range(LIMBS), basis.special]):
            switching.inner_products(digits, keys, which, sums, j, k, q[k], p[k], terms)

    def down() -> None:
        for r in range(KEYS):
            for m in (0, 1):
                switching.finish_switch(sums[0, r, m], rest, m == 0, order, out, basis.inverses, tables, q, p)

    first, second = _seconds(before), _seconds(down)
    return second / (first + second)


def _seconds(function: Callable[[], None]) -> float:
    function()
    started = time.perf_counter()
    for _ in range(TIMES):
        function()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    keep_all_memory()
    cores = os.cpu_count() or 1
    found: dict[str, Any] = {"mod_down": mod_down_part(), "rows": []}
    own = 0.0
    measured(WARM_UP, Way(cores))
    for name, way in ways(cores).items():
        try:
            row = measured(SIZE, way)
        except VeilfedError as error:  # too few levels, or too small a modulus to hide what is refreshed
            found["rows"].append({"way": name, "refused": error.message})
            continue
        own = own or row["s_per_token_block"]
        kept = ("s_per_token_block", "bytes_per_sample_block", "max_error", "range", "log_q", "logN", "cores")
        found["rows"].append({"way": name, "ratio": row["s_per_token_block"] / own} | {key: row[key] for key in kept})
        tell(found["rows"][-1], None)
    tell(found, arguments.json)


if __name__ == "__main__":
    main()
