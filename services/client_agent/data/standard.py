"""The sets of domain generalisation and federated learning that papers report on, by name, from their usual folders.

    classes("pacs") -> ("dog", "elephant", ...)                         as a job lists them
    sections("pacs", folder) -> {institution: section}                  the `data` section of each agent
    load_all("pacs", folder) -> {institution: Samples}                  all of them at once, for studies in one process

Names: pacs, vlcs, office-home, terra-incognita (an institution is a domain) and femnist (an institution is a group of
writers; say how many). `folder` is the set's own, or for the first four the one above it (DomainBed's data folder).
"""

from pathlib import Path
from typing import Any

from client_agent.data import femnist, image_folder
from client_agent.data.benchmark_sets import BENCHMARK_SETS
from client_agent.data.config import Characters, DomainSetConfig, FemnistConfig, Groups, ImageFolderConfig
from client_agent.data.domain_sets import DOMAIN_SETS, DomainSet
from client_agent.data.samples import Samples, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["NAMES", "classes", "load", "load_all", "sections"]

FEMNIST = "femnist"
NAMES = (*DOMAIN_SETS, FEMNIST)


def classes(name: str, characters: Characters = "all") -> tuple[str, ...]:
    """All classes of a set, in a fixed order; also of the sets of one piece: cifar-10, cifar-100, svhn, dtd.

    Raises VeilfedError(INPUT_INVALID) for an unknown set.
    """
    if name in BENCHMARK_SETS:
        return BENCHMARK_SETS[name]
    _known(name)
    return femnist.classes(characters) if name == FEMNIST else DOMAIN_SETS[name].classes


def sections(
    name: str, folder: Path, institutions: int | None = None, characters: Characters = "all", group: Groups = "writer"
) -> dict[str, dict[str, Any]]:
    """Institution -> the `data` section of its agent's configuration; `institutions`, `characters` and `group` are
    for femnist, which needs the first.

    Raises VeilfedError(INPUT_INVALID) for an unknown set or the wrong arguments.
    """
    _known(name)
    if (institutions is None) != (name != FEMNIST):
        raise VeilfedError(
            Code.INPUT_INVALID, f"{name}: a number of institutions is needed for femnist, and for no other set"
        )
    if institutions is None:
        return {domain: {"source": name, "root": str(folder), "domain": domain} for domain in DOMAIN_SETS[name].domains}
    shared = {"source": name, "root": str(folder), "characters": characters, "group": group}
    width = len(str(institutions))
    return {
        f"writers-{number:0{width}}": {**shared, "institution": number, "institutions": institutions}
        for number in range(1, institutions + 1)
    }


def load_all(
    name: str, folder: Path, institutions: int | None = None, characters: Characters = "all", group: Groups = "writer"
) -> dict[str, Samples]:
    """The samples of each of `sections`, equal to what its agent loads; FEMNIST's files are read only once.

    Raises VeilfedError: INPUT_INVALID, and what `load` says.
    """
    found = sections(name, folder, institutions, characters, group)
    if name == FEMNIST:
        configs = [FemnistConfig.model_validate(section) for section in found.values()]
        return dict(zip(found, femnist.load_all(configs), strict=True))
    return {domain: load(DomainSetConfig.model_validate(section)) for domain, section in found.items()}


def load(config: DomainSetConfig) -> Samples:
    """One domain of a set. Images that are larger than an oracle takes are made smaller.

    Raises VeilfedError: DATA_INVALID for another layout, with the expected one; what `image_folder.load` says.
    """
    spec = DOMAIN_SETS[config.source]
    domain = spec.domains[config.domain]
    root = next((root for root in (config.root, config.root / spec.folder) if (root / domain).is_dir()), None)
    if root is None:
        raise invalid(f"{config.root}: no folder {domain!r} here or in {spec.folder!r}; {_layout(spec)}")
    samples = image_folder.load(ImageFolderConfig(source="image-folder", root=root, domain=domain), shrink=True)
    found = set(samples.labels)
    unknown, missing = sorted(found - set(spec.classes)), sorted(set(spec.classes) - found)
    if unknown:
        raise invalid(f"{root / domain}: {unknown[0]!r} is no class of {spec.title}; {_layout(spec)}")
    if missing:
        raise invalid(
            f"{root / domain}: no images of {missing[0]!r}, and {len(missing)} of {len(spec.classes)} classes missing "
            f"in all; {_layout(spec)}"
        )
    return samples


def _layout(spec: DomainSet) -> str:
    folders = ", ".join(repr(folder) for folder in spec.domains.values())
    return (
        f"{spec.title} is expected as DomainBed prepares it: the folders {folders}, in each one folder of images "
        f"for each of {len(spec.classes)} classes ({spec.classes[0]}, {spec.classes[1]}, ...)"
    )


def _known(name: str) -> None:
    if name not in NAMES:
        raise VeilfedError(Code.INPUT_INVALID, f"there is no set {name!r}; there are {', '.join(NAMES)}")
