"""`python -m benchmarks SUITE [options]`: see `runner`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.runner import command  # the repository has to be on the path

if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
