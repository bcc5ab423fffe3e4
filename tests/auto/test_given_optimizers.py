"""Policy `auto` simulates the optimizer that a Trainer has, of whatever class, or refuses it by its name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Adafactor, Trainer, TrainingArguments

from hf_ckpt import HFCkptCallback
from hf_ckpt.errors import UnsupportedError
from hf_ckpt.measure.track_real_step import follow_trainer
from tests.training import VOCAB, arguments, changed, llama, lora, losses, trainer, weights

pytestmark = pytest.mark.slow

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Projected(torch.optim.Optimizer):
    """As a library would have one: other arguments than torch's, nested state, an object in it, and two modes."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], rank: int) -> None:
        self.named = dict(named)
        self.rank = rank
        self.table = torch.zeros(3000)
        self.is_training = False
        super().__init__(list(self.named.values()), {"lr": 0.01})

    def train(self) -> None:
        self.is_training = True

    def eval(self) -> None:
        self.is_training = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert self.is_training
        for parameter in self.named.values():
            if parameter.grad is None:
                continue
            state = self.state[parameter]
            rows = parameter.grad.reshape(parameter.shape[0], -1)
            if not state:
                state["projection"] = Projection(rows, self.rank)
                state["moments"] = {"of": [torch.zeros(self.rank, rows.shape[1]) for _ in range(2)]}
            low = state["projection"].matrix @ rows
            for moment in state["moments"]["of"]:
                moment.lerp_(low, 0.1)
            change = state["projection"].matrix.T @ state["moments"]["of"][0]
            parameter.sub_(change.reshape(parameter.shape), alpha=self.param_groups[0]["lr"])


class Projection:
    def __init__(self, rows: Tensor, rank: int) -> None:
        self.matrix = torch.linalg.svd(rows, full_matrices=False).U[:, :1].T.expand(rank, -1).contiguous()


class Reads(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        if any(bool(parameter.grad.isnan().any()) for parameter in self.param_groups[0]["params"]):
            return None
        return super().step(closure)


class OfASubclass(torch.optim.SGD):
    pass


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.ndim == 2]


OPTIMIZERS: dict[str, Make] = {
    "Muon": lambda model: torch.optim.Muon(matrices(model)),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "SGD with momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True, lr=torch.tensor(0.1)),
    "AdamW by group": lambda model: torch.optim.AdamW([{"params": [each]} for each in model.parameters()], fused=True),
    "part of the model": lambda model: torch.optim.Adam(matrices(model)[:3], foreach=True),
    "NAdam": lambda model: torch.optim.NAdam(model.parameters()),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters()),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), momentum=0.5, centered=True),
    "Adafactor": lambda model: Adafactor(model.parameters(), lr=0.1, relative_step=False, scale_parameter=False),
    "of a subclass": lambda model: OfASubclass(model.parameters(), lr=0.1, momentum=0.9),
    "of another library": lambda model: Projected(model.named_parameters(), rank=12),
}


def run_of(
    folder: Path, made: Make | None, budget: str | None = "1GiB", length: int = 8, **own: Any
) -> tuple[Trainer, HFCkptCallback]:
    """A run under `auto`, or without a plan where there is no budget; of texts so long."""
    callback = HFCkptCallback("auto", memory_budget=budget or "1GiB")
    model = own.pop("model", None) or llama(hidden_size=64, attention_dropout=0.0)
    tokens = torch.randint(0, VOCAB, (8, length), generator=torch.Generator().manual_seed(0))
    own |= {} if made is None else {"optimizers": (made(model), None)}
    kind = own.pop("kind", Trainer)
    run = kind(
        model,
        TrainingArguments(**arguments(folder)),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[] if budget is None else [callback],
        **own,
    )
    return run, callback


def predicted(callback: HFCkptCallback) -> int:
    assert callback._planning is not None
    return callback._planning.predicted_bytes


def prediction_error(*given: Any, **own: Any) -> float:
    """Return by which fraction the predicted peak of a run is off the followed one."""
    run, callback = run_of(*given, **own)
    followed = follow_trainer(run).peak_bytes
    return predicted(callback) / followed - 1


def counted(caplog: pytest.LogCaptureFixture) -> str:
    (found,) = {entry.getMessage() for entry in caplog.records if entry.msg.startswith("Counted")}
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_given_optimizer_is_the_one_that_is_simulated(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "hf_ckpt"):
        assert abs(prediction_error(tmp_path, OPTIMIZERS[name])) < 0.001
    kind = type(OPTIMIZERS[name](llama())).__name__
    left_out = "nothing that is known"
    if name.startswith("of "):
        left_out = f"what {kind} does in some steps only, such as its first"
    assert counted(caplog).endswith(f"LlamaForCausalLM; {kind}; one process. Not counted: {left_out}.")


@pytest.mark.parametrize("name", ["Muon", "SGD with momentum", "Adagrad", "Adafactor", "of another library"])
@pytest.mark.sweep
def test_budget_is_kept_and_losses_are_those_without_a_plan(tmp_path: Path, name: str) -> None:
    made, long = OPTIMIZERS[name], {"length": 256}
    run, callback = run_of(tmp_path, made, **long)
    plain = follow_trainer(run).peak_bytes
    assert callback._planning is not None
    least = callback._planning.simulator(callback._planning.batch).simulate("full").peak_bytes
    budget = (least + plain) // 2
    run, callback = run_of(tmp_path, made, f"{budget}B", **long)
    assert follow_trainer(run).peak_bytes <= budget < 0.97 * plain
    without, _ = run_of(tmp_path, made, None, **long)
    without.train()
    assert losses(run) == losses(without)
    assert changed(weights(without.model), weights(run.model)) == []


