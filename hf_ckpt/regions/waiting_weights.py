"""Frozen weights that wait on the host, and are copied to the device each time that their layer runs.

A frozen layer's weights are read twice in a micro-batch, in forward and in recomputation and backward, in an order that
is known. Nothing changes them, so that nothing is copied back. All that waits of a layer lies in one piece of pinned
host memory, and is copied in one piece into memory of the device, while the layers before it compute.

Note on storages. Each layer has a device storage of its own, for as long as the plan is in force. It is emptied
(resized to nothing) when others need its room, and filled with the same bytes before the layer's next use. Layers must
not share one: what autograd keeps of a forward may be a view of the weight that no saved-tensor hook sees
(`MatMul4Bit` of bitsandbytes has it on its `ctx`), and the first forward's nodes run in backward, whatever is
recomputed. Were the next layer's weights in that storage by then, gradients would be wrong without an error.

Note on who looks. Except while its layer runs, `parameter.data` is the tensor on the host: who reads an emptied storage
ends the process. The parameter stays the same object with the same version, name, dtype and shape, and so does what
bitsandbytes keeps beside it.

Note on streams. A storage is resized on the stream that computes, and filled on the wire's stream, which waits for what
that stream was given before: for the layer that had the memory until then. The stream that computes waits for the copy
where the layer begins. Nothing waits on the host.

Note on embeddings. A lookup reads one row for each token, and no other part of its table. So an embedding's weight
stays in host memory, and the parameter is that memory as a tensor of the device, which reads the rows over the link
(`Wire.map`). The module runs as it is, with its hooks: nothing is fetched, nothing can come late, and the host need not
wait for the tokens of a batch, as it had to if it looked up the rows itself.

Note on order. Autograd runs the nodes of later layers first, on one thread for each device. So where backward comes to
the output of a layer, all layers behind it have done theirs.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from hf_ckpt.errors import RecomputationError
from hf_ckpt.policy.options import Weights
from hf_ckpt.regions.execution_state import is_in_backward
from hf_ckpt.regions.fingerprints import unobserved
from hf_ckpt.regions.offload.cuda import CudaWire
from hf_ckpt.regions.offload.host_memory import HostLimits
from hf_ckpt.regions.offload.transfer import AsyncCopy, Buffer, Wire
from hf_ckpt.structure.four_bit_tensor import holder_of
from hf_ckpt.upstream.bitsandbytes import quantized_tensors
from hf_ckpt.upstream.torch import FakeTensor, queue_callback, storage_id, tree_leaves

# Kernels ask for aligned operands; the caching allocator gives no less.
_ALIGNMENT = 512

# Bytes below which what a quantised weight needs beside it stays on the device: all of them are a share of the weight.
_SMALL = 2**20


@dataclass(slots=True, eq=False)
class _Place:
    """Where a waiting tensor lies in the memory of its layer, and who else is the same tensor."""

    tensors: list[Tensor]  # The parameter first. The others are the same bytes under other names.
    on_host: Tensor
    on_device: Tensor
    version: int

    @property
    def parameter(self) -> Tensor:
        return self.tensors[0]

    def is_as_fetched(self) -> bool:
        """Whether the parameter, in use, is what was fetched."""
        return self.is_shown(self.on_device) and self.parameter._version == self.version

    def is_shown(self, shown: Tensor) -> bool:
        """Whether the parameter is this tensor, and nobody has put something else in its place."""
        return self.parameter.data_ptr() == shown.data_ptr()


class LayerWeights:
    """What waits of one layer.

    Args:
        name: of the layer, for messages.
        waiting: its tensors, as `waiting_tensors` returns them.
        device: where the layer runs.
        in_place: the device reads them where they wait. See the note on embeddings.
    """

    def __init__(
        self, name: str, waiting: Sequence[tuple[str, list[Tensor]]], device: torch.device, *, in_place: bool = False
    ) -> None:
        self.name = name
        self.device = device
        self._waiting = list(waiting)
        self._in_place = in_place
        self._reset()

    def _reset(self) -> None:
        self._places: list[_Place] = []
        self._buffer: Buffer | None = None
        self._memory: Tensor | None = None
        self._copy: AsyncCopy | None = None
        self.is_on_device = False  # Its storage is filled, or being filled.
        self.on_resize: Callable[[int], None] = lambda num_bytes: None  # Told of the device's memory.
        self._num_proofs = 0
        self.is_in_use = False  # The parameters are views of it.

    def __getstate__(self) -> dict[str, Any]:
        # A copy of the model has its own tensors, on the host, and packs them when they are first used.
        return {"name": self.name, "waiting": self._waiting, "device": self.device, "in_place": self._in_place}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy begins as a new one

    @property
    def num_bytes(self) -> int:
        """Bytes on the host, and of the device where they are."""
        return packed_bytes([tensors[0] for _, tensors in self._waiting])

    @property
    def names(self) -> list[str]:
        """The names of the parameters below the layer."""
        return [name for name, _ in self._waiting]

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that wait."""
        for _, tensors in self._waiting:
            yield from tensors

    def memory(self) -> Iterator[Tensor]:
        """Yield the memory on the host and that of the device, as bytes."""
        if self._buffer is not None and self._memory is not None:
            yield from (self._buffer.memory.bytes, self._memory)

    @property
    def is_packed(self) -> bool:
        """Whether they lie on the host already."""
        return self._buffer is not None

    def pack(self, wire: Wire, limits: HostLimits, held_bytes: int) -> None:
        """Move what waits into one piece of host memory, and free it on the device.

        Raises:
            HostMemoryError: the host does not have it, or does not pin it.
        """
        limits.check(self.num_bytes, held_bytes)
        try:
            buffer = Buffer(wire.allocate(self.num_bytes, in_forks=True))
        except (OSError, RuntimeError) as error:
            raise limits.allocation_error(self.num_bytes, held_bytes, error) from error
        # Never in inference mode, whose tensors nobody else could use.
        with torch.inference_mode(False), torch.no_grad():
            if self._in_place:
                memory = wire.map(buffer.memory, self.device)
            else:
                memory = torch.empty(self.num_bytes, dtype=torch.uint8, device=self.device)
            start, places = 0, []
            for _, tensors in self._waiting:
                first, end = tensors[0], start + tensors[0].nbytes
                on_host, on_device = (_like(first, each[start:end]) for each in (buffer.memory.bytes, memory))
                places.append(_Place(tensors, on_host, on_device, first._version))
                start = _aligned(end)
            if not self._in_place:
                # Views cannot be made of an empty storage.
                memory.untyped_storage().resize_(0)
            for place in places:
                place.on_host.copy_(place.parameter)
        self._buffer, self._memory, self._places = buffer, memory, places
        for place in places:
            self._show(place, self._at_rest(place))

    def _at_rest(self, place: _Place) -> Tensor:
        return place.on_device if self._in_place else place.on_host

    def prove(self) -> None:
        """Hold what the layer reads, in its next forward and backward, against what lies on the host."""
        self._num_proofs = 1 if self._in_place else 2

    def _check_values(self) -> None:
        # Where a layer has written to its weight, or put another in its place, that is what it read.
        if not self._num_proofs or not all(place.is_as_fetched() for place in self._places):
            return
        self._num_proofs -= 1
        # After the layer has run: what it read is still there. The host's sums are taken anew: a parameter may have
        # been unfrozen or replaced since, or written to by its `data`, which counts no version.
        if any(_sum_of(place.on_device) != _sum_of(place.on_host) for place in self._places):
            raise RecomputationError(
                f"The frozen weights of {self.name} wait on the host (weights: cpu), and what its forward or backward "
                "read on the device was something else: a copy came late, or went elsewhere. This is a fault of "
                "hf_ckpt: please report it, and leave weights out of the policy."
            )

    def look_up(self) -> None:
        """Have what is read in place as it should be, before it is read."""
        self._check_values()
        for place in list(self._places):
            if place.parameter.requires_grad:
                # Unfrozen: the optimizer steps it on the device from now on.
                self._show(place, place.on_device.clone())
                self._places.remove(place)

    def fetch(self, wire: Wire) -> None:
        """Start copying to the device. Its memory is that of the current stream."""
        assert self._memory is not None, "packed before"
        assert self._buffer is not None, "packed before"
        wire.check(self.device)
        storage = self._memory.untyped_storage()
        storage.resize_(self._memory.numel())
        self.on_resize(self._memory.numel())
        self.is_on_device = True
        try:
            # A region must not take the copy for one of its layer's operators.
            with unobserved():
                self._copy = wire.fill(self._memory, self._buffer)
        except BaseException:
            self.free()
            raise

    def use(self, wire: Wire) -> None:
        """Let the parameters be what was fetched; the current stream waits for the copy."""
        if self.is_in_use:
            return
        self.is_in_use = True
        if self._copy is not None:
            wire.wait(self._copy, self.device)
            self._copy = None
        for place in list(self._places):
            if not place.is_shown(place.on_host):
                # Replaced: by another's tensor, which stays where it is.
                self._places.remove(place)
            elif place.parameter.requires_grad:
                # Unfrozen: the optimizer steps it on the device from now on.
                self._show(place, place.on_device.clone())
                self._places.remove(place)
            else:
                self._show(place, place.on_device)

    def rest(self) -> None:
        """Let the parameters be what lies on the host. The device's memory stays filled."""
        if not self.is_in_use:
            return
        self.is_in_use = False
        try:
            self._check_values()
        finally:
            self._show_host()

    def _show_host(self) -> None:
        for place in list(self._places):
            if not place.is_shown(place.on_device):
                # A layer may convert its weight when it first runs.
                self._places.remove(place)
                continue
            if place.parameter._version != place.version:
                # Written to by its own layer. The host's thread waits.
                place.version = place.parameter._version
                place.on_host.copy_(place.on_device)
            self._show(place, place.on_host)

    def free(self) -> None:
        """Give the device's memory back, for what is given to the current stream from now on."""
        if self._memory is None or not self.is_on_device:
            return
        if self._copy is not None:
            # Fetched for nothing: the memory's next use comes after the copy.
            self._copy.wait_home_stream()
            self._copy = None
        self.is_on_device = False
        self._memory.untyped_storage().resize_(0)
        self.on_resize(0)

    def bring_back(self) -> None:
        """Put everything where the layer runs, for good."""
        if self.is_packed:
            self._unpack(self.device)
            return
        for tensor in self.tensors():
            if tensor.device != self.device:
                tensor.data = tensor.data.to(self.device)

    def convert(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Follow what `fn` makes of a tensor of the device: another device to run on, another dtype."""
        waiting = list(self.tensors())
        for dtype in dict.fromkeys(tensor.dtype for tensor in waiting):
            probe = torch.empty(0, dtype=dtype, device=self.device)
            moved = fn(probe)
            if (moved.device, moved.dtype) == (probe.device, dtype):
                continue
            # The other device may want other host memory, and a storage of its own. Packed at the next use.
            if self.is_packed:
                self._unpack(torch.device("cpu"))
            self.device = moved.device
            for tensor in waiting:
                if tensor.dtype == dtype != moved.dtype:
                    tensor.data = tensor.data.to(moved.dtype)

    def _unpack(self, device: torch.device) -> None:
        """Let what waits be ordinary tensors on a device, and give the host's memory back."""
        buffer = self._buffer
        assert buffer is not None, "packed before"
        self.rest()
        self.free()
        buffer.synchronize()
        with torch.inference_mode(False), torch.no_grad(), unobserved():
            if self._memory is not None and not self._in_place:
                # A forward whose backward is to come has views of it, which end the process where it is empty. Where
                # nobody has, it is freed below.
                self._memory.untyped_storage().resize_(self._memory.numel())
                self._memory.copy_(buffer.memory.bytes)
            for place in self._places:
                if place.is_shown(self._at_rest(place)):
                    self._show(place, torch.empty_like(place.on_host, device=device).copy_(place.on_host))
        self._reset()
        if not self._in_place:
            # Else somebody may have kept a tensor of the device that lies there, in a `state_dict`.
            buffer.memory.free()

    @staticmethod
    def _show(place: _Place, shown: Tensor) -> None:
        for tensor in place.tensors:
            tensor.data = shown


def has_no_values(module: nn.Module) -> bool:
    """Whether a module is on `meta`, or one of a simulation."""
    return any(each.is_meta or isinstance(each, FakeTensor) for each in module.parameters())


def _like(tensor: Tensor, memory: Tensor) -> Tensor:
    """Return bytes [n] as a tensor of the same shape, strides and dtype."""
    return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _sum_of(tensor: Tensor) -> int:
    """Return a sum over the bits of a tensor that fills a piece of memory. The host waits for it."""
    with unobserved():
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
        words = flat[: flat.numel() // 4 * 4].view(torch.int32)
        return int(words.sum(dtype=torch.int64)) + int(flat[words.numel() * 4 :].sum(dtype=torch.int64))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def packed_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes that tensors take in one piece of memory."""
    end = 0
    for tensor in tensors:
        end = _aligned(end) + tensor.nbytes
    return end


# --- Which weights of a layer wait. ---

Memory = tuple[int, int]
"""Where a tensor begins: its storage, and its place there."""


def waiting_tensors(layer: nn.Module, owners: Counter[Memory]) -> tuple[list[tuple[str, list[Tensor]]], dict[str, str]]:
    """Return the tensors of a layer that can wait on the host, by name, and why others of its weights cannot.

    Args:
        layer: the layer.
        owners: of the whole model, by `owners_of`.
    """
    waiting: dict[Memory, tuple[str, list[Tensor]]] = {}
    staying: dict[str, str] = {}
    inside = owners_of(layer)
    for path, module in layer.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or parameter.ndim < 2 or parameter.requires_grad:
                # Norms and biases are small. What trains is read and written by the optimizer.
                continue
            where = f"{path}.{name}" if path else name
            held = holder_of(parameter)
            reason = _reason_to_stay(held, inside, owners)
            if reason is not None:
                staying[where] = reason
                continue
            _add(waiting, where, held)
            for beside in quantized_tensors(module, parameter):
                if _memory_of(beside) in waiting or beside.nbytes >= _SMALL:
                    _add(waiting, f"{where} (statistics)", beside)
    return list(waiting.values()), staying


def _add(waiting: dict[Memory, tuple[str, list[Tensor]]], name: str, tensor: Tensor) -> None:
    _, same = waiting.setdefault(_memory_of(tensor), (name, []))
    if not any(each is tensor for each in same):
        same.append(tensor)


def _memory_of(tensor: Tensor) -> Memory:
    return storage_id(tensor.untyped_storage()), int(tensor.storage_offset())


def owners_of(module: nn.Module) -> Counter[Memory]:
    """Return how many modules have each piece of memory as a parameter, inside of a module or a model."""
    # Also the same parameter in two modules.
    found = (parameter for inner in module.modules() for parameter in inner._parameters.values())
    return Counter(_memory_of(holder_of(parameter)) for parameter in found if parameter is not None)


_PLAIN = ("Tensor", "Parameter", "Params4bit", "Int8Params")


def _reason_to_stay(parameter: Tensor, inside: Counter[Memory], owners: Counter[Memory]) -> str | None:
    memory = _memory_of(parameter)
    if owners[memory] > inside[memory]:
        return "shared with another layer"
    return _reason_in_itself(parameter)


def _reason_in_itself(parameter: Tensor) -> str | None:
    if type(parameter).__name__ not in _PLAIN:
        return f"a {type(parameter).__name__}"
    if not parameter.is_contiguous() and not parameter.mT.is_contiguous():
        return "not in one piece"
    if parameter.device.type != "cpu" and parameter.untyped_storage().nbytes() > parameter.nbytes + _ALIGNMENT:
        # Its memory would not be free.
        return "a part of another tensor"
    return None


@dataclass(frozen=True)
class Table:
    """The weight of an embedding outside of the layers."""

    path: str
    parameter: Tensor
    modules: tuple[nn.Module, ...]  # Which look up in it: of an encoder-decoder there may be two.
    reason_to_stay: str | None

    def weights(self) -> LayerWeights:
        """Return the table as what waits."""
        memory, same = _memory_of(self.parameter), dict[int, Tensor]()
        for module in self.modules:
            same |= {id(each): each for each in module._parameters.values() if each is not None}
        tensors = [each for each in same.values() if _memory_of(each) == memory]
        return LayerWeights(self.path, [("weight", tensors)], self.parameter.device, in_place=True)


def tables_of(model: nn.Module, inside_layers: Iterable[nn.Module]) -> list[Table]:
    """Return the tables that tokens are looked up in: the input embedding, and others that are as large (Gemma 3n).

    Args:
        model: of transformers; there are none where it does not name its input embedding.
        inside_layers: modules that are not asked for.
    """
    inputs = _input_embedding(model)
    if inputs is None:
        return []
    modules = dict(model.named_modules())
    weight = inputs._parameters.get("weight")
    least, inside = 0 if weight is None else weight.nbytes, {id(each) for each in inside_layers}
    others = [each for each in modules.values() if isinstance(each, nn.Embedding) and id(each) not in inside]
    found: dict[Memory | nn.Module, Table] = {}
    for module in (inputs, *(each for each in others if weight is not None and each.weight.nbytes >= least)):
        path = next(path for path, each in modules.items() if each is module)
        parameter = module._parameters.get("weight")
        if not isinstance(module, nn.Embedding) or parameter is None:
            # An adapter stands around it, or a parametrisation.
            found[module] = Table(path, torch.empty(0), (), f"computed by {type(module).__name__}")
            continue
        found.setdefault(_memory_of(parameter), _table(path, parameter, modules))
    return list(found.values())


def _table(path: str, parameter: Tensor, modules: Mapping[str, nn.Module]) -> Table:
    memory = _memory_of(parameter)
    owners = {
        where: module
        for where, module in modules.items()
        if any(each is not None and _memory_of(each) == memory for each in module._parameters.values())
    }
    others = [where for where, module in owners.items() if not isinstance(module, nn.Embedding)]
    reason: str | None
    if parameter.requires_grad:
        reason = "trained"
    elif others:
        reason = f"tied to {others[0]}, which reads all of it"
    elif type(parameter).__name__ != "Parameter":
        reason = f"a {type(parameter).__name__}"
    else:
        reason = _reason_in_itself(parameter)
    return Table(path, parameter, tuple(owners.values()), reason)


def _input_embedding(model: nn.Module) -> nn.Module | None:
    for module in model.modules():
        if hasattr(module, "get_input_embeddings"):
            # Of models without one, or with several.
            with suppress(NotImplementedError, AttributeError):
                found: Any = module.get_input_embeddings()  # type: ignore[operator]  # a method, not a submodule
                return found if isinstance(found, nn.Module) else None
    return None


# --- The engine. ---


class WaitingWeights:
    """Moves the weights of the layers that wait, in the order in which the layers run.

    Lives on the hooks of the layers, and is copied with them. `tables` are read in place, each by its modules.
    """

    def __init__(
        self,
        settings: Weights,
        layers: Sequence[LayerWeights],
        tables: Sequence[tuple[LayerWeights, tuple[nn.Module, ...]]] = (),
    ) -> None:
        self.settings = settings
        self.layers = tuple(layers)
        self.tables = tuple(tables)
        self.modules: tuple[nn.Module, ...] = ()  # Of the layers.
        self.is_handed_over = False
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._wires: dict[str, Wire] = {}
        self._limits = HostLimits(self.settings.host_memory, trusts=self.settings.trust_host_memory)
        # The layers on the device, the one that was used last at the end. Another plan may have left some there.
        self._recent = [index for index, layer in enumerate(self.layers) if layer.is_on_device]
        self._forwards: list[int] = []  # The layers whose forward runs.
        self._last = -1  # The layer whose forward began last.
        self.backward: int | None = None  # The layer whose backward runs.
        self.num_fetched = 0

    def __getstate__(self) -> dict[str, Any]:
        names = ("settings", "layers", "tables", "modules")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy begins as a new one.
        self.__init__(state["settings"], state["layers"], state["tables"])  # type: ignore[misc]
        self.modules = state["modules"]

    def use_wire(self, wire: Wire) -> None:
        """Copy over this wire in place of the device's own, in tests. Nothing may be on the device."""
        self._wires = dict.fromkeys((each.device.type for each in self.weights), wire)

    @property
    def host_bytes(self) -> int:
        """Bytes that lie on the host."""
        return sum(each.num_bytes for each in self.weights if each.is_packed)

    @property
    def weights(self) -> list[LayerWeights]:
        """What waits of layers, and tables."""
        return [*self.layers, *(table for table, _ in self.tables)]

    def pack(self, *, proves: bool = False) -> None:
        """Move everything to the host. Raises `HostMemoryError`; what was moved by then is brought back.

        `proves`: hold what each layer reads against it, in its first forward and backward.
        """
        try:
            for each in self.weights:
                self.pack_one(each)
                if proves:
                    each.prove()
        except BaseException:
            self.bring_back()
            raise

    def bring_back(self) -> None:
        """Put the weights back where they were, unless another plan takes this one's place."""
        with self._lock:
            for each in () if self.is_handed_over else self.weights:
                each.bring_back()
            self._recent.clear()

    def place_hooks(self) -> Iterator[RemovableHandle]:
        """Place hooks on the layers' modules; yield the handles."""
        for index, module in enumerate(self.modules):
            # Around the hooks of others: those may read the weights too.
            yield module.register_forward_pre_hook(partial(_begin_forward, self, index), prepend=True)
            # Also where the forward raises.
            yield module.register_forward_hook(partial(_end_forward, self, index), always_call=True)
        for table, modules in self.tables:
            for module in modules:
                yield module.register_forward_pre_hook(partial(_look_up, self, table), prepend=True)

    def look_up(self, table: LayerWeights) -> None:
        """Have a table where rows can be looked up."""
        with self._lock:
            self.pack_one(table)
            table.look_up()

    def begin_forward(self, index: int) -> None:
        """Have a layer's weights on the device, and those of the next ones on their way."""
        with self._lock:
            if not self._forwards and index <= self._last:
                # Another pass: somebody may have written to what lies on the host.
                self._free_all()
            self._last = index
            self._forwards.append(index)
            self._use(index)
            self._fetch_ahead(range(index + 1, len(self.layers)))

    def end_forward(self, index: int, *, needs_backward: bool) -> None:
        """Let a layer's weights rest. Where a backward can follow, it will ask for them."""
        with self._lock:
            with suppress(ValueError):
                self._forwards.remove(index)
            if index not in self._forwards:
                self.layers[index].rest()
            if not needs_backward and index + 1 == len(self.layers):
                self._free_all()

    def begin_backward(self, index: int) -> None:
        """Have a layer's weights on the device until backward comes to the next one, whose weights start coming."""
        with self._lock:
            before = self.backward
            if before is not None and before not in (index, *self._forwards):
                self.layers[before].rest()
            self.backward = index
            self._use(index)
            self._fetch_ahead(range(index - 1, -1, -1))

    def end_backward(self) -> None:
        """Free the device of all weights, but of layers whose forward runs."""
        with self._lock:
            self._free_all()

    def _free_all(self) -> None:
        # Also what a backward has left that ended in an exception: autograd drops its callbacks then.
        self.backward = None
        for index in [index for index in self._recent if index not in self._forwards]:
            self.layers[index].rest()
            self.layers[index].free()
            self._recent.remove(index)

    def _use(self, index: int) -> None:
        layer = self.layers[index]
        self.pack_one(layer)
        self._fetch(index)
        layer.use(self._wire(layer))

    def _fetch_ahead(self, order: Iterable[int]) -> None:
        for index, _ in zip(order, range(self.settings.resident - 1), strict=False):
            self.pack_one(self.layers[index])
            self._fetch(index)

    def _fetch(self, index: int) -> None:
        layer = self.layers[index]
        if layer.is_on_device:
            self._recent.remove(index)
            self._recent.append(index)
            return
        unused = [other for other in self._recent if not self.layers[other].is_in_use]
        for other in unused[: max(0, len(self._recent) + 1 - self.settings.resident)]:
            # Before the next one asks for memory: the allocator hands it the same block.
            self.layers[other].free()
            self._recent.remove(other)
        layer.fetch(self._wire(layer))
        self._recent.append(index)
        self.num_fetched += 1

    def pack_one(self, weights: LayerWeights) -> None:
        """Move what waits of a layer to the host, if it is not there."""
        if not weights.is_packed:
            weights.pack(self._wire(weights), self._limits, self.host_bytes)

    def _wire(self, weights: LayerWeights) -> Wire:
        kind = weights.device.type
        if kind not in self._wires:
            self._wires[kind] = CudaWire() if kind == "cuda" else Wire()
        return self._wires[kind]


# --- Hooks of the layers. ---


def _is_recomputed(engine: WaitingWeights, index: int) -> bool:
    """Whether a layer runs again in its backward: its weights are there, and stay until that ends."""
    # A hook on a gradient may call the model in a backward, and train it.
    return index == engine.backward and is_in_backward()


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch publishes it without types
def _look_up(engine: WaitingWeights, table: LayerWeights, module: nn.Module, args: Any) -> None:
    engine.look_up(table)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def _begin_forward(engine: WaitingWeights, index: int, module: nn.Module, args: Any) -> None:
    if not _is_recomputed(engine, index):
        engine.begin_forward(index)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as above
def _end_forward(engine: WaitingWeights, index: int, module: nn.Module, args: Any, output: Any) -> None:
    if _is_recomputed(engine, index):
        return
    needs_backward = torch.is_grad_enabled()
    engine.end_forward(index, needs_backward=needs_backward)
    if needs_backward:
        leaves = [each for each in tree_leaves(output) if isinstance(each, Tensor)]
        for node in {each.grad_fn for each in leaves if each.grad_fn is not None}:
            node.register_prehook(partial(_begin_backward, engine, index))


def _begin_backward(engine: WaitingWeights, index: int, gradients: Any) -> None:
    if engine.backward is None:
        queue_callback(engine.end_backward)
    engine.begin_backward(index)
