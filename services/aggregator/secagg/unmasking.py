"""The masks that are left in a sum of masked vectors, from what the institutions reveal."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from veilfed.errors import Code, VeilfedError
from veilfed.secagg import Cohort, Words, threshold
from veilfed.secagg.masks import apply_masks, commitment, pair_mask_key, self_mask_key
from veilfed.secagg.shamir import join

__all__ = ["Opened", "remove_masks"]


@dataclass
class Opened:
    """The shares of one member's secrets that came, by holder."""

    shares: dict[int, bytes] = field(default_factory=dict)

    def secret(self, name: str, holders: Collection[int]) -> bytes:
        """Raises VeilfedError(JOB_FAILED) where too few shares came, or they do not fit."""
        least = threshold(len(holders))
        came = sorted(self.shares)[:least]
        if len(came) < least:
            raise VeilfedError(Code.JOB_FAILED, f"{len(came)} shares of {name} were revealed; {least} are needed")
        try:
            return join([holder + 1 for holder in came], [self.shares[holder] for holder in came])
        except VeilfedError as error:
            raise VeilfedError(Code.JOB_FAILED, f"the shares of {name}: {error.message}") from None


def remove_masks(
    total: Words,
    cohort: Cohort,
    holders: Mapping[int, Collection[int]],
    commitments: Mapping[int, bytes],
    survivors: Sequence[int],
    opened: Mapping[int, Opened],
) -> None:
    """Leaves in `total`, the sum of the survivors' masked vectors, the sum of their vectors.

    `holders`: of each member that shared, those with shares of its secrets, itself among them. Raises
    VeilfedError(JOB_FAILED); `total` is of no use then.
    """
    alive, salt = set(survivors), cohort.digest
    plus, minus = list[bytes](), list[bytes]()  # of the sum; what is left over is taken away
    for member in survivors:
        name = cohort.members[member].identity.institution
        secret = opened[member].secret(name, holders[member])
        if commitment(secret, salt, member) != commitments[member]:
            raise VeilfedError(Code.JOB_FAILED, f"the shares of {name} are not of what it has committed to")
        plus.append(self_mask_key(secret, salt, member))
    for member in sorted(holders.keys() - alive):
        name = cohort.members[member].identity.institution
        peers = [peer for peer in survivors if peer in holders[member] or member in holders[peer]]
        if not peers:
            continue
        private = X25519PrivateKey.from_private_bytes(opened[member].secret(name, holders[member]))
        if private.public_key().public_bytes_raw() != cohort.members[member].mask_key:
            raise VeilfedError(Code.JOB_FAILED, f"the shares of {name} are not of its mask key")
        for peer in peers:
            key = pair_mask_key(private, cohort.members[peer].mask_key, salt, member, peer)
            (plus if peer < member else minus).append(key)
    apply_masks(total, cohort.context.form, minus, plus)
