"""Stop texts: found on the host between rounds, where the tokenizer is."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxspec.decoding.state import EOS, STOP, DecodingState, Statistics
from jaxspec.requests import Request
from jaxspec.results import Outcome

if TYPE_CHECKING:
    from jaxspec.tokenizer import Tokenizer


class StopText:
    """Reads the text of one row, token by token, up to the first of its stop texts.

    Attributes:
        text: of the tokens so far, or what is left of it once a stop is complete.
        is_complete: whether a stop was found.
        count: tokens read, the one that completes the stop included.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stops: Sequence[str],
        include_stop: bool = False,
        least: int = 0,
    ):
        """`least`: a stop that is complete before so many tokens is none."""
        self._decoder = tokenizer.stream_decoder()
        self._stops, self._include, self._least = stops, include_stop, least
        self.text, self.is_complete, self.count = "", False, 0

    def push(self, token: int) -> bool:
        """Reads a token; whether the text ends with it."""
        before = len(self.text)
        self.text += self._decoder.push([token])
        self.count += 1
        if self.count >= self._least:
            self._find(before)
        return self.is_complete

    def finish(self) -> None:
        """Adds what the decoder still holds back, unless a stop has ended the text."""
        if not self.is_complete:
            self.text += self._decoder.flush()

    @property
    def safe(self) -> int:
        """Characters that no stop can take back any more."""
        if self.is_complete:
            return len(self.text)
        open_ends = (
            length
            for stop in self._stops
            for length in range(len(stop) - 1, 0, -1)
            if self.text.endswith(stop[:length])
        )
        return len(self.text) - max(open_ends, default=0)

    def _find(self, before: int) -> None:
        """Cuts at the stop that ends first of those that the last token completed."""
        found = []
        for stop in self._stops:
            start = self.text.find(stop, max(0, before - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            end, start = min(found)
            self.text = self.text[: end if self._include else start]
            self.is_complete = True


class StopTexts:
    """Ends the rows of a batch at their stop texts, between two dispatches.

    It must see the state after every round, so that tokens, log-probabilities and
    statistics all end with the token that completes a stop.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: "Tokenizer",
        include_stop: bool,
        all_rows: bool = False,
    ):
        """Rows without a stop text are left alone, unless `all_rows` are to be read."""
        self.rows = {
            row: StopText(tokenizer, each.stop, include_stop, each.min_new_tokens or 0)
            for row, each in enumerate(requests)
            if each.stop or all_rows
        }
        self._prompts = [len(request.ids) for request in requests]
        self._before: Statistics | None = None
        # By row: the statistics before the round that was cut.
        self._cuts: dict[int, Statistics] = {}

    def watch(self, state: DecodingState) -> DecodingState:
        """Reads what the last round wrote; rows that are complete end there."""
        tokens, length = jax.device_get((state.tokens, state.length))
        after = jax.device_get(state.statistics)
        before = self._before or jax.tree.map(np.zeros_like, after)
        finish = np.array(state.finish)
        for row, reader in self.rows.items():
            for token in tokens[row, self._read(row) : length[row]].tolist():
                if reader.is_complete:
                    break
                if reader.push(token):
                    self._cuts[row] = before
                    # An EOS that completes a stop is named, as on the device.
                    if self._read(row) < length[row] or finish[row] != EOS:
                        finish[row] = STOP
        self._before = after
        return state._replace(finish=finish) if self._cuts else state

    def cut(self, outcome: Outcome) -> Outcome:
        """Ends lengths and statistics where the rows end."""
        length = np.array(outcome.length)
        counts = jax.tree.map(np.array, outcome.statistics)
        for row, before in self._cuts.items():
            new = self._read(row)
            _cut_round(before, counts, row, int(length[row]) - new)
            length[row] = new
        return outcome._replace(length=length, statistics=counts)

    def text(self, row: int) -> str | None:
        """The text of a row that has stop texts."""
        reader = self.rows.get(row)
        if reader is None:
            return None
        reader.finish()
        return reader.text

    def _read(self, row: int) -> int:
        """The length of what was read of a row, prompt included."""
        return self._prompts[row] + self.rows[row].count


def _cut_round(before: Statistics, after: Any, row: int, dropped: int) -> None:
    """Takes the last `dropped` tokens out of the round between the two.

    As at the device's commit boundary: a round cut to e tokens counts no node deeper
    than e.
    """
    emitted = int(after.emitted[row] - before.emitted[row])
    if not dropped or not emitted:
        return
    kept = emitted - dropped
    after.emitted[row] -= dropped
    for name in ("drafted", "accepted"):
        getattr(after, name)[row, kept:] = getattr(before, name)[row, kept:]
