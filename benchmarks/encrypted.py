"""Encrypted transformer blocks: seconds per token and block, and one linear layer against Pyfhel and TenSEAL.

    python -m benchmarks.encrypted --json FILE

Needs the extra `encrypted`; TenSEAL is installed in an environment of its own. A block has random weights and inputs;
its result is compared with the same arithmetic on plain slots. The agent is a process of its own, and what goes between
is what the wire takes. Times are of both parties together, on the same cores, after the compiled kernels were made by a
small block; tokens are real ones, padding is not counted. `phases` says where the seconds go, the agent's refreshes
included. The arithmetic's work is the same for one sample as for a full batch.
"""

import argparse
import os
import subprocess
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from Pyfhel import Pyfhel

from benchmarks.encrypted_agent import RemoteAgent, Setting, peak_mb
from benchmarks.peer import peer_python
from benchmarks.result import tell
from fm_oracle.distill.export import PADDING_SCALE, PARAMETERS, layout
from fm_oracle.encrypted.attention import Diagonals
from fm_oracle.encrypted.block import Block, Ranges, Weights
from fm_oracle.encrypted.ciphertexts import Ciphertexts
from fm_oracle.encrypted.evaluator import Evaluator
from fm_oracle.encrypted.linear import linear_layer
from fm_oracle.encrypted.operations import Layer, Real
from fm_oracle.encrypted.plain import PlainEvaluator, Slots
from veilfed.ckks.basis import Basis
from veilfed.ckks.parameters import Parameters
from veilfed.ckks.samples import arrange
from veilfed.memory import keep_all_memory

SCALE, REAL_TOKENS = PARAMETERS.scale, 50
LINEAR_FEATURES = 384
# Outputs of the linear layer that the peers compute: each costs them the same.
PEER_OUTPUTS = 2
LIMBS = 4
PEER_BITS = [48, *[36] * (LIMBS - 1), 48]
TENSEAL = "tenseal==0.3.18"


@dataclass(frozen=True)
class Size:
    channels: int
    heads: int


WARM_UP, SIZES = Size(8, 2), (Size(384, 6), Size(768, 12))


