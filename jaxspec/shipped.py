"""The trained drafters that come with the package."""

import json
from pathlib import Path
from typing import NamedTuple

from jaxspec.errors import UserError

AUTO = "auto"
_ASSETS = Path(__file__).parent / "assets"
_INDEX = "drafters.json"


class Shipped(NamedTuple):
    """A drafter, and the shape that it drafts if none is asked for.

    Attributes:
        kind: of drafter, the name of its folder too.
        shape: one number is k, of a chain; more are the levels of a tree.
    """

    kind: str
    folder: Path
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        """As `Generator` takes it."""
        return f"{self.kind}:{self.folder}"


def shipped(reference: str) -> list[Shipped]:
    """The drafters that were trained for a model of a short name, the best first.

    Args:
        reference: what the model is loaded by.
    """
    folder = _ASSETS / reference
    # A reference may be a path, or hold one: only what is shipped here is looked at.
    if folder.parent != _ASSETS or not (folder / _INDEX).is_file():
        return []
    listed = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    return [Shipped(k, folder / k, tuple(shape)) for k, shape in listed.items()]


def best(reference: str) -> Shipped:
    """The drafter that `auto` stands for.

    Raises:
        UserError: none is shipped for the model.
    """
    found = shipped(reference)
    if not found:
        models = ", ".join(
            sorted(path.parent.name for path in _ASSETS.glob(f"*/{_INDEX}"))
        )
        raise UserError(
            f"drafter is 'auto', but no drafter for {reference} comes with jaxspec "
            f"(there are some for {models}); name another, such as prompt-lookup, or "
            "make one with `jaxspec train`"
        )
    return found[0]
