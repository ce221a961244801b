"""The aggregator's part in one attempt at a masked round: what comes is taken phase by phase, and the sum unmasked.

    ADVERTISE -> SHARE -> MASK -> CONFIRM -> REVEAL

It holds no vectors: who calls it keeps them, adds up those of the survivors and gives it the sum. All that it knows
follows from the messages that it took and when a phase was closed, so it can be made again from those.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable
from datetime import datetime
from enum import IntEnum

from google.protobuf.message import Message

from aggregator.secagg.unmasking import Opened, remove_masks
from veilfed.errors import Code, VeilfedError
from veilfed.secagg import Cohort, Context, Words, threshold
from veilfed.secagg.cohort import holders_of, survivors_statement, verified
from veilfed.secagg.shamir import SHARE_BYTES
from veilfed.v1.secagg_pb2 import (
    Advertisement,
    Confirmation,
    Confirmations,
    ConfirmedBy,
    Delivery,
    MaskingCohort,
    OpenShare,
    Reveal,
    SealedShare,
    Shares,
    Survivors,
)

__all__ = ["Phase", "SecureSum"]

COMMITMENT_BYTES = 32
# The shares of both secrets, and the seal's tag.
SEALED_BYTES = 2 * SHARE_BYTES + 16
MAX_SIGNATURE_BYTES = 128


class Phase(IntEnum):
    """What the institutions are asked for."""

    ADVERTISE = 0
    SHARE = 1
    MASK = 2
    CONFIRM = 3
    REVEAL = 4


class SecureSum:
    """Of `cohort`, the institutions that train; with fewer than `least` answers in any phase it ends.

    All messages are checked when they are taken: one that the other institutions would refuse counts for nothing, so
    that its sender alone is left out.
    """

    def __init__(
        self,
        context: Context,
        cohort: Collection[str],
        least: int,
        federation: str,
        bundle_pem: bytes,
        at: datetime | None = None,
    ) -> None:
        self.context = context
        self.phase = Phase.ADVERTISE
        self._cohort, self._least = frozenset(cohort), least
        self._federation, self._bundle, self._at = federation, bundle_pem, at
        self._advertisements: dict[str, Advertisement] = {}
        self._members: Cohort | None = None
        self._message = MaskingCohort()
        # By the number of the member.
        self._shares: dict[int, Shares] = {}
        self._sharers: list[int] = []
        # By holder: whose shares it gets, sealed.
        self._held: defaultdict[int, list[tuple[int, bytes]]] = defaultdict(list)
        self._masked: set[int] = set()
        self._survivors: list[int] = []
        self._confirmations: dict[int, bytes] = {}
        self._confirmed: Confirmations = Confirmations()
        self._reveals: dict[int, Reveal] = {}
        self._asked, self._answered = self._cohort, set[str]()

    # What comes.

    @property
    def asked(self) -> frozenset[str]:
        """The institutions that the phase asks."""
        return self._asked

    @property
    def answered(self) -> frozenset[str]:
        """The institutions whose answer in this phase was taken."""
        return frozenset(self._answered)

    @property
    def members(self) -> Cohort:
        """Who takes part. Raises VeilfedError(PROTOCOL_VIOLATION) while that is open."""
        if self._members is None:
            raise VeilfedError(Code.PROTOCOL_VIOLATION, "the cohort is not known yet")
        return self._members

    @property
    def survivors(self) -> list[str]:
        """The institutions whose vectors are in the sum, from the phase CONFIRM on."""
        return self._names(self._survivors)

    def _names(self, numbers: Iterable[int]) -> list[str]:
        return [self.members.members[number].identity.institution for number in numbers]

    def take(self, institution: str, message: Message) -> None:
        """Takes what an institution answers in this phase.

        Raises VeilfedError, and counts it for nothing: COHORT_INVALID or PROTOCOL_VIOLATION for a message that is not
        what the phase asks for, UPDATE_DUPLICATE for a second one.
        """
        self._check_asked(institution)
        if isinstance(message, Advertisement) and self.phase is Phase.ADVERTISE:
            self._advertise(institution, message)
        elif isinstance(message, Shares) and self.phase is Phase.SHARE:
            self._share(self._number(institution), message)
        elif isinstance(message, Confirmation) and self.phase is Phase.CONFIRM:
            self._confirm(self._number(institution), message)
        elif isinstance(message, Reveal) and self.phase is Phase.REVEAL:
            self._reveal(self._number(institution), message)
        else:
            raise _violation(f"{message.DESCRIPTOR.name} is not what the phase {self.phase.name} asks for")
        self._answered.add(institution)

    def take_masked(self, institution: str) -> None:
        """Notes that a masked vector came and is kept. Errors as `take`."""
        self._check_asked(institution)
        if self.phase is not Phase.MASK:
            raise _violation(f"a masked vector is not what the phase {self.phase.name} asks for")
        self._masked.add(self._number(institution))
        self._answered.add(institution)

    def _check_asked(self, institution: str) -> None:
        if institution not in self._asked:
            raise _violation(f"{institution} is not asked in the phase {self.phase.name}")
        if institution in self._answered:
            raise VeilfedError(Code.UPDATE_DUPLICATE, f"{institution} has answered in the phase {self.phase.name}")

    def _number(self, institution: str) -> int:
        number = self.members.number(institution)
        assert number is not None  # noqa: S101  for mypy: it was asked
        return number

    def _advertise(self, institution: str, message: Advertisement) -> None:
        member = verified(self.context, message, self._federation, self._bundle, self._at)
        if member.identity.institution != institution:
            raise VeilfedError(Code.COHORT_INVALID, f"{institution} sent keys of {member.identity.institution}")
        keys = {message.mask_key, message.seal_key}
        if any(keys & {other.mask_key, other.seal_key} for other in self._advertisements.values()):
            raise VeilfedError(Code.COHORT_INVALID, f"{institution} sent a key of another institution")
        self._advertisements[institution] = message

    def _share(self, number: int, message: Shares) -> None:
        holders = [one.member for one in message.shares]
        count = len(self.members.members)
        if len(set(holders)) != len(holders) or len(holders) != holders_of(count):
            raise _violation(f"shares for {len(holders)} holders; {holders_of(count)} must have one each")
        if number in holders or max(holders, default=0) >= count:
            raise _violation("shares for oneself, or for somebody who is no member")
        sizes = {len(one.sealed) for one in message.shares}
        if len(message.commitment) != COMMITMENT_BYTES or not sizes <= {SEALED_BYTES}:
            raise _violation("shares or a commitment of another length")
        self._shares[number] = message

    def _confirm(self, number: int, message: Confirmation) -> None:
        statement = survivors_statement(self.members, self._sharers, self._survivors)
        if len(message.signature) > MAX_SIGNATURE_BYTES:
            raise _violation("a signature of another length")
        self.members.members[number].verify(statement, message.signature)
        self._confirmations[number] = message.signature

    def _reveal(self, number: int, message: Reveal) -> None:
        alive, held = set(self._survivors), {number, *(sender for sender, _ in self._held[number])}
        kinds = ((message.self_masks, held & alive), (message.mask_keys, held - alive))
        for shares, expected in kinds:
            members = [one.member for one in shares]
            if sorted(members) != sorted(expected) or any(len(one.share) != SHARE_BYTES for one in shares):
                raise _violation("other shares than those that this institution holds")
        self._reveals[number] = message

    # What follows.

    def advance(self) -> None:
        """Closes the phase: who has not answered is left out. Raises VeilfedError(JOB_FAILED) if too few have."""
        least = self._enough
        if len(self._answered) < least:
            missing = ", ".join(sorted(self._asked - self._answered)[:50])
            raise VeilfedError(
                Code.JOB_FAILED,
                f"{len(self._answered)} institutions have answered in the phase {self.phase.name.lower()}; at least"
                f" {least} must; missing: {missing}",
            )
        self._close()
        self.phase = Phase(self.phase + 1)
        self._answered = set()

    @property
    def _enough(self) -> int:
        """Answers without which a phase ends in nothing."""
        count = len(self._answered) if self._members is None else len(self._members.members)
        return max(self._least, threshold(count))

    def _close(self) -> None:
        """Fixes what the phase has brought, and whom the next one asks."""
        if self.phase is Phase.ADVERTISE:
            self._message = MaskingCohort(
                advertisements=[message for _, message in sorted(self._advertisements.items())]
            )
            self._members = Cohort.read(
                self.context, self._message, self._cohort, self._least, self._federation, self._bundle, self._at
            )
            self._asked = frozenset(self._names(range(len(self.members.members))))
        elif self.phase is Phase.SHARE:
            self._sharers = sorted(self._shares)
            for sender in self._sharers:
                for one in self._shares[sender].shares:
                    self._held[one.member].append((sender, one.sealed))
            self._asked = frozenset(self._names(self._sharers))
        elif self.phase is Phase.MASK:
            self._survivors = sorted(self._masked)
            self._asked = frozenset(self._names(self._survivors))
        elif self.phase is Phase.CONFIRM:
            # As many as are needed: each institution verifies all that it gets.
            proof = sorted(self._confirmations.items())[: self._enough]
            self._confirmed = Confirmations(
                confirmations=[ConfirmedBy(member=member, signature=signature) for member, signature in proof]
            )
            self._asked = frozenset(self._names(self._confirmations))
        else:
            raise _violation("there is no phase after the last one")

    def request(self, institution: str) -> Message | None:
        """What an institution is to answer in this phase; None for its keys, which follow from the context."""
        if self.phase is Phase.ADVERTISE:
            return None
        if self.phase is Phase.SHARE:
            return self._message
        if self.phase is Phase.MASK:
            return self._delivery(self._number(institution))
        if self.phase is Phase.CONFIRM:
            return Survivors(members=self._survivors)
        return self._confirmed

    def _delivery(self, number: int) -> Delivery:
        found = [SealedShare(member=sender, sealed=data) for sender, data in self._held[number]]
        return Delivery(members=self._sharers, shares=found)

    def unmask(self, total: Words) -> None:
        """Leaves in `total`, the sum of the survivors' masked vectors, the sum of their vectors.

        In the phase REVEAL. Raises VeilfedError(JOB_FAILED) where too few shares came, or they do not fit.
        """
        if self.phase is not Phase.REVEAL:
            raise _violation(f"nothing can be unmasked in the phase {self.phase.name}")
        opened = {member: Opened() for member in self._sharers}
        for holder, reveal in self._reveals.items():
            shares: list[OpenShare] = [*reveal.self_masks, *reveal.mask_keys]
            for one in shares:
                opened[one.member].shares[holder] = one.share
        holders = {
            member: frozenset([member, *(one.member for one in self._shares[member].shares)])
            for member in self._sharers
        }
        commitments = {member: shares.commitment for member, shares in self._shares.items()}
        remove_masks(total, self.members, holders, commitments, self._survivors, opened)


def _violation(message: str) -> VeilfedError:
    return VeilfedError(Code.PROTOCOL_VIOLATION, message)
