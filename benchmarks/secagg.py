"""Secure aggregation: bytes and processor time of a masked round, beside Flower's SecAgg+ on the same vectors.

    python -m benchmarks.secagg --json FILE

One round with 8, 100 and 1,000 institutions, of a 10 x 768 classifier (fixed point in Z/2^64) and of the triangle of R
at d = 768 (in Z/2^128). All parties are in one process, with real certificates and messages; seconds are of the
processor, of all institutions and the aggregator together. `identical`: the sum under masks is the sum without, bit for
bit. `bytes_ratio`: all that one institution uploads in the round (keys, shares and signatures included) over the vector
in the same ring encoding; `bytes_ratio_float`: over the vector as the floats that it is without masks (4 or 8 bytes).

Flower 1.28 is installed in an environment of its own. Its own SecAggPlusWorkflow and secaggplus_mod run in one process
too, with a loop in place of a network. `seconds_ratio` is ours / peer. The peer has an easier task: its secrets have 9
holders each, and so many pairwise masks, where ours have all others, up to 144 (with 100 holders it had not finished
after four minutes of the processor: its Shamir sharing is in Python); masks come from a Mersenne Twister with a seed of
32 bits, which the XOR of a key gives, over Z/2^32; vectors are quantised to 20 bits with rounding at random, so the sum
is not exact; keys are not signed, and nobody confirms who survived. It keeps all vectors in memory, so it is not run
for R with 1,000 institutions (`seconds_ratio` null).

One run beside other work on two cores; ours / peer in processor time, and bytes of an upload of ours in the ring and of
both as floats:

    institutions   10 x 768                                        R
    8              0.09   1.03 in the ring, 2.06 and 2.19          0.39   1.0004 in the ring, 2.00 and 1.00
    100            0.76   1.24 in the ring, 2.47 and 2.21          2.5    1.003 in the ring, 2.01 and 1.00
    1,000          4.0    1.37 in the ring, 2.74 and 2.21          -      1.005 in the ring, 2.01

R with 1,000 institutions took 605 s of the processor. All sums are identical. With 8 institutions both have the same
number of holders; beyond, ours has 11 to 16 times as many, and pays for them. An element of R is
16 bytes under our masks and 8 at the peer, which has 20 bits of it.

What dominates ours, in processor time on a busy machine of two cores:

- The classifier: the protocol, not the masks. With 100 institutions (4 to 5 s in all) sealing and signing keys and
  shares takes half of the time, opening shares, agreeing on masks and drawing them a quarter, confirming and revealing
  a fifth. Each institution uploads 14 kB beside its 61 kB: two sealed shares for each holder, and a signature with its
  certificate. So the ratio of bytes is above 1.2 there; for R, 1.0004 to 1.003, it is next to nothing.
- R: drawing masks, about 2 ms each of 4.7 MB, of which AES-256 in counter mode is 0.6 and the rest the addition with
  carries and a copy. With 1,000 institutions there are 144 holders each, and masks between those of whom one
  has chosen the other: 267 for each on average.

What was tried: ChaCha20 for the masks, 0.94 ms where AES has 0.6 (the processor has instructions for AES); AES-128,
0.51, which is not worth the smaller key. Blocks of 2^13 to 2^16 elements instead of 2^12: 1.3 to 1.5 ms for a mask
instead of 1.8 to 2.2, so the library has 2^14.
"""

import argparse
import json
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peer import peer_python
from benchmarks.secagg_vectors import SHAPES, vector
from benchmarks.transport import PEER
from tests.support.masking import Room, credentials_of, names
from veilfed import ring, wide_ring
from veilfed.secagg import Format, Words

FRACTION_BITS = 32
# Holders of each secret at the peer, and the most elements of all institutions together that it is run with.
PEER_SHARES = 9
PEER_ELEMENTS = 30_000_000
FLOAT_BYTES = {"10x768": 4, "R768": 8}


def encoded(shape: str, client: int) -> Words:
    values = vector(shape, client)
    return ring.encode(values, FRACTION_BITS) if shape == "10x768" else wide_ring.encode(values).reshape(-1)


class Drawn(dict[str, Words]):
    """The vectors of all institutions, made when they are asked for: a thousand of them need not be kept."""

    def __init__(self, shape: str, members: Sequence[str]) -> None:
        super().__init__()
        self.shape = shape
        self.numbers = {name: number for number, name in enumerate(members, start=1)}
        # Processor time that this took.
        self.seconds = 0.0

    def __missing__(self, name: str) -> Words:
        started = time.process_time()
        found = encoded(self.shape, self.numbers[name])
        self.seconds += time.process_time() - started
        return found


def ours(clients: int, shape: str) -> dict[str, Any]:
    """One round of ours."""
    elements = SHAPES[shape]
    form = Format(narrow=elements, wide=0) if shape == "10x768" else Format(narrow=0, wide=elements)
    members = names(clients)
    plain, vectors = form.zeros(), Drawn(shape, members)
    for name in members:
        credentials_of(name)  # made before the clock runs
        form.add(plain, vectors[name])
    vectors.seconds = 0.0
    started = time.process_time()
    room = Room(members, vectors, form)
    total = room.run()
    seconds = time.process_time() - started - vectors.seconds
    upload = max(room.uploads.values())
    return {
        "n": clients,
        "shape": shape,
        "identical": bool(np.array_equal(total, plain)),
        "upload_bytes": upload,
        "bytes_ratio": upload / (8 * form.words),
        "bytes_ratio_float": upload / (FLOAT_BYTES[shape] * elements),
        "seconds": seconds,
    }


def peer(clients: int, shape: str) -> dict[str, Any]:
    """One round of the peer."""
    script = Path(__file__).parent / "peers" / "flower_secagg.py"
    arguments = [clients, shape, min(clients, PEER_SHARES)]
    done = subprocess.run(
        [str(peer_python(PEER)), str(script), *map(str, arguments)], capture_output=True, text=True, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def row(clients: int, shape: str, with_peer: bool) -> dict[str, Any]:
    found = {**ours(clients, shape), "seconds_ratio": None}
    if with_peer:
        other = peer(clients, shape)
        found |= {
            "peer_shares": min(clients, PEER_SHARES),
            "seconds_ratio": found["seconds"] / other["seconds"],
            "peer_seconds": other["seconds"],
            "peer_upload_bytes": other["upload_bytes"],
            "peer_bytes_ratio_float": other["upload_bytes"] / (FLOAT_BYTES[shape] * SHAPES[shape]),
            "peer_largest_error": other["largest_error"],
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 100, 1000])
    arguments = parser.parse_args()
    rows = []
    for clients in arguments.clients:
        for shape in SHAPES:
            rows.append(row(clients, shape, clients * SHAPES[shape] <= PEER_ELEMENTS))
            print(json.dumps(rows[-1]))
    if arguments.json:
        arguments.json.write_text(json.dumps({"peer": PEER, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
