"""The real models that some tests read, by their short names."""

from pathlib import Path


def path(short_name: str) -> Path:
    """Returns the path of the model's GGUF file, downloaded on first use."""
    from jaxspec.checkpoints import hub

    return hub.fetch(short_name)
