"""What the weights of a model are, by dtype, and which adapter trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hf_ckpt.estimate.estimate import facts_as_json
from hf_ckpt.estimate.weights import weights_of
from tests.estimate.small_estimates import small_subject
from tests.small_recipes import LORA


class Experts(nn.Module):
    """The experts of a layer, which are one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.down_proj = nn.Parameter(torch.empty(1000, 1000, 45, dtype=torch.bfloat16))


class Mixture(nn.Module):
    """A model of which a linear layer is quantised, and the head is that of the embeddings."""

    def __init__(self, *, has_experts: bool) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(1000, 1000, dtype=torch.bfloat16)
        self.proj, self.head = nn.Linear(1000, 1000, bias=False), nn.Linear(1000, 1000, bias=False)
        self.head.weight = self.embeddings.weight
        self.norm = nn.LayerNorm(1000, dtype=torch.bfloat16)
        packed = nn.Parameter(torch.empty(500_000, 1, dtype=torch.uint8), requires_grad=False)
        packed.quant_state = SimpleNamespace(shape=(1000, 1000))  # type: ignore[attr-defined]  # as bitsandbytes does
        self.proj.weight = packed
        if has_experts:
            self.experts = Experts()


@pytest.mark.parametrize(
    ("has_experts", "said"),
    [
        (False, "2.0 M parameters: 1.0 M in 4 bits, 1.0 M in bfloat16 (embeddings)"),
        (
            True,
            "47.0 M parameters: 1.0 M in 4 bits, 46.0 M in bfloat16, 45.0 M of them experts, as bitsandbytes quantises "
            "linear layers only",
        ),
    ],
)
def test_quantised_weights_say_what_is_not_and_why(has_experts: bool, said: str) -> None:
    with torch.device("meta"):
        found = weights_of(Mixture(has_experts=has_experts))
    assert found.describe() == said
    assert found.by_dtype == {"4 bits": 10**6, "bfloat16": 10**6 + 2000 + 45 * 10**6 * has_experts}


def test_adapter_says_its_kind_rank_targets_and_numbers(tmp_path: Path) -> None:
    lora = {**LORA, "target_modules": ["q_proj", "v_proj"], "rank_pattern": {"v_proj": 2}, "lora_dropout": 0.0}
    subject = small_subject(tmp_path, lora={**lora, "use_dora": True, "modules_to_save": ["lm_head"]})
    facts = dict(subject.facts)
    assert subject.weights is not None
    # Of four layers: two matrices and a length each; and the head, 300 x 32.
    trained = 4 * (4 * (32 + 32) + 2 * (32 + 32) + 2 * 32) + 300 * 32
    assert facts["trained"] == (
        f"{trained:,} numbers in float32: DoRA of rank 4 on q_proj (4) and of rank 2 on v_proj (4); lm_head whole"
    )
    assert facts["weights"].endswith(" parameters in float32")
    assert facts["training"] == "no autocast, adamw_torch_fused"
    assert facts["versions"].startswith("transformers ")
    assert ", attention by sdpa" in facts["versions"]
    read = facts_as_json(subject)["weights"]
    assert (read["num_trained"], read["adapter"]["targets"][1]) == (trained, {"name": "v_proj", "count": 4, "rank": 2})


def test_adamw_in_half_precision_is_said(tmp_path: Path) -> None:
    facts = dict(small_subject(tmp_path, model={"dtype": "bfloat16"}).facts)
    assert facts["trained"] == "all in bfloat16"
    assert facts["training"].endswith(" in bfloat16: neither weights nor state in float32")
