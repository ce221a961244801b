"""A public data set as files that any program reads."""

import csv
import io
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from client_agent.data import emoji, heart, source, vader
from client_agent.data.config import EmojiConfig, HeartConfig, VaderConfig
from client_agent.data.samples import Samples
from veilfed.errors import Code, VeilfedError
from veilfed.files import write_atomic

__all__ = ["write"]


def _domains(name: str, folder: Path) -> Iterator[tuple[str, Samples]]:
    match name:
        case "vader":
            for domain in vader.FILES:
                config = VaderConfig.model_validate({"source": name, "domain": domain, "limit": 0})
                yield domain, source.load(config, folder)
        case "emoji":
            for style in emoji.FILES:
                yield style, source.load(EmojiConfig.model_validate({"source": name, "style": style}), folder)
        case "heart":
            for hospital in heart.HOSPITALS:
                yield hospital, source.load(HeartConfig.model_validate({"source": name, "hospital": hospital}), folder)
        case _:
            raise VeilfedError(Code.INPUT_INVALID, f"there is no data set {name}; there are vader, emoji and heart")


def write(name: str, target: Path, folder: Path) -> int:
    """A table (text, label, domain) or images (DOMAIN/CLASS/NUMBER.png), whole or not at all; how many examples.

    Raises VeilfedError: INPUT_INVALID for an unknown name, DATA_MISSING, FILE_UNUSABLE also for images where it exists.
    """
    domains = list(_domains(name, folder))
    if domains[0][1].modality == "image":
        _write_images(domains, target)
    else:
        buffer = io.StringIO(newline="")
        rows = [(text, label, domain) for domain, samples in domains for text, label in _pairs(samples)]
        csv.writer(buffer).writerows([("text", "label", "domain"), *rows])
        write_atomic(target, buffer.getvalue().encode(), 0o644)
    return sum(len(samples) for _, samples in domains)


def _pairs(samples: Samples) -> Iterator[tuple[Any, str]]:
    return zip(samples.inputs, samples.labels, strict=True)


def _write_images(domains: list[tuple[str, Samples]], target: Path) -> None:
    if target.exists():
        raise VeilfedError(Code.FILE_UNUSABLE, f"{target}: is there already", "Name a folder that is not there yet.")
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as temporary:
            made = Path(temporary) / target.name
            for domain, samples in domains:
                for number, (image, label) in enumerate(_pairs(samples)):
                    path = made / domain / label / f"{number:04d}.png"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(image)
            made.rename(target)
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{error.filename or target}: {error.strerror}") from None
