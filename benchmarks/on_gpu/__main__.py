"""`python -m benchmarks.on_gpu`: see `command`."""

import os
import sys
import time
from pathlib import Path

# Imports take their time too.
_BEGAN = time.monotonic()
# Looks for devices through the driver's own library, which leaves CUDA alone: stages are forked from this process.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.runner import main  # noqa: E402  # these lines have to come before

if __name__ == "__main__":
    sys.exit(main("benchmarks.on_gpu.command", began=_BEGAN))
