"""Models and drafters that make a wrong cache, mask, position or commit visible."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec.cache import KVCache, within
from jaxspec.drafters.eagle_head import (
    Eagle3Config,
    Eagle3Head,
    EagleConfig,
    EagleHead,
)
from jaxspec.drafters.medusa import Heads
from jaxspec.models.config import ModelConfig, Rope
from jaxspec.models.decoder import Decoder
from jaxspec.scratch import Scratch
from jaxspec.types import Context, Draft, Noise, Output, Target

# What a table model reads is one number, the tokens its digits and what it saw counted
# above them: four sums take a tenth longer to compile. Exact in float32.
DIGIT, FAULT = 64, 1e9
# Finite, and whatever it is added to is lost.
GARBAGE = 1e30
# Makes a token win any draw, and leaves float32 log-probabilities finite.
CERTAIN = 1e9
# A test may put `full_layout` in its place.
init_with_rings = KVCache.init


def tiny(
    seed: int, layers: int = 2, vocab: int = 64, dtype=jnp.float32, windows=None
) -> Decoder:
    """A random decoder: 4 query heads, 2 kv heads, untied so that its text varies."""
    config = ModelConfig(
        family="llama",
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_positions=512,
        norm_eps=1e-5,
        query_scale=8**-0.5,
        windows=windows or (None,) * layers,
        ropes=(Rope(1e4),) * layers,
        tied=False,
    )
    return Decoder(config, dtype=dtype, rngs=nnx.Rngs(seed))


def full_layout(windows, *sizes, **options) -> KVCache:
    """`KVCache.init` without rings: every layer keeps all that is committed to it."""
    endless = tuple(window and window + 10**6 for window in windows)
    return dataclasses.replace(
        init_with_rings(endless, *sizes, **options), windows=windows
    )


def near(model: Decoder, noise: float) -> Decoder:
    """A draft that is the model, a little disturbed: it is often right."""
    leaves, tree = jax.tree.flatten(model)
    rng = np.random.default_rng(0)
    moved = [leaf * (1 + noise * rng.normal(size=leaf.shape)) for leaf in leaves]
    return jax.tree.unflatten(tree, [jnp.asarray(leaf, "f4") for leaf in moved])


def heads(model: Decoder, count: int) -> Heads:
    """Random Medusa heads for models of this one's width."""
    width, rng = model.config.hidden_size, np.random.default_rng(count)
    shape = (count, 1, width, width)
    weights = jnp.asarray(rng.normal(size=shape) * width**-0.5, model.dtype)
    return Heads(weights, jnp.zeros(shape[:3], model.dtype))


def eagle(model: Decoder) -> EagleHead:
    """A random EAGLE-1 head for models of this one's width."""
    config = dataclasses.replace(
        model.config, num_layers=1, windows=(None,), ropes=model.config.ropes[:1]
    )
    return EagleHead(EagleConfig(config), dtype=model.dtype, rngs=nnx.Rngs(3))


def eagle3(model: Decoder, taps: tuple[int, ...] = (0, 1, 1), **fields) -> Eagle3Head:
    """A random EAGLE-3 head for models of this one's width."""
    config = dataclasses.replace(
        model.config, num_layers=1, windows=(None,), ropes=model.config.ropes[:1]
    )
    config = Eagle3Config(config, taps, config.hidden_size, **fields)
    return Eagle3Head(config, dtype=model.dtype, rngs=nnx.Rngs(4))


def soil(monkeypatch) -> None:
    """From now on caches and scratch of models and heads are made full of garbage."""

    def fill(leaf):
        is_float = jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.full_like(leaf, GARBAGE) if is_float else leaf

    for made in (Decoder, EagleHead, Eagle3Head):
        for name in ("init_cache", "init_scratch"):
            init = getattr(made, name)
            dirty = lambda *args, init=init: jax.tree.map(fill, init(*args))  # noqa: E731
            monkeypatch.setattr(made, name, dirty)


