"""Statistics that no samples can have, sent to a real aggregator: excluded by name, and the round goes on."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from aggregator.strategies import strategy_for
from tests.support.aggregators import Aggregator, job_spec, running_aggregator
from tests.support.analytic import pool, sums
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import until
from tests.support.scripted_agent import ScriptedAgent, answer
from veilfed.jobs import JobSpec
from veilfed.wire.tensors import Arrays, digest, map_bytes

D, K = 4, 2


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


@pytest.fixture(scope="module")
def aggregator(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Aggregator]:
    with running_aggregator(federation, tmp_path_factory.mktemp("aggregator")) as made:
        yield made


def agent(aggregator: Aggregator, institution: str) -> ScriptedAgent:
    federation = aggregator.federation
    return ScriptedAgent(federation.agents[institution], aggregator.address, federation.aggregator_id)


def honest(seed: int) -> dict[str, Any]:
    (arrays,) = sums(pool(40, D, K, seed), D, K, [np.arange(40)])
    return {name: np.array(array) for name, array in arrays.items()}


def scaled_up(update: dict[str, Any]) -> None:
    for name, factor in (("gram", 100), ("counts", 100), ("cross", 1000)):
        update[name] *= factor


POISONS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "not finite": (lambda u: u["gram"].__setitem__(2, np.nan), "gram: not all elements are finite"),
    "of another type": (lambda u: u.update(cross=u["cross"].astype(np.float32)), "cross: expected float64"),
    "of another shape": (lambda u: u.update(gram=u["gram"][1:]), "gram: expected shape"),
    "more samples than there are": (lambda u: u["counts"].__iadd__(1), "the trace"),
    "scaled up": (
        lambda u: (u["gram"].__imul__(100), u["counts"].__imul__(100), u["cross"].__imul__(1000)),
        "negative",
    ),
    "a negative eigenvalue": (lambda u: u["gram"].__setitem__(1, 100.0), "an eigenvalue is negative"),
}


@pytest.mark.parametrize("poison", POISONS)
@asynchronous
async def test_it_excludes_by_name_and_the_round_goes_on(aggregator: Aggregator, poison: str) -> None:
    change, words = POISONS[poison]
    spec = job_spec(["north", "south"], rounds=1, quorum=1, strategy={"name": "afl", "dimension": D}, grace_seconds=5)
    good: Arrays = honest(0)
    bad = honest(1)
    change(bad)
    async with aggregator.admin() as admin, agent(aggregator, "north") as north, agent(aggregator, "south") as south:
        job_id = await admin.submit(spec)
        await south.send(update=answer(await south.task(), bad))
        response = await south.next()
        assert response.rejection.code == "UPDATE_INVALID"
        assert words in response.rejection.message
        await north.send(update=answer(await north.task(), good))
        await admin.happened(job_id, "round_published")
        job = await admin.get(job_id)
        await admin.cancel(job_id)
    states = {client.institution: (client.state, client.code) for client in job.rounds[0].clients}
    assert states == {"north": ("done", ""), "south": ("excluded", "UPDATE_INVALID")}
    alone = strategy_for(JobSpec.model_validate(spec)).fold([(1.0, good)], dict)
    assert job.rounds[0].published_sha256 == digest(map_bytes(alone))
    # The job was cancelled before it was done: nothing of the statistics may stay.
    folder = aggregator.folder / "artifacts" / "sealed" / job_id
    until(lambda: not folder.exists(), 10, "sealed statistics removed")
