"""Where a Trainer writes, and which checkpoint it goes on from: asked of the Trainer, as callbacks are not told."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerState, TrainingArguments

from hf_ckpt.patch.instance_methods import method_before, set_method, take_off
from hf_ckpt.patch.interrupted_run import running_trainer, train_arguments
from hf_ckpt.upstream.transformers import OUTPUT_FOLDER, SAVE_MODEL


def output_folder(args: TrainingArguments) -> Path:
    """Return where the run in this thread writes: each trial of a search has a folder of its own."""
    folder_of = getattr(running_trainer(), OUTPUT_FOLDER, None)
    # Trainer itself sets the default; the annotation of the field is wider.
    found = args.output_dir or "trainer_output" if folder_of is None else folder_of(train_arguments().get("trial"))
    return Path(found)


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return where the checkpoint after the last step lies, if the run writes one."""
    return output_folder(args) / f"checkpoint-{state.global_step}"


def resumed_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Return the checkpoint that the run in this thread goes on from."""
    # `train()` has its argument. A run that some other trainer resumes may name it in the arguments; else the usual
    # place counts.
    for named in (train_arguments().get("resume_from_checkpoint"), args.resume_from_checkpoint):
        if isinstance(named, str | Path) and Path(named).is_dir():
            return Path(named)
    return checkpoint_folder(args, state)


class SaveWatch:
    """Has `note` called with the folder of each checkpoint, once the model is in it, until `remove`.

    `on_save` comes later: after a push to the hub, which is to hold what we add, and perhaps in another directory.
    """

    def __init__(self, trainer: Any, note: Callable[[Path], None]) -> None:
        self._note = note
        self._undos: list[Callable[[], None]] = []
        if hasattr(trainer, SAVE_MODEL):
            ours = set_method(trainer, SAVE_MODEL, partial(_save_model, self, trainer))
            self._undos.append(partial(take_off, trainer, SAVE_MODEL, ours))

    def remove(self) -> None:
        """Take the method off; a second call does nothing."""
        while self._undos:
            self._undos.pop()()

    def saved(self, folder: Path) -> None:
        """A model was saved for a checkpoint."""
        self._note(folder)

    def __reduce__(self) -> tuple[type[SaveWatch], tuple[None, Callable[[Path], None]]]:
        # A copy of the model leads here by what its removal undoes, and no copy has a Trainer.
        return SaveWatch, (None, _leave)


def _leave(folder: Path) -> None:
    pass


def _save_model(
    watch: SaveWatch,
    trainer: Any,
    found: Callable[..., Any] | None,
    output_dir: str | None = None,
    _internal_call: bool = False,
    **options: Any,
) -> Any:
    save = method_before(trainer, SAVE_MODEL, found)
    folder = None if output_dir is None else Path(output_dir).absolute()
    returned = save(output_dir, _internal_call=_internal_call, **options)
    if _internal_call and folder is not None:
        watch.saved(folder)
    return returned
