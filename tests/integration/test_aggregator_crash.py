"""The aggregator killed with SIGKILL at random instants, again and again: what it publishes must not show it."""

import asyncio
import random
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from tests.support.aggregators import Aggregator, job_spec, running_aggregator
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.scripted_agent import ScriptedAgent
from veilfed.errors import VeilfedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

INSTITUTIONS = ["north", "south", "east"]
KILLS = 15
ROUNDS = 120
STRATEGY = {"classes": [f"class-{number}" for number in range(10)], "dimension": 768}


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), INSTITUTIONS)


# What calls raise when the aggregator is gone, or has had nothing to say for long.
CUT = (VeilfedError, grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError)


async def _stubborn(one: ScriptedAgent) -> None:
    """Answers every task, whatever becomes of the aggregator meanwhile; keeps its session."""
    while True:
        try:
            await one.open()
            await one.work()
        except CUT:
            await asyncio.sleep(0.02)


@asynccontextmanager
async def _institutions(aggregator: Aggregator) -> "AsyncIterator[None]":
    federation = aggregator.federation
    async with AsyncExitStack() as stack:
        tasks = []
        for name in INSTITUTIONS:
            one = ScriptedAgent(federation.agents[name], aggregator.address, federation.aggregator_id)
            await stack.enter_async_context(one)
            tasks.append(asyncio.create_task(_stubborn(one)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended, running = await asyncio.wait(tasks, timeout=20)
            assert not running
            assert all(task.cancelled() for task in ended), ended


async def _kills(aggregator: Aggregator, job_id: str, seed: int) -> int:
    """Kills and restarts until the job has ended or it has been enough; how often."""
    instants = random.Random(seed)
    for number in range(KILLS):
        await asyncio.sleep(instants.uniform(0.0, 0.6))
        aggregator.kill9()
        await asyncio.to_thread(aggregator.start)
        async with aggregator.admin() as admin:
            if (await admin.get(job_id)).summary.state != "running":
                return number + 1
    return KILLS


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@asynchronous
async def test_killed_at_any_instant_it_publishes_the_same_bytes(
    federation: Federation, tmp_path: Path, seed: int
) -> None:
    spec = job_spec(["north", "south"], ["east"], rounds=ROUNDS, strategy=STRATEGY)
    with running_aggregator(federation, tmp_path / "undisturbed") as aggregator:
        async with aggregator.admin() as admin, _institutions(aggregator):
            undisturbed = await admin.ended(await admin.submit(spec))
    with running_aggregator(federation, tmp_path / "killed") as aggregator:
        async with aggregator.admin() as admin:
            job_id = await admin.submit(spec)
        async with _institutions(aggregator):
            kills = await _kills(aggregator, job_id, seed)
            async with aggregator.admin() as admin:
                killed = await admin.ended(job_id)
                kinds = [event.kind async for event in admin.watch(job_id)]
        aggregator.kill9()
        await asyncio.to_thread(aggregator.start)
        artifacts = aggregator.folder / "artifacts"
        assert list(artifacts.rglob("*.tmp")) == list((artifacts / "updates").iterdir()) == []
    assert kills >= 3
    assert undisturbed.summary.state == killed.summary.state == "done", killed.summary.error
    assert [item.published_sha256 for item in killed.rounds] == [item.published_sha256 for item in undisturbed.rounds]
    # Every step is told once, and nobody was left out.
    assert kinds.count("round_published") == ROUNDS + 1
    assert kinds.count("update_taken") == 2 * ROUNDS
    assert "client_excluded" not in kinds
