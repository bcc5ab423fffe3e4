"""Measures on a GPU what matters most first, keeps what it has at every moment, and goes on where it stopped.

    python -m benchmarks.on_gpu --out runs/gpu --seconds 540
    python -m benchmarks.on_gpu --out runs/gpu --seconds 540 --resume runs/gpu/results.json
    python -m benchmarks.on_gpu --prepare --predicts-for h200       # plans and predictions, on any machine
    python -m benchmarks.on_gpu --merge runs/gpu/results.json       # file what came home
    python -m benchmarks.on_gpu --device cpu --small --out runs/gpu # all of it with tiny models

`--out` holds `results.json` (rewritten after every entry), `cases.xml` (the tests, as JUnit has them) and `log.txt`.
Exit code 0 if anything was measured, 1 if nothing was, 2 for wrong input.
"""

import os
import sys
import time
from pathlib import Path

# Imports take their time too.
_BEGAN = time.monotonic()
# Looks for devices through the driver's own library, which leaves CUDA alone: stages are forked from this process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.on_gpu.command import main  # noqa: E402  # these lines have to come before

if __name__ == "__main__":
    main(began=_BEGAN, doc=__doc__)
