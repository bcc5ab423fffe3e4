"""Where a Trainer writes, what the files of a saved model must hold, and whether they do; and the plan in a checkpoint.

Sharded runs lose weights without a word: a wrapper that renames modules empties PEFT's adapter file, shards that were
not gathered are written as they are, or nothing is written at all. So names and shapes are noted before the model is
sharded, and every saved file is held against them by its header; no weights are read.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import TrainerState, TrainingArguments

from hf_ckpt.distributed import deepspeed
from hf_ckpt.errors import PlanMismatchError, PolicyError, SavedFilesError, UnsupportedError
from hf_ckpt.patch.instance_methods import method_before, set_method, take_off
from hf_ckpt.patch.interrupted_run import running_trainer, train_arguments
from hf_ckpt.policy.plan import Plan
from hf_ckpt.structure.stored import adapter_configs, stored
from hf_ckpt.trainer.part import Part
from hf_ckpt.upstream.accelerate import fsdp_plugin
from hf_ckpt.upstream.deepspeed import WHOLE_SHAPE
from hf_ckpt.upstream.torch import CHECKPOINT_WRAPPED, WRAPPER_NAMES
from hf_ckpt.upstream.transformers import IGNORED_ON_SAVE, OUTPUT_FOLDER, SAVE_MODEL

logger = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]

PLAN_FILE = "hf_ckpt_plan.json"

_ADAPTER_FILE = "adapter_model.safetensors"
_SHARDS_FOLDER = "pytorch_model_fsdp_0"
_NUM_SHOWN = 3


@dataclass(frozen=True)
class Contents:
    """What one file, or the files of one model, must hold."""

    what: Literal["adapter", "model"]
    patterns: str
    """The files, as a glob below the folder of the saved model."""
    tensors: Sequence[tuple[tuple[int, ...], frozenset[str]]]
    """For each tensor its shape and the names that it may be saved under: a tied weight has several."""

    def missing(self, found: Shapes) -> list[str]:
        """Return the names of the tensors that `found` lacks or has in another shape."""
        missing = [min(names) for shape, names in self.tensors if not any(found.get(name) == shape for name in names)]
        num_elements = sum(math.prod(shape) for shape, _ in self.tensors)
        # transformers saves some architectures under the names and in the pieces of their original weights.
        is_renamed = self.what == "model" and num_elements <= sum(map(math.prod, found.values()))
        return [] if is_renamed else missing


@dataclass(frozen=True)
class SavedFiles:
    """What a saved model must consist of: one file for each adapter, or the files of a whole model.

    Example:
        expected = SavedFiles.of(model)  # before DDP, FSDP or DeepSpeed have it
        trainer.save_model()
        expected.check(Path(args.output_dir), trainer.model)
    """

    contents: tuple[Contents, ...]

    @classmethod
    def of(cls, model: nn.Module) -> SavedFiles:
        """Note what saving a model must write. It is not sharded yet, and has its adapters, if any."""
        adapters = tuple(_adapters(model))
        return cls(adapters or (_whole_model(model),))

    @property
    def has_adapter(self) -> bool:
        """Whether adapters are what is saved."""
        return self.contents[0].what == "adapter"

    def fault(self, folder: Path, model: nn.Module | None = None) -> str | None:
        """Return what is wrong with the files in `folder`, and, by the model as it was saved, why; None if complete."""
        return _fault(self.contents, folder, _headers, model)

    def fault_of_checkpoint(self, folder: Path, model: nn.Module | None = None) -> str | None:
        """Do the same for a checkpoint of the Trainer, which may consist of shards."""
        if not writes_shards_only():
            return self.fault(folder, model)
        shards = [replace(contents, patterns=_SHARDS_FOLDER) for contents in self.contents]
        return _fault(shards, folder, _shards, model)

    def check(self, folder: Path, model: nn.Module | None = None) -> None:
        """Raise `SavedFilesError` where a tensor is missing, has another shape, or goes by the name of a wrapper."""
        if (fault := self.fault(folder, model)) is not None:
            raise SavedFilesError(fault)

    def verdict(self) -> str:
        """Return a sentence for where `check` found nothing wrong."""
        num = sum(len(contents.tensors) for contents in self.contents)
        return f"all {num:,} tensors are there, as one process would save them"


def writes_shards_only() -> bool:
    """Whether the Trainer writes shards that only a resumed run can read, and no adapter or model file."""
    plugin = fsdp_plugin()
    return plugin is not None and "FULL_STATE_DICT" not in str(plugin.state_dict_type)


def check_can_be_saved(device: torch.device) -> None:
    """Refuse to save under FSDP1 on a CPU, where saving loses weights or ends the process."""
    plugin = fsdp_plugin()
    if plugin is not None and plugin.fsdp_version == 1 and device.type == "cpu":
        raise UnsupportedError(
            "This run would save a model that FSDP1 shards on a CPU. There torch's full state dict ends the process, "
            "and accelerate's sharded one loses the adapter and the optimizer's state. Use FSDP2 (fsdp_version: 2), "
            'or save nothing (save_strategy: "no").'
        )


# --- What must be there. ---


def _adapters(model: nn.Module) -> Iterator[Contents]:
    configs = adapter_configs(model)
    if not configs or not hasattr(model, "base_model"):
        return
    from peft import get_peft_model_state_dict

    # Kept as parameters: DeepSpeed notes the whole shape of a partitioned one on it.
    state = model.state_dict(keep_vars=True)
    for name in configs:
        # What PEFT adds of itself, such as embeddings that were resized, may be there and need not.
        tensors = get_peft_model_state_dict(model, state_dict=state, adapter_name=name, save_embedding_layers=False)
        named = [(_shape(tensor), frozenset({key})) for key, tensor in tensors.items()]
        yield Contents("adapter", _ADAPTER_FILE if name == "default" else f"{name}/{_ADAPTER_FILE}", named)


def _whole_model(model: nn.Module) -> Contents:
    ignored = stored(model, IGNORED_ON_SAVE) or ()
    names: dict[nn.Parameter, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if not any(re.search(pattern, name) for pattern in ignored):
            names.setdefault(parameter, set()).add(name)
    tensors = [(_shape(parameter), frozenset(its_names)) for parameter, its_names in names.items()]
    return Contents("model", "model*.safetensors", tensors)


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    # ZeRO-3 leaves an empty tensor in place of a partitioned parameter.
    return tuple(getattr(tensor, WHOLE_SHAPE, tensor.shape))


# --- What is there. ---


def _headers(folder: Path, pattern: str) -> Shapes:
    from safetensors import safe_open

    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(folder.glob(pattern)):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return found


def _shards(folder: Path, name: str) -> Shapes:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    if not (folder / name / ".metadata").is_file():
        return {}
    saved = FileSystemReader(folder / name).read_metadata().state_dict_metadata
    # accelerate saves a mapping with the model under this key.
    return {name.removeprefix("model."): tuple(getattr(entry, "size", ())) for name, entry in saved.items()}


def _wrapped(found: Shapes) -> list[str]:
    return [name for name in found if any(part in WRAPPER_NAMES for part in name.split("."))]


def _fault(
    expected: Sequence[Contents], folder: Path, read: Callable[[Path, str], Shapes], model: nn.Module | None
) -> str | None:
    for contents in expected:
        found = read(folder, contents.patterns)
        missing = contents.missing(found)
        if missing or _wrapped(found):
            return f"{_finding(folder, contents, found, missing)} {_reason(found, model)}"
    return None


# --- Words. ---


def _finding(folder: Path, contents: Contents, found: Shapes, missing: Sequence[str]) -> str:
    where = folder / contents.patterns
    if not found and not any(folder.glob(contents.patterns)):
        return f"There is no {where}: the {contents.what} was not saved."
    if not missing:
        return f"{where} holds the {contents.what} under the names of a wrapper ({_some(_wrapped(found))})."
    num = len(contents.tensors)
    return (
        f"{where} holds {len(found):,} tensors, but {len(missing):,} of the {num:,} of the {contents.what} are missing "
        f"or have another shape ({_some(missing)})."
    )


def _some(names: Sequence[str]) -> str:
    more = f", and {len(names) - _NUM_SHOWN:,} more" if len(names) > _NUM_SHOWN else ""
    return ", ".join(names[:_NUM_SHOWN]) + more


def _reason(found: Shapes, model: nn.Module | None) -> str:
    """Say why something is missing, as far as the file and the model tell, and what to do."""
    names = [*found, *(() if model is None else dict(model.named_modules()))]
    in_the_way = {part for name in names for part in name.split(".") if part in WRAPPER_NAMES}
    if CHECKPOINT_WRAPPED in in_the_way:
        return (
            "Layers are wrapped in CheckpointWrapper, which renames modules, and PEFT does not know them again. Switch "
            "off accelerate's fsdp_activation_checkpointing (and fsdp_config.activation_checkpointing), and whatever "
            "else wraps layers."
        )
    if writes_shards_only():
        return (
            "With fsdp_state_dict_type: SHARDED_STATE_DICT the Trainer writes shards only. Use FULL_STATE_DICT, or "
            'call trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT") before '
            "trainer.save_model()."
        )
    is_partitioned = model is not None and deepspeed.is_sharded(model)
    if is_partitioned or any(math.prod(shape) == 0 for shape in found.values()):
        return (
            "Shards were not gathered before they were saved. Under ZeRO-3 set "
            "stage3_gather_16bit_weights_on_model_save: true; save through trainer.save_model() on all processes."
        )
    return (
        "Something renamed, replaced or left out these modules while the model was prepared or saved. Compare the "
        "names in the file with those of model.named_parameters()."
    )


# --- The plan in a checkpoint. ---


def write_plan(plan: Plan, folder: Path) -> None:
    """Write a plan into a folder, whole or not at all: half a plan would stop the run that resumes from it."""
    folder.mkdir(parents=True, exist_ok=True)
    half = folder / f"{PLAN_FILE}.part"
    half.write_text(plan.to_json() + "\n")
    half.replace(folder / PLAN_FILE)


def check_resumed_plan(plan: Plan, checkpoint: Path, *, is_strict: bool) -> None:
    """Hold a plan against that of the checkpoint that a run goes on from; log a difference, or raise if strict."""
    saved = checkpoint / PLAN_FILE
    try:
        if Plan.from_file(saved) == plan:
            return
        message = f"{saved} was written under another plan."
    except PolicyError as error:
        is_missing = isinstance(error.__cause__, FileNotFoundError)
        message = f"There is no {saved}." if is_missing else str(error)
        if not is_strict:
            if not is_missing:
                logger.warning("%s It is left aside: results do not depend on it.", message)
            return
    if is_strict:
        raise PlanMismatchError(
            f"strict_resume asks for the plan of the run that is resumed. {message} Use the policy of that run, "
            "or leave strict_resume out."
        )
    logger.info("%s Results do not change, memory does.", message)


class PlanFile(Part):
    """The file that says which plan is in force: where the run writes, and in each checkpoint."""

    def __init__(self, plan: Plan, folder: Path, *, is_written: bool) -> None:
        self._folder = folder
        self._is_written = is_written
        self.change_plan(plan)

    def change_plan(self, plan: Plan) -> None:
        self._plan = plan
        if self._is_written:
            write_plan(plan, self._folder)

    def save(self, folder: Path) -> None:
        write_plan(self._plan, folder)


# --- Folders, asked of the Trainer, as callbacks are not told. ---


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
        self.note = note
        self._undos: list[Callable[[], None]] = []
        if hasattr(trainer, SAVE_MODEL):
            ours = set_method(trainer, SAVE_MODEL, partial(_save_model, self, trainer))
            self._undos.append(partial(take_off, trainer, SAVE_MODEL, ours))

    def remove(self) -> None:
        while self._undos:
            self._undos.pop()()

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
        watch.note(folder)
    return returned
