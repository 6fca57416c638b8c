# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Why nothing is lost
#
# A drafter guesses, and yet every token has exactly the distribution that the target
# alone would give it. This page shows why, on a vocabulary of three tokens: by hand, by
# what it buys, and by 400,000 draws through the code that `jaxspec` generates with. It
# needs no model.
#
# ## The rule
#
# p is the target's distribution of the next token, q the drafter's.
#
# ```text
# 1  draw x from q, and u uniformly from [0, 1)
# 2  accept x if u q(x) < p(x): with probability min(1, p(x) / q(x))
# 3  else draw the token from the residual: max(0, p - q), divided by its sum
# ```
#
# Of k draft tokens all before the first refusal are kept, and the residual ends the
# round; if all are kept, one token more comes from the target. (Leviathan et al. 2023,
# algorithm 1; Chen et al. 2023, algorithm 2.)

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from jaxspec.core import analytics, noise
from jaxspec.core.accept import rejection
from jaxspec.core.distributions import residual_log_probs, sample
from jaxspec.core.tree import chain
from jaxspec.types import Draft

p = np.array([0.5, 0.3, 0.2], np.float32)
q = np.array([0.6, 0.1, 0.3], np.float32)
log_p, log_q = np.log(p), np.log(q)
np.set_printoptions(precision=4, suppress=True)

# %% [markdown]
# ## Exercise (a): by hand
#
# Token x is drawn *and* accepted with probability q(x) min(1, p(x) / q(x)) =
# min(p(x), q(x)). The sum of these is alpha, the chance that a draft token is accepted.
# The residual is all that p has above q: here that is token 1 alone.

# %%
overlap = np.minimum(p, q)
alpha = float(analytics.acceptance_probability(p, q))
residual = np.exp(residual_log_probs(log_p, q))

print("min(p, q)", overlap)
print(f"alpha     {alpha:.3f}")
print("residual ", residual, "sum", residual.sum())
print("restored ", overlap + (1 - alpha) * residual, "= p:", p)

# %%
tokens, width = np.arange(3), 0.2
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), sharey=True)
bars = [
    ("p, target", p),
    ("q, draft", q),
    ("min(p, q)", overlap),
    ("residual", residual),
]
for place, (label, values) in enumerate(bars):
    left.bar(tokens + (place - 1.5) * width, values, width, label=label)
left.set_title("what the rule is made of")
right.bar(tokens, overlap, 0.5, color="C2", label="accepted: min(p, q)")
refused = (1 - alpha) * residual
right.bar(tokens, refused, 0.5, overlap, color="C3", label="(1 - alpha) residual")
right.hlines(p, tokens - 0.35, tokens + 0.35, color="black", label="p")
right.set_title("what comes out")
for axes in (left, right):
    axes.set_xticks(tokens, [f"token {token}" for token in tokens])
    axes.legend()
left.set_ylabel("probability")
plt.tight_layout()
plt.show()

# %% [markdown]
# A refusal has probability 1 - alpha, and max(0, p - q) has the same sum: both are what
# p and q do not share. So the residual comes in just the amount that is missing, and
# min(p, q) + max(0, p - q) = p. That holds for every q: a bad one costs time, never
# quality.

# %% [markdown]
# ## Exercise (b): what it buys
#
# Let the drafter be s = 8 times as fast as the target, alpha = 0.8, and k = 4. A round
# costs k / s + 1 target forwards. The simple estimate of the speedup,
# (1 + k alpha) / (1 + k / s), counts every draft token as if those before it had been
# accepted. Exactly, a round gives
# 1 + alpha + ... + alpha^k = (1 - alpha^(k+1)) / (1 - alpha) tokens.

# %%
speed, rate = 8, 0.8
for k in (4, 20):
    print(
        f"k = {k:2d}: simple {analytics.simple_speedup(rate, k, speed):.2f}, "
        f"exact {analytics.speedup(rate, k, speed):.2f}, "
        f"{analytics.expected_tokens(rate, k):.2f} tokens per round"
    )

lengths = np.arange(21)
dearer = 1 + 0.1 * lengths
best = analytics.best_draft_length(rate, 1 / speed, np.ones(21))
best_dearer = analytics.best_draft_length(rate, 1 / speed, dearer)
print(f"best: k = {best.k}, {best.speedup:.2f} times as fast as plain decoding")
print(f"best if the verify gets dearer: k = {best_dearer.k}, {best_dearer.speedup:.2f}")

# %%
plt.figure(figsize=(6, 3.5))
simple = analytics.simple_speedup(rate, lengths, speed)
exact = analytics.speedup(rate, lengths, speed)
costly = analytics.speedup(rate, lengths, speed, dearer)
plt.plot(lengths, simple, marker=".", label="simple estimate")
plt.plot(lengths, exact, marker=".", label="exact")
plt.plot(lengths, costly, marker=".", label="exact, verify 10 % dearer per token")
plt.axhline(1.0, linestyle="--", color="grey", label="plain decoding")
plt.xticks(lengths[::4])
plt.xlabel("draft tokens k")
plt.ylabel("speedup")
plt.title("alpha = 0.8, s = 8")
plt.legend(fontsize="small")
plt.tight_layout()
plt.show()

