from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veilfed.config import MAX_YAML_BYTES, Strict, load_config, parse_yaml, validate
from veilfed.errors import Code, VeilfedError


class Inner(Strict):
    port: int


class Outer(Strict):
    name: str
    inner: Inner
    items: tuple[Inner, ...] = ()


def refusal(text: str) -> str:
    with pytest.raises(VeilfedError) as refused:
        validate(Outer, text, "file.yaml")
    assert refused.value.code is Code.CONFIG_INVALID
    return refused.value.message


def test_a_right_document_is_read() -> None:
    read = validate(Outer, "name: a\ninner:\n  port: 7\n", "file.yaml")
    assert read == Outer(name="a", inner=Inner(port=7))


@pytest.mark.parametrize(
    ("text", "line", "key"),
    [
        ("name: a\ninner:\n  port: secret-value\n", "line 3", "inner.port"),
        ("name: a\ninner:\n  port: 7\n  prot: 8\n", "line 4", "inner.prot"),
        ("name: a\ninner:\n  port: 7\nitems:\n- port: 1\n- port: x\n", "line 6", "items.1.port"),
        ("name: a\n", "", "inner"),
        ("name: a\nname: b\n", "line 2", "name"),
        ("name: a\ninner: {port: 7\n", "line 3", "expected"),
        ("name: &x a\ninner: *x\n", "line 2", "aliases"),
        ("1: a\n", "line 1", "keys must be text"),
        ("- a\n", "", "expected keys and values"),
        ("", "", "expected keys and values"),
        ("name: !!python/object/apply:os.system ['true']\n", "line 1", "constructor"),
        ("name: a\x00\n", "", "YAML"),
        ("[" * 3000, "", ""),
    ],
)
def test_an_error_names_file_line_and_key_and_never_the_value(text: str, line: str, key: str) -> None:
    message = refusal(text)
    assert message.startswith("file.yaml: ")
    assert line in message
    assert key in message
    assert "secret-value" not in message


def test_a_huge_file_is_refused_before_it_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_text("x" * (MAX_YAML_BYTES + 1))
    with pytest.raises(VeilfedError, match="longer than"):
        load_config(Outer, path)


@pytest.mark.parametrize(
    ("content", "code"), [(b"\xff\xfe\xff", Code.CONFIG_INVALID), (None, Code.FILE_UNUSABLE)], ids=["binary", "missing"]
)
def test_an_unreadable_file_is_a_typed_error_with_its_path(tmp_path: Path, content: bytes | None, code: Code) -> None:
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(VeilfedError, match=r"config\.yaml") as refused:
        load_config(Outer, path)
    assert refused.value.code is code


@given(st.text(max_size=300))
def test_any_text_is_parsed_or_refused_with_the_typed_error(text: str) -> None:
    try:
        parse_yaml(text, "text")
    except VeilfedError as error:
        assert error.code is Code.CONFIG_INVALID  # noqa: PT017  either outcome is right
