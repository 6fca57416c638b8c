"""The words of the project: what passes between model, drafter, rule and loop.

Axis letters: `B` rows, `T` tokens in one forward, `S` capacity in tokens, `P` scratch
slots, `L` layers, `H` query heads, `K` kv heads, `D` head width, `E` model width,
`V` vocabulary, `N` draft nodes, `M` slots up to the last that has a child.

One numbering: slot 0 is the newest committed token (the root, not yet fed to the
target); draft node i is slot i + 1; a parent is a slot, smaller than its child's.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from jaxtyping import Array, Bool, Float, Int

# logits[B, m, V], path_tokens[B, m, depth], path_count[B, m] -> log_probs[B, m, V].
# The path of a slot is its ancestors below the root and itself (slot 0: count 0).
Warp = Callable[[Array, Array, Array], Array]
# slots[B, m], positions[B, m] of the tokens drawn -> Gumbel[B, m, V], in target ids.
Noise = Callable[[Array, Array], Array]
# A drafter's state: any pytree whose leaves have rows first (a KVCache apart).
State = Any


class Output(NamedTuple):
    """What a forward pass computed, by slot.

    Attributes:
        hidden: the un-normed residual stream after the last block that was run.
        taps: the un-normed outputs of the tapped blocks, counted from 0.
    """

    hidden: Float[Array, "*B T E"]
    taps: Float[Array, "*B T taps E"]


class Draft(NamedTuple):
    """The tokens that a drafter proposes in one round.

    Attributes:
        tokens: in target ids.
        parents: the slot that each node hangs on.
        valid: a lookup miss or a missing child is not: it is neither drafted nor
            accepted.
        log_probs: row s is the distribution that slot s's children were drawn from;
            None: the drafter is deterministic and each distribution is one-hot.
        prefix: None, or (hidden[B, N+1, E], scratch) of the target's first
            `prefix_layers` layers for every slot.
    """

    tokens: Int[Array, "B N"]
    parents: Int[Array, "B N"]
    valid: Bool[Array, "B N"]
    log_probs: Float[Array, "B M V"] | None = None
    prefix: tuple[Array, Any] | None = None


class Verdict(NamedTuple):
    """What the acceptance rule decided.

    Attributes:
        path: the slots to commit, slot 0 first; entries past `count` are padding.
        count: slots committed and tokens emitted: accepted + 1, later cut by the
            commit boundary; 0 for a row that is not active.
        next_log_probs: the distribution of the last token: the residual after a
            rejection, the target's own row (the bonus token) after none.
    """

    path: Int[Array, "B depth+1"]
    count: Int[Array, " B"]
    next_log_probs: Float[Array, "B V"]


class Context(NamedTuple):
    """What a drafter may know: the committed text, newest token included."""

    tokens: Int[Array, "B S"]
    length: Int[Array, " B"]
    active: Bool[Array, " B"]
    warp: Warp


class Chunk(NamedTuple):
    """A piece of prompt: `count` tokens of each row, from position `start` on."""

    tokens: Int[Array, "B T"]
    start: Int[Array, " B"]
    count: Int[Array, " B"]


class Model(Protocol):
    """A decoder for one row; `norm` and `unembed` are apart and take any batch."""

    @property
    def vocab_size(self) -> int:
        """Ids that have a logit."""
        ...

    def init_hidden(self, rows: int) -> Float[Array, "B E"]:
        """A hidden state of zeros for each row."""
        ...

    def __call__(
        self,
        tokens: Int[Array, " T"],
        positions: Int[Array, " T"],
        cache: Any,
        scratch: Any,
        slots: Int[Array, " T"],
        visible: Bool[Array, "T P"],
        *,
        live_blocks: Int[Array, ""],
        first: int = 0,
        last: int | None = None,
        hidden: Float[Array, "T E"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> tuple[Output, Any]:
        """Runs blocks `first` to `last`; reads the cache, never writes it.

        Returns:
            The output and the scratch with this pass's keys and values in `slots`.
        """
        ...

    def embed(self, tokens: Int[Array, "*B"]) -> Float[Array, "*B E"]:
        """What the first block is given."""
        ...

    def norm(self, hidden: Float[Array, "*B E"]) -> Float[Array, "*B E"]:
        """The final norm."""
        ...

    def unembed(
        self, normed: Float[Array, "*B E"], ids: Int[Array, " v"] | None = None
    ) -> Float[Array, "*B V"]:
        """Vocabulary head and soft cap: logits in float32, of `ids` alone if given."""
        ...

    def init_cache(self, rows: int, capacity: int, width: int) -> Any:
        """An empty cache for `capacity` tokens and commits of up to `width`."""
        ...

    def init_scratch(self, rows: int, slots: int) -> Any:
        """Empty scratch space for `slots` slots a row."""
        ...


class Target(NamedTuple):
    """The target as a drafter sees it: read only, always an argument, never stored."""

    model: Any
    cache: Any


class Drafter(Protocol):
    """Four verbs on an explicit state; a pytree whose static fields are these.

    Attributes:
        taps: the target's blocks whose outputs the drafter reads.
        nodes: draft nodes a round, N.
        depth: the longest path of nodes.
        prefix_layers: how many of the target's layers `propose` already runs; 0: none.
        may_miss: rounds in which it drafts nothing are common, as a lookup's are: they
            are worth a verify of their own, of one token.
    """

    @property
    def taps(self) -> tuple[int, ...]: ...  # noqa: D102
    @property
    def nodes(self) -> int: ...  # noqa: D102
    @property
    def depth(self) -> int: ...  # noqa: D102
    @property
    def prefix_layers(self) -> int: ...  # noqa: D102
    @property
    def may_miss(self) -> bool: ...  # noqa: D102

    def init(self, rows: int, capacity: int, width: int) -> State:
        """An empty state; `width` is the largest prefill chunk."""
        ...

    def prefill(
        self, target: Target, state: State, chunk: Chunk, output: Output
    ) -> State:
        """Takes in a piece of prompt, chunk after chunk."""
        ...

    def propose(
        self, target: Target, state: State, context: Context, noise: Noise
    ) -> tuple[Draft, State]:
        """Drafts the tokens of one round.

        The children of a slot are the top of its `log_probs + noise`, in that order.
        """
        ...

    def commit(
        self,
        target: Target,
        state: State,
        draft: Draft,
        verdict: Verdict,
        output: Output,
    ) -> State:
        """Keeps what the verdict accepted; sees it after the commit boundary's cut."""
        ...
