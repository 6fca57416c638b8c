"""What drawing needs."""

import importlib.util
from pathlib import Path

from jaxspec.errors import UserError

KINDS = (".png", ".svg", ".pdf")


def require_matplotlib() -> None:
    """Refuses to draw without it, before any work.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "pictures need matplotlib; pip install 'jaxspec-decoding[plot]'"
        )


def check_picture(path: Path) -> None:
    """Refuses a file that could not be drawn to, before any work.

    Raises:
        UserError: matplotlib is not installed, the file is of another kind, or its
            folder is not there.
    """
    require_matplotlib()
    if path.suffix.lower() not in KINDS:
        raise UserError(f"{path}: expected a name that ends in {', '.join(KINDS)}")
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} is not there; make it first")
