"""The one exception for a user's mistake."""

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake the user can mend: names the culprit, what was expected, the fix.

    The command line prints it on one line and exits with code 2.
    """


def refuse(faults: Sequence[str], heading: str = "") -> None:
    """Raises one `UserError` that lists all `faults`, or returns if there are none."""
    if faults:
        raise UserError(f"{heading}{': ' if heading else ''}{'; '.join(faults)}")
