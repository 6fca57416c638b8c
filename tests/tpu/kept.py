"""Whether all jobs of `tpu_configs/` have been compiled before, as they are now.

Run as `python -m tests.tpu.kept`; the exit code says it.
"""

import pathlib
import sys

from jaxspec.job import read_job
from jaxspec.tpu.compiled_job import kept_file

FOLDER = pathlib.Path(__file__).parents[2] / "tpu_configs"


def main() -> int:
    jobs = [read_job(path) for path in FOLDER.glob("*.yaml")]
    return int(not all(kept_file(job, job.capacity // 2).exists() for job in jobs))


if __name__ == "__main__":
    sys.exit(main())
