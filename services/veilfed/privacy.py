"""How much privacy a sequence of noisy releases spends: (epsilon, delta) by Renyi differential privacy.

By dp-accounting's accountant of Renyi divergences. For the discrete Gaussian they are those of the Gaussian or less at
every order (Canonne, Kamath and Steinke, 2020, theorem 4). With sampling the moments that bound them are the same for
both at whole orders, as the shifts are integers on the grid: so only whole orders are used there.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from veilfed.errors import Code, VeilfedError

__all__ = ["MAX_DEVIATION", "Release", "epsilon"]

# Of noise, in units of its grid. Magnitudes stay below 2^53, where floats are exact integers, but with probability
# e^-128.
MAX_DEVIATION = 2**46

WHOLE = (*range(2, 65), *range(68, 257, 4), 320, 384, 512, 768, 1024)
FRACTIONAL = (*(1 + step / 20 for step in range(1, 181)), *range(11, 65), *WHOLE[63:], 2048, 4096, 8192, 16384, 65536)


@dataclass(frozen=True)
class Release:
    """`steps` outputs, each with noise of `noise_multiplier` times the sensitivity.

    In each of them a sample takes part with probability `sampling_rate`, independently (Poisson sampling).
    """

    noise_multiplier: float
    sampling_rate: float = 1.0
    steps: int = 1


def epsilon(releases: Iterable[Release], delta: float) -> float:
    """Of all releases together, each of which may depend on those before; 0 for none.

    Needs dp-accounting, of the extras `agent` and `aggregator`; raises VeilfedError(PACKAGE_MISSING) without it.
    """
    counts: dict[tuple[float, float], int] = {}
    for release in releases:
        key = (release.noise_multiplier, release.sampling_rate)
        counts[key] = counts.get(key, 0) + release.steps
    return _epsilon(tuple(sorted(counts.items())), delta) if counts else 0.0


@lru_cache(maxsize=1024)
def _epsilon(counts: tuple[tuple[tuple[float, float], int], ...], delta: float) -> float:
    try:  # takes a second, which jobs without privacy need not wait for
        import dp_accounting  # noqa: PLC0415
        from dp_accounting.rdp import RdpAccountant  # noqa: PLC0415
    except ImportError:
        raise VeilfedError(Code.PACKAGE_MISSING, "jobs with privacy need the package dp-accounting") from None
    sampled = any(rate < 1 for (_, rate), _ in counts)
    accountant = RdpAccountant(WHOLE if sampled else FRACTIONAL, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    for (noise, rate), steps in counts:
        event: dp_accounting.DpEvent = dp_accounting.GaussianDpEvent(noise)
        if rate < 1:
            event = dp_accounting.PoissonSampledDpEvent(rate, event)
        accountant.compose(event, steps)
    found = float(accountant.get_epsilon(delta))
    return found if math.isfinite(found) else math.inf
