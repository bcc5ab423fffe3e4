"""Each kind of PEFT's adapters: its simulated step needs what the step that really ran needed, or it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

from hf_ckpt.errors import UnsupportedError
from hf_ckpt.simulation.devices import CPU, Device, find_device
from hf_ckpt.simulation.simulator import simulate_step
from hf_ckpt.simulation.step import Sharding, Step
from tests import plain_models
from tests.following import LENGTH, Run, differences

pytestmark = [
    pytest.mark.slow,
    # OFT writes a parameter into a constant; torch looks at its gradient, and hides what that warns of.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    # PEFT's own: no compiler for a kernel of BOFT, adapted norms, hooks that follow the step.
    pytest.mark.filterwarnings("ignore:Failed to load the CUDA extension:UserWarning"),
    pytest.mark.filterwarnings("ignore:Setting boft_n_butterfly_factor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Unsupported layer type:UserWarning"),
    pytest.mark.filterwarnings("ignore:One of the base layers adapted with ShiRA has:UserWarning"),
]

# The Trainer's own few numbers of 4 bytes, as in test_simulated_against_real.py.
TOLERANCE = 1e-3
A100 = find_device("a100-80gb")
NUM_VIRTUAL = 8
CAUSAL: dict[str, Any] = {"task_type": "CAUSAL_LM"}
TWO: dict[str, Any] = {**CAUSAL, "target_modules": ["q_proj", "v_proj"]}
VIRTUAL: dict[str, Any] = {**CAUSAL, "num_virtual_tokens": NUM_VIRTUAL}
LAYERS = 5
"""Of which the third and the fourth are alike, neighbours included: one of them is traced."""


def run(adapters: peft.PeftConfig, **settings: Any) -> Run:
    return Run(layers=LAYERS, adapters=adapters, **settings)


MIXED: dict[str, Any] = {"rows": "padded", "dtype": "bfloat16", "bf16": True, "accumulation": 2}
RUNS = {
    "dora": run(peft.LoraConfig(r=4, lora_dropout=0.1, use_dora=True, **TWO), policy="full", **MIXED),
    "rslora": run(peft.LoraConfig(r=4, use_rslora=True, **TWO), policy="attention"),
    "adalora": run(peft.AdaLoraConfig(init_r=6, target_r=4, total_step=9, **TWO), policy="selective"),
    "ia3": run(
        peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"], **CAUSAL), **MIXED
    ),
    "vera": run(peft.VeraConfig(r=8, **TWO), policy="full"),
    "oft": run(peft.OFTConfig(r=0, oft_block_size=16, **TWO), policy="selective", **MIXED),
    "boft": run(peft.BOFTConfig(boft_block_size=4, **TWO), accumulation=2),
    "loha": run(peft.LoHaConfig(r=4, **TWO), policy="attention", **MIXED),
    "lokr": run(peft.LoKrConfig(r=4, **TWO)),
    "fourierft": run(peft.FourierFTConfig(n_frequency=50, **TWO), policy="full", accumulation=2),
    "hra": run(peft.HRAConfig(r=4, **TWO), bf16=True),
    "randlora": run(peft.RandLoraConfig(r=4, **TWO), policy="ffn"),
    "layer norms": run(peft.LNTuningConfig(**CAUSAL), policy="full", **MIXED),
    "trainable tokens": run(peft.TrainableTokensConfig(token_indices=[3, 4], **CAUSAL)),
    "llama adapter": run(peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=2, **CAUSAL), policy="full"),
    "prompt": run(peft.PromptTuningConfig(**VIRTUAL), policy="full", **MIXED),
    "prompt, selective": run(peft.PromptTuningConfig(**VIRTUAL), policy="selective"),
    "prefix": run(peft.PrefixTuningConfig(**VIRTUAL), **MIXED),
    "prefix, ffn": run(peft.PrefixTuningConfig(**VIRTUAL), policy="ffn"),
    "prefix, projected": run(peft.PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=32, **VIRTUAL)),
    "p-tuning": run(peft.PromptEncoderConfig(encoder_hidden_size=32, **VIRTUAL), policy="attention", accumulation=2),
}


@pytest.mark.parametrize("name", RUNS)
def test_simulated_peak_and_categories_are_those_of_the_step_that_ran(name: str, tmp_path: Path) -> None:
    hold(RUNS[name], tmp_path)


def hold(run: Run, folder: Path) -> None:
    """Assert that a simulated step is that which really runs."""
    followed, simulated = run.followed(folder), run.simulated()
    off = differences(simulated, followed)
    assert {category: value for category, value in off.items() if abs(value) > TOLERANCE} == {}
    assert (simulated.peak_at.phase, simulated.peak_at.layer_idx) == (
        followed.peak_at.phase,
        followed.peak_at.layer_idx,
    )
    assert simulated.tokens == followed.tokens


ON_EXPERTS: dict[str, Any] = {
    "target_modules": ["q_proj", "o_proj"],
    "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}


@pytest.mark.parametrize("policy", [None, "full", "attention", "ffn", "selective", "selective_attention"])
@pytest.mark.parametrize(
    ("model_type", "settings"), [("qwen3_moe", MIXED), ("gpt_oss", {**MIXED, "attention": "eager"}), ("mixtral", {})]
)
@pytest.mark.sweep(keep=3)
def test_experts_with_an_adapter_are_there_once_more_in_each_forward(
    model_type: str, settings: dict[str, Any], policy: str | None, tmp_path: Path
) -> None:
    adapted = run(peft.LoraConfig(r=4, **CAUSAL, **ON_EXPERTS), model_type=model_type, policy=policy, **settings)
    hold(adapted, tmp_path)
    # PEFT adds to all experts of a layer, and autograd keeps what comes out where the layer is not recomputed. Mode
    # selective makes it again: what does not grow with the tokens is dear to keep and cheap to make.
    shapes = {each.shape for each in adapted.model().parameters() if each.dim() == 3}
    copies = [held for held in adapted.simulated(explains=True).ledger if torch.Size(held.shape) in shapes]
    assert len(copies) == (2 * LAYERS if policy in (None, "attention") else 0)


@pytest.mark.parametrize(("name", "length"), [("prefix", LENGTH), ("prompt, selective", LENGTH + NUM_VIRTUAL)])
@pytest.mark.filterwarnings("error:.past_key_values. is deprecated")
def test_rows_are_as_long_as_virtual_tokens_make_them(name: str, length: int) -> None:
    # Those of a prefix are keys and values that are there already: no query is computed for them.
    shapes = {held.shape for held in RUNS[name].simulated().ledger}
    assert {shape[1] for shape in shapes if len(shape) == 3 and shape[0] == 2} >= {length}
    assert not any(LENGTH + NUM_VIRTUAL in shape[:2] for shape in shapes) or length > LENGTH


@pytest.mark.parametrize(
    ("is_4bit", "device", "sharding", "expected"),
    [
        (False, A100, Sharding(), torch.float32),
        # Over quantised weights PEFT casts only where CUDA's autocast is off.
        (True, A100, Sharding(), torch.bfloat16),
        (True, CPU, Sharding(), torch.float32),
        # FSDP1 gathers an adapter when PEFT has looked at its dtype, FSDP2 with its layer.
        (False, A100, Sharding(engine="fsdp1", world_size=2), torch.float32),
        (False, A100, Sharding(engine="fsdp2", world_size=2), torch.bfloat16),
    ],
    ids=["bf16", "4-bit", "4-bit on a CPU", "FSDP1", "FSDP2"],
)
def test_adapters_are_given_what_peft_casts_to(
    is_4bit: bool, device: Device, sharding: Sharding, expected: torch.dtype
) -> None:
    run, found = Run(layers=1, adapters=True, is_4bit=is_4bit, dtype="bfloat16", bf16=True), set[torch.dtype]()

    @contextmanager
    def recorded(model: nn.Module) -> Iterator[nn.Module]:
        for name, module in model.named_modules():
            if name.endswith("lora_A.default"):
                module.register_forward_pre_hook(lambda _, args: found.add(args[0].dtype))
        yield model

    simulate_step(run.model(), None, replace(run.step, sharding=sharding), device, changed_by=recorded)
    assert found == {expected}
    assert not torch.is_autocast_enabled()


READS_VALUES = "it reads values of tensors to decide what to compute"
REFUSED = {
    "aLoRA": (
        peft.LoraConfig(r=4, alora_invocation_tokens=[5], **TWO),
        "on the device instead, or use a fixed policy.",
    ),
    "VB-LoRA": (peft.VBLoRAConfig(r=4, num_vectors=16, vector_length=16, topk=2, **TWO), READS_VALUES),
    "CPT": (
        peft.CPTConfig(cpt_token_ids=[3, 4], cpt_mask=[1, 1], cpt_tokens_type_mask=[1, 2], **CAUSAL),
        READS_VALUES,
    ),
    "SHiRA": (peft.ShiraConfig(r=4, **TWO), "it computes with a sparse tensor, whose memory cannot be followed"),
    "Poly": (peft.PolyConfig(r=4, n_tasks=1, n_skills=2, **TWO), 'it raises ValueError "task_ids should not be None'),
    "p-tuning with an LSTM": (
        peft.PromptEncoderConfig(
            encoder_hidden_size=32, encoder_reparameterization_type="LSTM", encoder_dropout=0.0, **VIRTUAL
        ),
        'Module "prompt_encoder.default.lstm_head" cannot be simulated: the kernel of LSTM keeps memory of its own',
    ),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:for MLP, the argument")
def test_what_cannot_be_simulated_is_refused(name: str) -> None:
    config, message = REFUSED[name]
    with pytest.raises(UnsupportedError, match="cannot be simulated") as refused:
        run(config).simulated()
    assert message in str(refused.value)
    assert "Measure a step on the device instead" in str(refused.value)
    assert "experts" not in str(refused.value)


def test_prefix_tuning_is_refused_under_recomputation_as_in_a_real_run(tmp_path: Path) -> None:
    prefix = run(peft.PrefixTuningConfig(**VIRTUAL), policy="full")
    message = (
        'Layer 0 of base_model.model.layers is set to "full", but PEFT\'s PREFIX_TUNING hands layers a key/value '
        "cache, which recomputed layers can neither read nor fill: the loss would change without a word. Use mode "
        '"none" or "ffn", or prompt tuning.'
    )
    for step in (prefix.simulated, lambda: prefix.followed(tmp_path)):
        with pytest.raises(UnsupportedError, match=re.escape(message)):
            step()


class ByName(plain_models.Decoder):
    """Blocks in a dictionary, by names that are no numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleDict({f"block_{number}": block for number, block in enumerate(self.blocks)})
        self.tokens, self.head = nn.Embedding(16, plain_models.WIDTH), nn.Linear(plain_models.WIDTH, 16)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        hidden = self.embedding(self.tokens(input_ids))
        for block in self.blocks.values():
            hidden = block(hidden)
        return {"loss": nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())}


def test_layers_with_names_are_simulated_one_by_one() -> None:
    step = Step(batch_size=2, seq_length=8)
    found = [simulate_step(ByName(), None, step, CPU, traces_all=traces_all) for traces_all in (False, True)]
    assert found[0].peak_bytes == found[1].peak_bytes
    assert found[0].timeline == found[1].timeline
