"""Masked rounds in one process: the sum is exact whoever drops out, and a lying server learns nothing."""

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest
import scipy.stats
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.secagg import Phase, SecureSum
from client_agent.secagg import Participant
from client_agent.secagg.state import Kept
from tests.support.masking import FEDERATION, Member, Room, credentials_of, names, roots
from veilfed.errors import Code, VeilfedError
from veilfed.identity.names import Role
from veilfed.secagg import Context, Format, Words, threshold
from veilfed.secagg.cohort import advertisement_statement, last_valid, survivors_statement
from veilfed.secagg.masks import apply_masks, pair_mask_key
from veilfed.secagg.shamir import join
from veilfed.v1.secagg_pb2 import (
    Advertisement,
    Confirmation,
    Confirmations,
    ConfirmedBy,
    Delivery,
    MaskingCohort,
    Reveal,
    Shares,
    Survivors,
)

SMALL = Format(5, 3)


def vectors_of(members: list[str], form: Format, seed: int = 0) -> dict[str, Words]:
    random = np.random.default_rng(seed)
    return {name: random.integers(0, 2**64, form.words, np.uint64, endpoint=False) for name in members}


def sum_of(vectors: dict[str, Words], members: list[str], form: Format) -> Words:
    total = form.zeros()
    for name in members:
        form.add(total, vectors[name])
    return total


def room_of(count: int, **options: object) -> Room:
    members = names(count)
    return Room(members, vectors_of(members, SMALL), SMALL, **options)  # type: ignore[arg-type]


def refused(code: Code, function: Callable[..., object], *arguments: object) -> VeilfedError:
    with pytest.raises(VeilfedError) as caught:
        function(*arguments)
    assert caught.value.code is code, caught.value
    return caught.value


# Dropouts.


@st.composite
def _drops(draw: st.DrawFn) -> tuple[int, list[set[str]], set[str]]:
    count = draw(st.integers(3, 8))
    some = st.sets(st.sampled_from(names(count)), max_size=2)
    return count, [draw(some) for _ in range(5)], draw(st.sets(st.sampled_from(names(count))))


@given(_drops())
@settings(max_examples=60, deadline=None)
def test_any_dropouts_give_the_exact_sum_or_an_abort(case: tuple[int, list[set[str]], set[str]]) -> None:
    """Of those whose masked vector arrived, if enough answer in each phase; whoever has restarted meanwhile."""
    count, silent, restarts = case
    room = room_of(count, restarts=restarts)
    gone, left = set[str](), list[set[str]]()
    for quiet in silent:
        gone |= quiet
        left.append(set(names(count)) - gone)
    advertised = len(left[0])
    enough = advertised >= 3 and all(len(some) >= max(3, threshold(advertised)) for some in left[1:])
    if not enough:
        refused(Code.JOB_FAILED, room.run, silent)
        return
    total = room.run(silent)
    assert room.server.survivors == sorted(left[2])
    assert (total == sum_of(room.vectors, sorted(left[2]), SMALL)).all()


def test_a_large_cohort_with_holders_chosen_at_random() -> None:
    members = names(148)
    vectors = vectors_of(members, SMALL)
    room = Room(members, vectors, SMALL)
    silent = [set(members[start : start + 8]) for start in range(0, 40, 8)]
    total = room.run(silent)
    assert (total == sum_of(vectors, members[24:], SMALL)).all()
    chosen = [{one.member for one in room.server._shares[number].shares} for number in sorted(room.server._shares)]
    assert len({frozenset(some) for some in chosen}) == len(chosen), "each member chooses for itself"


# What one masked vector looks like.


