"""What files were made by, so that no other job adds to them."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.checkpoints.atomic import create
from jaxspec.checkpoints.fields import read_json
from jaxspec.errors import refuse


def pin(
    path: Any,
    values: Mapping[str, Any],
    write: Callable[[Any, bytes], None] = create,
    fix: str = "choose another folder",
) -> None:
    """Writes the values to a JSON file, or holds them against those it has.

    Args:
        path: of a local file, or one that `write` can write.
        values: what JSON can hold.
        write: puts a file there as a whole, if there is none.
        fix: what to do if the values differ, for the message.

    Raises:
        UserError: lists what differs.
    """
    # What JSON makes of them: a tuple would differ from the list that is read.
    wanted = json.loads(json.dumps(values))
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, (json.dumps(wanted, indent=2) + "\n").encode())
    # Another process may have been faster: what is there now is what counts.
    found = read_json(path)
    refuse(
        [
            f"{path}: `{name}` is {json.dumps(found.get(name))}, but "
            f"{json.dumps(wanted.get(name))} is asked for; {fix}"
            for name in sorted({*found, *wanted})
            if found.get(name) != wanted.get(name)
        ]
    )
