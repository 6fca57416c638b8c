"""Training states in checkpoints: the newest whole one is where a job goes on."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec.errors import UserError


class Checkpoints:
    """The checkpoints of one training, in a folder of their own.

    They are written in the background. Kept are the newest, and the one with the best
    measure.
    """

    def __init__(self, folder: Path, keep: int):
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        self._ocp = ocp
        self._folder = folder

        def measure(metrics: Mapping) -> float:
            return metrics["best"]

        best = policies.BestN(get_metric_fn=measure, n=1)
        kept = policies.AnyPreservationPolicy([policies.LatestN(keep), best])
        # Without a best_fn the measures are not written.
        options = ocp.CheckpointManagerOptions(
            best_fn=measure, preservation_policy=kept
        )
        self._manager = ocp.CheckpointManager(
            folder.absolute(),
            options=options,
            item_handlers=ocp.StandardCheckpointHandler(),
        )

    def save(self, step: int, state: Any, measure: float) -> None:
        """Begins to write a state; the larger its `measure` the better it is."""
        args = self._ocp.args.StandardSave(named_leaves(state))
        self._manager.save(step, args=args, metrics={"best": measure})

    def close(self) -> None:
        """Waits until all is written."""
        self._manager.wait_until_finished()
        self._manager.close()

    def restore(self, state: Any) -> Any:
        """The newest whole state, arranged and sharded as `state`; None: there is none.

        Raises:
            UserError: the newest is of another model or optimiser.
        """
        for step in sorted(self._manager.all_steps(), reverse=True):
            try:
                return self._restore(step, state)
            except UserError:
                raise
            # Whatever a torn file makes orbax raise.
            except Exception as error:
                reason = str(error).strip().split("\n")[0][:120]
                warnings.warn(
                    f"{self._folder}: the checkpoint of step {step} is incomplete and "
                    f"is removed ({type(error).__name__}: {reason})",
                    stacklevel=2,
                )
                # Else nothing could be written in its place.
                self._manager.delete(step)
        return None

    def best(self, state: Any) -> Any:
        """The state with the best measure, arranged and sharded as `state`."""
        self._manager.wait_until_finished()
        step = self._manager.best_step()
        assert step is not None, "no checkpoint has a measure"
        return self._restore(step, state)

    def _restore(self, step: int, state: Any) -> Any:
        wanted = named_leaves(state)
        found = self._manager.item_metadata(step)
        if found is None:
            raise ValueError("it says nothing of what it holds")
        self._refuse_other(step, wanted, found)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf.shape, leaf.dtype, sharding=leaf.sharding
            ),
            wanted,
        )
        args = self._ocp.args.StandardRestore(abstract)
        leaves = self._manager.restore(step, args=args)
        return jax.tree.unflatten(
            jax.tree.structure(state), [leaves[name] for name in wanted]
        )

    def _refuse_other(self, step: int, wanted: Mapping, found: Mapping) -> None:
        """Names the leaves in which a checkpoint is of another training."""

        def shape(leaves, name):
            return f"{leaves[name].shape}" if name in leaves else "missing"

        differing = [
            f"{name} (there {shape(found, name)}, here {shape(wanted, name)})"
            for name in sorted({*wanted, *found})
            if shape(wanted, name) != shape(found, name)
        ]
        if differing:
            more = f", and {len(differing) - 4} more" if len(differing) > 4 else ""
            raise UserError(
                f"{self._folder}: the checkpoint of step {step} is of another model: "
                f"{', '.join(differing[:4])}{more}; choose another folder"
            )


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, in the order of the tree."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): leaf for path, leaf in leaves}


def path_name(path: Any) -> str:
    """The path of a leaf as one name."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