def test_a_masked_vector_is_uniform() -> None:
    """Vectors of zeros under fixed seeds: chi-square of the bytes and of 16-bit words at each place of a word."""
    form, members = Format(60_000, 20_000), names(3)
    context = Context("job-1", 0, 0, "0" * 64, form)
    room = Room(members, {name: form.zeros() for name in members}, form)
    for number, member in enumerate(room.members.values()):
        member.disk[:] = [Kept.new(context, bytes([number]) * 32).to_bytes()]
    room.clients = {name: member.begin() for name, member in room.members.items()}
    room.advertise()
    room.share()
    request = room.server.request(members[0])
    assert isinstance(request, Delivery)
    masked = room.clients[members[0]].mask(request, form.zeros())
    for part in (masked[: form.narrow], masked[form.narrow :]):
        observed = part.view(np.uint16).reshape(-1, 4)
        for place in range(4):
            counts = np.bincount(observed[:, place] >> 6, minlength=1024)
            assert scipy.stats.chisquare(counts).pvalue > 1e-6
        assert scipy.stats.chisquare(np.bincount(part.view(np.uint8), minlength=256)).pvalue > 1e-6


# A lying server.


def test_two_lists_of_survivors_unmask_neither() -> None:
    room = room_of(6)
    room.advertise()
    room.share()
    room.mask()
    lists = [list(range(6)), list(range(5))]
    signed: list[list[ConfirmedBy]] = [[], []]
    for number, name in enumerate(names(5)):
        which = number % 2
        survivors = Survivors(members=lists[which])
        answer = room.clients[name].confirm(survivors)
        signed[which].append(ConfirmedBy(member=number, signature=answer.signature))
        assert "second list" in str(
            refused(Code.COHORT_INVALID, room.clients[name].confirm, Survivors(members=lists[1 - which]))
        )
        # A restart changes nothing.
        refused(Code.COHORT_INVALID, room.members[name].begin().confirm, Survivors(members=lists[1 - which]))
    for number, name in enumerate(names(5)):
        own, other = signed[number % 2], signed[1 - number % 2]
        both = sorted([*own, *other], key=lambda one: one.member)
        for proof in (own, other, both):
            refused(Code.COHORT_INVALID, room.clients[name].reveal, Confirmations(confirmations=proof))
        assert not Kept.from_bytes(room.members[name].disk[-1]).revealed


def test_confirmations_must_be_enough_genuine_and_once_each() -> None:
    room = room_of(5)
    room.advertise()
    room.share()
    room.mask()
    room.confirm()
    proof = room.server.request(names(5)[0])
    assert isinstance(proof, Confirmations)
    client = room.clients[names(5)[0]]
    first = list(proof.confirmations)
    for wrong in (
        first[:3],
        [first[0], first[0], *first[1:]],
        [*first[:4], ConfirmedBy(member=4, signature=first[0].signature)],
        [*first[:4], ConfirmedBy(member=4)],
        [*first[:4], ConfirmedBy(member=9, signature=first[0].signature)],
    ):
        refused(Code.COHORT_INVALID, client.reveal, Confirmations(confirmations=wrong))
    assert client.reveal(proof).self_masks


def test_one_declared_dropped_after_its_upload_stays_masked() -> None:
    """The server has the masked vector of a member and all that the others reveal; the self mask is still on it."""
    room = room_of(6)
    form, victim = SMALL, 2
    name = names(6)[victim]
    room.advertise()
    room.share()
    delivery = room.server.request(name)
    assert isinstance(delivery, Delivery)
    masked = room.clients[name].mask(delivery, room.vectors[name])  # arrives, and the server says it did not
    room.mask([name])
    room.confirm()
    room.reveal()
    reveals = room.server._reveals
    assert all(victim not in {one.member for one in reveal.self_masks} for reveal in reveals.values())
    # It can have the pairwise masks removed, as for anybody who dropped out; uniform words are left.
    shares = {h: one.share for h, reveal in reveals.items() for one in reveal.mask_keys if one.member == victim}
    secret = join([holder + 1 for holder in list(shares)[:5]], list(shares.values())[:5])
    private = X25519PrivateKey.from_private_bytes(secret)
    cohort = room.server.members
    keys = {
        peer: pair_mask_key(private, cohort.members[peer].mask_key, cohort.digest, victim, peer)
        for peer in range(6)
        if peer != victim
    }
    opened = masked.copy()
    apply_masks(
        opened, form, [key for peer, key in keys.items() if peer < victim], [k for p, k in keys.items() if p > victim]
    )
    assert not (opened == room.vectors[name]).any()
    # The member itself refuses to confirm a list without it.
    refused(Code.COHORT_INVALID, room.clients[name].confirm, Survivors(members=[0, 1, 3, 4, 5]))
    room.server.unmask(room.total)
    assert (room.total == sum_of(room.vectors, [n for n in names(6) if n != name], form)).all()


