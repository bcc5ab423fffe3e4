"""A plan's entries turned into settings on modules: which region a layer, a part or a module of it becomes.

Nothing is wrapped and no name changes; every value set here is a module-level function or a `partial` of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from torch import nn

from hf_ckpt.patch.stack_patch import Region, SegmentHooks, StackPatch
from hf_ckpt.patch.tileable_modules import tiled_modules
from hf_ckpt.policy.options import Offload
from hf_ckpt.policy.plan import LayerPlan, Plan, StackPlan
from hf_ckpt.policy.policy import SELECTIVE_MODES, WHOLE_LAYER_MODES, Mode
from hf_ckpt.regions.eight_bit_inputs import let_go_of_inputs
from hf_ckpt.regions.module_state import STATE, Values
from hf_ckpt.regions.offload.offloader import Offloader, OffloadKeeper, run_offloaded, run_with_prefetch_hook
from hf_ckpt.regions.original_proof import run_region_proven
from hf_ckpt.regions.recomputation_errors import OtherModes
from hf_ckpt.regions.recompute import KeptModules, recompute, recompute_around, run_kept, run_region
from hf_ckpt.regions.segments import SegmentRunner, run_in_segment
from hf_ckpt.regions.selective.save_rules import SaveRules
from hf_ckpt.regions.selective.selective_recompute import SelectiveStack, recompute_selectively
from hf_ckpt.regions.tiling import Tiling, run_tiled
from hf_ckpt.regions.value_proof import ValueProof
from hf_ckpt.structure.layers import Layer, Stack, is_sharded, is_unit

# A module, and what makes it carry its part of the plan.
Setting = tuple[nn.Module, Callable[[], None]]


# By stack and `layer_idx`: what moves the layer's activations, and the layer's position among those that use it.
OffloadedLayers = dict[tuple[str, int], tuple[Offloader, int]]


def offloaded_layers(plan: Plan) -> OffloadedLayers:
    """Return the layers that offload, with one `Offloader` for each `offload` option that the plan names."""
    places: dict[Offload, list[tuple[str, int]]] = {}
    for stack in plan.stacks:
        for layer_idx, entry in enumerate(stack.layers):
            if entry.offload is not None:
                places.setdefault(entry.offload, []).append((stack.path, layer_idx))
    found: OffloadedLayers = {}
    for offload, layers in places.items():
        offloader = Offloader(offload, len(layers))
        found.update({layer: (offloader, position) for position, layer in enumerate(layers)})
    return found


def set_on_stack(
    model: nn.Module, patch: StackPatch, plan: StackPlan, stack: Stack, offloaded: OffloadedLayers, proof: ValueProof
) -> None:
    """Make the layers of one stack carry their entries; `patch` notes what is set. FSDP may have sharded the model."""
    stack_settings = _StackSettings(patch, stack, offloaded, proof)
    settings: dict[nn.Module, list[Callable[[], None]]] = {}
    for entry, layer in zip(plan.layers, stack.layers, strict=True):
        for module, make in stack_settings.of_layer(entry, layer):
            settings.setdefault(module, []).append(make)
    if is_sharded(model):
        from hf_ckpt.distributed import fsdp

        fsdp.set_in_place(model, settings)
        _follow_shards(fsdp.shards(model), stack)
    else:
        for make in chain.from_iterable(settings.values()):
            make()
        patch.watch_above(model)
    in_segments = [idx for idx, entry in enumerate(plan.layers) if entry.segment is not None]
    if in_segments:
        patch.segment_hooks = SegmentHooks(stack_settings.runner, in_segments)


def _follow_shards(shards: Mapping[nn.Module, Sequence[Values]], stack: Stack) -> None:
    """Let regions read their shares of the weights: the whole ones are others each time they are gathered."""
    for layer in stack.layers:
        for module in layer.module.modules():
            state = module.__dict__.get(STATE)
            if state is not None:
                state.use_shards([read for inner in module.modules() for read in shards.get(inner, ())])


def _let_go(unit: nn.Module) -> None:
    """See `fsdp.let_go`. A function of a module: copies of a model and pickles hold it."""
    if is_unit(unit):
        from hf_ckpt.distributed import fsdp

        fsdp.let_go(unit)


def kinds_of_modules(module: nn.Module) -> tuple[tuple[str, type[nn.Module]], ...]:
    """Return what is equal for modules that are proven alike: one of them is held to the original."""
    return tuple((name, type(inner)) for name, inner in module.named_modules())


class _StackSettings:
    """What to set for the layers of one stack, and what these layers share."""

    def __init__(self, patch: StackPatch, stack: Stack, offloaded: OffloadedLayers, proof: ValueProof) -> None:
        self._patch = patch
        self._stack = stack
        self._offloaded = offloaded
        self._proof = proof
        self._selection = SelectiveStack(stack.path)
        self.runner = SegmentRunner(_let_go)

    def of_layer(self, entry: LayerPlan, layer: Layer) -> Iterator[Setting]:
        path = f"{self._stack.path}.{layer.layer_idx}"
        tiled: list[str] = []
        if entry.tiles is not None:
            tiled = tiled_modules(layer)
            for name in tiled:
                part = f"{path}.{name}"
                tiling = Tiling(entry.tiles, proof=self._proof.region(part))
                self._patch.tilings.append(tiling)
                yield self._forward(part, layer.submodule(name), partial(run_tiled, tiling))
        if entry.mode is not Mode.NONE:
            names = _parts_of(layer).get(entry.mode.value)
            for module in (layer.module,) if names is None else map(layer.submodule, names):
                yield module, partial(self._let_go_of_inputs, module)
        if entry.mode in WHOLE_LAYER_MODES:
            yield from self._whole(entry, layer, path)
        elif entry.mode is Mode.ATTENTION:
            self._patch.drops_cache = True
            yield from self._parts(entry, path, layer, layer.attention)
        elif entry.mode is Mode.FFN and layer.ffn_is_inline:
            yield from self._around_attention(entry, layer, path)
        elif entry.mode is Mode.FFN:
            # What runs in tiles is recomputed already.
            yield from self._parts(entry, path, layer, tuple(name for name in layer.ffn if name not in tiled))

    def _whole(self, entry: LayerPlan, layer: Layer, path: str) -> Iterator[Setting]:
        region: Region = recompute
        if entry.segment is not None:
            link = partial(run_in_segment, self.runner, entry.segment, layer.layer_idx, entry.nested)
            region = self._proven(entry, path, layer.module, partial(link, snapshots=entry.snapshots))
            yield self._region(path, layer.module, region, _parts_of(layer))
            return
        host = self._offloaded.get((self._stack.path, layer.layer_idx))
        before = self._offloaded.get((self._stack.path, layer.layer_idx - 1))
        if entry.mode in SELECTIVE_MODES:
            saves = SaveRules.of(entry.mode.value, entry.save)
            keeper = None if host is None else OffloadKeeper(*host)
            region = partial(recompute_selectively, self._selection, saves, keeper)
            yield layer.module, partial(self._place_hooks, layer.module, saves)
        if host is not None:
            region = partial(run_offloaded, *host, region)
        elif before is not None:
            region = partial(run_with_prefetch_hook, before[0], region)
        yield self._region(path, layer.module, self._proven(entry, path, layer.module, region), _parts_of(layer))

    def _place_hooks(self, module: nn.Module, saves: SaveRules) -> None:
        self._patch.hooks.extend(self._selection.hooks(module, saves))

    def _let_go_of_inputs(self, module: nn.Module) -> None:
        self._patch.hooks.extend(let_go_of_inputs(module))

    def _around_attention(self, entry: LayerPlan, layer: Layer, path: str) -> Iterator[Setting]:
        kept = KeptModules()
        region = self._proven(entry, path, layer.module, partial(recompute_around, kept))
        yield self._region(path, layer.module, region, _parts_of(layer))
        for name in layer.attention:
            yield self._forward(f"{path}.{name}", layer.submodule(name), partial(run_kept, kept))

    def _parts(self, entry: LayerPlan, path: str, layer: Layer, names: tuple[str, ...]) -> Iterator[Setting]:
        for name in names:
            part = f"{path}.{name}"
            region = self._proven(entry, part, layer.submodule(name), recompute, name)
            # The other part has none of its modules.
            others: OtherModes = {mode: () for mode, part_names in _parts_of(layer).items() if name not in part_names}
            yield self._forward(part, layer.submodule(name), partial(run_region, region), others)

    def _proven(self, entry: LayerPlan, path: str, module: nn.Module, region: Region, part: str = "") -> Region:
        """Return the region with its proofs. Of those that treat equal modules alike, one is held to the original."""
        proof = self._proof.region(path, (self._stack.path, part, entry.alone, kinds_of_modules(module)))
        return partial(run_region_proven, proof, region)

    def _region(self, path: str, module: nn.Module, region: Region, modes: OtherModes) -> Setting:
        return module, partial(self._patch.make_region, path, module, region, modes)

    def _forward(self, path: str, module: nn.Module, run: partial[Any], modes: OtherModes | None = None) -> Setting:
        return module, partial(self._patch.set_forward, path, module, run, modes)


def _parts_of(layer: Layer) -> OtherModes:
    """Return the modes that recompute some modules of a layer alone, with those."""
    modes = {Mode.ATTENTION.value: layer.attention, Mode.FFN.value: () if layer.ffn_is_inline else layer.ffn}
    return {mode: names for mode, names in modes.items() if names}
