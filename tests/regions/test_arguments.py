"""Arguments reach a layer as they are, but for caches of transformers; what a layer changes is refused by name."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor, nn
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.modeling_layers import GradientCheckpointingLayer

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.regions.arguments import GivenBits, is_cache, is_filled
from tests import exactness, plain_models, zoo

pytestmark = pytest.mark.core

every_policy = pytest.mark.parametrize("policy", ["full", "segments_2", "nested"])
by_each_way = pytest.mark.parametrize("by", ["position", "keyword"])
SCALE = torch.linspace(0.5, 2.0, plain_models.WIDTH)


@pytest.fixture(autouse=True)
def _weights_and_inputs_are_the_same_each_time() -> None:
    torch.manual_seed(0)


class Giving(plain_models.Decoder):
    """Hands each block what `make` makes for the forward."""

    def __init__(self, block: type[nn.Module], make: Callable[[], Any], by: str = "keyword") -> None:
        super().__init__([block() for _ in range(4)])
        self.make, self.by = make, by
        self.given: Any = None

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        self.given = self.make()
        hidden = self.embedding(hidden)
        for block in self.blocks:
            hidden = block(hidden, self.given) if self.by == "position" else block(hidden, given=self.given)
        return hidden


def giving(block: type[nn.Module], make: Callable[[], Any], by: str = "keyword") -> zoo.Case:
    return plain_models.case(Giving(block, make, by))


# --- What is no cache of transformers reaches the layer. ---


class RopeCache:
    """No key/value cache, whatever its name says."""

    def __init__(self) -> None:
        self.scale = SCALE


class TableCache(dict[str, Tensor]):
    """Another one."""


@dataclass
class Tables:
    scale: Tensor = field(default_factory=lambda: SCALE)


class UsersCache(DynamicCache):
    """A subclass of a real one, which holds more."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = SCALE


DynamicTables = type("HybridMambaAttentionDynamicCache", (Tables,), {"__module__": "transformers_modules.remote"})


def scale_of(value: Any) -> Tensor:
    """Find the scale, wherever it is."""
    while not isinstance(value, Tensor):
        items = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else None
        value = value.scale if items is None else next(iter(items))
    return value


class Scaled(plain_models.Block):
    def forward(self, hidden: Tensor, given: Any = None) -> Tensor:
        return super().forward(hidden * scale_of(given))


class ScaledBehindSeam(GradientCheckpointingLayer):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mlp = plain_models.Attention(), plain_models.Mlp()

    def forward(self, hidden: Tensor, given: Any = None) -> Tensor:
        hidden = self.attention(hidden * scale_of(given))
        return hidden + self.mlp(hidden)


NO_CACHES: dict[str, Callable[[], Any]] = {
    "by its name": RopeCache,
    "a dict": lambda: TableCache(scale=SCALE),
    "a dataclass": Tables,
    "of remote code": DynamicTables,
    "a subclass of a real one": UsersCache,
    "in a tuple": lambda: (RopeCache(),),
    "in a list": lambda: [RopeCache(), 3],
    "in a dict": lambda: {"rope": RopeCache()},
}


@by_each_way
@pytest.mark.parametrize("block", [Scaled, ScaledBehindSeam])
@pytest.mark.parametrize("kind", NO_CACHES)
def test_object_that_is_no_cache_reaches_recomputed_layers(kind: str, block: type[nn.Module], by: str) -> None:
    case = giving(block, NO_CACHES[kind], by)
    for policy in exactness.RECOMPUTING:
        assert exactness.check(case, policy) == []


def named_block(name: str) -> type[nn.Module]:
    """Return a layer behind transformers' seam that calls what it reads `name`."""

    class Named(ScaledBehindSeam):
        def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
            assert kwargs[name] is not None
            return super().forward(hidden, kwargs[name])

    return Named