@given(_drops())
@settings(max_examples=20, deadline=None)
def test_never_both_secrets_of_a_member(case: tuple[int, list[set[str]], set[str]]) -> None:
    count, silent, restarts = case
    room = room_of(count, restarts=restarts)
    with suppress(VeilfedError):
        room.run(silent)
    opened = {"self": set[int](), "key": set[int]()}
    for reveal in room.server._reveals.values():
        opened["self"] |= {one.member for one in reveal.self_masks}
        opened["key"] |= {one.member for one in reveal.mask_keys}
    assert not opened["self"] & opened["key"]


def _cohort(room: Room) -> MaskingCohort:
    for name in sorted(room.server.asked):
        room.server.take(name, room.clients[name].advertise())
    room.server.advance()
    found = room.server.request(names(4)[0])
    assert isinstance(found, MaskingCohort)
    return found


def _signed(context: Context, institution: str, keys: tuple[bytes, bytes], **who: object) -> Advertisement:
    """An advertisement of whoever has this certificate."""
    credentials = credentials_of(institution, **who)
    member = Participant(Kept.new(context, b"x" * 32), credentials, [], 3, lambda _: None, None)
    statement = advertisement_statement(context, str(credentials.identity), *keys)
    return Advertisement(
        mask_key=keys[0],
        seal_key=keys[1],
        signature=member._sign(statement),
        certificate_pem=credentials.certificate_pem,
    )


KEYS = (b"\x09" + bytes(31), b"\x0a" + bytes(31))


def _swap_key(room: Room, cohort: MaskingCohort) -> None:
    cohort.advertisements[1].mask_key = KEYS[0]


def _swap_keys_between(room: Room, cohort: MaskingCohort) -> None:
    one = cohort.advertisements[1]
    one.mask_key, one.seal_key = one.seal_key, one.mask_key


def _replay_attempt(room: Room, cohort: MaskingCohort) -> None:
    earlier = Context("job-1", 0, 7, "0" * 64, SMALL)
    cohort.advertisements[1].CopyFrom(Member(names(4)[1], earlier, names(4), 3).begin().advertise())


def _replay_spec(room: Room, cohort: MaskingCohort) -> None:
    other = Context("job-1", 0, 0, "1" * 64, SMALL)
    cohort.advertisements[1].CopyFrom(Member(names(4)[1], other, names(4), 3).begin().advertise())


def _other_root(room: Room, cohort: MaskingCohort) -> None:
    cohort.advertisements[1].CopyFrom(_signed(room.context, names(4)[1], KEYS, ca="other"))


def _other_federation(room: Room, cohort: MaskingCohort) -> None:
    cohort.advertisements[1].CopyFrom(_signed(room.context, names(4)[1], KEYS, federation="another.veilfed"))


def _administrator(room: Room, cohort: MaskingCohort) -> None:
    cohort.advertisements[1].CopyFrom(_signed(room.context, names(4)[1], KEYS, role=Role.ADMIN))


def _invented(room: Room, cohort: MaskingCohort) -> None:
    """Institutions with genuine certificates of the federation's authority that are on nobody's roster."""
    for number in range(1, 4):
        keys = (bytes([number]) + bytes(31), bytes([number + 9]) + bytes(31))
        cohort.advertisements[number].CopyFrom(_signed(room.context, f"invented-{number}", keys))


def _twice(room: Room, cohort: MaskingCohort) -> None:
    """A second agent of an institution, with a genuine certificate."""
    cohort.advertisements[2].CopyFrom(_signed(room.context, names(4)[1], KEYS, name="second"))


