"""A process that appends records until it is killed: run by test_killed.

    python appending.py FOLDER local|remote RECORDS SEED

It prints "ready", then the index of each record whose append has returned.
"""

import pathlib
import random
import sys
import types

ROOT = pathlib.Path(__file__).parents[2] / "jaxspec"


def text_of(index):
    """A text that no other index has, from some bytes to some pages of memory."""
    return f"{index}." * (1 + 7919 * index % 20_000)


def main(folder, kind, records, seed):
    # The package's own __init__ would load jax, two seconds for each kill.
    package = types.ModuleType("jaxspec")
    package.__path__ = [str(ROOT)]
    sys.modules["jaxspec"] = package
    from etils import epath

    from jaxspec.batch.journal import open_journal

    root = pathlib.Path(folder) if kind == "local" else epath.Path(folder)
    with open_journal(root / "OUT.jsonl", 0, 1, {"a": 1}, most_records=3) as journal:
        print("ready", flush=True)
        left = [index for index in range(int(records)) if index not in journal.done]
        random.Random(seed).shuffle(left)
        for index in left:
            journal.append({"index": index, "text": text_of(index)})
            print(index, flush=True)
    print("end", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
