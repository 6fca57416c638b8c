"""What a generator and a call are given, checked before any compute."""

from jaxspec.core.accept import RULES, Rule
from jaxspec.drafters.autoregressive import Autoregressive
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.prompt_lookup import PromptLookup
from jaxspec.errors import UserError, refuse
from jaxspec.loading import LanguageModel, require_same_tokenizer
from jaxspec.row_options import is_whole
from jaxspec.types import Drafter

MOST_ALTERNATIVES = 100


def check_call(*, batch_size: int | None, log_probs: int | None) -> None:
    """Refuses what is wrong with the options of a whole call.

    Raises:
        UserError: names the values.
    """
    faults = []
    if batch_size is not None and not is_whole(batch_size, 1):
        faults.append(f"batch_size is {batch_size!r}, expected a whole number over 0")
    if log_probs is not None and not is_whole(log_probs, 0, MOST_ALTERNATIVES):
        faults.append(
            f"log_probs is {log_probs!r}, expected a whole number from 0 to "
            f"{MOST_ALTERNATIVES}, or None"
        )
    refuse(faults)


def find_rule(name: str) -> Rule:
    """The acceptance rule of this name.

    Raises:
        UserError: there is none.
    """
    if name not in RULES:
        raise UserError(f"rule is {name!r}, expected one of {', '.join(RULES)}")
    return RULES[name]


def make_drafter(
    target: LanguageModel, drafter: LanguageModel | Drafter | str | None, count: int
) -> Drafter:
    """The drafter of k = `count` that an argument names.

    Raises:
        UserError: there is none, or its tokenizer is another one.
    """
    if not isinstance(count, int) or count < 1:
        raise UserError(f"draft_tokens is {count!r}, expected a whole number over 0")
    if drafter is None:
        return Autoregressive()
    if drafter == "prompt-lookup":
        return PromptLookup(count)
    if isinstance(drafter, LanguageModel):
        require_same_tokenizer(target, drafter)
        return DraftModel(drafter.decoder, count)
    if isinstance(drafter, str):
        raise UserError(
            f"drafter is {drafter!r}, expected 'prompt-lookup', a loaded model or None"
        )
    return drafter