def _same_key(room: Room, cohort: MaskingCohort) -> None:
    first = cohort.advertisements[2]
    cohort.advertisements[1].CopyFrom(_signed(room.context, names(4)[1], (first.mask_key, KEYS[1])))


def _unsorted(room: Room, cohort: MaskingCohort) -> None:
    one = Advertisement.FromString(cohort.advertisements[1].SerializeToString())
    cohort.advertisements[1].CopyFrom(cohort.advertisements[2])
    cohort.advertisements[2].CopyFrom(one)


def _without_me(room: Room, cohort: MaskingCohort) -> None:
    del cohort.advertisements[0]


def _too_few(room: Room, cohort: MaskingCohort) -> None:
    del cohort.advertisements[2:]


def _no_certificate(room: Room, cohort: MaskingCohort) -> None:
    cohort.advertisements[1].certificate_pem = b"-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n"


def _my_keys_of_before(room: Room, cohort: MaskingCohort) -> None:
    cohort.advertisements[0].CopyFrom(_signed(room.context, names(4)[0], KEYS))


LIES = [
    _swap_key,
    _swap_keys_between,
    _replay_attempt,
    _replay_spec,
    _other_root,
    _other_federation,
    _administrator,
    _invented,
    _twice,
    _same_key,
    _unsorted,
    _without_me,
    _too_few,
    _no_certificate,
    _my_keys_of_before,
]


@pytest.mark.parametrize("lie", LIES, ids=lambda lie: lie.__name__.strip("_"))
def test_a_false_cohort_is_refused(lie: Callable[[Room, MaskingCohort], None]) -> None:
    room = room_of(4)
    cohort = _cohort(room)
    lie(room, cohort)
    client = room.clients[names(4)[0]]
    before = list(room.members[names(4)[0]].disk)
    refused(Code.COHORT_INVALID, client.share, cohort)
    assert room.members[names(4)[0]].disk == before, "nothing was accepted"


def test_a_key_of_small_order_is_refused() -> None:
    room = room_of(4)
    cohort = _cohort(room)
    cohort.advertisements[1].CopyFrom(_signed(room.context, names(4)[1], (KEYS[0], bytes(32))))
    refused(Code.COHORT_INVALID, room.clients[names(4)[0]].share, cohort)


def test_each_step_is_answered_once_and_the_same_again() -> None:
    room = room_of(4, restarts=names(4))
    name = names(4)[0]
    cohort = _cohort(room)
    shares = room.client(name).share(cohort)
    assert room.client(name).share(cohort) == shares
    other = MaskingCohort(advertisements=list(cohort.advertisements)[:3])
    refused(Code.COHORT_INVALID, room.client(name).share, other)
    room.share()
    delivery = room.server.request(name)
    assert isinstance(delivery, Delivery)
    vector = room.vectors[name]
    masked = room.client(name).mask(delivery, vector)
    assert (room.client(name).mask(delivery, vector) == masked).all()
    assert not (masked == vector).any()
    refused(Code.TASK_INVALID, room.client(name).mask, delivery, room.vectors[names(4)[1]])
    refused(Code.COHORT_INVALID, room.client(name).mask, Delivery(members=[0, 1, 2]), vector)
    room.mask()
    room.confirm()
    room.reveal()
    proof = room.server.request(name)
    assert isinstance(proof, Confirmations)
    assert room.client(name).reveal(proof) == room.server._reveals[0]


def test_messages_before_their_time() -> None:
    client = room_of(4).clients[names(4)[0]]
    refused(Code.COHORT_INVALID, client.mask, Delivery(members=[0, 1, 2, 3]), SMALL.zeros())
    refused(Code.COHORT_INVALID, client.confirm, Survivors(members=[0, 1, 2, 3]))
    refused(Code.COHORT_INVALID, client.reveal, Confirmations())


