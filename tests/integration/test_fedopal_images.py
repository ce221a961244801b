"""FedOPAL on images, with the real ViT: one institution, over the real services."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from client_agent.cache import EmbeddingCache
from client_agent.state import StateFolder
from fm_oracle.models.vit import ViT
from tests.support.agents import CLASSES, spec
from tests.support.identities import make_federation
from tests.support.loops import asynchronous
from tests.support.models import png, published
from tests.support.parties import running_parties
from veilfed.ledger import read
from veilfed.wire.tensors import parse_map

D = 384


def write_images(root: Path) -> list[bytes]:
    """Stripes that stand or lie, 15 of each."""
    rng, made = np.random.default_rng(0), []
    for number, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for place in range(15):
            stripes = (np.arange(56) // rng.integers(3, 9) % 2 * rng.integers(100, 255)).astype(np.uint8)
            picture = np.tile(stripes, (56, 1)) + rng.integers(0, 40, (56, 56)).astype(np.uint8) // 2
            made.append(png(picture.T.copy() if number else picture))
            (root / name / f"{place:02}.png").write_bytes(made[-1])
    return made


@pytest.mark.slow
@asynchronous
async def test_a_job_on_images(tmp_path: Path) -> None:
    pictures = write_images(tmp_path / "images")
    federation = make_federation(tmp_path / "federation", ["north"])
    oracle = {"model": "vit", "folder": str(published("vit")), "prompts": "gradients", "max_batch": 16}
    with running_parties(federation, tmp_path, ["north"], D, oracle=oracle) as parties:
        config = tmp_path / "north" / "agent.yaml"
        document = yaml.safe_load(config.read_text())
        document["data"] = {"source": "image-folder", "root": str(tmp_path / "images")}
        document["policy"]["min_evaluation_samples"] = 5
        config.write_text(yaml.safe_dump(document))
        parties.agents["north"].kill()
        parties.agents["north"].start()
        strategy: dict[str, Any] = {"prompts": 3, "prompt_width": D, "batch_size": 6, "mu": 0.01, "min_class_count": 1}
        job_id = await parties.submit(spec(["north"], rounds=1, name="fedopal", dimension=D, **strategy))
        ended = await parties.ended(job_id, 150)
    assert ended.summary.state == "done", ended.summary.error
    (client,) = ended.rounds[-1].clients
    assert {e.name: e.correct / e.total > 0.75 for e in client.evaluations} == {"personal": True, "global": True}
    kept = StateFolder(tmp_path / "north" / "state").job(job_id).finished(0)
    assert kept is not None
    update, model = parse_map(kept.update), parse_map(kept.model)
    prompts = update["prompts"].astype(np.float32)
    assert np.abs(prompts - model["first_prompts"].astype(np.float32)).max() > 1e-3
    # What the agent has of the oracle is what the model gives with these prompts.
    local = ViT.load(published("vit"))
    folder = tmp_path / "north" / "state" / "embeddings"
    with EmbeddingCache(folder, local.card.version, "image", D, prompts) as cache:
        found, absent = cache.get(pictures)
    there = np.setdiff1d(np.arange(len(pictures)), absent)
    assert len(there) == len(pictures)  # of the training split for the statistics, of the test split for itself
    expected = local.forward_prompted(local.prepare([pictures[at] for at in there]), prompts)
    assert np.abs(found[there] - expected).max() < 1e-3
    gradients = [record for record in read(tmp_path / "north" / "state" / "ledger.jsonl") if record.get("labels")]
    assert sum(record["labels"] for record in gradients) == 18  # one epoch of the training split
