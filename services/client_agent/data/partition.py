"""Divides samples among clients: what a study needs to make many institutions of a few data sets.

    dirichlet(labels, groups, clients, alpha, seed) -> [indices of each client]
    by_domain([groups of each domain], clients, seed) -> [(domain, indices into it) of each client]

Deterministic by `seed` and the order of the samples. Every sample is with exactly one client, and a group as a whole.
No client is empty; with fewer groups than clients there is no such division, which is an error.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from client_agent.data.samples import invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["by_domain", "dirichlet"]

Indices = NDArray[np.intp]


def dirichlet(labels: Sequence[str], groups: Sequence[str], clients: int, alpha: float, seed: int) -> list[Indices]:
    """Indices of each client's samples, ascending; class shares are drawn from Dirichlet(alpha) (Hsu et al., 2019).

    Of each class the groups are shuffled and cut at the drawn shares of its samples. A group with samples of several
    classes goes with its most frequent one. A client that gets nothing takes the last group of the client with most
    samples. Small `alpha` gives each client few classes, large `alpha` all of them evenly.

    Raises VeilfedError: INPUT_INVALID for bad arguments, DATA_INVALID for fewer groups than clients.
    """
    _check(clients, [len(labels)])
    if not (np.isfinite(alpha) and alpha > 0):
        raise VeilfedError(Code.INPUT_INVALID, "alpha: must be finite and greater than 0")
    rng = np.random.default_rng(seed)
    members = _members(groups)
    by_class: dict[str, list[str]] = {}
    for group, indices in members.items():
        counts = Counter(labels[index] for index in indices)
        by_class.setdefault(min(counts, key=lambda name: (-counts[name], name)), []).append(group)
    parts: list[list[str]] = [[] for _ in range(clients)]
    for name in sorted(by_class):
        shuffled = [by_class[name][index] for index in rng.permutation(len(by_class[name]))]
        _cut(shuffled, members, rng.dirichlet(np.full(clients, alpha)), parts)
    return _filled(parts, members)


def by_domain(domains: Sequence[Sequence[str]], clients: int, seed: int) -> list[tuple[int, Indices]]:
    """(domain, ascending indices of its samples) of each client; `domains` are the groups of each domain's samples.

    Each client has samples of one domain alone. A domain gets clients in proportion to its samples, one at least, and
    deals its shuffled groups so that they have equally many samples, as far as groups allow.

    Raises VeilfedError: INPUT_INVALID for fewer clients than domains, DATA_INVALID for fewer groups than clients.
    """
    sizes = [len(groups) for groups in domains]
    _check(clients, sizes)
    if clients < len(domains):
        raise VeilfedError(
            Code.INPUT_INVALID, f"{clients} clients cannot have a domain each: there are {len(domains)} domains"
        )
    rng = np.random.default_rng(seed)
    members = [_members(groups) for groups in domains]
    found = []
    for domain, share in enumerate(_shares(sizes, [len(groups) for groups in members], clients)):
        parts: list[list[str]] = [[] for _ in range(share)]
        filled = [0] * share
        names = list(members[domain])
        for group in (names[index] for index in rng.permutation(len(names))):
            least = filled.index(min(filled))
            parts[least].append(group)
            filled[least] += len(members[domain][group])
        found += [(domain, indices) for indices in _filled(parts, members[domain])]
    return found


def _check(clients: int, sizes: Sequence[int]) -> None:
    if clients < 1:
        raise VeilfedError(Code.INPUT_INVALID, "clients: at least one is needed")
    if not sizes or not all(sizes):
        raise invalid("no samples to divide")


def _members(groups: Sequence[str]) -> dict[str, list[int]]:
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    return members


def _cut(
    names: Sequence[str], members: dict[str, list[int]], shares: NDArray[np.float64], parts: list[list[str]]
) -> None:
    """Deals groups in their order: each to the client in whose share its middle sample lies."""
    sizes = np.array([len(members[name]) for name in names], float)
    middles = (np.cumsum(sizes) - sizes / 2) / sizes.sum()
    owners = np.searchsorted(np.cumsum(shares), middles, side="right").clip(max=len(parts) - 1)
    for name, owner in zip(names, owners.tolist(), strict=True):
        parts[owner].append(name)


def _filled(parts: list[list[str]], members: dict[str, list[int]]) -> list[Indices]:
    """The indices of each part, after each empty one got a group of the one with most samples among those with two."""
    if len(members) < len(parts):
        raise invalid(f"{len(members)} groups of samples are too few for {len(parts)} clients")
    sizes = [sum(len(members[group]) for group in part) for part in parts]
    for part in range(len(parts)):
        if not parts[part]:
            donor = max((other for other in range(len(parts)) if len(parts[other]) > 1), key=sizes.__getitem__)
            parts[part].append(parts[donor].pop())
            sizes[part] = len(members[parts[part][0]])
            sizes[donor] -= sizes[part]
    return [np.array(sorted(index for group in part for index in members[group]), np.intp) for part in parts]


def _shares(sizes: Sequence[int], most: Sequence[int], clients: int) -> list[int]:
    """How many clients each domain gets: one, and each further one where most samples are for a client.

    No domain gets more than `most`, its groups.
    """
    if sum(most) < clients:
        raise invalid(f"{sum(most)} groups of samples are too few for {clients} clients")
    shares = [1] * len(sizes)
    for _ in range(clients - len(sizes)):
        open_domains = [domain for domain in range(len(sizes)) if shares[domain] < most[domain]]
        shares[max(open_domains, key=lambda domain: sizes[domain] / shares[domain])] += 1
    return shares