class Followed(Evaluator):
    """Notes the seconds of each phase."""

    def start(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._phase, self._since = "", time.perf_counter()

    def phase(self, name: str) -> None:
        now = time.perf_counter()
        self.seconds[self._phase.split(": ")[-1]] += now - self._since  # type: ignore[assignment]
        self._phase, self._since = name, now


def random_block(size: Size, diagonals: Diagonals, random: np.random.Generator) -> Block:
    d = size.channels

    def layer(out: int, fan_in: int, factor: float) -> Real:
        return np.asarray(random.standard_normal((out, fan_in + 1)) * factor / np.sqrt(fan_in))

    def centred(weights: Real) -> Real:
        return np.asarray(weights - weights.mean(axis=0))

    # Scores of about 0.2: products of d / heads pairs of queries and keys.
    qkv = layer(3 * d, d, 0.45 * (d / size.heads) ** -0.25)
    weights = Weights(qkv, centred(layer(d, d, 1)), layer(4 * d, d, 1), centred(layer(d, 4 * d, 1)) / 8)
    ranges = Ranges(64.0, 32.0, 8.0, (20.0, 160.0), (0.3, 3.0), (0.3, 4.0))
    return Block(weights, ranges, size.heads, diagonals)


@dataclass(frozen=True)
class Way:
    """How a block is computed; by default as the oracle does."""

    cores: int
    parameters: Parameters = PARAMETERS
    baby: int | None = None

    @property
    def diagonals(self) -> Diagonals:
        made = layout(REAL_TOKENS, self.parameters.slots)
        return made if self.baby is None else replace(made, baby=self.baby)


def measured(size: Size, way: Way) -> dict[str, Any]:
    """One block on a full batch; the agent is a process of its own."""
    random, parameters, cores = np.random.default_rng(0), way.parameters, way.cores
    diagonals = way.diagonals
    samples, d = diagonals.samples, size.channels
    block = random_block(size, diagonals, random)
    batch = arrange(list(random.standard_normal((samples, REAL_TOKENS, d))), diagonals.tokens, diagonals.samples)
    x = (batch.channels - batch.channels.mean(axis=0)) * batch.mask
    inputs = [(x, parameters.scale), (batch.mask, parameters.scale), (batch.padding, PADDING_SCALE)]
    basis = Basis(parameters, threads=cores)
    with RemoteAgent(Setting(parameters, diagonals.steps, cores), basis) as agent:
        keys, public_key = agent.keys()
        key_bytes, agent.bytes = agent.bytes, 0
        evaluator = Followed(basis, keys, public_key, agent.refresh)
        started = time.perf_counter()
        batches = [Ciphertexts(agent.encrypt(slots, scale), scale) for slots, scale in inputs]
        encrypting, agent.seconds = time.perf_counter() - started, 0.0
        started = time.perf_counter()
        evaluator.start()
        found = block(batches[0], batches[1], batches[2], evaluator)
        evaluator.phase("")
        seconds = time.perf_counter() - started
        some = range(0, d, max(1, d // 16))
        opened = agent.decrypt(found.values[list(some)], found.scale)
        client_peak, server_peak = agent.peak_mb(), peak_mb()
    basis.close()
    on_slots = [Slots(slots, scale, parameters.limbs) for slots, scale in inputs]
    plain = block(on_slots[0], on_slots[1], on_slots[2], PlainEvaluator(parameters))
    return {
        "d": d,
        "heads": size.heads,
        "tokens": REAL_TOKENS,
        "batch": samples,
        "logN": parameters.log_n,
        "log_q": parameters.log_modulus,
        "security_bits": 128,
        "cores": cores,
        "seconds": seconds,
        "s_per_sample_block": seconds / samples,
        "s_per_token_block": seconds / samples / REAL_TOKENS,
        "agent_seconds": agent.seconds,
        "s_latency_one_sample": seconds,
        "encrypt_seconds": encrypting,
        "bytes_per_sample_block": agent.bytes / samples,
        "key_bytes": key_bytes,
        "client_peak_mb": client_peak,
        "server_peak_mb": server_peak,
        "max_error": float(np.abs(opened - plain.values[list(some)]).max()),
        "range": float(np.abs(plain.values).max()),
        "phases": {name: round(value, 2) for name, value in evaluator.seconds.items() if name},
    }


def linear_ours(random: np.random.Generator, cores: int) -> float:
    """Seconds of one layer on LIMBS limbs."""
    basis = Basis(PARAMETERS, threads=cores)
    layer = Layer.rounded(random.standard_normal((LINEAR_FEATURES, LINEAR_FEATURES)) / 20, 2.0**12)
    values = np.rint(random.uniform(-(2.0**34), 2.0**34, (LINEAR_FEATURES, 2, LIMBS, basis.n)))
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        linear_layer(layer, Ciphertexts(values, SCALE), basis)
        seconds.append(time.perf_counter() - started)
    basis.close()
    return min(seconds)


def linear_pyfhel(random: np.random.Generator) -> float:
    """Seconds that Pyfhel's products with plaintexts and sums would need, from a few outputs; encoding not counted."""
    context = Pyfhel()
    context.contextGen(scheme="ckks", n=PARAMETERS.n, scale=SCALE, qi_sizes=PEER_BITS)
    context.keyGen()
    inputs = [context.encrypt(random.uniform(-1, 1, PARAMETERS.slots)) for _ in range(LINEAR_FEATURES)]
    weights = [context.encode(np.full(PARAMETERS.slots, value)) for value in random.standard_normal(LINEAR_FEATURES)]
    started = time.perf_counter()
    for _ in range(PEER_OUTPUTS):
        total = None
        for ciphertext, weight in zip(inputs, weights, strict=True):
            product = context.multiply_plain(ciphertext, weight, in_new_ctxt=True)
            total = product if total is None else context.add(total, product)
    return (time.perf_counter() - started) * LINEAR_FEATURES / PEER_OUTPUTS


def linear_tenseal() -> float:
    """The same with TenSEAL; it encodes weights as it multiplies, and its context has all cores."""
    script = Path(__file__).parent / "peers" / "tenseal_linear.py"
    arguments = [LINEAR_FEATURES, PEER_OUTPUTS, PARAMETERS.n, PARAMETERS.scale_bits, *PEER_BITS]
    done = subprocess.run(
        [str(peer_python(TENSEAL)), str(script), *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return float(done.stdout) * LINEAR_FEATURES / PEER_OUTPUTS


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--channels", type=int, nargs="*", help="of the sizes, only these")
    arguments = parser.parse_args()
    keep_all_memory()
    cores, random = os.cpu_count() or 1, np.random.default_rng(1)
    measured(WARM_UP, Way(cores))
    ours, pyfhel, tenseal = linear_ours(random, cores), linear_pyfhel(random), linear_tenseal()
    found: dict[str, Any] = {
        "linear_seconds": ours,
        "linear_ratio_pyfhel": pyfhel / ours,
        "linear_ratio_tenseal": tenseal / ours,
        "rows": [],
    }
    for size in SIZES:
        if arguments.channels is None or size.channels in arguments.channels:
            found["rows"].append(measured(size, Way(cores)))
    tell(found, arguments.json)


if __name__ == "__main__":
    main()
