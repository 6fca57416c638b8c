"""The options of each row that shape its distribution, as arrays.

Whether an option is there is static: an absent one (None) costs nothing in the compiled
program. Its values are traced, so that another value compiles nothing.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Sequences(NamedTuple):
    """Some sequences of ids for each row, the ends aligned.

    Attributes:
        tokens: each sequence fills its last places.
        length: of each sequence; 0: there is none.
    """

    tokens: Int[Array, "B n width"]
    length: Int[Array, "B n"]


class Sampling(NamedTuple):
    """The options of each row, in the order in which they apply.

    Attributes:
        temperature: 0 is greedy: the row's most likely token, ties to the lowest id.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the fewest most likely tokens whose probabilities reach `top_p`
            (Holtzman et al. 2020).
        min_p: keep tokens at least `min_p` times as likely as the most likely one
            (Nguyen et al. 2024).
        logit_bias: added to the logits; minus infinity bans an id.
        repetition_penalty: divides the positive logits, and multiplies the others, of
            ids in prompt or output (Keskar et al. 2019, section 4.1).
        presence_penalty: taken from the logits of ids in the output.
        frequency_penalty: taken as often as the id stands in the output.
        banned: sequences that the text, prompt included, is never continued to.
        min_new_tokens: before so many the ids that end the row are impossible.
    """

    temperature: Float[Array, " B"]
    top_k: Int[Array, " B"] | None = None
    top_p: Float[Array, " B"] | None = None
    min_p: Float[Array, " B"] | None = None
    logit_bias: Float[Array, "B V"] | None = None
    repetition_penalty: Float[Array, " B"] | None = None
    presence_penalty: Float[Array, " B"] | None = None
    frequency_penalty: Float[Array, " B"] | None = None
    banned: Sequences | None = None
    min_new_tokens: Int[Array, " B"] | None = None

    @property
    def greedy(self) -> Bool[Array, " B"]:
        """Which rows take the arg-max."""
        return self.temperature == 0

    @property
    def counts_output(self) -> bool:
        """Whether an option asks how often an id stands in the output."""
        penalties = (
            self.repetition_penalty,
            self.presence_penalty,
            self.frequency_penalty,
        )
        return any(each is not None for each in penalties)
