"""The cache of embeddings: what was added is found again, and damage is noticed, wherever it is."""

import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from client_agent.cache import MAX_PROMPTED, EmbeddingCache, prompts_digest
from veilfed.errors import Code, VeilfedError

VERSION = "ab" * 32
D = 5
TEXTS = ["one", "two", "three"]
RECORD = 32 + 4 * D + 4
HEADER = 16


def vectors(count: int, seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, D)).astype(np.float32)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[EmbeddingCache]:
    with EmbeddingCache(tmp_path / "cache", VERSION, "text", D) as opened:
        yield opened


def reopened(cache: EmbeddingCache) -> EmbeddingCache:
    return EmbeddingCache(cache.path.parent, VERSION, "text", D)


def test_what_was_added_is_found_bit_for_bit_by_a_later_process_too(cache: EmbeddingCache) -> None:
    assert cache.get(TEXTS)[1].tolist() == [0, 1, 2]
    cache.add(TEXTS, vectors(3))
    for opened in (cache, reopened(cache)):
        found, absent = opened.get(["three", "four", "one"])
        assert absent.tolist() == [1]
        assert found[[0, 2]].tobytes() == vectors(3)[[2, 0]].tobytes()
        assert not found[1].any()
        assert len(opened) == 3


def test_texts_and_images_models_and_modalities_do_not_mix(tmp_path: Path, cache: EmbeddingCache) -> None:
    cache.add(TEXTS, vectors(3))
    for version, modality in (("cd" * 32, "text"), (VERSION, "image")):
        with EmbeddingCache(tmp_path / "cache", version, modality, D) as other:  # type: ignore[arg-type]
            assert other.get(TEXTS)[1].tolist() == [0, 1, 2]
    with EmbeddingCache(tmp_path / "cache", VERSION, "image", D) as images:
        images.add([b"\x89PNG", b"\xff\xd8"], vectors(2))
        assert images.get([b"\xff\xd8"])[0].tobytes() == vectors(2)[1].tobytes()


