"""What the command line prints of words that others chose: as they are, and harmless to a terminal."""

import pytest

from veilfed.cli import output
from veilfed.errors import Code, VeilfedError

# Rich's markup, an emoji code, and a sequence that steers a terminal.
WORDS = "[/] [bold]x[/bold] :smile: [x.png]"
STEERING = "\x1b]0;title\x07 \x1b[2J\r\x9b"


@pytest.mark.parametrize("where", ["text", "cell", "title", "error"])
def test_words_of_others_are_shown_as_they_are(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = WORDS + STEERING
    if where == "text":
        output.result(None, f"{words}\nsecond line")
    elif where == "cell":
        output.result(None, output.table(("a",), [[words]]))
    elif where == "title":
        output.result(None, output.table(("a" * 80,), [], words))
    else:
        output.failure(VeilfedError(Code.JOB_FAILED, words, words))
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert WORDS in text
    assert not set(text) & set("\x1b\x07\x9b\r")
