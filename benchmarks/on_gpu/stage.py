"""One stage in an interpreter of its own, for the programme: where CUDA was touched before it could fork."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.journal import PipeJournal
from benchmarks.on_gpu.programme import be
from benchmarks.on_gpu.results import read
from benchmarks.on_gpu.setting import Prepared, Setting
from benchmarks.on_gpu.stages import STAGES


def main() -> None:
    """Run the stage that the file in the first argument asks for."""
    task = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    setting = Setting(
        device=task["device"],
        is_small=task["is_small"],
        is_lean=task["is_lean"],
        prepared=Prepared(**task["prepared"]),
        scratch=Path(task["scratch"]),
    )
    (stage,) = (stage for stage in STAGES if stage.name == task["stage"])
    found = read(Path(task["results"]))["stages"].get(stage.name, {}).get("entries", {})
    be(stage, setting, PipeJournal(task["pipe"], found, task["deadline"]))


if __name__ == "__main__":
    main()
