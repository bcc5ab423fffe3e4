"""What a recipe gives once it is read: sections, overrides, `extends`, `base_recipe`; and the recipes that ship."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from hf_ckpt.cli.finetune import main
from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe import upstream_fields
from hf_ckpt.recipe.recipe import load_recipe
from tests.recipe.recipe_texts import CHECKPOINTING, checkpointed, data, mistakes_in, model, text_of, training, write
from tests.small_recipes import can_be_loaded

pytestmark = pytest.mark.core

ROOT = Path(__file__).parents[2]
SHIPPED = sorted((ROOT / "recipes").glob("*.yaml"))
LOADABLE = list(filter(can_be_loaded, SHIPPED))


# --- Several mistakes, and where they are. ---


def test_every_mistake_is_reported_at_once(tmp_path: Path) -> None:
    write(tmp_path, "lora: {r: 0}\ntraining:\n  bf16: yes\n  max_step: 5\n", "base.yaml")
    path = write(tmp_path, text_of(extends="base.yaml", checkpointing="{policy: ful}", data="{path: x, max_length: 0}"))
    lines = mistakes_in(path, "training.optim=adam", "seed=1", "training.seed=1=2")
    assert {line.split(": ")[0] for line in lines} == {
        f"{tmp_path / 'base.yaml'}:1",
        f"{tmp_path / 'base.yaml'}:3",
        f"{tmp_path / 'base.yaml'}:4",
        f"{path}:2",
        f"{path}:5",
        'override "training.optim=adam"',
        'override "seed=1"',
        'override "training.seed=1=2"',
    }
    assert len(lines) == 8


def test_unreadable_file_hides_no_other_mistake(tmp_path: Path) -> None:
    lines = mistakes_in(write(tmp_path, "extends: nowhere.yaml\ntraining: {bf16: yes, seeds: 1}\n"))
    assert [line.split(": ")[1].split(" =")[0] for line in lines] == ["extends", "training.bf16", "training.seeds"]


# --- What is allowed. ---


def test_infinite_clipping_is_allowed(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, training("max_grad_norm: .inf"))).training["max_grad_norm"] == float("inf")


def test_checkpointing_of_transformers_is_allowed_without_ours(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, training(f"{CHECKPOINTING}: true")))
    assert (recipe.training[CHECKPOINTING], recipe.checkpointing) == (True, None)


def test_name_of_the_other_version_is_suggested(tmp_path: Path) -> None:
    other = {"activation_checkpointing", "gradient_checkpointing"} - set(upstream_fields.training_keys())
    for name in other:
        (line,) = mistakes_in(write(tmp_path, training(f"{name}: true")))
        assert f'Did you mean "{CHECKPOINTING}"?' in line


# --- What comes out. ---


def test_recipe_holds_plain_values(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, text_of(lora="{r: 4, rank_pattern: {q_proj: 2}}")))
    assert recipe.model == {"name_or_path": "some/model"}
    assert (recipe.lora, recipe.quantization, recipe.checkpointing) == (
        {"r": 4, "rank_pattern": {"q_proj": 2}},
        None,
        None,
    )
    assert type(recipe.lora["rank_pattern"]) is dict
    assert recipe.path == tmp_path / "recipe.yaml"


def test_recipe_cannot_be_changed(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, text_of()))
    with pytest.raises(TypeError, match="item assignment"):
        recipe.training["seed"] = 1  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.lora = {}  # type: ignore[misc]


def test_a_folder_in_the_home_of_the_user_is_read_there(tmp_path: Path) -> None:
    model = "{name_or_path: ~/model, tokenizer: ~/tokenizer}"
    found = load_recipe(write(tmp_path, text_of(model=model, training="{output_dir: ~/run}")))
    written = [found.model["name_or_path"], found.model["tokenizer"], found.training["output_dir"]]
    assert written == [f"{Path.home()}/{name}" for name in ("model", "tokenizer", "run")]


def test_null_takes_an_own_key_away(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, data("eval_split: null, columns: {text: body, prompt: null}")))
    assert recipe.data == {"path": "some/data", "columns": {"text": "body"}}


TRICKY = [
    "no",
    "1e-4",
    "8:24",
    "null",
    "~",
    "",
    "2024-01-01",
    "1_000",
    "0x1F",
    "=",
    "<<",
    "true",
    " a ",
    "a: b",
    "#c",
    "\n\t{{ x }}",
]


@pytest.mark.parametrize("value", [*TRICKY, 1e-4, 1e22, 3, True, None, float("inf"), [1, "no"], {"a": {"b": "off"}}])
def test_printed_recipe_loads_as_the_same(value: object, tmp_path: Path) -> None:
    recipe = load_recipe(
        write(tmp_path, training(f"lr_scheduler_kwargs: {{x: {json.dumps(value)}}}".replace("Infinity", ".inf")))
    )
    again = load_recipe(write(tmp_path, recipe.to_yaml(), "again.yaml"))
    assert dataclasses.replace(again, path=recipe.path) == recipe
    assert again.training["lr_scheduler_kwargs"] == {"x": value}


def test_print_shows_what_load_recipe_resolves(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "recipes" / "llama7b_qlora_24gb.yaml"
    assert main([str(path), "training.learning_rate=1e-5", "--print"]) == 0
    printed = capsys.readouterr().out
    assert printed == load_recipe(path, ["training.learning_rate=1e-5"]).to_yaml()
    assert "learning_rate: 1.0e-05\n" in printed
    assert "extends" not in printed


# --- Overrides. ---


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("training.learning_rate=1e-4", "training.learning_rate", 1e-4),
        ("training.run_name='7'", "training.run_name", "7"),
        ("training.run_name=a=b", "training.run_name", "a=b"),
        ("lora.r=4", "lora", {"r": 4}),
        ("lora={r: 4, lora_alpha: 8}", "lora", {"r": 4, "lora_alpha": 8}),
        ("checkpointing.policy=[{mode: ffn}]", "checkpointing.policy", [{"mode": "ffn"}]),
        ("checkpointing=null", "checkpointing", None),
        ("checkpointing.policy.mode=ffn", "checkpointing.policy", {"mode": "ffn"}),
        ("data.columns.text=body", "data.columns", {"text": "body"}),
    ],
)
def test_override_sets(override: str, path: str, value: object, tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, checkpointed("policy: full")), [override])
    section, _, key = path.partition(".")
    assert (getattr(recipe, section)[key] if key else getattr(recipe, section)) == value


def test_another_policy_takes_along_what_was_said_for_auto(tmp_path: Path) -> None:
    base = write(tmp_path, checkpointed("policy: auto, exact: true, memory_budget: 1GiB, offload: cpu"))
    assert load_recipe(base, ["checkpointing.policy=full"]).checkpointing == {"policy": "full", "offload": "cpu"}
    over = write(tmp_path, f"extends: {base.name}\ncheckpointing: {{policy: selective}}\n", "over.yaml")
    assert load_recipe(over).checkpointing == {"policy": "selective", "offload": "cpu"}
    assert load_recipe(base, ["checkpointing.policy=auto"]).checkpointing == load_recipe(base).checkpointing
    own = ["checkpointing.policy=full", "checkpointing.exact=true"]
    for overrides in (own, own[::-1]):
        with pytest.raises(RecipeError, match="belongs to policy: auto"):
            load_recipe(base, overrides)


def test_last_override_wins(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, text_of()), ["training.seed=1", "training.seed=2"])
    assert recipe.training["seed"] == 2


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("training.seed", "expected key.path=value, such as training.learning_rate=1e-4."),
        ("=3", "expected key.path=value"),
        ("training..seed=3", "expected key.path=value"),
        ("training.seed=", "training.seed: has no value. Write null if there is to be none."),
        ("training.seed=[1", "not valid YAML: expected ',' or ']'"),
        ("training.sed=1", "training.sed = 1: unknown key of TrainingArguments"),
        ("training={seed: 1, seed: 2}", "training.seed: given twice"),
        ("checkpointing.policy.0.mode=ffn", "checkpointing.policy is a list. Give the whole list, in YAML."),
        ("extends=other.yaml", 'extends = "other.yaml": unknown section'),
    ],
)
def test_override_is_refused(override: str, says: str, tmp_path: Path) -> None:
    (line,) = mistakes_in(write(tmp_path, checkpointed("policy: [{mode: full}]")), override)
    assert line.startswith(f'override "{override}": ')
    assert says in line


# --- extends. ---


def test_extending_recipe_is_laid_on_its_base(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    write(
        tmp_path,
        text_of(lora="{r: 4, target_modules: [a, b]}", quantization="{load_in_4bit: true}"),
        "bases/first.yaml",
    )
    write(tmp_path, "extends: first.yaml\ntraining: {seed: 1, bf16: true}\n", "bases/second.yaml")
    text = "extends: bases/second.yaml\nlora: {target_modules: [c]}\nquantization: null\ntraining: {seed: 2}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.lora == {"r": 4, "target_modules": ["c"]}
    assert recipe.quantization is None
    assert recipe.training == {"output_dir": "runs/x", "seed": 2, "bf16": True}


def test_weights_to_load_give_way_to_weights_to_make(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "base.yaml")
    text = "extends: base.yaml\nmodel: {name_or_path: null, config: {model_type: llama}, tokenizer: x}\n"
    recipe = load_recipe(write(tmp_path, text))
    assert recipe.model == {"config": {"model_type": "llama"}, "tokenizer": "x"}


def test_recipes_that_extend_each_other_are_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: second.yaml\n", "first.yaml")
    write(tmp_path, "extends: first.yaml\n", "second.yaml")
    (line,) = mistakes_in(tmp_path / "first.yaml")
    circle = "first.yaml -> second.yaml -> first.yaml"
    assert line == f'{tmp_path / "second.yaml"}:1: extends = "first.yaml": a circle, {circle}. Break it.'


# --- base_recipe. ---


def test_base_recipe_is_found_beside_the_recipe(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "base.yaml")
    (tmp_path / "more").mkdir()
    recipe = load_recipe(write(tmp_path, model("base_recipe: ../base.yaml"), "more/recipe.yaml"))
    assert recipe.model["base_recipe"] == str(tmp_path / "base.yaml")


def test_mistakes_of_the_base_recipe_are_reported_too(tmp_path: Path) -> None:
    base = write(tmp_path, training("seeds: 1"), "base.yaml")
    path = write(tmp_path, text_of(model="{name_or_path: x, base_recipe: base.yaml, dtyp: x}"))
    own, of_base = mistakes_in(path)
    assert own.startswith(f"{path}:1: model.dtyp")
    assert of_base.startswith(f"{base}:3: training.seeds")


def test_missing_base_recipe_is_refused(tmp_path: Path) -> None:
    write(tmp_path, text_of(), "base.yaml")
    path = write(tmp_path, model("base_recipe: bas.yaml"))
    missing = tmp_path / "bas.yaml"
    assert mistakes_in(path) == [
        f'{path}:1: model.base_recipe = "bas.yaml": there is no file {missing}. Did you mean "base.yaml"?'
    ]


def test_recipes_that_wait_for_each_other_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, model("base_recipe: recipe.yaml"))
    assert mistakes_in(path) == [
        f'{path}:1: model.base_recipe = "recipe.yaml": recipes wait for each other\'s weights. Break the circle.'
    ]


# --- The recipes that ship. ---


def test_recipes_ship() -> None:
    assert [path.stem for path in SHIPPED] == [
        "gemma3_4b_lora",
        "gpt_oss_20b_lora_24gb",
        "llama32_3b_qlora_t4",
        "llama3_8b_dpo_lora",
        "llama3_8b_qlora",
        "llama3_8b_qlora_6gb",
        "llama3_8b_qlora_longctx",
        "llama3_8b_reward",
        "llama70b_qlora_24gb",
        "llama70b_qlora_fsdp",
        "llama7b_full_fsdp",
        "llama7b_full_zero3",
        "llama7b_lora",
        "llama7b_lora_ddp",
        "llama7b_qlora_24gb",
        "mistral7b_full_bf16",
        "mixtral_8x7b_qlora_48gb",
        "qwen3_30b_a3b_qlora_24gb",
        "qwen3_32b_lora_fsdp",
        "qwen3_4b_grpo_lora",
        "qwen3_8b_lora",
        "qwen3_vl_8b_lora",
        "tiny_llama_base",
        "tiny_llama_dpo_lora",
        "tiny_llama_lora",
    ]


@pytest.mark.parametrize("path", LOADABLE, ids=lambda path: path.stem)
def test_shipped_recipe_loads(path: Path) -> None:
    recipe = load_recipe(path)
    assert recipe.training["output_dir"] == f"runs/{path.stem}"
    assert recipe.checkpointing is not None
    assert (recipe.lora is None) == ("lora" not in path.stem)
    # gpt-oss comes in 4 bits, so that its recipe has no other name.
    assert (recipe.quantization is not None) == ("qlora" in path.stem or path.stem == "gpt_oss_20b_lora_24gb")


@pytest.mark.parametrize("path", LOADABLE, ids=lambda path: path.stem)
def test_shipped_recipe_prints_and_loads_again(path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(path)
    again = load_recipe(write(tmp_path, recipe.to_yaml()))
    assert dataclasses.replace(again, path=path) == recipe


@pytest.mark.parametrize("path", LOADABLE, ids=lambda path: path.stem)
def test_header_says_purpose_hardware_launch_and_override(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.isascii()
    header = [line for line in text.split("\n\n")[0].splitlines() if line.startswith("#")]
    said = dict(re.findall(r"^# (\w+): +(\S.*)$", "\n".join(header), re.MULTILINE))
    assert {"Purpose", "Hardware", "Launch", "Override"} <= set(said)
    launch = rf"accelerate launch (?:--config_file (\S+) )?scripts/finetune\.py recipes/{path.name}"
    found = re.fullmatch(launch, said["Launch"])
    assert found is not None
    assert found[1] is None or (ROOT / found[1]).is_file()
    command, launch, overrides = said["Override"].replace("--num_processes 4 ", "").partition(said["Launch"])
    assert (command, launch) == ("", said["Launch"])
    assert load_recipe(path, overrides.split()) != load_recipe(path)


# --- Nothing heavy. ---

LOAD_AND_LIST = """
import json, sys, hf_ckpt
for path in sys.argv[1:]:
    try:
        hf_ckpt.load_recipe(path).to_yaml()
    except hf_ckpt.RecipeError:
        pass
print(json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""


def test_loading_imports_nothing_heavy(tmp_path: Path) -> None:
    refused = write(tmp_path, text_of(lora="{r: 0}"))
    command = [sys.executable, "-c", LOAD_AND_LIST, *map(str, SHIPPED), str(refused)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    heavy = {"trl", "torch", "transformers", "peft", "datasets", "accelerate", "tokenizers", "numpy", "bitsandbytes"}
    assert heavy.isdisjoint(json.loads(done.stdout))
    assert "yaml" in json.loads(done.stdout)


@pytest.mark.parametrize("policy", ["[{mode: full, layers: '0:2'}]", "{mode: full, layers: '0'}"])
def test_rules_beside_trained_keys_and_values_are_left_to_the_layers(policy: str, tmp_path: Path) -> None:
    text = text_of(adapter="{type: prefix_tuning, num_virtual_tokens: 4}", checkpointing=f"{{policy: {policy}}}")
    assert load_recipe(write(tmp_path, text)).checkpointing is not None
