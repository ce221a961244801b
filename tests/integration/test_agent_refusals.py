"""An agent that cannot work: its own log says why and where, and it goes on when that is mended."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from tests.integration.test_agent_standin import JOB, bench, offer
from tests.support.agents import running, write_data
from tests.support.identities import Federation, make_federation
from tests.support.loops import asynchronous
from tests.support.processes import until
from veilfed.errors import Code


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return make_federation(tmp_path_factory.mktemp("federation"), ["north", "south"])


@asynchronous
async def test_data_that_cannot_be_used_is_named_in_the_own_log_alone(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        data = tmp_path / "data.csv"
        cases: list[tuple[str | None, Code, str]] = [
            ("text,label\n", Code.DATA_INVALID, "data.csv: no samples"),
            ("text,label\naeiou,vowels\naei,vowels\n", Code.DATA_INVALID, "all 2 samples are of one class"),
            (None, Code.FILE_UNUSABLE, "data.csv: No such file"),
        ]
        with running(b.config()) as agent:
            await b.coordinator.activity("idle")  # its stream is open
            for number, (content, code, words) in enumerate(cases):
                data.unlink()
                if content is not None:
                    data.write_text(content)
                b.coordinator.send(offer(number))
                refusal = await b.refusal()
                assert (refusal.job_id, refusal.round, refusal.code) == (JOB, number, code.name)
                assert str(tmp_path) not in refusal.reason
                assert "data.csv" not in refusal.reason
                assert words in agent.err.read_text()
                data.touch()
            write_data(data, seed=1)
            b.coordinator.send(offer(len(cases)))
            assert (await b.update()).round == len(cases)


@asynchronous
async def test_a_damaged_cache_is_named_and_filled_again(federation: Federation, tmp_path: Path) -> None:
    async with bench(federation, tmp_path) as b:
        b.coordinator.open = [offer(0)]
        cache = tmp_path / "state" / "embeddings" / f"{b.model.card.version}-text.cache"
        cache.parent.mkdir(parents=True)
        cache.write_bytes(b"no cache" * 99)
        with running(b.config()) as agent:
            await b.update()
            assert "the embedding cache is damaged" in agent.err.read_text()
            assert str(cache) in agent.err.read_text()
        whole = cache.read_bytes()
        cache.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])  # in the last vector
        b.coordinator.open = [offer(1)]
        asked = b.model.seen
        with running(b.config()) as agent:
            assert (await b.update()).round == 1
            assert "an embedding is damaged" in agent.err.read_text()
        assert b.model.seen == asked + 1


@asynchronous
async def test_an_expired_certificate_is_named_and_its_successor_taken_up(
    federation: Federation, tmp_path: Path
) -> None:
    now = datetime.now(UTC)
    own = tmp_path / "own"
    files = federation.make(
        federation.agent_id("north"), own, not_before=now - timedelta(days=9), lifetime=timedelta(days=1)
    )
    async with bench(federation, tmp_path) as b:
        identity = {name: str(path) for name, path in files}
        with running(b.config(identity=identity)) as agent:
            await asyncio.to_thread(until, lambda: "expired at" in agent.err.read_text(), 60, "what is wrong")
            assert Code.TLS_REFUSED.name in agent.err.read_text()
            assert b.coordinator.joins == 0
            for path in own.iterdir():
                path.unlink()
            federation.make(federation.agent_id("north"), own)
            await asyncio.to_thread(agent.ready)
        assert b.coordinator.joins == 1