@pytest.mark.parametrize("make", [lambda: SCALE, lambda: (SCALE, SCALE), RopeCache, UsersCache])
@pytest.mark.parametrize("name", ["past_key_values", "layer_past", "cache"])
def test_argument_that_is_named_like_a_cache_reaches_recomputed_layers(name: str, make: Callable[[], Any]) -> None:
    # transformers' seam goes by the name, and takes it out.
    if name != "cache" and Version(transformers.__version__) < Version("5.17"):
        pytest.skip("what it has taken out is gone for good: the seam calls us after that")
    case = plain_models.case(plain_models.Decoder([named_block(name)() for _ in range(4)]))
    case = zoo.Case("plain", case.model, {**case.inputs, name: make()})
    before = [dict(vars(block)) for block in case.model.blocks]
    for policy in exactness.RECOMPUTING:
        assert exactness.check(case, policy) == []
    assert [dict(vars(block)) for block in case.model.blocks] == before


# --- Caches of transformers do not. ---


def hybrid() -> Any:
    """As jamba's in transformers 5.0, which is no subclass of `Cache`."""
    made: Any = type("HybridMambaAttentionDynamicCache", (), {"__module__": "transformers.models.jamba.modeling_jamba"})
    return made()


CACHES: dict[str, Callable[[], Any]] = {
    "dynamic": DynamicCache,
    "encoder and decoder": lambda: EncoderDecoderCache(DynamicCache(), DynamicCache()),
    "hybrid": hybrid,
}


@pytest.mark.parametrize("kind", CACHES)
def test_caches_of_transformers_are_known(kind: str) -> None:
    assert is_cache(CACHES[kind]())


@pytest.mark.parametrize("make", [*NO_CACHES.values(), Tables, dict, lambda: None, lambda: torch.zeros(2)])
def test_nothing_else_is_a_cache(make: Callable[[], Any]) -> None:
    assert not is_cache(make())


def caching_block(name: str, seam: type[nn.Module]) -> type[nn.Module]:
    """Return a layer that appends to a cache, which it calls `name`."""

    class Caching(seam):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mlp = plain_models.Attention(), plain_models.Mlp()

        def forward(self, hidden: Tensor, **kwargs: Any) -> Tensor:
            if (cache := kwargs.get(name)) is not None:
                cache.update(hidden[:, None], hidden[:, None], 0)
            return hidden + self.mlp(self.attention(hidden))

    return Caching


@pytest.mark.parametrize("seam", [nn.Module, GradientCheckpointingLayer])
@pytest.mark.parametrize("name", ["past_key_values", "cache", "cache_params", "memory"])
def test_layer_appends_to_no_cache_twice_whatever_it_calls_it(name: str, seam: type[nn.Module]) -> None:
    # transformers clears `past_key_values` in its own checkpointing until 5.23, and `cache` from 5.24 on.
    blocks = [caching_block(name, seam)() for _ in range(4)]
    case = plain_models.case(plain_models.Decoder(blocks))
    expected = exactness.step(case)
    for policy in ("full", "segments_2", "nested"):
        cache = DynamicCache()
        cached = zoo.Case("plain", case.model, {**case.inputs, name: cache})
        with exactness.apply(case.model, policy):
            # The model that runs the layers is handed the cache: the user has asked for it.
            with pytest.raises(UnsupportedError, match="handed a key/value cache"):
                exactness.step(cached)
            hidden = case.inputs["hidden"].requires_grad_()
            blocks[0](hidden, **{name: cache}).sum().backward()
        assert cache.get_seq_length() == 0
        assert exactness.differences(expected, exactness.step(case)) == []


def growing() -> Cache:
    return DynamicCache()


def of_two() -> Cache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


def fixed() -> Cache:
    return StaticCache(zoo.build("llama").model.config, max_cache_len=plain_models.LENGTH + 3)


class WithPrefix(plain_models.Decoder):
    """Makes its cache itself, with keys in it at some indices."""

    def __init__(self, make: Callable[[], Cache], filled: int) -> None:
        blocks = [caching_block("past", nn.Module)() for _ in range(4)]
        for index, block in enumerate(blocks):
            block.attention.layer_idx = index
        super().__init__(blocks)
        self.make, self.filled = make, filled

    def forward(self, hidden: Tensor, **kwargs: object) -> Tensor:
        cache = self.make()
        states = torch.ones(1, 2, 3, 8)
        getattr(cache, "self_attention_cache", cache).update(states, states, self.filled)
        return super().forward(hidden, past=cache)