def test_simulating_an_optimizer_leaves_it_as_it_was(tmp_path: Path) -> None:
    run, _ = run_of(tmp_path, OPTIMIZERS["of another library"])
    made = run.optimizer
    assert isinstance(made, Projected)
    before = dict(vars(made))
    seen: list[tuple[int, bool]] = []
    made.register_step_pre_hook(lambda *_: seen.append((len(made.state), made.is_training)))  # type: ignore[arg-type]  # upstream
    run.train()
    # The run's own two steps: the first one finds no state.
    assert seen == [(0, True), (len(list(run.model.parameters())), True)]
    assert all(vars(made)[name] is before[name] for name in ("named", "table", "rank"))


def test_given_class_is_the_one_that_is_simulated(tmp_path: Path) -> None:
    given = (torch.optim.SGD, {"lr": 0.1})
    assert abs(prediction_error(tmp_path, None, optimizer_cls_and_kwargs=given)) < 0.01


def test_optimizer_that_a_trainer_makes_is_the_one_that_is_simulated(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    assert abs(prediction_error(tmp_path, None, kind=Own, model=lora())) < 0.01


def test_optimizer_of_bitsandbytes_is_simulated_without_the_trainer_s_settings(tmp_path: Path) -> None:
    optim = pytest.importorskip("bitsandbytes").optim
    assert abs(prediction_error(tmp_path, lambda model: optim.AdamW8bit(model.parameters()))) < 0.01


# --- Refused. ---


def refusal(folder: Path, made: Make, model: nn.Module | None = None) -> str:
    """Return what `auto` says to an optimizer, which it has to refuse before a weight changes."""
    run, _ = run_of(folder, made, model=model or llama(num_hidden_layers=1))
    before = weights(run.model)
    with pytest.raises(UnsupportedError) as raised:
        run.train()
    assert changed(before, weights(run.model)) == []
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(torch.optim.Adafactor, "it computes with values on the host"), (torch.optim.LBFGS, "it runs the forward again")],
)
def test_optimizer_that_cannot_be_simulated_is_refused(tmp_path: Path, kind: Any, reason: str) -> None:
    told = refusal(tmp_path, lambda model: kind(model.parameters()))
    assert f"the optimizer of this Trainer, {kind.__module__}.{kind.__name__}, cannot be simulated: {reason}." in told
    assert "set TrainingArguments.optim to one of adamw_torch, adamw_torch_fused," in told


@pytest.mark.parametrize(
    "made",
    [
        lambda model: Adafactor(model.parameters(), lr=0.1, relative_step=False),
        lambda model: Reads(model.parameters(), lr=0.1),
    ],
)
def test_optimizer_that_reads_values_is_refused(tmp_path: Path, made: Make) -> None:
    name = type(made(llama(num_hidden_layers=1))).__name__
    told = refusal(tmp_path, made)
    assert told.startswith(f"The step of optimizer {name} cannot be simulated: it reads values of tensors")


def test_optimizer_whose_step_fails_without_values_is_refused(tmp_path: Path) -> None:
    class Fails(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise NotImplementedError("use fused_backward")

    told = refusal(tmp_path, lambda model: Fails(model.parameters()))
    assert told.startswith("The step of optimizer Fails cannot be simulated: NotImplementedError: use fused_backward.")


def test_optimizer_without_a_step_is_refused(tmp_path: Path) -> None:
    class Lomo(torch.optim.Optimizer):
        """As that of lomo_optim: what calls it is a backward of its own."""

        def fused_backward(self, loss: Tensor, lr: float) -> None:
            """Change each weight as soon as its gradient is there."""

    told = refusal(tmp_path, lambda model: Lomo(model.parameters(), {"lr": 0.1}))
    assert told.startswith(
        "The step of optimizer Lomo cannot be simulated: it has none, as it changes weights and frees"
    )
    assert told.endswith('Use a fixed policy, such as HFCkptCallback("full"), or an optimizer with a step.')


def test_optimizer_with_tensors_of_its_own_class_is_refused(tmp_path: Path) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    class Wraps(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for each in self.param_groups[0]["params"]:
                self.state[each]["of"] = TwoTensor(torch.zeros_like(each), torch.zeros_like(each))

    assert "its state is of a class of its own, whose memory is not known" in refusal(
        tmp_path, lambda model: Wraps(model.parameters())
    )


def test_optimizer_that_steps_in_backward_is_refused(tmp_path: Path) -> None:
    model = llama(num_hidden_layers=1)
    model.lm_head.weight.register_post_accumulate_grad_hook(lambda parameter: None)
    told = refusal(tmp_path, OPTIMIZERS["SGD"], model)
    assert "hooks run when lm_head.weight has its gradient" in told


def test_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    told = refusal(tmp_path, lambda model: torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(2))]))
    assert "torch.optim.sgd.SGD, holds parameters that are not the model's." in told


def test_step_in_backward_loses_no_gradient_under_a_fixed_policy(tmp_path: Path) -> None:
    def stepping(model: nn.Module) -> nn.Module:
        made = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

        def step(parameter: nn.Parameter) -> None:
            made[parameter].step()
            parameter.grad = None

        for parameter in made:
            parameter.register_post_accumulate_grad_hook(step)
        return model

    found = []
    for callbacks in ([], [HFCkptCallback("full")]):
        run = trainer(stepping(llama()), tmp_path, *callbacks)
        run.train()
        found.append((losses(run), weights(run.model)))
    assert found[0][0] == found[1][0]
    assert changed(found[0][1], found[1][1]) == []