# %% [markdown]
# Why do 20 draft tokens not give five times as much as 4?
#
# - The drafter has to be paid: k / s grows with k, so that even the simple estimate
#   never reaches s alpha = 6.4.
# - A token counts only if all before it were accepted. The 20th is reached in
#   0.8^20 = 1 % of the rounds, and no k gives more than 1 / (1 - alpha) = 5 tokens.
#
# So the tokens level off while the cost does not, and the exact curve falls: k = 20 is
# *slower* than k = 4. Where a verify of more tokens costs more, as on a CPU, the best k
# is smaller still.

# %% [markdown]
# ## Exercise (c): 400,000 draws
#
# Now through the code itself: random numbers, draws and rule are the functions that a
# generation calls. As a control, a wrong sampler: it replaces a refused token by a draw
# from p, which sounds harmless.

# %%
DRAWS = 400_000
keys, lengths = noise.seed_keys(range(DRAWS)), jnp.full(DRAWS, 1)
slots = jnp.tile(jnp.arange(2), (DRAWS, 1))


@jax.jit
def one_round_each(keys):
    """The first token of each row's round, by the rule and by the wrong sampler."""
    rows = lambda log_probs: jnp.broadcast_to(log_probs, (DRAWS, 1, 3))  # noqa: E731
    drafting = noise.gumbels(keys, lengths, slots[:, :1], noise.DRAFT_TOKEN, 3)
    drawn = sample(rows(log_q), drafting)
    valid = jnp.ones((DRAWS, 1), bool)
    draft = Draft(drawn, chain(DRAWS, 1), valid, log_probs=rows(log_q))
    uniforms = noise.uniforms(keys, lengths, slots[:, 1:], noise.ACCEPT)
    target = jnp.concatenate([rows(log_p), rows(log_p)], axis=1)
    verdict = rejection(target, draft, uniforms)

    last = noise.gumbels(keys, lengths, slots[:, :1], noise.NEXT_TOKEN, 3)[:, 0]
    accepted = verdict.count == 2
    right = jnp.where(accepted, drawn[:, 0], sample(verdict.next_log_probs, last))
    wrong = jnp.where(accepted, drawn[:, 0], sample(log_p, last))
    return right, wrong, accepted


right, wrong, accepted = one_round_each(keys)
found, found_wrong = (np.bincount(x, minlength=3) / DRAWS for x in (right, wrong))
print("target      ", p)
print("the rule    ", found)
print("wrong one   ", found_wrong)
print(f"accepted     {accepted.mean():.4f}, alpha {alpha:.4f}")
print("within 0.01 of the target:", bool(np.abs(found - p).max() < 0.01))
print("control within 0.01:", bool(np.abs(found_wrong - p).max() < 0.01))

# %%
figure, axes = plt.subplots(figsize=(6, 3))
bars = [("p, target", p), ("the rule", found), ("wrong: refused, then p", found_wrong)]
for place, (label, values) in enumerate(bars):
    color = ("C0", "C2", "C3")[place]
    axes.bar(tokens + (place - 1) * 0.27, values, 0.27, color=color, label=label)
axes.set_xticks(tokens, [f"token {token}" for token in tokens])
axes.set_ylabel("frequency")
axes.set_title("400,000 draws")
axes.legend()
plt.tight_layout()
plt.show()

# %% [markdown]
# The wrong sampler gives min(p, q) + (1 - alpha) p: too much of what the drafter likes.
# In one text nobody would notice; in 400,000 draws the deviation is nearly two hundred
# standard deviations.

# %% [markdown]
# ## Another rule: shared noise
#
# `jaxspec` draws a token by adding Gumbel noise to the log-probabilities and taking the
# largest. Under the rule `coupled`, drafter and target share that noise, and a draft
# token is accepted if the target draws it too. The text is then that of plain sampling
# with the same seed, whatever the drafter. The price is a lower acceptance: between
# (1 - TV) / (1 + TV) and 1 - TV, where TV is the distance of p and q, 1 - alpha above.
# (Daliri, Musco and Suresh 2025.)

# %%
shared = noise.gumbels(keys, lengths, slots[:, :1], noise.NEXT_TOKEN, 3)[:, 0]
agree = np.mean(sample(log_p, shared) == sample(log_q, shared))
coupled = analytics.coupled_acceptance_probability(p, q)
print(f"rejection {alpha:.4f}, coupled {coupled:.4f}, 400,000 draws {agree:.4f}")

# %%
rng = np.random.default_rng(0)
target, other = rng.dirichlet(np.full(50, 0.3), (2, 400))
share = rng.random((400, 1))
drafts = share * target + (1 - share) * other
distance = 1 - analytics.acceptance_probability(target, drafts)
agreement = analytics.coupled_acceptance_probability(target, drafts)

line = np.linspace(0, 1, 101)
plt.figure(figsize=(6, 3.5))
plt.plot(line, 1 - line, label="rejection: 1 - TV")
plt.plot(line, (1 - line) / (1 + line), linestyle="--", label="(1 - TV) / (1 + TV)")
plt.scatter(distance, agreement, s=5, color="C2", label="coupled, random p and q")
plt.scatter(
    1 - alpha, coupled, marker="x", color="black", label="coupled, exercise (a)"
)
plt.xlabel("distance TV of p and q")
plt.ylabel("probability of acceptance")
plt.legend()
plt.tight_layout()
plt.show()