def test_two_open_caches_see_what_the_other_adds(cache: EmbeddingCache) -> None:
    with reopened(cache) as other:
        cache.add(TEXTS[:1], vectors(1))
        other.add(TEXTS[1:], vectors(2, seed=1))
        assert not len(cache.get(TEXTS)[1])
        assert not len(other.get(TEXTS)[1])


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, HEADER + 3 * RECORD - 1))
def test_a_file_cut_anywhere_keeps_its_whole_records_and_takes_new_ones(tmp_path: Path, cut: int) -> None:
    folder = tmp_path / str(cut)
    with EmbeddingCache(folder, VERSION, "text", D) as cache:
        cache.add(TEXTS, vectors(3))
        cache.path.write_bytes(cache.path.read_bytes()[:cut])
    whole = max(0, cut - HEADER) // RECORD
    with EmbeddingCache(folder, VERSION, "text", D) as cache:
        found, absent = cache.get(TEXTS)
        assert absent.tolist() == list(range(whole, 3))
        assert found[:whole].tobytes() == vectors(3)[:whole].tobytes()
        cache.add(TEXTS[whole:], vectors(3)[whole:])
    with EmbeddingCache(folder, VERSION, "text", D) as cache:
        assert cache.get(TEXTS)[0].tobytes() == vectors(3).tobytes()
        assert cache.path.stat().st_size == HEADER + 3 * RECORD


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, HEADER + 3 * RECORD - 1), flip=st.integers(1, 255))
def test_a_changed_byte_anywhere_never_gives_a_wrong_embedding(tmp_path: Path, position: int, flip: int) -> None:
    folder = tmp_path / f"{position}-{flip}"
    with EmbeddingCache(folder, VERSION, "text", D) as cache:
        cache.add(TEXTS, vectors(3))
        data = bytearray(cache.path.read_bytes())
        data[position] ^= flip
        cache.path.write_bytes(data)
    damaged = [0, 1, 2] if position < HEADER else [(position - HEADER) // RECORD]
    with EmbeddingCache(folder, VERSION, "text", D) as cache:
        found, absent = cache.get(TEXTS)
        assert absent.tolist() == damaged
        intact = [row for row in range(3) if row not in damaged]
        assert found[intact].tobytes() == vectors(3)[intact].tobytes()
        cache.add([TEXTS[row] for row in damaged], vectors(3)[damaged])
        assert cache.get(TEXTS)[0].tobytes() == vectors(3).tobytes()


def test_another_dimension_starts_anew(tmp_path: Path, cache: EmbeddingCache) -> None:
    cache.add(TEXTS, vectors(3))
    with EmbeddingCache(tmp_path / "cache", VERSION, "text", D + 1) as other:
        assert other.get(TEXTS)[1].tolist() == [0, 1, 2]
    assert cache.get(TEXTS)[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("version", ["../../etc", "", "AB", "ab/cd", "a" * 129])
def test_a_version_from_the_oracle_cannot_choose_a_path(tmp_path: Path, version: str) -> None:
    with pytest.raises(VeilfedError) as caught:
        EmbeddingCache(tmp_path / "cache", version, "text", D)
    assert caught.value.code is Code.PROTOCOL_VIOLATION
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    "bad", [np.full((3, D), np.nan, np.float32), np.zeros((2, D), np.float32), np.zeros((3, D + 1), np.float32)]
)
def test_embeddings_that_do_not_fit_are_refused(cache: EmbeddingCache, bad: NDArray[np.float32]) -> None:
    with pytest.raises(VeilfedError) as caught:
        cache.add(TEXTS, bad)
    assert caught.value.code is Code.INPUT_INVALID
    assert cache.get(TEXTS)[1].tolist() == [0, 1, 2]


def test_only_the_agent_s_user_may_read_it(cache: EmbeddingCache) -> None:
    assert stat.S_IMODE(cache.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(cache.path.parent.stat().st_mode) == 0o700


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(VeilfedError) as caught:
        EmbeddingCache(tmp_path / "file" / "cache", VERSION, "text", D)
    assert caught.value.code is Code.FILE_UNUSABLE


def prompted(folder: Path, seed: int) -> EmbeddingCache:
    return EmbeddingCache(folder, VERSION, "text", D, vectors(2, seed))


def test_embeddings_with_prompts_are_kept_apart(tmp_path: Path, cache: EmbeddingCache) -> None:
    cache.add(TEXTS, vectors(3))
    folder = cache.path.parent
    with prompted(folder, 1) as mine, prompted(folder, 2) as others:
        mine.add(TEXTS, vectors(3, 9))
        assert others.get(TEXTS)[1].tolist() == [0, 1, 2]
    with prompted(folder, 1) as again:
        assert again.get(TEXTS)[0].tobytes() == vectors(3, 9).tobytes()
    assert cache.get(TEXTS)[0].tobytes() == vectors(3).tobytes()


def test_the_shape_of_prompts_counts() -> None:
    assert prompts_digest(vectors(4).reshape(2, 10)) != prompts_digest(vectors(4))
    assert prompts_digest(vectors(4)) == prompts_digest(np.asfortranarray(vectors(4)))


def test_of_many_prompts_those_that_were_used_last_are_kept(tmp_path: Path, cache: EmbeddingCache) -> None:
    cache.add(TEXTS, vectors(3))
    folder = cache.path.parent
    first = prompted(folder, 0)
    first.add(TEXTS, vectors(3))
    for seed in range(1, MAX_PROMPTED + 3):
        with prompted(folder, seed) as opened:
            opened.add(TEXTS, vectors(3, seed))
    assert len(list(folder.iterdir())) == MAX_PROMPTED + 1  # and the one without prompts
    assert cache.get(TEXTS)[1].tolist() == []
    assert prompted(folder, MAX_PROMPTED + 2).get(TEXTS)[1].tolist() == []
    # Who still has the oldest one open goes on with it.
    first.add(["four"], vectors(1))
    assert first.get([*TEXTS, "four"])[1].tolist() == []
    assert prompted(folder, 0).get(TEXTS)[1].tolist() == [0, 1, 2]
