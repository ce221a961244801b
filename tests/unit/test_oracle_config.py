"""The oracle's configuration, and that the documented example is one."""

import re
from pathlib import Path

import pytest

from fm_oracle.config import OracleConfig
from veilfed.config import validate
from veilfed.errors import Code, VeilfedError

DOCUMENT = Path(__file__).parents[2] / "docs" / "explanation" / "oracle.md"

SMALL = """
identity: {certificate: c.pem, key: k.pem, bundle: b.pem}
listen: 127.0.0.1:0
model: minilm
state: state
"""


def test_the_documented_example_is_valid() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    config = validate(OracleConfig, example, "oracle.md")
    assert (config.model, config.quota, config.quotas, config.threads) == ("minilm", 50000, {"north": 100000}, 2)


def test_every_setting_is_documented() -> None:
    text = DOCUMENT.read_text()
    section = text[text.index("## Configuration") :]
    assert [name for name in OracleConfig.model_fields if name not in section] == []


def test_the_documented_defaults_are_the_defaults() -> None:
    config = validate(OracleConfig, SMALL, "small")
    rest = DOCUMENT.read_text().split("The rest, with the defaults:")[1]
    documented = dict(re.findall(r"`(\w+)` (\w+)", rest))
    assert documented == {name: str(getattr(config, name)).removesuffix(".0") for name in documented}
    assert len(documented) == 7


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (
            "model: gpt",
            r"line \d+: model: there is no model gpt; installed are minilm, onnx, open_clip, timm, ",
        ),
        ("quota: -1", "quota"),
        ("quotas: {north: -1}", "north"),
        ("quotas: {North: 0}", "North"),
        ("quotas: {spiffe://trial/agent/north/agent: 0}", "quotas"),
        ("rate: 0", "rate"),
        ("rate: .nan", "rate"),
        ("burst: 63", "oracle.yaml: burst: must be at least max_batch"),
        ("max_batch: 0", "max_batch"),
        ("colour: blue", "colour"),
    ],
)
def test_mistakes_are_named(line: str, named: str) -> None:
    key = line.split(":", maxsplit=1)[0]
    text = re.sub(rf"^{key}:.*\n", "", SMALL, flags=re.MULTILINE) + line + "\n"
    with pytest.raises(VeilfedError, match=named) as caught:
        validate(OracleConfig, text, "oracle.yaml")
    assert caught.value.code is Code.CONFIG_INVALID
