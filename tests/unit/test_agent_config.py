"""The agent's configuration, and that its documented example is one."""

import re
from pathlib import Path

import pytest

from client_agent.config import AgentConfig
from veilfed.config import validate
from veilfed.errors import Code, VeilfedError

DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "agent.md"


@pytest.fixture(scope="module")
def example() -> str:
    found = re.search(r"```yaml\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    return found[1]


def test_the_documented_example(example: str) -> None:
    config = validate(AgentConfig, example, "example")
    assert config.own_oracle.identity.institution == "north"
    assert config.test_fraction == 0.4
    assert config.policy.consent == "ask"


def test_every_key_is_documented() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for name in AgentConfig.model_fields:
        assert f"| `{name}" in text


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("aggregator/coordinator/aggregator", "oracle/coordinator/aggregator", "aggregator"),
        ("oracle/north/oracle", "agent/north/oracle", "oracle"),
        ("spiffe://example.veilfed/oracle", "https://example.veilfed/oracle", "oracle.identity"),
        ("example.org:7443", "example.org", "aggregator.address"),
        ("source: table", "source: nothing", "data"),
        ("consent: ask", "consent: maybe", "policy.consent"),
        ("state: /var", "unknown: 1\nstate: /var", "unknown"),
    ],
)
def test_what_is_wrong_is_named(example: str, old: str, new: str, key: str) -> None:
    assert old in example
    with pytest.raises(VeilfedError, match=rf"line \d+: {key}") as caught:
        validate(AgentConfig, example.replace(old, new), "example")
    assert caught.value.code is Code.CONFIG_INVALID
