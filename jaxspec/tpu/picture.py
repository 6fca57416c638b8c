"""A picture of a plan."""

from pathlib import Path
from typing import Any

from jaxspec.errors import UserError
from jaxspec.job import Job
from jaxspec.tpu.plan import Plan


def draw_plan(job: Job, plan: Plan, path: Path) -> None:
    """Draws where a round's time goes, and tokens a second by acceptance.

    Raises:
        UserError: the file cannot be written, or is of no kind that can be drawn.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    _draw_steps(left, plan)
    _draw_rates(right, plan)
    figure.suptitle(
        f"{job.model} with {job.drafting} on {job.topology}: predicted, not measured",
        fontsize=10,
    )
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be drawn to ({error})") from None


def _draw_steps(axes: Any, plan: Plan) -> None:
    rounds = {"plain": plan.plain_step_seconds, "speculative": plan.step_seconds}
    start = dict.fromkeys(rounds, 0.0)
    for step in plan.step_seconds:
        widths = [1e3 * steps[step] for steps in rounds.values()]
        axes.barh(list(rounds), widths, left=list(start.values()), label=step)
        start = {
            name: at + width
            for (name, at), width in zip(start.items(), widths, strict=True)
        }
    axes.set_xlabel("milliseconds a round")
    axes.legend(fontsize=8)


def _draw_rates(axes: Any, plan: Plan) -> None:
    alphas = [float(alpha) for alpha in plan.tokens_per_second]
    axes.plot(alphas, list(plan.tokens_per_second.values()), "o-", label="speculative")
    axes.axhline(plan.plain_tokens_per_second, color="gray", ls="--", label="plain")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("acceptance rate of a draft token")
    axes.set_ylabel("tokens/s of the slice")
    axes.legend(fontsize=8)
