"""A plan's entries turned into settings on modules: which region a layer, a part or a module of it becomes.

Nothing is wrapped and no name changes; every value set here is a module-level function or a `partial` of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ckpt.distributed import fsdp
from hf_ckpt.patch.stack_patch import FLAG, FORWARD, FUNCTION, Doors, StackPatch
from hf_ckpt.patch.tileable import tiled_modules
from hf_ckpt.policy.modifiers import Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import SELECTIVE_MODES, WHOLE_LAYER_MODES, Mode
from hf_ckpt.regions.module_state import STATE, ModuleState
from hf_ckpt.regions.offload import Offloader, announced, offloaded
from hf_ckpt.regions.recompute import recompute, run_region
from hf_ckpt.regions.recompute_around import KeptModules, recompute_around, run_kept
from hf_ckpt.regions.segments import SegmentRunner, run_in_segment
from hf_ckpt.regions.selective import Saves, Selection, recompute_selectively
from hf_ckpt.regions.tiling import Tiling, run_tiled
from hf_ckpt.regions.value_proof import ValueProof
from hf_ckpt.structure.layers import Layer, Stack

Region = Callable[..., Any]
"""Runs a function so that its activations are handled: `region(function, *args)`."""

Setting = tuple[nn.Module, Callable[[], None]]
"""A module, and what makes it carry its part of the plan."""


class Hosts:
    """Where the layers of a model offload to: one engine for each way that the plan names.

    Args:
        plan: the plan.
    """

    def __init__(self, plan: Plan) -> None:
        places: dict[Offload, list[tuple[str, int]]] = {}
        for stack in plan.stacks:
            for layer_idx, entry in enumerate(stack.layers):
                if entry.offload is not None:
                    places.setdefault(entry.offload, []).append((stack.path, layer_idx))
        self.offloaders = {offload: Offloader(offload, len(layers)) for offload, layers in places.items()}
        self._of_layers = {
            layer: (self.offloaders[offload], position)
            for offload, layers in places.items()
            for position, layer in enumerate(layers)
        }

    def of(self, path: str, layer_idx: int) -> tuple[Offloader, int] | None:
        """Return the engine of a layer, and its position among the layers that use it; None if it does not offload.

        Args:
            path: of its stack.
            layer_idx: its place in the stack.
        """
        return self._of_layers.get((path, layer_idx))


def place(model: nn.Module, patch: StackPatch, plan: StackPlan, stack: Stack, hosts: Hosts, proof: ValueProof) -> None:
    """Make the layers of one stack carry their entries.

    Args:
        model: the whole model, which FSDP may have sharded.
        patch: takes note of what is set.
        plan: the entries.
        stack: the layers.
        hosts: of the whole plan.
        proof: of the whole plan.
    """
    placing = _Placing(patch, stack, hosts, proof)
    settings: dict[nn.Module, list[Callable[[], None]]] = {}
    for entry, layer in zip(plan.layers, stack.layers, strict=True):
        for module, make in placing.settings(entry, layer):
            settings.setdefault(module, []).append(make)
    if fsdp.is_sharded(model):
        fsdp.set_in_place(model, settings)
        _follow_shards(model, stack)
    else:
        for make in chain.from_iterable(settings.values()):
            make()
    in_segments = [idx for idx, entry in enumerate(plan.layers) if entry.segment is not None]
    if in_segments:
        patch.doors = Doors(placing.runner, in_segments)


def _follow_shards(model: nn.Module, stack: Stack) -> None:
    """Let regions look at their shares of the weights: the whole ones are others each time they are gathered."""
    shards = fsdp.shards(model)
    for layer in stack.layers:
        for module in layer.module.modules():
            state = module.__dict__.get(STATE)
            if state is not None:
                state.follow([read for inner in module.modules() for read in shards.get(inner, ())])


class _Placing:
    """What the layers of one stack share.

    Args:
        patch: takes note of what is set.
        stack: the layers.
        hosts: of the whole plan.
        proof: of the whole plan.
    """

    def __init__(self, patch: StackPatch, stack: Stack, hosts: Hosts, proof: ValueProof) -> None:
        self._patch = patch
        self._stack = stack
        self._hosts = hosts
        self._proof = proof
        self._selection = Selection(stack.path)
        self.runner = SegmentRunner()

    def settings(self, entry: LayerPlan, layer: Layer) -> Iterator[Setting]:
        """Yield what to set for one layer."""
        path = f"{self._stack.path}.{layer.layer_idx}"
        tiled: list[str] = []
        if entry.tiles is not None:
            tiled = tiled_modules(layer)
            for name in tiled:
                part = f"{path}.{name}"
                tiling = Tiling(entry.tiles, proof=self._proof.region(part))
                yield self._forward(part, layer.submodule(name), partial(run_tiled, tiling))
        if entry.mode in WHOLE_LAYER_MODES:
            yield from self._whole(entry, layer, path)
        elif entry.mode is Mode.ATTENTION:
            self._patch.drops_cache = True
            yield from self._parts(path, layer, layer.attention)
        elif entry.mode is Mode.FFN and layer.ffn_is_inline:
            yield from self._around_attention(layer, path)
        elif entry.mode is Mode.FFN:
            # What runs in tiles is recomputed already.
            yield from self._parts(path, layer, tuple(name for name in layer.ffn if name not in tiled))

    def _whole(self, entry: LayerPlan, layer: Layer, path: str) -> Iterator[Setting]:
        proof = self._proof.region(path)
        if entry.segment is not None:
            segment = partial(run_in_segment, self.runner, entry.segment, layer.layer_idx, entry.nested, proof=proof)
            yield self._region(path, layer.module, segment)
            return
        host = self._hosts.of(self._stack.path, layer.layer_idx)
        before = self._hosts.of(self._stack.path, layer.layer_idx - 1)
        region: Region = partial(recompute, proof=proof)
        if entry.mode in SELECTIVE_MODES:
            saves = Saves.of(entry.mode.value, entry.save)
            keeper = None if host is None else host[0].keeper(host[1])
            region = partial(recompute_selectively, self._selection, saves, keeper, proof=proof)
            yield layer.module, partial(self._place_hooks, layer.module, saves)
        if host is not None:
            region = partial(offloaded, *host, region)
        elif before is not None:
            region = partial(announced, before[0], region)
        yield self._region(path, layer.module, region)

    def _place_hooks(self, module: nn.Module, saves: Saves) -> None:
        self._patch.hooks.extend(self._selection.hooks(module, saves))

    def _around_attention(self, layer: Layer, path: str) -> Iterator[Setting]:
        kept = KeptModules()
        yield self._region(path, layer.module, partial(recompute_around, kept, proof=self._proof.region(path)))
        for name in layer.attention:
            yield self._forward(f"{path}.{name}", layer.submodule(name), partial(run_kept, kept))

    def _parts(self, path: str, layer: Layer, names: tuple[str, ...]) -> Iterator[Setting]:
        for name in names:
            part = f"{path}.{name}"
            region = partial(recompute, proof=self._proof.region(part))
            yield self._forward(part, layer.submodule(name), partial(run_region, region))

    def _region(self, path: str, module: nn.Module, region: Region) -> Setting:
        return module, partial(_make_region, self._patch, path, module, region)

    def _forward(self, path: str, module: nn.Module, run: partial[Any]) -> Setting:
        return module, partial(set_forward, self._patch, path, module, run)


def _make_region(patch: StackPatch, path: str, module: nn.Module, region: Region) -> None:
    """Make a whole layer a region, through the seam if it has one."""
    patch.drops_cache = True
    if isinstance(module, GradientCheckpointingLayer):
        patch.set(path, module, STATE, ModuleState(path))
        patch.set(path, module, FUNCTION, region)
        patch.set(path, module, FLAG, True)
    else:
        set_forward(patch, path, module, partial(run_region, region))


def set_forward(patch: StackPatch, path: str, module: nn.Module, run: partial[Any]) -> None:
    """Set an instance forward that calls the one that it found there.

    Args:
        patch: takes note of it.
        path: of the module, for messages.
        module: the module.
        run: is given the module, the forward that stood on the instance or None, and what the forward takes.
    """
    found = module.__dict__.get(FORWARD)
    if isinstance(found, partial) and found.func is run.func:
        # A module that two layers share: the first of them has reached it already.
        return
    forward = partial(run.func, *run.args, module, found)
    patch.set(path, module, STATE, ModuleState(path))
    # Tools that look at the signature see the original's.
    patch.set(path, module, FORWARD, update_wrapper(forward, found or module.forward))
