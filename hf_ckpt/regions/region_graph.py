"""The graph of a region, for `original_proof`: where gradients leave it, and what else a backward would do there."""

from __future__ import annotations

import gc
import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from hf_ckpt.regions.module_state import gradient_hooks_away
from hf_ckpt.regions.put_back import put_container_back
from hf_ckpt.upstream.torch import FakeTensor, sequence_number, will_engine_execute_node

# What a gradient is for: an argument, by its place, or a weight, by its id.
Key = Hashable
# What the outputs of nodes stand for: arguments of a region.
Goals = dict[tuple[Node, int], Key]
_CAST = "ToCopyBackward0"
# Nodes, and which of the gradients that each returns is for what, with the node that gets it.
Edges = list[tuple[Node, list[tuple[int, Key, Node]]]]


def goals_of(arguments: Mapping[int | str, Any]) -> Goals:
    """Return what stands for the arguments that get a gradient; of a tensor that is given twice, its first place."""
    goals: Goals = {}
    for place, value in arguments.items():
        if isinstance(value, Tensor) and value.requires_grad:
            node, number, *_ = get_gradient_edge(value)
            goals.setdefault((node, number), place)
    return goals


def edges_of(outputs: Sequence[Tensor], goals: Goals, first_node: int) -> tuple[Edges, set[Node], set[Key]]:
    """Return the nodes between tensors and goals that hand gradients to a goal or to a leaf, and all nodes between.

    See Note [edges].

    `first_node` is the number of the first node that belongs here: what is older is reached by tensors that came
    another way, as through a container. The third value are the weights behind those: autocast keeps what it has cast.
    """
    earlier: set[Key] = set()
    edges: Edges = []
    nodes = deque(
        node
        for node in dict.fromkeys(tensor.grad_fn for tensor in outputs)
        if node is not None and sequence_number(node) >= first_node
    )
    seen = set(nodes)
    while nodes:
        node = nodes.popleft()
        targets: list[tuple[int, Key, Node]] = []
        for place, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            if (following, number) in goals:
                targets.append((place, goals[following, number], following))
            elif hasattr(following, "variable"):
                # Other leaves may have been made inside, for this run alone.
                if isinstance(following.variable, nn.Parameter):
                    targets.append((place, ("weight", id(following.variable)), following))
            elif following not in seen and sequence_number(following) >= first_node:
                seen.add(following)
                nodes.append(following)
            elif following not in seen:
                behind = (getattr(node, "variable", None) for node, _ in following.next_functions)
                earlier.update(("weight", id(each)) for each in behind if isinstance(each, nn.Parameter))
        if targets:
            edges.append((node, targets))
    return edges, seen, earlier


def leads_around(nodes: set[Node], goals: Goals, weights: set[Tensor]) -> bool:
    """Whether a backward through these nodes would reach one of the weights by nodes that were there before them."""
    # Those may belong to the backward that runs. To run such a node inside of itself hangs: torch locks it. Casts of
    # weights, which autocast keeps, are no others' nodes: they save nothing.
    todo = [
        following
        for node in nodes
        for following, number in node.next_functions
        if following is not None and following not in nodes and (following, number) not in goals
    ]
    seen: set[Node] = set()
    while todo:
        node = todo.pop()
        if node in seen or hasattr(node, "variable"):
            continue
        seen.add(node)
        behind = [following for following, _ in node.next_functions if following is not None]
        if node.name() != _CAST and any(getattr(each, "variable", None) in weights for each in behind):
            return True
        todo += behind
    return False


