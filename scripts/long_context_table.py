"""Predict the longest contexts and write the tables of docs/long_context.md: python scripts/long_context_table.py.

Takes some minutes. With --from-json only the tables are written, from the result that is there.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import longctx_predict  # noqa: E402  # found only from here on
from benchmarks.longctx_table import with_tables  # noqa: E402
from benchmarks.result_files import write  # noqa: E402
from benchmarks.runner import RESULTS  # noqa: E402

DOCUMENT = ROOT / "docs" / "long_context.md"


def main(words: list[str]) -> None:
    """Predict, or read with --from-json what was predicted, and write."""
    result = RESULTS / longctx_predict.NAME
    if "--from-json" not in words:
        write(result, longctx_predict.predict())
    read = json.loads(result.read_text(encoding="utf-8"))
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(encoding="utf-8"), read), encoding="utf-8")
    print(f"Wrote {DOCUMENT.relative_to(ROOT)}")


if __name__ == "__main__":
    main(sys.argv[1:])
