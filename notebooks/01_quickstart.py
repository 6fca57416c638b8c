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
# # jaxspec in five minutes
#
# A language model writes one token per forward pass, and a forward pass is bound by
# memory: reading the weights takes most of the time, whether one token is computed or
# five. **Speculative decoding** uses that. A cheap *drafter* proposes k tokens, the
# *target* checks all of them in one forward pass, and an accept-reject rule keeps the
# output exactly what the target alone would have written.
#
# On Colab, run `pip install jaxspec-decoding` first (the import name is `jaxspec`).

# %%
import jax
import matplotlib.pyplot as plt
import numpy as np

import jaxspec

print(f"jax {jax.__version__} on {jax.devices()[0].platform}")

# %% [markdown]
# ## Load the default model
#
# SmolLM2-135M-Instruct, 98 MB. The first call fetches it into a cache folder.

# %%
model = jaxspec.load("smollm2-135m-instruct")
print(f"{model.decoder.config.num_layers} layers, {model.decoder.vocab_size} ids")

# %% [markdown]
# ## With and without speculation
#
# The drafter here is *prompt lookup*: it finds the last place where the text's own
# ending stood before, and proposes what followed there. It costs nothing, and it pays
# where the answer repeats the question: code edits, summaries, extraction.

# %%
prompt = """Repeat the following text exactly, word for word:

Ada opened the notebook. Ada wrote a program for a machine that was not built yet.
The machine was never finished. The program was right, and Ada knew it.
"""
chat = [{"role": "user", "content": prompt}]

plain = jaxspec.Generator(model)
speculative = jaxspec.Generator(model, "prompt-lookup", draft_tokens=7)

for generator in (plain, speculative):
    generator.generate(chat, max_new_tokens=96)  # compiles
without = plain.generate(chat, max_new_tokens=96)
result = speculative.generate(chat, max_new_tokens=96)

print(result.text)
print()
print("same tokens:", result.token_ids == without.token_ids)

# %% [markdown]
# The tokens are the same; the number of forward passes is not. A *round* is one forward
# pass of the target.

# %%
for name, each in (("plain", without), ("prompt lookup", result)):
    stats = each.stats
    rate = "-" if stats.acceptance_rate is None else f"{stats.acceptance_rate:.0%}"
    print(
        f"{name:14s} {stats.rounds:3d} rounds, {stats.tokens_per_round:.2f} tokens per "
        f"round, {rate} of the draft accepted, {stats.tokens_per_second:.1f} tokens/s"
    )

# %% [markdown]
# ## Where drafts are accepted
#
# `accepted_by_position` says how often the draft's first, second, ... token was kept. A
# token counts only if all before it were accepted, so the bars never rise by much.

# %%
positions = np.arange(1, len(result.stats.accepted_by_position) + 1)
plt.figure(figsize=(5, 3))
plt.bar(positions, [rate or 0.0 for rate in result.stats.accepted_by_position])
plt.xlabel("place in the draft")
plt.ylabel("accepted / drafted")
plt.ylim(0, 1)
plt.title("acceptance by place, SmolLM2 with prompt lookup")
plt.tight_layout()
plt.show()

# %% [markdown]
# ## How long should a draft be?
#
# A longer draft can save more rounds and wastes more where it is wrong. Tokens per
# round against k, on this prompt:

# %%
lengths = [1, 2, 4, 6, 8, 12]
tokens_per_round = []
for k in lengths:
    generator = jaxspec.Generator(model, "prompt-lookup", draft_tokens=k)
    drafted = generator.generate(chat, max_new_tokens=96)
    assert drafted.token_ids == without.token_ids
    tokens_per_round.append(drafted.stats.tokens_per_round)

plt.figure(figsize=(5, 3))
plt.plot(lengths, tokens_per_round, marker="o", label="prompt lookup")
plt.axhline(1.0, linestyle="--", color="grey", label="plain decoding")
plt.xlabel("draft tokens k")
plt.ylabel("tokens per round")
plt.legend()
plt.tight_layout()
plt.show()

# %% [markdown]
# ## Sampling
#
# With a temperature the output is random, and speculation does not change its
# distribution. Each row has its own seed.

# %%
question = [{"role": "user", "content": "Name one fruit and one colour."}]
for answer in speculative.generate(
    [question] * 3, max_new_tokens=24, temperature=0.9, top_p=0.95, seed=[1, 2, 1]
):
    print(repr(answer.text))
