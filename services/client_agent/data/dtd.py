"""DTD, describable textures (Cimpoi et al., 2014): images/CLASS/*.jpg, and lists of ten divisions in labels/."""

from pathlib import Path, PurePosixPath

from client_agent.data import image_folder
from client_agent.data.benchmark_sets import BENCHMARK_SETS
from client_agent.data.config import DtdConfig, ImageFolderConfig
from client_agent.data.samples import Samples, check_labels, invalid
from veilfed.errors import Code, VeilfedError

__all__ = ["load"]


def load(config: DtdConfig) -> Samples:
    """All images, or those of one list, in its order. Images that are larger than an oracle takes are made smaller.

    Raises VeilfedError: DATA_INVALID, naming file and line; what `image_folder.load` says.
    """
    root = next((root for root in (config.root, config.root / "dtd") if (root / "images").is_dir()), None)
    if root is None:
        raise invalid(f"{config.root}: no folder 'images' here or in 'dtd'; DTD is expected as images/CLASS/*.jpg")
    if config.split is None:
        samples = image_folder.load(ImageFolderConfig(source="image-folder", root=root / "images"), shrink=True)
        where = str(root / "images")
    else:
        path = root / "labels" / f"{config.split}.txt"
        samples, where = image_folder.read(_listed(path, root / "images"), "content", shrink=True), str(path)
        check_labels(samples.labels, where)
    if unknown := sorted(set(samples.labels) - set(BENCHMARK_SETS["dtd"])):
        raise invalid(f"{where}: {unknown[0]!r} is no class of DTD")
    return samples


def _listed(path: Path, images: Path) -> list[Path]:
    """The files that a list names, one CLASS/FILE a line."""
    found: dict[Path, int] = {}
    for number, line in enumerate(_lines(path), start=1):
        name = PurePosixPath(line.strip())
        # Two plain names, so that nothing outside of the set is read.
        if len(name.parts) != 2 or name.is_absolute() or ".." in name.parts or "\\" in line or "\0" in line:
            raise invalid(f"{path}: line {number} is not CLASS/FILE")
        file = images / name
        if not file.is_file():
            raise invalid(f"{path}: the image of line {number} is missing")
        if file in found:
            raise invalid(f"{path}: line {number} is the same as line {found[file]}")
        found[file] = number
    return list(found)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise invalid(f"{path}: no such file; leave out `split` to take all images") from None
    except OSError as error:
        raise VeilfedError(Code.FILE_UNUSABLE, f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise invalid(f"{path}: not UTF-8 text") from None