@pytest.mark.parametrize("make", [growing, of_two, fixed])
@every_policy
def test_cache_that_a_model_has_filled_for_a_layer_is_refused(make: Callable[[], Cache], policy: str) -> None:
    for filled in (0, 1):
        case = plain_models.case(WithPrefix(make, filled))
        with exactness.apply(case.model, policy), pytest.raises(UnsupportedError) as raised:
            zoo.loss(case.model, case.inputs)
        assert str(raised.value).startswith(f"blocks.{filled} is to be recomputed, but it is handed a key/value cache ")


def test_state_of_a_linear_layer_counts_as_filled() -> None:
    config = zoo.build("qwen3_next").model.config
    cache, layer = DynamicCache(config=config), nn.Module()
    if not hasattr(cache, "update_conv_state"):
        pytest.skip("this transformers has caches of another class for it")
    layer.layer_idx = config.layer_types.index("linear_attention")  # type: ignore[assignment]
    assert not is_filled(cache, layer)
    cache.update_conv_state(torch.ones(1, 2, 4), layer.layer_idx)
    assert is_filled(cache, layer)
    layer.layer_idx += 1
    assert not is_filled(cache, layer)


# --- What a layer changes. ---


class Memory:
    """As a key/value cache of remote code."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []

    def append(self, hidden: Tensor) -> None:
        self.keys.append(hidden.detach())


class Slotted:
    __slots__ = ("last", "unset")

    def __init__(self) -> None:
        self.last: Tensor | None = None

    def append(self, hidden: Tensor) -> None:
        self.last = hidden.detach()


@dataclass
class Counter:
    number: int = 0

    def append(self, hidden: Tensor) -> None:
        self.number += 1


class Summed(Tables):
    def append(self, hidden: Tensor) -> None:
        self.scale += 1


class Noise(torch.Generator):
    def append(self, hidden: Tensor) -> None:
        torch.rand(1, generator=self)


class Counts(np.ndarray):
    def append(self, hidden: Tensor) -> None:
        self += 1


class Wrapped(Memory):
    def __init__(self, inner: Any, append: Callable[[Any, Tensor], Any]) -> None:
        self.inner, self._append = inner, append

    def append(self, hidden: Tensor) -> None:
        self._append(self.inner, hidden.detach())


def in_closure() -> Callable[[Tensor], None]:
    seen: list[Tensor] = []
    return lambda hidden: seen.append(hidden.detach())


def update_cache(cache: Cache, hidden: Tensor) -> None:
    cache.update(hidden[:, None], hidden[:, None], 0)


CHANGED: dict[str, Callable[[], Any]] = {
    "an object that appends": Memory,
    "an object with slots": Slotted,
    "a dataclass that counts": Counter,
    "a tensor inside": lambda: Summed(torch.zeros(())),
    "a deque": deque,
    "a generator": Noise,
    "an array": lambda: np.zeros(3).view(Counts),
    "a method": lambda: [].append,
    "a closure": in_closure,
    "a partial": lambda: partial(list.append, []),
    "a set": lambda: Wrapped(set(), lambda seen, hidden: seen.add(float(hidden.sum()))),
    "a list in a dict": lambda: Wrapped({"seen": []}, lambda seen, hidden: seen["seen"].append(hidden)),
    "a dict of the library's": lambda: Wrapped(UserDict(), lambda seen, hidden: seen.update({len(seen): hidden})),
    "a real cache": lambda: Wrapped((DynamicCache(),), lambda caches, hidden: update_cache(caches[0], hidden)),
    "a real cache in a dict": lambda: Wrapped(
        {"a": DynamicCache()}, lambda them, hidden: update_cache(them["a"], hidden)
    ),
    "a generator function": lambda: (number for number in range(99)),
}


class Appending(plain_models.Block):
    def forward(self, hidden: Tensor, given: Any = None) -> Tensor:
        add = next if hasattr(given, "__next__") else given if callable(given) else given.append
        add(given if add is next else hidden)
        return super().forward(hidden)


@every_policy
@pytest.mark.parametrize("kind", CHANGED)
def test_object_that_a_layer_changes_is_refused_in_the_forward(kind: str, policy: str) -> None:
    case = giving(Appending, CHANGED[kind])
    # With and without the proof, which would only see what changes a value.
    for prove in ("first_step", "off"):
        with exactness.apply(case.model, policy, prove=prove), pytest.raises(UnsupportedError) as raised:
            zoo.loss(case.model, case.inputs)
        assert str(raised.value).startswith("blocks.0 is to be recomputed, but it ")
        assert str(raised.value).endswith(
            " that it is given, or another module does: the argument given. Recomputing it would give other values. "
            'Use mode "none" for the layer, or "attention" or "ffn", which recompute a part of it each.'
        )


def test_real_cache_in_a_tuple_is_appended_to_once_and_refused() -> None:
    class Caching(plain_models.Block):
        def forward(self, hidden: Tensor, given: Any = None) -> Tensor:
            update_cache(given[0], hidden)
            return super().forward(hidden)

    case = giving(Caching, lambda: (DynamicCache(), None), by="position")
    message = r"blocks\.0 .* changes a tuple .*: the argument given\."
    with exactness.apply(case.model, "full"), pytest.raises(UnsupportedError, match=message):
        zoo.loss(case.model, case.inputs)
    assert case.model.given[0].get_seq_length() == plain_models.LENGTH


def test_object_that_a_layer_changes_from_its_second_step_on_is_refused_there() -> None:
    case = giving(Appending, lambda: memory)
    memory: Any = Wrapped([], lambda seen, hidden: None)
    with exactness.apply(case.model, "full"):
        exactness.step(case)
        memory._append = list.append
        with pytest.raises(UnsupportedError, match="changes a Wrapped that it is given"):
            exactness.step(case)
    assert len(memory.inner) == 1


def test_object_that_a_layer_changes_is_no_matter_around_its_parts() -> None:
    memory = Memory()
    case = giving(Appending, lambda: memory)
    with exactness.apply(case.model, "ffn"):
        exactness.step(case)
    assert len(memory.keys) == 4


# --- Dictionaries that layers hand values on in. ---


class HandingOn(plain_models.Block):
    """Reads what the layers before wrote, and writes; another key each time it runs."""

    def forward(self, hidden: Tensor, given: Any = None) -> Tensor:
        hidden = super().forward(hidden + sum(given.values()))
        given[len(given)] = hidden.tanh()
        return hidden


@pytest.mark.parametrize("make", [dict, OrderedDict, UserDict])
@every_policy
def test_values_in_a_dictionary_are_those_of_the_forward_and_written_once(make: type, policy: str) -> None:
    case = giving(HandingOn, make)
    expected = exactness.step(case)
    with exactness.apply(case.model, policy):
        assert exactness.differences(expected, exactness.step(case)) == []
        assert list(case.model.given) == [0, 1, 2, 3]


# --- What others change between the forward and the recomputation. ---


def shift(tensor: Tensor) -> None:
    tensor.add_(1.0)


OTHERS: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
    "a tensor in a dict": (lambda: {"scale": SCALE.clone()}, lambda given: shift(given["scale"])),
    "a tensor in a tuple in a tuple": (lambda: ((SCALE.clone(),),), lambda given: shift(given[0][0])),
    "a tensor of an object": (lambda: Tables(SCALE.clone()), lambda given: shift(given.scale)),
    "an attribute": (Tables, lambda given: setattr(given, "scale", SCALE + 1)),
    "an item": (lambda: [SCALE], lambda given: given.__setitem__(0, SCALE + 1)),
}


@every_policy
@pytest.mark.parametrize("kind", OTHERS)
def test_change_behind_an_argument_is_refused(kind: str, policy: str) -> None:
    make, change = OTHERS[kind]
    case = giving(Scaled, make)
    with exactness.apply(case.model, policy):
        # Not only in the first step.
        exactness.step(case)
        loss = zoo.loss(case.model, case.inputs)
        change(case.model.given)
        with pytest.raises(UnsupportedError, match=r"blocks\.[0-3] is to be recomputed, but .*: the argument given\."):
            loss.backward()


def test_memory_that_another_tensor_has_taken_is_no_write() -> None:
    tensor = torch.zeros(64)
    bits, address = GivenBits([tensor]), tensor.data_ptr()
    assert bits.differ([tensor.view(64).fill_(1.0)]) is True
    del tensor
    others = [torch.full((64,), 2.0) for _ in range(64)]
    # The allocator hands it out again, as a recomputation finds it.
    taken = next((each for each in others if each.data_ptr() == address), others[0])
    assert bits.differ([taken]) is False
