"""What drawing needs."""

import importlib.util

from jaxspec.errors import UserError


def require_matplotlib() -> None:
    """Refuses to draw without it, before any work.

    Raises:
        UserError: it is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise UserError(
            "pictures need matplotlib; pip install 'jaxspec-decoding[plot]'"
        )