def constant(model: Decoder) -> Decoder:
    """The same structure, so the same program, but it always prefers token 0."""
    graph, params = nnx.split(model)
    mute = nnx.merge(graph, jax.tree.map(jnp.array, params))
    mute.final_norm.weight = nnx.Param(jnp.zeros_like(model.final_norm.weight[...]))
    return mute


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["table"],
    meta_fields=["windows", "stacked"],
)
@dataclasses.dataclass(frozen=True)
class TableModel:
    """Logits by (position mod 3, token before, token), all read through the cache.

    Keys are the tokens themselves and values the positions. A query looks for its own
    token and the one before it among what it sees, by position. If it sees an entry too
    many or too few, or one that stands where it does not belong, its row of the table
    comes out reversed. Layer i adds `100 i` to what it stores.

    Attributes:
        table: logits `[3, V + 1, V, V]`; index 0 of the second axis: no token before.
        windows: of each layer; at least 2.
    """

    table: Any
    windows: tuple[int | None, ...] = (None, None)
    stacked: bool = False

    @classmethod
    def random(cls, vocab: int, seed: int, scale: float = 1.0, **fields):
        shape = (3, vocab + 1, vocab, vocab)
        logits = np.random.default_rng(seed).normal(size=shape) * scale
        return cls(jnp.asarray(logits, jnp.float32), **fields)

    def near(self, seed: int, noise: float) -> "TableModel":
        """A draft for this model: the same logits, disturbed."""
        fresh = np.random.default_rng(seed).normal(size=self.table.shape) * noise
        return dataclasses.replace(self, table=self.table + jnp.asarray(fresh, "f4"))

    def greedy_text(self, prompt, new: int) -> list[int]:
        """What it must write, straight from the table."""
        table, text = np.asarray(self.table), list(prompt)
        for _ in range(new):
            before = text[-2] + 1 if len(text) > 1 else 0
            text.append(int(table[(len(text) - 1) % 3, before, text[-1]].argmax()))
        return text[len(prompt) :]

    @property
    def vocab_size(self) -> int:
        return self.table.shape[-1]

    def init_hidden(self, rows):
        return jnp.zeros((rows, 4))

    def init_cache(self, rows, capacity, width):
        return KVCache.init(
            self.windows, rows, 1, capacity, width, 2, "f4", stacked=self.stacked
        )

    def init_scratch(self, rows, slots):
        return Scratch.init(len(self.windows), rows, 1, slots, 2, "f4")

    def norm(self, hidden):
        return hidden

    def unembed(self, normed, ids=None):
        assert ids is None
        index = normed.astype(int)
        third, before, own = index[..., 0], index[..., 1], index[..., 2] - 1
        logits = self.table.at[third, before, own].get(mode="clip")
        return jnp.where(normed[..., 3:] == 1, logits, logits[..., ::-1])

    def __call__(
        self,
        tokens,
        positions,
        cache,
        scratch,
        slots,
        visible,
        *,
        live_blocks,
        first=0,
        last=None,
        hidden=None,
        taps=(),
    ):
        scratch = scratch.place(positions, slots)
        reads = []
        for layer, window in enumerate(self.windows):
            keys = jnp.stack([tokens, positions], -1)[None].astype("f4") + 100 * layer
            scratch = scratch.write(layer, keys, keys[..., ::-1], slots)
            reads.append(
                self._read(
                    layer, window, positions, cache, scratch, visible, live_blocks
                )
            )
        before, own, intact = (jnp.stack(each) for each in zip(*reads, strict=True))
        agree = intact.all(0) & (before == before[0]).all(0) & (own == own[0]).all(0)
        state = jnp.stack([positions % 3, before[0], own[0], agree], -1).astype("f4")
        return Output(state, jnp.zeros((len(tokens), len(taps), 4))), scratch

    def _read(self, layer, window, positions, cache, scratch, visible, live_blocks):
        # A token seen twice must not carry into the next digit.
        assert 2 * self.vocab_size < DIGIT
        query = positions[:, None]

        def take(found, keys, values, at, seen):
            keys, values = keys[0] - 100 * layer, values[0] - 100 * layer
            token = keys[:, 0] + 1
            wrong = (values[:, 0] != at) | (keys[:, 1] != at)
            wrong |= keys[:, 0] != values[:, 1]
            code = jnp.where(at == query - 1, token, 0)
            code += jnp.where(at == query, token * DIGIT, 0)
            code += jnp.where(wrong, FAULT, DIGIT**2)
            return found + jnp.where(seen, code, 0).sum(-1)

        def block(index, found):
            keys, values = cache.block(layer, index)
            at = cache.positions(layer, index)
            seen = cache.visible(layer, index, positions)
            return take(found, keys, values, at, seen)

        blocks = cache.live_blocks_of(layer, live_blocks)
        found = lax.fori_loop(0, blocks, block, jnp.zeros(len(positions)))
        at = scratch.positions
        seen = visible & within(window, query - at)
        found = take(found, scratch.keys[layer], scratch.values[layer], at, seen)
        before, own = found % DIGIT, found // DIGIT % DIGIT
        expected = positions + 1
        expected = expected if window is None else jnp.minimum(expected, window)
        return before, own, found // DIGIT**2 == expected


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["inner"], meta_fields=[]
)
@dataclasses.dataclass(frozen=True)
class Certain:
    """Takes the likeliest children of a drafter that draws, and tells no distribution.

    What Medusa's heads do, with drafts that are often right.
    """

    inner: Any

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def propose(self, target, state, context, noise):
        silent = lambda *args: 0 * noise(*args)  # noqa: E731
        draft, state = self.inner.propose(target, state, context, silent)
        return draft._replace(log_probs=None), state


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["inner", "text", "forced", "seed"],
    meta_fields=["by_warp", "always"],
)
@dataclasses.dataclass(frozen=True)
class Oracle:
    """Goes around a real drafter and dictates what it drafts, on greedy rows.

    The draft is the row's plain text up to a random depth and wrong there; of a tree,
    on the path of first children, and no other path is right for longer. The
    drafter's own code runs on that draft: one that draws is made to draw these tokens
    by the noise it is given, one that does not has its tokens replaced.

    Attributes:
        text: the plain run's tokens, prompt included.
        forced: False leaves the drafter alone (the same program serves both).
        seed: of the depths.
        always: how many are right, in the place of a random depth.
        by_warp: for a drafter that looks at likelihoods alone and tells none.
    """

    inner: Any
    text: Any
    forced: Any = True
    seed: Any = 0
    by_warp: bool = False
    always: int | None = None

    @property
    def taps(self):
        return self.inner.taps

    @property
    def nodes(self):
        return self.inner.nodes

    @property
    def depth(self):
        return self.inner.depth

    @property
    def prefix_layers(self):
        return self.inner.prefix_layers

    @property
    def may_miss(self):
        return self.inner.may_miss

    def init(self, rows, capacity, width):
        return self.inner.init(rows, capacity, width)

    def prefill(self, target, state, chunk, output):
        return self.inner.prefill(target, state, chunk, output)

    def commit(self, target, state, draft, verdict, output):
        return self.inner.commit(target, state, draft, verdict, output)

    def right(self, length):
        """How many draft tokens of the round that starts at `length` are right."""
        if self.always is not None:
            return jnp.full(length.shape, self.always)

        def one(row, length):
            key = jax.random.fold_in(jax.random.key(self.seed), row)
            return jax.random.randint(
                jax.random.fold_in(key, length), (), 0, self.depth + 1
            )

        return jax.vmap(one)(jnp.arange(len(length)), length)

    def propose(
        self, target: Target, state: Any, context: Context, noise: Noise
    ) -> tuple[Draft, Any]:
        place = jnp.arange(self.depth)
        at = context.length[:, None] + place
        text = jnp.take_along_axis(self.text, at, axis=1, mode="clip")
        wrong = place == self.right(context.length)[:, None]
        vocabulary = target.model.vocab_size
        tokens = jnp.where(wrong, (text + 1 + place) % vocabulary, text)

        def liking(index):
            """How much each token of this place in the draft is wanted."""
            chosen, never = (
                jnp.take_along_axis(each, index, axis=1, mode="clip")
                for each in (tokens, jnp.where(wrong, text, -1))
            )
            # Nor may a sibling of the wrong token be the right one.
            certain = jax.nn.one_hot(chosen, vocabulary) * CERTAIN
            return certain - jax.nn.one_hot(never, vocabulary) * CERTAIN

        def dictated(slots, positions):
            wanted = liking(positions - context.length[:, None])
            return jnp.where(self.forced, wanted, noise(slots, positions))

        def swayed(logits, path_tokens, path_count):
            log_probs = context.warp(logits, path_tokens, path_count)
            # Never above 0: a path must not be likelier than its beginning.
            wanted = liking(path_count) - CERTAIN
            return log_probs + jnp.where(self.forced, wanted, 0.0)

        if self.by_warp:
            swayed_context = context._replace(warp=swayed)
            return self.inner.propose(target, state, swayed_context, noise)
        draft, state = self.inner.propose(target, state, context, dictated)
        if draft.log_probs is None:
            active = jnp.broadcast_to(context.active[:, None], tokens.shape)
            draft = draft._replace(
                tokens=jnp.where(self.forced, tokens, draft.tokens),
                valid=jnp.where(self.forced, active, draft.valid),
            )
        return draft, state