def is_held_elsewhere(nodes: set[Node], outputs: Sequence[Tensor]) -> bool:
    """Whether a tensor that one of these nodes has made is still there, besides the outputs: a hook collects it, say.

    Once a region has run, what it is to recompute is gone. Looks at all objects that are new, as long as no cycles
    are collected meanwhile, which would make them old. What only the graph holds, as the base of a view, is in Python's
    list of objects too; nothing of Python refers to it.
    """
    if any(isinstance(each, FakeTensor) for each in outputs):
        # Nobody collects tensors of a simulated step, whose events would take most of the time here.
        return False
    known = set(map(id, outputs))
    young = gc.get_objects(generation=0)
    # A hundred thousand objects have a few hundred types.
    kinds = {kind for kind in set(map(type, young)) if issubclass(kind, Tensor)}
    young = [each for each in young if type(each) in kinds]
    # Python 3.13 finds the tuple of a call among those who hold what is in it: this is that tuple.
    inside = tuple([each for each in young if id(each) not in known and each.grad_fn in nodes])
    holders = gc.get_referrers(*inside) if inside else []
    return any(each is not young and each is not inside and not isinstance(each, FrameType) for each in holders)


def is_asked(node: Node) -> bool:
    """Whether the backward that runs wants the gradient that a node gets: `torch.autograd.grad` names a few."""
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:
        # Of a leaf that `torch.autograd.grad` names.
        return False


def is_hooked(node: Node) -> bool:
    """Whether somebody has placed a hook on a node itself. Those on the tensor that it made are not seen."""
    for register in (node.register_hook, node.register_prehook):
        # The handle of one more hook leads to all of them.
        handle: Any = register(_nothing)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _nothing(*gradients: Any) -> None:
    return None


class HooksNoted(TorchFunctionMode):
    """Tells of each hook that is placed on the gradient of a tensor while it is entered.

    With `leaves_out` none is, but on weights: for runs that no backward goes through, where it would act on what was
    there before, as it does since the forward.
    """

    def __init__(self, on_hook: Callable[[], None], *, leaves_out: bool) -> None:
        super().__init__()
        self._on_hook = on_hook
        self._leaves_out = leaves_out

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch."""
        if function in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook):
            self._on_hook()
            # Those on weights are put back by who runs a region; see `gradient_hooks_put_back`.
            if self._leaves_out and not isinstance(args[0], nn.Parameter):
                return RemovableHandle(OrderedDict())
        return function(*args, **(kwargs or {}))


def hook_first(tensor: Tensor, hook: Any) -> None:
    """Place a gradient hook before those that are there."""
    hooks: Any = tensor._backward_hooks
    before = dict(hooks or {})
    if before:
        hooks.clear()
    tensor.register_hook(hook)  # type: ignore[no-untyped-call]  # upstream
    # torch calls them in the order in which they came to be there.
    (tensor._backward_hooks or {}).update(before)


def acts_in_backward(module: nn.Module) -> bool:
    """Whether a backward does more here than give gradients: in hooks, or to what weights hold. It would do it twice.

    Engines with fused kernels add the gradient of a weight to its `main_grad` (Megatron, TransformerEngine).
    """
    forward = inspect.unwrap(type(module).forward)
    return (
        bool(module._backward_hooks or module._backward_pre_hooks)
        or "register_hook" in getattr(getattr(forward, "__code__", None), "co_names", ())
        or any(
            isinstance(value, Tensor)
            for weight in module._parameters.values()
            if weight is not None and weight.requires_grad
            for value in vars(weight).values()
        )
    )


@contextmanager
def without_hooks(weights: Collection[Tensor]) -> Iterator[None]:
    """Take the gradient hooks of weights away for the block: autograd calls them whether a gradient comes or not."""
    # Their gradients too, and what else is set on them: functions of others may do so by hand.
    attributes = [(weight, dict(vars(weight))) for weight in weights]
    gradients = [(weight, weight.grad) for weight in weights if weight.grad is not None]
    for weight, _ in gradients:
        weight.grad = None
    try:
        with gradient_hooks_away(weights):
            yield
    finally:
        for weight, before in attributes:
            put_container_back(vars(weight), before)
            weight.grad = None
        for weight, gradient in gradients:
            weight.grad = gradient
