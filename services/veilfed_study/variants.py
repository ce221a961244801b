"""What the study of one shot against many rounds runs: methods, each with all choices of what is varied of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from veilfed.errors import Code, VeilfedError
from veilfed_study.methods import METHODS
from veilfed_study.options import numbers

__all__ = ["ONE_SHOT", "Grid", "Ridge", "Tuning", "Variant", "methods_of", "ridges_of", "tunings_of", "variants"]

ONE_SHOT = {"afl": "AFL", "fedcgs": "FedCGS", "fedopal": "FedOPAL"}

Ridge = float | Literal["gcv"]
# What a job takes for an infinite mu: no step of the prompts is as large as a rounding error then.
INFINITE_MU = 1e300
# Clients have some tens of rows, and the first batch of a tuning moves no prompts, as its classifier is still zero:
# with the default, 64, many clients would tune nothing in one epoch.
BATCH = 16


@dataclass(frozen=True)
class Tuning:
    """How FedOPAL's prompts are tuned."""

    mu: float = 0.1
    epochs: int = 1

    @property
    def name(self) -> str:
        return f"mu{self.mu:g}-e{self.epochs}"


@dataclass(frozen=True)
class Grid:
    """What is varied. `least` are policies: an institution leaves out its classes with fewer samples.

    `tunings` are FedOPAL's; the first is also run with `reextract`, and `own` is measured of it alone, as both take
    many embeddings more.
    """

    clients: Sequence[int]
    alphas: Sequence[float]
    ridges: Sequence[Ridge]
    least: Sequence[int]
    tunings: Sequence[Tuning] = (Tuning(),)


@dataclass(frozen=True)
class Variant:
    """A method with one choice of what is varied of it; the keys that other methods lack are None."""

    method: str
    ridge: Ridge | None = None
    least: int | None = None
    tuning: Tuning | None = None
    reextract: bool = False

    @property
    def name(self) -> str:
        parts = [self.method, *(str(part) for part in (self.ridge, self.least) if part is not None)]
        if self.tuning is not None:
            parts.append(self.tuning.name)
        return "-".join([*parts, "reextract"] if self.reextract else parts)

    @property
    def label(self) -> str:
        said = [ONE_SHOT.get(self.method) or METHODS[self.method].label]
        if self.tuning is not None:
            mu = "infinite" if self.tuning.mu == float("inf") else f"{self.tuning.mu:g}"
            said.append(f"mu {mu}, E {self.tuning.epochs}")
        if self.reextract:
            said.append("reextract")
        if self.ridge is not None:
            said.append("lambda by GCV" if self.ridge == "gcv" else f"lambda {self.ridge:g}")
        if self.least is not None and self.least > 1:
            said.append(f"classes from {self.least} samples on")
        return ", ".join(said)

    @property
    def strategy(self) -> dict[str, Any]:
        """The keys of a one-shot job's strategy that are this choice."""
        found: dict[str, Any] = {"name": self.method}
        if self.ridge is not None:
            found["ridge"] = self.ridge
        if self.tuning is not None:
            found |= {
                "mu": min(self.tuning.mu, INFINITE_MU),
                "epochs": self.tuning.epochs,
                "batch_size": BATCH,
                "reextract": self.reextract,
            }
        return found


def methods_of(names: str) -> list[str]:
    """The methods of a list such as "afl,fedot-b", in its order.

    Raises VeilfedError(INPUT_INVALID) for an unknown one, and for one that has nothing to train or needs class vectors.
    """
    possible = [*ONE_SHOT, *(name for name, method in METHODS.items() if method.trains and not method.class_vectors)]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in possible]
    if unknown or not wanted or len(set(wanted)) != len(wanted):
        which = f"{unknown[0]!r} is no method of this study" if unknown else "--methods takes distinct names"
        raise VeilfedError(Code.INPUT_INVALID, which, f"Methods: {', '.join(possible)}.")
    return wanted


def ridges_of(text: str) -> list[Ridge]:
    """The values of a list such as "0.1,1,gcv". Raises VeilfedError(INPUT_INVALID)."""
    parts = [part.strip() for part in text.split(",")]
    plain = [part for part in parts if part != "gcv"]
    found: list[Ridge] = [*numbers(",".join(plain), float, "--ridges")] if plain else []
    if len(parts) - len(plain) > 1:
        raise VeilfedError(Code.INPUT_INVALID, "--ridges: gcv is there twice")
    return [*found, "gcv"] if len(plain) < len(parts) else found


def tunings_of(text: str) -> list[Tuning]:
    """The values of a list such as "0.1:1,inf:1", mu and epochs of each. Raises VeilfedError(INPUT_INVALID)."""
    try:
        pairs = [part.split(":") for part in text.split(",")]
        found = [Tuning(float(mu), int(epochs)) for mu, epochs in pairs]
    except ValueError:
        found = []
    if not found or len(set(found)) != len(found) or not all(one.mu >= 0 and one.epochs >= 1 for one in found):
        raise VeilfedError(Code.INPUT_INVALID, "--tunings takes distinct pairs MU:EPOCHS, such as 0.1:1,inf:1")
    return found


def variants(methods: Sequence[str], grid: Grid) -> list[Variant]:
    """All choices of each method. Those of FedOPAL that have the same prompts stand together."""
    found = []
    for method in methods:
        if method not in ONE_SHOT:
            found.append(Variant(method))
            continue
        ridges = [None] if method == "fedcgs" else grid.ridges
        tunings: list[tuple[Tuning | None, bool]] = [(None, False)]
        if method == "fedopal":
            tunings = [(tuning, False) for tuning in grid.tunings]
            tunings.insert(1, (grid.tunings[0], True))
        found += [
            Variant(method, ridge, least, tuning, again)
            for least in grid.least
            for tuning, again in tunings
            for ridge in ridges
        ]
    return found
