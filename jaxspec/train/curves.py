"""Curves of a training, drawn from what it has written about each step."""

import json
from pathlib import Path
from typing import Any


def draw_curves(folder: Path) -> Path:
    """Draws `metrics.jsonl` of a folder as `curves.png` beside it; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = (folder / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    checks = [step for step in steps if "held_out" in step]
    figure, (loss, right, worth) = pyplot.subplots(1, 3, figsize=(13, 3.6))
    _draw_loss(loss, steps)
    _draw_accuracy(right, checks)
    _draw_worth(worth, checks)
    for axes in (loss, right, worth):
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    figure.tight_layout()
    path = folder / "curves.png"
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return path


def _draw_loss(axes: Any, steps: list[dict[str, Any]]) -> None:
    axes.plot([s["step"] for s in steps], [s["loss"] for s in steps], linewidth=0.8)
    axes.set_title("loss of each batch")


def _draw_accuracy(axes: Any, checks: list[dict[str, Any]]) -> None:
    at = [check["step"] for check in checks]
    depths = zip(*(check["held_out"]["accuracy"] for check in checks), strict=True)
    for depth, values in enumerate(depths, 1):
        axes.plot(at, values, marker=".", label=f"guess {depth}")
    axes.set_title("held out: the likeliest guess is right")
    axes.legend()


def _draw_worth(axes: Any, checks: list[dict[str, Any]]) -> None:
    at = [check["step"] for check in checks]
    for name, label in (
        ("greedy_tokens_per_round", "greedy"),
        ("sampled_tokens_per_round", "temperature 1"),
    ):
        values = [check["held_out"][name] for check in checks]
        axes.plot(at, values, marker=".", label=label)
    axes.set_title("held out: tokens per round of a chain")
    axes.legend()
