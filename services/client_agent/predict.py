"""`veilfed predict`: classifies new inputs with a job's model and the institution's own private state."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from veilfed import logs
from veilfed.cli import output
from veilfed.config import load_config
from veilfed.errors import Code, VeilfedError

__all__ = ["predict"]

# At most this much of one file is read: an image or a list of texts is shorter.
MAX_FILE_BYTES = 64 * 1024 * 1024

IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp"})


def predict(
    files: Annotated[list[Path], typer.Argument(metavar="FILES...", help="Images, or text files: one text per line.")],
    config: Annotated[Path, typer.Option("--config", help="The agent's configuration (YAML).")],
    job: Annotated[str, typer.Option("--job", help="A job's id, as `veilfed agent jobs` lists it.")],
    as_json: output.Json = False,
) -> None:
    """Prints class and probability of each input, by the newest classifier that this institution has got."""
    from client_agent.config import AgentConfig  # noqa: PLC0415

    loaded = load_config(AgentConfig, config)
    logs.configure(loaded.log_level)
    inputs = _read(files)
    document = asyncio.run(_classify(loaded, job, inputs))
    rows = [(row["input"], row["class"], f"{row['probability']:.3f}") for row in document]
    output.result(document, output.table(("input", "class", "probability"), rows), as_json)


def _read(files: list[Path]) -> list[tuple[str, str | bytes]]:
    """(name, text or encoded image) of each input; all are of one kind."""
    inputs: list[tuple[str, str | bytes]] = []
    for file in files:
        inputs += _read_file(file)
    if len({type(value) for _, value in inputs}) > 1:
        raise VeilfedError(Code.INPUT_INVALID, "texts and images cannot be mixed in one call")
    if not inputs:
        raise VeilfedError(Code.INPUT_INVALID, f"{', '.join(map(str, files))}: no texts")
    return inputs


def _read_file(file: Path) -> list[tuple[str, str | bytes]]:
    try:
        if file.stat().st_size > MAX_FILE_BYTES:
            raise VeilfedError(Code.INPUT_INVALID, f"{file}: longer than {MAX_FILE_BYTES} bytes")
        data = file.read_bytes()
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{file}: {error.strerror}") from None
    if file.suffix.lower() in IMAGE_SUFFIXES:
        return [(str(file), data)]
    try:
        lines = data.decode("utf-8").splitlines()
    except UnicodeDecodeError:
        raise VeilfedError(Code.INPUT_INVALID, f"{file}: neither an image (by its name) nor UTF-8 text") from None
    return [(f"{file}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


async def _classify(config: Any, job: str, inputs: list[tuple[str, str | bytes]]) -> list[dict[str, Any]]:
    """One row per input, in order."""
    import numpy as np  # noqa: PLC0415
    import torch  # noqa: PLC0415

    from client_agent.features import embed_apart  # noqa: PLC0415
    from client_agent.state import StateFolder  # noqa: PLC0415
    from client_agent.trainers import method_for  # noqa: PLC0415
    from client_agent.work import model_of  # noqa: PLC0415
    from veilfed.jobs import BlindfedStrategy  # noqa: PLC0415

    torch.set_num_threads(config.threads)
    folder = StateFolder(config.state).job(job)
    strategy, latest = folder.spec().strategy, folder.latest()
    if latest is None:
        raise VeilfedError(
            Code.NOT_FOUND, f"this institution has got no model of job {job} yet", "Wait for the job's first round."
        )
    if isinstance(strategy, BlindfedStrategy):
        raise VeilfedError(
            Code.INPUT_INVALID,
            f"job {job} is on encrypted blocks: `predict` asks for embeddings, and has no pass of its own yet",
            "Evaluate on samples of the agent's data source.",
        )
    method, model = method_for(strategy), model_of(latest.model, strategy)
    private = method.read_state(latest.state, f"job {job}") if latest.state else None
    values: Any = [value for _, value in inputs]
    features = await embed_apart(config, values, strategy.dimension, method.prompts(model, private))
    found = method.probabilities(model, private, features)
    best = np.argmax(found, axis=1)
    return [
        {"input": name, "class": strategy.classes[index], "probability": round(float(row[index]), 6)}
        for (name, _), index, row in zip(inputs, best, found, strict=True)
    ]