def test_false_deliveries_are_refused() -> None:
    room = room_of(4)
    room.advertise()
    room.share()
    name = names(4)[0]
    genuine = room.server.request(name)
    assert isinstance(genuine, Delivery)
    shares = list(genuine.shares)
    of_another = room.server.request(names(4)[1])
    assert isinstance(of_another, Delivery)
    for members, given_shares in (
        ([0, 1], shares[:1]),
        ([1, 2, 3], shares),
        ([0, 2, 1, 3], shares),
        ([0, 1, 2, 3, 9], shares),
        ([0, 1, 2, 3], [*shares, shares[0]]),
        ([0, 1, 2], shares),
        ([0, 1, 2, 3], list(of_another.shares)),
    ):
        message = Delivery(members=members, shares=given_shares)
        refused(Code.COHORT_INVALID, room.clients[name].mask, message, room.vectors[name])
    assert room.clients[name].mask(genuine, room.vectors[name]).size


def test_false_lists_of_survivors_are_refused() -> None:
    room = room_of(4)
    room.advertise()
    room.share([names(4)[3]])
    room.mask()
    client = room.clients[names(4)[0]]
    for members in ([0, 1], [1, 2], [0, 1, 2, 3], [0, 2, 1], [0, 1, 1, 2], []):
        refused(Code.COHORT_INVALID, client.confirm, Survivors(members=members))
    assert client.confirm(Survivors(members=[0, 1, 2])).signature


# Rounds and attempts.


def _again(room: Room, name: str, round_number: int, attempt: int) -> Participant:
    member = room.members[name]
    context = Context("job-1", round_number, attempt, "0" * 64, SMALL)
    return Member(name, context, member.allowed, 3, member.disk).begin()


def test_a_round_that_was_revealed_is_not_summed_again() -> None:
    room = room_of(4)
    room.run()
    name = names(4)[0]
    assert "revealed" in str(refused(Code.TASK_INVALID, _again, room, name, 0, 1))
    later = _again(room, name, 1, 0)
    assert later.advertise().mask_key != room.clients[name].advertise().mask_key
    refused(Code.TASK_INVALID, _again, room, name, 0, 0)
    refused(Code.TASK_INVALID, _again, room, name, 0, 9)


def test_an_attempt_that_failed_is_run_again_with_other_keys() -> None:
    room = room_of(4)
    room.advertise()
    room.share()
    refused(Code.JOB_FAILED, room.mask, names(4)[:2])
    again = Room(names(4), room.vectors, SMALL, attempt=1)
    for name, member in again.members.items():
        member.disk[:] = room.members[name].disk
    again.clients = {name: member.begin() for name, member in again.members.items()}
    assert (again.run() == sum_of(room.vectors, names(4), SMALL)).all()
    assert again.server.members.digest != room.server.members.digest
    refused(Code.TASK_INVALID, _again, again, names(4)[0], 0, 0)


def test_kept_secrets_that_are_damaged_or_of_another_job() -> None:
    room = room_of(3)
    member = room.members[names(3)[0]]
    member.disk.append(member.disk[-1][:-9])
    refused(Code.STATE_CORRUPT, member.begin)
    member.disk[-1] = Kept.new(Context("job-2", 0, 0, "0" * 64, SMALL), bytes(32)).to_bytes()
    refused(Code.STATE_CORRUPT, member.begin)


def test_certificates_that_have_ended_since_the_cohort_was_accepted() -> None:
    """Who restarts then goes on, on either side; nobody new is taken with such a certificate."""
    members = names(3)
    vectors, context = vectors_of(members, SMALL), Context("job-1", 0, 0, "0" * 64, SMALL)
    disks: dict[str, list[bytes]] = {name: [] for name in members}

    def client(name: str, at: datetime | None) -> Participant:
        credentials = credentials_of(name, until=timedelta(minutes=-1))
        disk = disks[name]
        kept = disk[-1] if disk else None
        return Participant.begin(context, credentials, allowed=members, least=3, keep=disk.append, kept=kept, at=at)

    ads = {name: client(name, None).advertise() for name in members}
    ended = last_valid(ads.values())
    then = ended - timedelta(seconds=30)
    assert ended < datetime.now(UTC)
    refused(Code.COHORT_INVALID, SecureSum(context, members, 3, FEDERATION, roots()).take, members[0], ads[members[0]])
    server = SecureSum(context, members, 3, FEDERATION, roots(), ended)
    for name in members:
        server.take(name, ads[name])
    server.advance()
    for name in members:
        request = server.request(name)
        assert isinstance(request, MaskingCohort)
        refused(Code.COHORT_INVALID, client(name, None).share, request)
        server.take(name, client(name, then).share(request))
    server.advance()
    for name in members:
        delivery = server.request(name)
        assert isinstance(delivery, Delivery)
        assert client(name, None).mask(delivery, vectors[name]).size


