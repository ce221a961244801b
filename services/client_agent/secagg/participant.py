"""One institution's part in one attempt at a masked round.

    advertise -> share -> mask -> confirm -> reveal

Each step answers one message of the aggregator, and the same message again with the same answer: what was accepted is
kept (`keep`, which must reach the disk) before the answer is returned. Another message at the same step is refused,
so one vector is masked once, one list of survivors is confirmed, and of no member are both secrets revealed.
"""

import hashlib
import secrets
from collections.abc import Callable, Collection
from datetime import datetime
from functools import cached_property
from typing import Self

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256

from client_agent.secagg.secrets import Secrets
from client_agent.secagg.state import Kept
from veilfed.errors import Code, VeilfedError
from veilfed.identity.certificates import load_key
from veilfed.identity.material import Credentials
from veilfed.secagg import Cohort, Context, Words, threshold
from veilfed.secagg.cohort import advertisement_statement, last_valid, survivors_statement
from veilfed.secagg.masks import apply_masks, commitment, pair_mask_key, self_mask_key
from veilfed.v1.secagg_pb2 import (
    Advertisement,
    Confirmation,
    Confirmations,
    Delivery,
    MaskingCohort,
    OpenShare,
    Reveal,
    SealedShare,
    Shares,
    Survivors,
)

__all__ = ["Participant"]


