"""`veilfed oracle` as a process of its own, with the published models."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from fm_oracle.models import registry
from tests.support import onnx_folders
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.models import png, published
from tests.support.processes import started, veilfed
from veilfed.errors import Code, VeilfedError
from veilfed.identity.material import load_credentials
from veilfed.rpc.channel import open_channel, translated
from veilfed.v1.oracle_pb2 import DescribeRequest, DescribeResponse, EmbedRequest, EmbedResponse, Images, Texts
from veilfed.v1.oracle_pb2_grpc import OracleStub
from veilfed.wire.tensors import from_tensor

TEXTS = ["A happy person laughs.", "no", "Rates rose again, and nobody was surprised by it."]


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north"])


def write_config(federation: Federation, where: Path, **settings: Any) -> Path:
    document = {
        "identity": {name: str(path) for name, path in federation.oracles["north"]},
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


@asynchronous
async def test_texts_and_a_kill_that_gives_no_quota_back(federation: Federation, tmp_path: Path) -> None:
    folder = published("minilm")
    config = write_config(federation, tmp_path, model="minilm", folder=str(folder), quota=4)
    command = veilfed("oracle", "serve", "--config", config)
    requests = [EmbedRequest(batch=n, texts=Texts(values=[text])) for n, text in enumerate(TEXTS)]
    with started(command, tmp_path / "first") as process:
        ready = process.ready()
        assert (ready["ready"], ready["service"]) == (True, "oracle")
        card, answers = await ask(federation, ready["port"], requests)
        process.kill()
    assert (card.model, card.dimension, card.blocks, card.max_tokens) == ("minilm", 384, 6, 256)
    assert [answer.quota_left for answer in answers] == [3, 2, 1]
    embeddings = np.concatenate([from_tensor(answer.embeddings) for answer in answers])
    assert np.abs(np.subtract(embeddings, registry.embed("minilm", TEXTS, folder))).max() < 1e-4
    with started(command, tmp_path / "second") as process:
        port = process.ready()["port"]
        with pytest.raises(VeilfedError) as caught:
            await ask(federation, port, requests[:2])
        assert caught.value.code is Code.QUOTA_EXCEEDED


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
async def test_a_model_of_a_family(federation: Federation, tmp_path: Path) -> None:
    model = f"onnx:{onnx_folders.images(tmp_path / 'mine')}"
    config = write_config(federation, tmp_path, model=model)
    rng = np.random.default_rng(0)
    pictures = [png(rng.integers(0, 255, (6, 8, 3), dtype=np.uint8)) for _ in range(3)]
    with started(veilfed("oracle", "serve", "--config", config), tmp_path / "oracle") as process:
        port = process.ready()["port"]
        card, answers = await ask(federation, port, [EmbedRequest(batch=1, images=Images(values=pictures))])
        assert (card.model, card.dimension, card.image_size) == ("onnx:mine", 3, 4)
        expected = registry.embed(model, pictures, tmp_path)
        assert np.abs(np.subtract(from_tensor(answers[0].embeddings), expected)).max() < 1e-5
        assert process.terminate() == 0