def test_certificates_that_are_valid_are_looked_at_now() -> None:
    before = datetime.now(UTC)
    room = room_of(3)
    assert before <= last_valid(client.advertise() for client in room.clients.values()) <= datetime.now(UTC)


# What institutions send that is wrong counts for nothing.


def test_what_the_server_does_not_take() -> None:
    room = room_of(4)
    server, members = room.server, names(4)
    ads = {name: room.clients[name].advertise() for name in members}
    refused(Code.PROTOCOL_VIOLATION, server.take, "stranger", ads[members[0]])
    refused(Code.COHORT_INVALID, server.take, members[0], ads[members[1]])
    refused(Code.PROTOCOL_VIOLATION, server.take, members[0], Shares())
    refused(Code.PROTOCOL_VIOLATION, server.take_masked, members[0])
    server.take(members[0], ads[members[0]])
    refused(Code.UPDATE_DUPLICATE, server.take, members[0], ads[members[0]])
    copied = _signed(room.context, members[1], (ads[members[0]].mask_key, KEYS[1]))
    refused(Code.COHORT_INVALID, server.take, members[1], copied)
    for name in members[1:]:
        server.take(name, ads[name])
    server.advance()

    request = server.request(members[0])
    assert isinstance(request, MaskingCohort)
    for wrong in range(5):
        shares = room.clients[members[0]].share(request)
        if wrong == 0:
            del shares.shares[0]
        elif wrong == 1:
            shares.shares[0].member = 0
        elif wrong == 2:
            shares.shares[0].member = 9
        elif wrong == 3:
            shares.shares[0].sealed += b"x"
        else:
            shares.commitment = b""
        refused(Code.PROTOCOL_VIOLATION, server.take, members[0], shares)
    room.share()
    room.mask()
    refused(Code.COHORT_INVALID, server.take, members[0], Confirmation(signature=b"x"))
    room.confirm()
    proof = server.request(members[0])
    assert isinstance(proof, Confirmations)
    reveal = room.clients[members[0]].reveal(proof)
    moved = Reveal(self_masks=list(reveal.self_masks)[:3], mask_keys=list(reveal.self_masks)[3:])
    refused(Code.PROTOCOL_VIOLATION, server.take, members[0], moved)
    refused(Code.PROTOCOL_VIOLATION, server.take, members[0], Reveal())
    room.reveal()
    refused(Code.PROTOCOL_VIOLATION, server.advance)
    assert server.phase is Phase.REVEAL


def test_a_wrong_share_is_noticed_before_anything_is_published() -> None:
    room = room_of(4)
    for step in (room.advertise, room.share, room.mask, room.confirm, room.reveal):
        step()
    share = room.server._reveals[1].self_masks[2]
    share.share = bytes([share.share[0] ^ 1]) + share.share[1:]
    assert names(4)[2] in str(refused(Code.JOB_FAILED, room.server.unmask, room.total))


def test_nothing_is_unmasked_before_the_end() -> None:
    room = room_of(3)
    refused(Code.PROTOCOL_VIOLATION, room.server.unmask, room.total)
    room.advertise()
    assert survivors_statement(room.server.members, [0, 1, 2], [0, 1]) != survivors_statement(
        room.server.members, [0, 1, 2], [0, 1, 2]
    )
    assert FEDERATION in str(room.server.members.members[0].identity)
