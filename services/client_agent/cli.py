"""`veilfed agent`: serve, jobs, approve, purge, class-vectors."""

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from veilfed import logs
from veilfed.cli import output
from veilfed.config import load_config
from veilfed.errors import Code, VeilfedError
from veilfed.wire.class_vectors import write_class_vectors

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The data owner's service: trains, and gives away what its policy lists.")

Config = Annotated[Path, typer.Option("--config", help="The agent's configuration (YAML).")]
Job = Annotated[str, typer.Argument(metavar="JOB", help="A job's id, as `veilfed agent jobs` lists it.")]


@app.command()
def serve(config: Config) -> None:
    """Works for the aggregator until SIGTERM."""
    from client_agent.agent import serve as run  # noqa: PLC0415  loads torch, which help texts do not need
    from client_agent.config import AgentConfig  # noqa: PLC0415

    loaded = load_config(AgentConfig, config)
    logs.configure(loaded.log_level)
    asyncio.run(run(loaded))


@app.command()
def jobs(config: Config, as_json: output.Json = False) -> None:
    """Lists the jobs that were offered to this institution."""
    from client_agent.config import AgentConfig  # noqa: PLC0415
    from client_agent.state import StateFolder  # noqa: PLC0415

    loaded = load_config(AgentConfig, config)
    document = [_job(folder, loaded) for folder in StateFolder(loaded.state).jobs()]
    rows = [(row["job"], row["consent"], row["role"], row["rounds"], row["last_round"]) for row in document]
    output.result(document, output.table(("job", "consent", "role", "rounds", "last round"), rows), as_json)


def _job(folder: Any, config: Any) -> dict[str, Any]:
    """What is known of one job."""
    from client_agent.startup import load_agent_credentials  # noqa: PLC0415

    spec = folder.spec()
    consent = "approved" if folder.approved else "waiting"
    try:
        config.policy.check_job(spec.strategy.name, folder.approved)
        consent = consent if folder.approved else "allowed by the policy"
    except VeilfedError as error:
        if error.code is Code.POLICY_DENIED:
            consent = "denied by the policy"
    institution = load_agent_credentials(config).identity.institution
    rounds = folder.rounds()
    return {
        "job": folder.job_id,
        "name": spec.name,
        "strategy": spec.strategy.name,
        "classes": list(spec.strategy.classes),
        "sends": sorted(spec.strategy.update_shapes),
        "masked": spec.secure_aggregation is not None,
        "privacy": None if spec.privacy is None else spec.privacy.model_dump(),
        "train": spec.cohort.train,
        "evaluate": spec.cohort.evaluate,
        "role": "train" if institution in spec.cohort.train else "evaluate",
        "rounds": spec.rounds,
        "consent": consent,
        "last_round": rounds[-1] if rounds else None,
    }


@app.command()
def approve(job: Job, config: Config, as_json: output.Json = False) -> None:
    """Consents to a job as it was offered; a running agent takes notice within a second."""
    from client_agent.config import AgentConfig  # noqa: PLC0415
    from client_agent.state import StateFolder  # noqa: PLC0415

    loaded = load_config(AgentConfig, config)
    folder = StateFolder(loaded.state).job(job)
    loaded.policy.check_job(folder.spec().strategy.name, approved=True)
    folder.approve()
    output.result(_job(folder, loaded), f"{job} is approved.", as_json)


@app.command()
def purge(
    config: Config,
    job: Annotated[str | None, typer.Argument(metavar="[JOB]", help="A job's id.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="All jobs.")] = False,
    as_json: output.Json = False,
) -> None:
    """Removes the private state of a job (its transform, too), or of all. The agent must be stopped."""
    from client_agent.config import AgentConfig  # noqa: PLC0415
    from client_agent.startup import load_agent_credentials, open_gate  # noqa: PLC0415
    from client_agent.state import StateFolder  # noqa: PLC0415

    if (job is None) is not everything:
        raise VeilfedError(Code.INPUT_INVALID, "name one job, or say --all")
    loaded = load_config(AgentConfig, config)
    state = StateFolder(loaded.state)
    with state.locked():
        folders = state.jobs() if job is None else [state.job(job)]
        if job is not None and not folders[0].path.is_dir():
            raise VeilfedError(
                Code.NOT_FOUND, f"there is no state of job {job}", "See `veilfed agent jobs --config FILE`."
            )
        with open_gate(loaded, load_agent_credentials(loaded), state.ledger) as gate:
            for folder in folders:
                gate.note("purge", f"the state of job {folder.job_id} is removed")
                folder.purge()
    names = [folder.job_id for folder in folders]
    output.result({"purged": names}, f"Removed the state of {len(names)} jobs.", as_json)


@app.command("class-vectors")
def class_vectors(
    prompts: Annotated[Path, typer.Argument(help="YAML: for each class its prompt, or a list of prompts.")],
    config: Config,
    out: Annotated[Path, typer.Option("--out", help="NAME.npz, for `veilfed job submit --class-vectors`.")],
    as_json: output.Json = False,
) -> None:
    """Has the oracle embed prompts for the classes: class vectors for a job with `initial: class_vectors`."""
    from client_agent.class_vectors import embed_classes, read_prompts  # noqa: PLC0415
    from client_agent.config import AgentConfig  # noqa: PLC0415

    loaded = load_config(AgentConfig, config)
    logs.configure(loaded.log_level)
    read = read_prompts(prompts)
    vectors = asyncio.run(embed_classes(loaded, read))
    write_class_vectors(out, list(read), vectors)
    document = {"file": str(out), "classes": list(read), "dimension": vectors.shape[1]}
    output.result(document, f"{out}: vectors of {len(read)} classes, of length {vectors.shape[1]}", as_json)
