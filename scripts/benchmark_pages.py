"""Write docs/benchmarks.md, its tables and pictures from benchmarks/results/: python scripts/benchmark_pages.py.

Pictures whose data is unchanged are left alone; with --all they are drawn anew too. Needs matplotlib (extra `plot`).
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.pages.write import write  # noqa: E402  # found only from here on


def main(words: list[str]) -> None:
    """Write the page and the pictures, and name what was written."""
    for path in write(ROOT / "benchmarks" / "results", ROOT / "docs", is_all="--all" in words):
        print(f"Wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
