"""Levels, scales and costs of a computation, without doing it: the table that docs and progress are made of."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from fm_oracle.encrypted.operations import Layer, Operations
from veilfed.ckks.parameters import Parameters
from veilfed.errors import Code, VeilfedError

__all__ = ["Planner", "Row", "Shape", "markdown"]


WORK = ("transforms", "products", "multiply_adds", "refreshed")


@dataclass(frozen=True)
class Shape:
    """What is known of ciphertexts before there are any."""

    count: int
    scale: float
    limbs: int
    components: int = 2

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, which: slice) -> "Shape":
        return replace(self, count=len(range(self.count)[which]))

    def read_at(self, scale: float) -> "Shape":
        return replace(self, scale=scale)

    def at(self, limbs: int) -> "Shape":
        if not 1 <= limbs <= self.limbs:
            raise VeilfedError(Code.INPUT_INVALID, f"{limbs} limbs are not within 1 and {self.limbs}")
        return replace(self, limbs=limbs)


@dataclass
class Row:
    """One phase of a block: where it ends, and what it takes."""

    phase: str
    limbs: int = 0
    scale_bits: float = 0.0
    # Transforms of one limb, products of residues in sums, multiply-adds of matrix products, ciphertexts refreshed.
    work: Counter[str] = field(default_factory=Counter)


class Planner(Operations[Shape]):
    """Follows a computation; `rows` are its phases, the work outside of any belongs to one without a name."""

    def __init__(self, parameters: Parameters) -> None:
        super().__init__(parameters)
        self.rows = [Row("")]

    def phase(self, name: str) -> None:
        self.rows.append(Row(name))

    def _done(self, x: Shape, **work: int) -> Shape:
        """Notes where a phase has got to. Raises VeilfedError(INPUT_INVALID) for a scale beyond the modulus."""
        row = self.rows[-1]
        row.limbs, row.scale_bits = x.limbs, math.log2(x.scale)
        row.work.update(work)
        modulus_bits = sum(math.log2(q) for q in self.parameters.primes[: x.limbs])
        if row.scale_bits + 1 > modulus_bits:
            raise VeilfedError(
                Code.INPUT_INVALID,
                f"{row.phase}: a scale of {row.scale_bits:.0f} bits, but a modulus of {modulus_bits:.0f}",
                "Choose parameters with more primes, or refresh earlier.",
            )
        return x

    def join(self, parts: Sequence[Shape]) -> Shape:
        for part in parts[1:]:
            self.matching(parts[0], part)
        return replace(parts[0], count=sum(part.count for part in parts))

    def add(self, x: Shape, y: Shape) -> Shape:
        self.matching(x, y)
        return x

    def plus(self, x: Shape, constant: float) -> Shape:
        return x

    def times(self, x: Shape, constants: Sequence[float], scale: float) -> Shape:
        return self._done(replace(x, count=len(constants), scale=scale))

    def total(self, x: Shape) -> Shape:
        return replace(x, count=1)

    def products(self, x: Shape, y: Shape) -> Shape:
        if x.limbs != y.limbs:
            raise VeilfedError(Code.INPUT_INVALID, "products of different levels")
        terms = 4 * x.count * x.limbs
        return self._done(replace(x, scale=x.scale * y.scale, components=3), products=terms)

    def sum_products(self, x: Shape, of_x: Sequence[Sequence[int]], y: Shape, of_y: Sequence[Sequence[int]]) -> Shape:
        if x.limbs != y.limbs:
            raise VeilfedError(Code.INPUT_INVALID, "products of different levels")
        count = len(of_x) * len(of_y)
        terms = 4 * count * len(of_x[0]) * x.limbs
        return self._done(replace(x, count=count, scale=x.scale * y.scale, components=3), products=terms)

    def relinearise(self, x: Shape) -> Shape:
        return self._done(replace(x, components=2), **_switching(x.limbs, x.count, 1))

    def rescale(self, x: Shape) -> Shape:
        if x.limbs < 2:
            raise VeilfedError(Code.INPUT_INVALID, "no level is left for a rescale")
        out = replace(x, scale=x.scale / self.parameters.primes[x.limbs - 1], limbs=x.limbs - 1)
        return self._done(out, transforms=x.count * x.components * x.limbs)

    def rotate(self, x: Shape, steps: Sequence[int]) -> Shape:
        switched = sum(step != 0 for step in steps)
        return self._done(replace(x, count=x.count * len(steps)), **_switching(x.limbs, x.count, switched))

    def linear(self, layer: Layer, x: Shape) -> Shape:
        count, fan_in = layer.integers.shape
        out = replace(x, count=count, scale=x.scale * layer.scale)
        return self._done(out, multiply_adds=count * fan_in * x.components * x.limbs)

    def refresh(self, x: Shape, largest: float, shift: int, limbs: int | None = None) -> Shape:
        limbs = self.refreshed_limbs(x, largest, shift, limbs)
        out = replace(x, scale=x.scale / 2**shift, limbs=limbs)
        return self._done(out, refreshed=x.count)


def markdown(rows: Sequence[Row]) -> str:
    """A table of the phases; those of all heads together."""
    merged: dict[str, Row] = {}
    for row in rows:
        if row.work:
            name = row.phase.split(": ")[-1]
            same = merged.setdefault(name, Row(name))
            same.limbs, same.scale_bits = row.limbs, row.scale_bits
            same.work.update(row.work)
    lines = [
        "| phase | limbs at its end | log2 of the scale | transforms | products | multiply-adds | refreshed |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in merged.values():
        work = " | ".join(f"{row.work[kind]:,}" for kind in WORK)
        lines.append(f"| {row.phase} | {row.limbs} | {row.scale_bits:.1f} | {work} |")
    return "\n".join(lines)


def _switching(limbs: int, count: int, keys: int) -> dict[str, int]:
    """Work of a key switch: each of `count` polynomials, by each of some keys."""
    return {
        "transforms": count * (limbs * (limbs + 1) + keys * 2 * (limbs + 1)),
        "products": count * keys * 2 * limbs * (limbs + 1),
    }