class Participant:
    """Made by `begin`. All methods raise VeilfedError(COHORT_INVALID) for what the aggregator must not ask."""

    def __init__(
        self,
        kept: Kept,
        credentials: Credentials,
        allowed: Collection[str],
        least: int,
        keep: Callable[[bytes], None],
        at: datetime | None,
    ) -> None:
        self._kept, self._keep, self._at = kept, keep, at
        self._credentials = credentials
        self._allowed = {*allowed, credentials.identity.institution}
        self._least = least
        self._context = kept.context
        self._secrets = Secrets(kept.seed, self._context.digest)

    @classmethod
    def begin(
        cls,
        context: Context,
        credentials: Credentials,
        *,
        allowed: Collection[str],
        least: int,
        keep: Callable[[bytes], None],
        kept: bytes | None = None,
        at: datetime | None = None,
    ) -> Self:
        """Starts an attempt, or goes on with it where `kept` is what `keep` got last.

        `allowed`: the institutions that may take part, those of the job that are on this institution's own roster;
        `least`: the fewest with which it takes part. `at`: the time for certificates, by default now. Raises
        VeilfedError: TASK_INVALID for a round or an attempt that is past, or of a round in which something was
        revealed; STATE_CORRUPT.
        """
        before = Kept.from_bytes(kept) if kept is not None else None
        if before is None or before.context != context:
            if before is not None:
                _check_newer(before, context)
            before = Kept.new(context, secrets.token_bytes(32))
            keep(before.to_bytes())
        return cls(before, credentials, allowed, least, keep, at)

    def advertise(self) -> Advertisement:
        """This institution's keys."""
        keys = self._secrets.mask_key, self._secrets.seal_key
        statement = advertisement_statement(self._context, str(self._credentials.identity), *keys)
        return Advertisement(
            mask_key=keys[0],
            seal_key=keys[1],
            signature=self._sign(statement),
            certificate_pem=self._credentials.certificate_pem,
        )

    def share(self, message: MaskingCohort) -> Shares:
        """Shares of this member's secrets, sealed for the holders that it chooses."""
        data = message.SerializeToString(deterministic=True)
        if self._kept.cohort not in {b"", data}:
            raise _refuse("a second cohort in one attempt")
        cohort = self._read(message, self._at)
        self._accept(cohort=data)
        self._cohort = cohort
        own = self._own
        return Shares(
            commitment=commitment(self._secrets.self_mask, cohort.digest, own),
            shares=[
                SealedShare(member=holder, sealed=self._secrets.seal(cohort, own, holder, shares))
                for holder, shares in self._own_shares.items()
                if holder != own
            ],
        )

    def mask(self, message: Delivery, vector: Words) -> Words:
        """The vector under all masks of this member, in a new array. Another vector is refused."""
        data = message.SerializeToString(deterministic=True)
        if self._kept.delivery not in {b"", data}:
            raise _refuse("a second delivery of shares in one attempt")
        form = self._context.form
        form.check(vector)
        digest = hashlib.sha256(vector.data).hexdigest()
        if self._kept.vector not in {"", digest}:
            raise VeilfedError(Code.TASK_INVALID, "one attempt masks one vector: this is another")
        sharers = list(message.members)
        if sharers != sorted(set(sharers)) or self._own not in sharers or sharers[-1] >= len(self._cohort.members):
            raise _refuse("those who shared are not members in ascending order, with this one")
        if len(sharers) < max(self._cohort.threshold, self._least):
            raise _refuse(f"{len(sharers)} members have shared, too few")
        held = self._opened(message)
        plus, minus = list[bytes](), list[bytes]()
        own, salt = self._own, self._cohort.digest
        for peer in self._neighbours(message):
            key = pair_mask_key(self._secrets.mask_private, self._cohort.members[peer].mask_key, salt, own, peer)
            (plus if own < peer else minus).append(key)
        plus.append(self_mask_key(self._secrets.self_mask, salt, own))
        self._accept(delivery=data, vector=digest)
        self._held = held
        masked = vector.copy()
        apply_masks(masked, form, plus, minus)
        return masked

    def confirm(self, message: Survivors) -> Confirmation:
        """A signature over the list of survivors, the only one that this member will reveal shares for."""
        survivors = tuple(message.members)
        if self._kept.survivors not in {(), survivors}:
            raise _refuse("a second list of survivors in one attempt")
        if not self._kept.vector:
            raise _refuse("survivors before this institution's own values were masked")
        sharers = self._sharers
        if list(survivors) != sorted(set(survivors)) or not set(survivors) <= set(sharers):
            raise _refuse("survivors who have not shared, or out of order")
        if self._own not in survivors:
            raise _refuse("this institution is not among the survivors")
        if len(survivors) < max(self._cohort.threshold, self._least):
            raise _refuse(f"{len(survivors)} survivors, too few")
        holders = self._own_shares.keys()
        if len(holders & set(survivors)) < threshold(len(holders)):
            raise _refuse("too few survivors among those who hold this institution's shares")
        self._accept(survivors=survivors)
        return Confirmation(signature=self._sign(survivors_statement(self._cohort, sharers, survivors)))

    def reveal(self, message: Confirmations) -> Reveal:
        """The shares with which the masks are removed, once enough members were shown the same list."""
        survivors = self._kept.survivors
        if not survivors:
            raise _refuse("nothing is revealed before a list of survivors was confirmed")
        numbers = [one.member for one in message.confirmations]
        if numbers != sorted(set(numbers)) or not set(numbers) <= set(survivors):
            raise _refuse("confirmations by others than survivors, or out of order")
        if len(numbers) < max(self._cohort.threshold, self._least):
            raise _refuse(f"{len(numbers)} members have confirmed the survivors, too few")
        statement = survivors_statement(self._cohort, self._sharers, survivors)
        for one in message.confirmations:
            self._cohort.members[one.member].verify(statement, one.signature)
        self._accept(revealed=True)
        alive = set(survivors)
        return Reveal(
            self_masks=[
                OpenShare(member=member, share=shares[0]) for member, shares in self._held.items() if member in alive
            ],
            mask_keys=[
                OpenShare(member=member, share=shares[1])
                for member, shares in self._held.items()
                if member not in alive
            ],
        )

    # What follows from what was accepted; read again from what was kept after a restart.

    @cached_property
    def _cohort(self) -> Cohort:
        if not self._kept.cohort:
            raise _refuse("a message before the cohort is known")
        message = MaskingCohort.FromString(self._kept.cohort)
        return self._read(message, last_valid(message.advertisements))

    def _read(self, message: MaskingCohort, at: datetime | None) -> Cohort:
        identity, bundle = self._credentials.identity, self._credentials.bundle_pem
        cohort = Cohort.read(self._context, message, self._allowed, self._least, identity.federation, bundle, at)
        number = cohort.number(identity.institution)
        keys = self._secrets.mask_key, self._secrets.seal_key
        if number is None or (cohort.members[number].mask_key, cohort.members[number].seal_key) != keys:
            raise _refuse("this institution is not a member with its own keys")
        return cohort

    @cached_property
    def _own(self) -> int:
        number = self._cohort.number(self._credentials.identity.institution)
        assert number is not None  # noqa: S101  for mypy: _read sees to it
        return number

    @cached_property
    def _own_shares(self) -> dict[int, bytes]:
        return self._secrets.shares(self._cohort, self._own)

    @property
    def _sharers(self) -> list[int]:
        return list(Delivery.FromString(self._kept.delivery).members)

    @cached_property
    def _held(self) -> dict[int, tuple[bytes, bytes]]:
        return self._opened(Delivery.FromString(self._kept.delivery))

    def _opened(self, message: Delivery) -> dict[int, tuple[bytes, bytes]]:
        """By member, the two shares of its secrets that this one holds, in ascending order."""
        own = self._own
        numbers = [one.member for one in message.shares]
        if len(set(numbers)) != len(numbers) or not set(numbers) <= set(message.members) - {own}:
            raise _refuse("shares of one member twice, or of one who has not shared")
        held = {one.member: self._secrets.open(self._cohort, own, one.member, one.sealed) for one in message.shares}
        mine = self._own_shares[own]
        held[own] = mine[: len(mine) // 2], mine[len(mine) // 2 :]
        return dict(sorted(held.items()))

    def _neighbours(self, message: Delivery) -> list[int]:
        """The members with whom a pairwise mask is shared: one of the two has chosen the other as a holder."""
        chosen = self._own_shares.keys() & set(message.members)
        return sorted((chosen | {one.member for one in message.shares}) - {self._own})

    def _accept(self, **values: object) -> None:
        after = self._kept.after(**values)
        if after != self._kept:
            self._keep(after.to_bytes())
            self._kept = after

    def _sign(self, statement: bytes) -> bytes:
        key = load_key(self._credentials.key_pem, "the agent's key")
        return key.sign(statement, ec.ECDSA(SHA256()))


def _check_newer(before: Kept, context: Context) -> None:
    """Raises VeilfedError(TASK_INVALID) for what must not be summed after what was before."""
    if before.job_id != context.job_id:
        raise VeilfedError(Code.STATE_CORRUPT, f"the kept secrets are not of job {context.job_id}")
    if (context.round, context.attempt) <= (before.round, before.attempt):
        raise VeilfedError(Code.TASK_INVALID, f"round {context.round}, attempt {context.attempt} is past")
    if context.round == before.round and before.revealed:
        # Two sums of the same values over different survivors differ by one institution's values.
        raise VeilfedError(Code.TASK_INVALID, f"round {context.round} was revealed: it is not masked again")


def _refuse(message: str) -> VeilfedError:
    return VeilfedError(Code.COHORT_INVALID, message)
