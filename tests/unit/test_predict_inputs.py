"""What `veilfed predict` takes as inputs."""

from pathlib import Path

import pytest

from client_agent.predict import _read
from veilfed.errors import Code, VeilfedError


def test_lines_and_images(tmp_path: Path) -> None:
    text, image = tmp_path / "some.txt", tmp_path / "one.PNG"
    text.write_text("first\n\n  \nsecond\n")
    image.write_bytes(b"pixels")
    assert _read([text]) == [(f"{text}:1", "first"), (f"{text}:4", "second")]
    assert _read([image, image]) == [(str(image), b"pixels")] * 2
    with pytest.raises(VeilfedError, match="mixed"):
        _read([text, image])


@pytest.mark.parametrize(
    ("content", "code"), [(b"", Code.INPUT_INVALID), (b"\xff\xfe", Code.INPUT_INVALID), (None, Code.FILE_UNUSABLE)]
)
def test_unusable_files(tmp_path: Path, content: bytes | None, code: Code) -> None:
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(VeilfedError) as caught:
        _read([path])
    assert caught.value.code is code
