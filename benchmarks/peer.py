"""Environments of the systems that ours are compared with."""

import subprocess
import sys
from pathlib import Path

from veilfed.packages import default_folder

__all__ = ["peer_python"]


def peer_python(requirement: str) -> Path:
    """The Python of an environment with one pinned package, such as `flwr==1.28.0`; made once."""
    folder = default_folder().parent / "peers" / requirement.replace("==", "-")
    python = folder / "bin" / "python"
    if not (folder / ".installed").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "--quiet", requirement], check=True)
        (folder / ".installed").touch()
    return python
