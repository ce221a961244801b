"""`veilfed oracle` as a process of its own, with the published models."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fm_oracle.models import registry
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.models import png, published
from tests.support.processes import Process, started, veilfed
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import TlsFiles, load_credentials
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.oracle_pb2 import DescribeRequest, DescribeResponse, EmbedRequest, EmbedResponse, Images, Texts
from veilfed.v1.oracle_pb2_grpc import OracleStub
from veilfed.wire.tensors import from_tensor

TEXTS = ["A happy person laughs.", "no", "Rates rose again, and nobody was surprised by it."]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


def write_config(federation: Federation, where: Path, identity: TlsFiles | None = None, **settings: Any) -> Path:
    files = identity or federation.oracles["north"]
    document = {
        "identity": {name: str(path) for name, path in files},
        "listen": "127.0.0.1:0",
        "state": str(where / "state"),
        **settings,
    }
    path = where / "oracle.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


async def ask(
    federation: Federation, port: int, requests: list[EmbedRequest]
) -> tuple[DescribeResponse, list[EmbedResponse]]:
    """The model card and the answers, as the agent of `north` gets them."""
    credentials = load_credentials(federation.agents["north"])
    server = load_credentials(federation.oracles["north"]).identity
    address = f"127.0.0.1:{port}"
    roots = federation.zone_roots["north"].read_bytes()
    async with open_channel(credentials, address, server, roots=roots) as channel:
        stub = OracleStub(channel)
        with translated(credentials, address):
            card = await stub.Describe(DescribeRequest(), timeout=30)
            return card, [answer async for answer in stub.Embed(iter(requests), timeout=60)]


def _document(*arguments: str | Path) -> Any:
    """What a subcommand prints with --json."""
    done = subprocess.run(veilfed(*arguments, "--json"), capture_output=True, check=True, timeout=120)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def minilm(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    folder = tmp_path_factory.mktemp("minilm")
    config = write_config(federation, folder, model="minilm", folder=str(published("minilm")), quota=1000)
    with started(veilfed("oracle", "serve", "--config", config), folder / "oracle") as process:
        yield process


@asynchronous
async def test_texts(federation: Federation, minilm: Process) -> None:
    ready = minilm.ready()
    assert ready["ready"] is True
    assert ready["service"] == "oracle"
    requests = [EmbedRequest(batch=n, texts=Texts(values=[text])) for n, text in enumerate(TEXTS)]
    card, answers = await ask(federation, ready["port"], requests)
    assert (card.model, card.dimension, card.blocks, card.max_tokens) == ("minilm", 384, 6, 256)
    embeddings = np.concatenate([from_tensor(answer.embeddings) for answer in answers])
    assert np.abs(embeddings - registry.embed("minilm", TEXTS, published("minilm"))).max() < 1e-4


@asynchronous
async def test_images(federation: Federation, tmp_path: Path) -> None:
    config = write_config(federation, tmp_path, model="vit", folder=str(published("vit")))
    rng = np.random.default_rng(0)
    pictures = [png(rng.integers(0, 255, (60, 80, 3), dtype=np.uint8)) for _ in range(3)]
    with started(veilfed("oracle", "serve", "--config", config), tmp_path / "oracle") as process:
        port = process.ready()["port"]
        card, answers = await ask(federation, port, [EmbedRequest(batch=1, images=Images(values=pictures))])
        assert (card.model, card.dimension, card.blocks, card.image_size) == ("vit", 384, 11, 112)
        expected = registry.embed("vit", pictures, published("vit"))
        assert np.abs(np.subtract(from_tensor(answers[0].embeddings), expected)).max() < 1e-3
        bad = [EmbedRequest(batch=2, images=Images(values=[pictures[0], b"no image"]))]
        with pytest.raises(VeilfedError, match="image 1 of the batch") as caught:
            await ask(federation, port, bad)
        assert caught.value.code is Code.INPUT_INVALID
        assert process.terminate() == 0


@asynchronous
async def test_a_kill_gives_no_quota_back(federation: Federation, tmp_path: Path) -> None:
    config = write_config(federation, tmp_path, model="minilm", folder=str(published("minilm")), quota=3)
    command = veilfed("oracle", "serve", "--config", config)
    request = [EmbedRequest(batch=0, texts=Texts(values=TEXTS))]
    with started(command, tmp_path / "first") as process:
        _, answers = await ask(federation, process.ready()["port"], request)
        assert answers[0].quota_left == 0
        process.kill()
    with started(command, tmp_path / "second") as process:
        with pytest.raises(VeilfedError) as caught:
            await ask(federation, process.ready()["port"], request)
        assert caught.value.code is Code.QUOTA_EXCEEDED
    assert _document("oracle", "usage", "--config", config) == [{"institution": "north", "left": 0, "released": 3}]


def _exit_code(arguments: list[str]) -> tuple[int, str]:
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, timeout=60)
    return done.returncode, done.stderr


def test_another_role_cannot_serve(federation: Federation, tmp_path: Path) -> None:
    config = write_config(federation, tmp_path, federation.agents["north"], model="minilm")
    code, message = _exit_code(veilfed("oracle", "serve", "--config", config))
    assert code == Code.IDENTITY_INVALID.exit_code
    assert "not the identity of an oracle" in message


def test_a_model_that_was_not_fetched_is_named(federation: Federation, tmp_path: Path) -> None:
    config = write_config(federation, tmp_path, model="minilm", folder=str(tmp_path / "nothing"))
    code, message = _exit_code(veilfed("oracle", "serve", "--config", config))
    assert code == Code.MODEL_MISSING.exit_code
    assert "veilfed oracle fetch" in message


def test_describe_and_fetch() -> None:
    folder = published("minilm")
    assert _document("oracle", "describe", "minilm", "--folder", folder)["dimension"] == 384
    fetched = _document("oracle", "fetch", "minilm", "--folder", folder)
    assert {row["file"] for row in fetched} == {"model.safetensors", "tokenizer.json"}
