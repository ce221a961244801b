"""Dynamic batching: order, fairness, and the failures of one client that others do not see."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from fm_oracle.embed.batcher import Batcher
from tests.support.loops import asynchronous
from tests.support.models import TinyModel


@asynccontextmanager
async def running(model: TinyModel, max_batch: int = 8, wait_seconds: float = 0.0) -> AsyncIterator[Batcher]:
    with ThreadPoolExecutor(1) as executor:
        batcher = Batcher(model.forward, executor, max_batch=max_batch, wait_seconds=wait_seconds)
        try:
            yield batcher
        finally:
            model.gate.set()
            await batcher.close()


async def ask(batcher: Batcher, model: TinyModel, client: str, texts: Sequence[str]) -> NDArray[np.float32]:
    return await batcher.embed(client, model.prepare(texts))


async def settled() -> None:
    """Lets every task run until it waits for something outside the loop."""
    for _ in range(10):
        await asyncio.sleep(0)


@asynchronous
async def test_each_request_gets_its_own_rows() -> None:
    model = TinyModel()
    async with running(model, max_batch=3) as batcher:
        answers = await asyncio.gather(*(ask(batcher, model, f"c{n}", ["a" * n] * n) for n in range(1, 12)))
    for n, answer in enumerate(answers, start=1):
        assert np.array_equal(answer, np.full((n, 2), n))
    assert max(model.sizes) == 3


@asynchronous
async def test_clients_share_a_pass() -> None:
    model = TinyModel()
    async with running(model, max_batch=8, wait_seconds=5.0) as batcher:
        # Far below the wait: a full pass starts at once.
        await asyncio.wait_for(asyncio.gather(*(ask(batcher, model, f"c{n}", ["a"] * 2) for n in range(4))), 3)
    assert model.sizes == [8]


@asynchronous
async def test_a_small_request_waits_only_a_moment() -> None:
    model = TinyModel()
    async with running(model, wait_seconds=0.02) as batcher:
        await asyncio.wait_for(ask(batcher, model, "c", ["a"]), 3)
    assert model.sizes == [1]


@asynchronous
async def test_one_with_much_does_not_hold_up_one_with_little() -> None:
    model = TinyModel()
    model.gate.clear()
    async with running(model, max_batch=8) as batcher:
        big = [asyncio.create_task(ask(batcher, model, "big", ["a"] * 8)) for _ in range(10)]
        await settled()
        small = asyncio.create_task(ask(batcher, model, "small", ["aa"]))
        await settled()
        model.gate.set()
        await asyncio.gather(small, *big)
    # Not in the pass that was under way when it came, but in the next one.
    assert ["aa" in texts for texts in model.passes].index(True) == 1
    assert sum(model.sizes) == 81


@asynchronous
async def test_a_failure_reaches_the_guilty_only() -> None:
    model = TinyModel()
    model.gate.clear()
    async with running(model, max_batch=16) as batcher:
        first = asyncio.create_task(ask(batcher, model, "z", ["a"]))
        await settled()
        good = asyncio.create_task(ask(batcher, model, "good", ["aaa"] * 3))
        bad = asyncio.create_task(ask(batcher, model, "bad", ["a", "poison"]))
        await settled()
        model.gate.set()
        assert np.array_equal(await good, np.full((3, 2), 3))
        with pytest.raises(ValueError, match="a pass that fails"):
            await bad
        await first
        assert np.array_equal(await ask(batcher, model, "bad", ["aa"]), [[2, 2]])


@asynchronous
async def test_what_is_cancelled_is_not_computed() -> None:
    model = TinyModel()
    model.gate.clear()
    async with running(model, max_batch=4) as batcher:
        first = asyncio.create_task(ask(batcher, model, "one", ["a"]))
        await settled()
        gone = asyncio.create_task(ask(batcher, model, "two", ["a"] * 40))
        await settled()
        gone.cancel()
        await settled()
        model.gate.set()
        await first
        await ask(batcher, model, "one", ["a"])
    assert sum(model.sizes) == 2


@asynchronous
async def test_close_ends_what_waits() -> None:
    model = TinyModel()
    model.gate.clear()
    async with running(model, max_batch=4) as batcher:
        tasks = [asyncio.create_task(ask(batcher, model, "one", ["a"] * 4)) for _ in range(3)]
        await settled()
        await batcher.close()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 3)
    assert all(isinstance(error, asyncio.CancelledError) for error in done)


@pytest.mark.parametrize("turns", range(6))
@asynchronous
async def test_close_while_a_pass_fills(turns: int) -> None:
    """At whatever turn of the loop: a cancellation that comes together with what was waited for is not lost."""
    model = TinyModel()
    async with running(model, max_batch=2, wait_seconds=60.0) as batcher:
        waiting = asyncio.create_task(ask(batcher, model, "one", ["a"]))
        await settled()
        filling = asyncio.create_task(ask(batcher, model, "two", ["a"]))
        for _ in range(turns):
            await asyncio.sleep(0)
        closing = asyncio.create_task(batcher.close())
        closed, _ = await asyncio.wait({closing}, timeout=20)
        assert closed
        filling.cancel()
        await asyncio.gather(waiting, filling, return_exceptions=True)


@asynchronous
async def test_work_of_its_own_is_a_pass_of_its_own_and_takes_one_turn() -> None:
    model = TinyModel()
    model.gate.clear()
    async with running(model, max_batch=4) as batcher:
        first = asyncio.create_task(ask(batcher, model, "z", ["z"]))
        await settled()
        alone = [
            asyncio.create_task(batcher.alone("own", partial(model.passes.append, [f"own {n}"]))) for n in range(2)
        ]
        plain = [asyncio.create_task(ask(batcher, model, name, ["a", "aa"])) for name in ("b", "c")]
        await settled()
        model.gate.set()
        await asyncio.gather(first, *alone, *plain)
    assert model.passes == [["z"], ["own 0"], ["a", "a", "aa", "aa"], ["own 1"]]


@asynchronous
async def test_work_of_its_own_that_fails_or_is_given_up() -> None:
    model = TinyModel()
    model.gate.clear()
    async with running(model) as batcher:
        first = asyncio.create_task(ask(batcher, model, "z", ["z"]))
        await settled()
        failing = asyncio.create_task(batcher.alone("a", lambda: 1 // 0))
        given_up = asyncio.create_task(batcher.alone("b", lambda: model.passes.append(["never"])))
        await settled()
        given_up.cancel()
        await settled()
        model.gate.set()
        with pytest.raises(ZeroDivisionError):
            await failing
        assert await batcher.alone("c", lambda: 7) == 7
        assert (await ask(batcher, model, "d", ["aa"])).tolist() == [[2, 2]]
        await first
    assert ["never"] not in model.passes
