"""Inputs for fuzzing: bytes that are almost messages, how many of them are tried, and what they may cost."""

import resource
import sys
from collections.abc import Iterator

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

__all__ = ["bounded_memory", "changed", "encoded", "profile"]

TEXT = FieldDescriptor.CPPTYPE_STRING
ENUM = FieldDescriptor.CPPTYPE_ENUM
SLOW = 40
NUMBERS = [0, 1, 2, 3, 7, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


MAX_GROWTH_BYTES = 512 * 1024 * 1024


@pytest.fixture(autouse=True)
def bounded_memory() -> Iterator[None]:
    """For a module that imports it: no input of a test makes the process grow beyond measure."""
    before = _peak_bytes()
    yield
    assert _peak_bytes() - before < MAX_GROWTH_BYTES


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def profile(quick: int, *, slow: bool = False) -> settings:
    """Hypothesis' settings: `quick` examples, always the same; or 40 times as many, new ones at each run."""
    factor = SLOW if slow else 1
    checks = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
    return settings(max_examples=quick * factor, derandomize=not slow, suppress_health_check=checks)


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def _value(field: FieldDescriptor, words: list[str], depth: int) -> "st.SearchStrategy[bytes]":
    """One field on the wire, with a tag of its own number."""
    if field.message_type is not None:
        inner = encoded(field.message_type, words, depth - 1) if depth else st.just(b"")
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        numbers = st.binary(min_size=8, max_size=8)
        return numbers.map(lambda data: _varint(field.number << 3 | 1) + data)
    elif field.cpp_type == TEXT:
        inner = st.one_of(st.sampled_from(words).map(str.encode), st.text(max_size=8).map(str.encode), st.binary())
    else:
        choices = [0, 1, 2, 9] if field.cpp_type == ENUM else NUMBERS
        return st.sampled_from(choices).map(lambda number: _varint(field.number << 3) + _varint(number))
    return inner.map(lambda data: _varint(field.number << 3 | 2) + _varint(len(data)) + data)


def encoded(message: Descriptor, words: list[str], depth: int = 4) -> "st.SearchStrategy[bytes]":
    """Bytes of any fields of a message, in any order, repeated, with texts from `words` among others."""
    fields = list(message.fields)
    if not fields:
        return st.binary(max_size=4)
    one = st.sampled_from(fields).flatmap(lambda field: _value(field, words, depth))
    all_once = st.tuples(*(_value(field, words, depth) for field in fields)).map(b"".join)
    return st.one_of(all_once, st.lists(one, max_size=5).map(b"".join))


def changed(data: bytes) -> "st.SearchStrategy[bytes]":
    """`data` cut somewhere, with some bytes replaced."""

    def spoil(draw: tuple[list[tuple[int, int]], int]) -> bytes:
        replaced, end = draw
        spoiled = bytearray(data)
        for position, value in replaced:
            spoiled[position % len(spoiled)] = value
        return bytes(spoiled[:end] if end else spoiled)

    position = st.tuples(st.integers(0, max(len(data), 1) - 1), st.integers(0, 255))
    return st.tuples(st.lists(position, max_size=4), st.integers(0, len(data))).map(spoil)
