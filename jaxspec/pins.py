"""What a folder's contents were made by, so that no other job adds to them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxspec.checkpoints.atomic import replace
from jaxspec.checkpoints.fields import read_json
from jaxspec.errors import refuse


def pin(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the values to a JSON file, or holds them against those it has.

    Raises:
        UserError: lists what differs.
    """
    # What JSON makes of them: a tuple would differ from the list that is read.
    wanted = json.loads(json.dumps(values))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        replace(path, (json.dumps(wanted, indent=2) + "\n").encode())
        return
    found = read_json(path)
    refuse(
        [
            f"{path}: `{name}` is {json.dumps(found.get(name))}, but "
            f"{json.dumps(wanted.get(name))} is asked for; choose another folder"
            for name in sorted({*found, *wanted})
            if found.get(name) != wanted.get(name)
        ]
    )
