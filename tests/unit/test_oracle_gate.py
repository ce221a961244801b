"""The release gate: quotas and rates per institution, on disk."""

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fm_oracle.gate import FILE, Charge, Limits, ReleaseGate
from veilfed.errors import Code, VeilfedError


class Clock:
    """Seconds, set by hand."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def refused(gate: ReleaseGate, institution: str, count: int) -> Code:
    with pytest.raises(VeilfedError) as caught:
        gate.charge(institution, count)
    return caught.value.code


def charged(gate: ReleaseGate, institution: str, count: int, refusal: Code) -> Charge | None:
    """The charge, or None after a refusal of this code."""
    try:
        return gate.charge(institution, count)
    except VeilfedError as error:
        if error.code is not refusal:
            raise
        return None


def test_a_quota_is_spent_once(tmp_path: Path) -> None:
    with ReleaseGate(tmp_path, Limits(quota=100)) as gate:
        assert gate.charge("north", 64).quota_left == 36
        assert refused(gate, "north", 37) is Code.QUOTA_EXCEEDED
        assert gate.left("north") == 36  # a refusal takes nothing
        assert gate.charge("north", 36).quota_left == 0
        assert refused(gate, "north", 1) is Code.QUOTA_EXCEEDED
        assert gate.charge("south", 100).quota_left == 0


def test_a_restart_gives_nothing_back(tmp_path: Path) -> None:
    clock = Clock()
    limits = Limits(quota=100, rate=1.0, burst=60, rate_wait_seconds=0)
    with ReleaseGate(tmp_path, limits, clock) as gate:
        gate.charge("north", 60)
    with ReleaseGate(tmp_path, limits, clock) as gate:
        assert gate.left("north") == 40
        assert refused(gate, "north", 1) is Code.RATE_LIMITED
        clock.now += 40
        assert gate.charge("north", 40).quota_left == 0


def test_quotas_of_single_institutions(tmp_path: Path) -> None:
    with ReleaseGate(tmp_path, Limits(quota=10, quotas={"north": 20, "closed": 0})) as gate:
        assert gate.left("north") == 20
        assert gate.left("south") == 10
        assert refused(gate, "closed", 1) is Code.QUOTA_EXCEEDED
    with ReleaseGate(tmp_path / "open", Limits()) as gate:
        assert gate.charge("north", 1_000_000).quota_left is None
        assert gate.left("north") is None
        assert gate.released() == {"north": 1_000_000}


def test_a_refund_returns_the_quota(tmp_path: Path) -> None:
    with ReleaseGate(tmp_path, Limits(quota=10)) as gate:
        gate.charge("north", 10)
        gate.refund("north", 4)
        assert gate.left("north") == 4
        gate.refund("north", 100)
        assert gate.left("north") == 10  # never more than there was


def test_the_rate_holds_back_and_then_refuses(tmp_path: Path) -> None:
    clock = Clock()
    with ReleaseGate(tmp_path, Limits(rate=10.0, burst=50, rate_wait_seconds=5.0), clock) as gate:
        assert gate.charge("north", 50).wait_seconds == 0
        assert gate.charge("north", 20).wait_seconds == pytest.approx(2.0)
        assert gate.charge("north", 30).wait_seconds == pytest.approx(5.0)
        assert refused(gate, "north", 1) is Code.RATE_LIMITED
        assert gate.charge("south", 50).wait_seconds == 0  # the others are not held back
        clock.now += 5.0
        assert gate.charge("north", 10).wait_seconds == pytest.approx(1.0)


def test_a_clock_set_back_takes_nothing_away(tmp_path: Path) -> None:
    clock = Clock()
    with ReleaseGate(tmp_path, Limits(rate=1.0, burst=10, rate_wait_seconds=0), clock) as gate:
        gate.charge("north", 5)
        clock.now -= 1000
        assert gate.charge("north", 5).wait_seconds == 0
        clock.now += 3
        assert gate.charge("north", 3).wait_seconds == 0


@settings(max_examples=30)
@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 40)), max_size=30))
def test_never_more_than_burst_and_rate(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[float, int]]
) -> None:
    """When every request waits as it is told, no window of any length sees more than burst + rate * length."""
    clock = Clock()
    released: list[tuple[float, int]] = []
    limits = Limits(rate=3.0, burst=40, rate_wait_seconds=10.0)
    with ReleaseGate(tmp_path_factory.mktemp("gate"), limits, clock) as gate:
        for pause, count in steps:
            clock.now += pause
            charge = charged(gate, "north", count, Code.RATE_LIMITED)
            if charge is not None:
                released.append((clock.now + charge.wait_seconds, count))
    for i, (start, _) in enumerate(released):
        for j in range(i, len(released)):
            total = sum(count for _, count in released[i : j + 1])
            assert total <= 40 + 3.0 * (released[j][0] - start) + 1e-6


def test_charges_from_many_threads_and_two_openings_add_up(tmp_path: Path) -> None:
    limits = Limits(quota=150)
    with ReleaseGate(tmp_path, limits) as one, ReleaseGate(tmp_path, limits) as two:
        granted: list[Charge] = []

        def ask(gate: ReleaseGate) -> None:
            for _ in range(50):
                charge = charged(gate, "north", 1, Code.QUOTA_EXCEEDED)
                if charge is not None:
                    granted.append(charge)

        threads = [threading.Thread(target=ask, args=(gate,)) for gate in (one, two, one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(granted) == 150
        assert one.left("north") == two.left("north") == 0


def test_the_file_is_private(tmp_path: Path) -> None:
    state = tmp_path / "state"
    with ReleaseGate(state, Limits()):
        assert state.stat().st_mode & 0o777 == 0o700
        assert {path.stat().st_mode & 0o777 for path in state.iterdir()} == {0o600}


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b"no database at all, but long enough to be read as one" * 100)
    with pytest.raises(VeilfedError, match=FILE) as caught:
        ReleaseGate(tmp_path, Limits(quota=1))
    assert caught.value.code is Code.STATE_CORRUPT


def test_an_unusable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(VeilfedError, match="file") as caught:
        ReleaseGate(tmp_path / "file", Limits())
    assert caught.value.code is Code.FILE_UNUSABLE
