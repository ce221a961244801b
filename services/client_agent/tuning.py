"""Tunes prompts with the oracle of the own zone: asks, keeps where it stands, says how far it is.

A tuning takes minutes. It can be stopped at any instant and goes on from the last batches that were kept, to the same
prompts, bit for bit, as if it had not been stopped.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from client_agent.data.source import Samples
from client_agent.features import embed
from client_agent.oracle_client import OracleClient
from client_agent.state import JobFolder
from client_agent.trainers.prompts import Answer, Question, Tuner
from veilfed.errors import Code, VeilfedError
from veilfed.logs import get_logger

__all__ = ["tune"]

log = get_logger("agent.tuning")

# What is asked for after a crash once more, at most.
KEEP_SECONDS = 1.0
TELL_SECONDS = 5.0


async def tune(
    tuner: Tuner,
    oracle: OracleClient,
    samples: Samples,
    rows: NDArray[np.intp],
    folder: JobFolder,
    model_sha256: str,
    arithmetic: Executor,
    cancelled: Callable[[], bool],
    queries_after: int = 0,
) -> None:
    """Takes `tuner`, of the samples `rows`, to its end, from where `folder` says that it stands.

    Raises VeilfedError: QUOTA_EXCEEDED before anything is asked, where the oracle's quota is too small for the rest and
    for `queries_after`, without which it would be for nothing; CANCELLED; what the oracle, the gate or the tuner say.
    """
    loop = asyncio.get_running_loop()
    kept = await asyncio.to_thread(folder.tuning, model_sha256)
    if kept is not None:
        where = f"job {folder.job_id}: where the tuning of prompts stands"
        await loop.run_in_executor(arithmetic, partial(tuner.resume, kept, where))
    if not tuner.done:  # else those after it may have been answered already
        _check_quota(oracle, tuner.queries_left + queries_after)
    saved = told = time.monotonic()
    while not tuner.done:
        if cancelled():
            raise VeilfedError(Code.CANCELLED, "the tuning of prompts was stopped")
        questions = await loop.run_in_executor(arithmetic, tuner.ask)
        answers = [await _answer(oracle, samples, rows, question) for question in questions]
        await loop.run_in_executor(arithmetic, partial(tuner.take, answers))
        now = time.monotonic()
        if now - saved > KEEP_SECONDS or tuner.done:
            saved = now
            await asyncio.to_thread(folder.keep_tuning, model_sha256, tuner.state().to_bytes())
        if now - told > TELL_SECONDS or tuner.done:
            told = now
            left = tuner.queries_left
            log.info("tuning prompts", job=folder.job_id, batch=tuner.step, of=tuner.steps, queries_left=left)
    log.info("prompts tuned", job=folder.job_id, queries=tuner.queries, loss=round(tuner.loss, 4))


def _check_quota(oracle: OracleClient, queries: int) -> None:
    card = oracle.card
    if card.HasField("quota_left") and card.quota_left < queries:
        raise VeilfedError(
            Code.QUOTA_EXCEEDED,
            f"the tuning of prompts and what follows needs {queries} more embeddings; the oracle's quota has"
            f" {card.quota_left}",
        )


async def _answer(oracle: OracleClient, samples: Samples, rows: NDArray[np.intp], question: Question) -> Answer:
    inputs: Sequence[Any] = [samples.inputs[row] for row in rows[question.rows]]
    if question.head is None or question.labels is None:
        return Answer(await embed(oracle, samples.modality, inputs, question.prompts))
    gradient, embeddings = await oracle.prompt_gradient(
        samples.modality, inputs, question.prompts, question.head, question.labels
    )
    return Answer(embeddings, gradient)
