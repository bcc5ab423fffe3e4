"""The fields of the upstream classes that recipes fill in, with their types and defaults.

The classes are asked for them, by `inspect` and `typing`. To import the modules that define them takes torch,
transformers and PEFT with it: seconds, where a recipe is checked in a fraction of one. So a class is made from its
source alone (`_made_class`). Where upstream's annotations understate a type, a table here corrects it.
"""

from __future__ import annotations

import ast
import builtins
import copy
import dataclasses
import enum
import functools
import importlib.metadata
import importlib.util
import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Union, cast

from hf_ckpt.errors import RecipeError
from hf_ckpt.recipe.field_types import Hint, members, parts, simplified


@dataclass(frozen=True)
class Key:
    """What is known of one key."""

    type: Hint  # What its value may be.
    default: Any = None  # Upstream's default, where it is a plain value.


Keys = Mapping[str, Key]

DTYPES = ("float32", "bfloat16", "float16")
_LogLevel = Literal["detail", "debug", "info", "warning", "error", "critical", "passive"]

_CORRECTED: Mapping[str, Hint] = {
    # `fsdp: true` is documented, and the choices of the log levels are computed.
    "fsdp": bool | str | list[str] | None,
    **dict.fromkeys(("log_level", "log_level_replica"), _LogLevel),
    # `BitsAndBytesConfig` has no annotations: the defaults of these do not say what they take.
    "llm_int8_skip_modules": list[str] | None,
    "bnb_4bit_quant_type": Literal["fp4", "nf4"],
    "bnb_4bit_compute_dtype": Literal[DTYPES] | None,
    "bnb_4bit_quant_storage": Literal["float16", "float32", "int8", "uint8", "float64", "bfloat16"] | None,
}
# LoHa and LoKr share the fields of a class that lies here.
_SHARED_CONFIG = "tuners/lycoris_utils.py"
# The pairs in a mapping of names, written as `("llama", "LlamaConfig")` or as `"llama": "LlamaConfig"`.
_NAMED = re.compile(r'"([\w.-]+)"[:,]\s+"(\w+)"')
# The base class of configs takes these out of its keyword arguments.
_CONFIG_KEYWORDS = (
    *("model_type", "attn_implementation", "experts_implementation", "output_attentions", "per_layer_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "num_labels"),
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "tie_word_embeddings", "use_cache", "torch_dtype"),
)


@functools.lru_cache
def trl_version() -> tuple[int, ...] | None:
    """Return the numbers of the version of trl that is installed; None without it."""
    if importlib.util.find_spec("trl") is None:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", importlib.metadata.version("trl"))[:2])


@functools.lru_cache
def training_keys(of_trl: str = "") -> Keys:
    """Return the fields of `transformers.TrainingArguments`, or of the arguments of a trainer of trl, such as `DPO`."""
    if of_trl:
        own_file = f"trainer/{of_trl.lower()}_config.py"
        return {**training_keys(), **_fields(_made_class("trl", f"{of_trl}Config", "trainer/base_config.py", own_file))}
    paths = ("trainer_utils.py", "debug_utils.py", "training_args.py")
    return _fields(_made_class("transformers", "TrainingArguments", *paths))


@functools.lru_cache
def adapter_classes() -> Mapping[str, tuple[str, str]]:
    """Return, for each kind of adapter that PEFT registers, the file and the name of its config class."""
    found: dict[str, tuple[str, str]] = {}
    for path in sorted((_folder("peft") / "tuners").glob("*/__init__.py")):
        for call in re.findall(r"register_peft_method\((.*?)\)", path.read_text(encoding="utf-8"), re.DOTALL):
            named = dict(re.findall(r"(name|config_cls)=[\"']?(\w+)", call))
            found[named["name"]] = f"tuners/{path.parent.name}/config.py", named["config_cls"]
    return found


@functools.lru_cache
def _adapter_class(kind: str) -> type:
    path, name = adapter_classes()[kind]
    text = _text("peft", path)
    # Some configs extend that of another kind.
    others = [other for other, theirs in adapter_classes().values() if other != path and theirs in text]
    return _made_class("peft", name, "utils/peft_types.py", "config.py", _SHARED_CONFIG, *others, path)


@functools.lru_cache
def adapter_keys(kind: str) -> Keys:
    """Return the fields of PEFT's config of a kind of adapter, such as `lora`; its bases' included."""
    return _fields(_adapter_class(kind))


def has_virtual_tokens(kind: str) -> bool:
    """Whether a kind of adapter puts tokens of its own before a row's, or keys and values before theirs."""
    return any(base.__name__ == "PromptLearningConfig" for base in _adapter_class(kind).__mro__)


@functools.lru_cache
def quantization_keys() -> Keys:
    """Return the parameters of `transformers.BitsAndBytesConfig`."""
    return _parameters(_made_class("transformers", "BitsAndBytesConfig", "utils/quantization_config.py"))


@functools.lru_cache
def model_types(task: str = "CAUSAL_LM") -> tuple[str, ...]:
    """Return the values of `model_type` for which there is a model of a task, as transformers names its mappings."""
    text = _text("transformers", "models/auto/modeling_auto.py")
    mapping = re.search(rf"^MODEL_FOR_{task}_MAPPING_NAMES = .*?^\)", text, re.DOTALL | re.MULTILINE)
    return tuple(dict(_NAMED.findall(mapping[0]))) if mapping else ()


@functools.lru_cache
def config_keys(model_type: str) -> tuple[str, Keys] | None:
    """Return the config class of `model_type` and the keys that it takes, or nothing where its source does not say."""
    # Newer versions keep the mapping in a file of its own.
    mappings = ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py")
    named = [pair for path in mappings for pair in _NAMED.findall(_text("transformers", path))]
    class_name = next((name for key, name in named if key == model_type and name.endswith("Config")), None)
    path = None if class_name is None else _config_file(model_type, class_name)
    if class_name is None or path is None:
        return None
    paths = ("configuration_utils.py", path)
    nodes = _classes("transformers", *paths)
    found = {name: Key(Any) for name in _CONFIG_KEYWORDS}
    for made in reversed(_made_class("transformers", class_name, *paths).__mro__[:-1]):
        aliases = vars(made).get("attribute_map") or {}
        # What a class sets on itself: derived values, which a saved config holds as well.
        assigned = re.findall(r"\bself\.([a-z]\w*)(?:: [^=\n]+)? = ", ast.unparse(nodes[made.__name__]))
        # Upstream holds dataclass fields to their annotations. Those of an `__init__` may be wrong (`int = 1e-6`).
        found |= dict.fromkeys((*_parameters(made), *aliases, *aliases.values(), *assigned), Key(Any))
        found |= _own_fields(made, unknown=Any)
    return class_name, found


def _config_file(model_type: str, class_name: str) -> str | None:
    models = _folder("transformers") / "models"
    module = model_type.replace("-", "_")
    # A model's folder is named after its type, with few exceptions; those are found by looking.
    likely = models / module / f"configuration_{module}.py"
    for path in (likely, *sorted(models.glob("*/configuration_*.py"))):
        if path.is_file() and re.search(rf"^class {class_name}\b", path.read_text(encoding="utf-8"), re.MULTILINE):
            return str(path.relative_to(models.parent))
    return None


def _fields(made: type) -> dict[str, Key]:
    """Return the annotated fields of a class, its bases' included."""
    return {name: key for base in reversed(made.__mro__) for name, key in _own_fields(base).items()}


def _own_fields(made: type, unknown: Hint = object) -> dict[str, Key]:
    found: dict[str, Key] = {}
    for name, hint in inspect.get_annotations(made).items():
        given: Any = vars(made).get(name)
        default, metadata = (given.default, given.metadata) if isinstance(given, dataclasses.Field) else (given, {})
        if not name.startswith("_") and parts(hint)[0] is not ClassVar:
            found[name] = _key(name, _narrowed(simplified(hint, unknown), metadata), default)
    return found


def _narrowed(hint: Hint, metadata: Mapping[str, Any]) -> Hint:
    """Narrow text to the choices that are listed in the metadata of a field, or in its help only."""
    if isinstance(choices := metadata.get("choices"), list):
        others = (member for member in members(hint) if member is not str)
        return Union[(Literal[tuple(choices)], *others)]
    listed = re.search(r"Possible values are:? (.*?)\. ", str(metadata.get("help")))
    choices = tuple(re.findall(r"`'?(\w+)'?`", listed[1])) if listed else ()
    if len(choices) > 1 and hint in (str, list[str]):
        choice: Hint = Literal[choices]
        # One of several may be written as text.
        return choice if hint is str else choice | list[choice]
    return hint


def _parameters(made: type) -> dict[str, Key]:
    """Return the parameters of a class's own `__init__` that can be given by keyword."""
    if "__init__" not in vars(made):
        return {}
    found: dict[str, Key] = {}
    for name, parameter in inspect.signature(vars(made)["__init__"]).parameters.items():
        if name != "self" and parameter.kind is not parameter.VAR_KEYWORD:
            hint, default = parameter.annotation, parameter.default
            if hint is parameter.empty:
                hint = Any if default is None else type(default)
            found[name] = _key(name, simplified(hint, unknown=Any), default)
    return found


def _key(name: str, hint: Hint, default: Any) -> Key:
    is_plain = type(default) in (bool, int, float, str, list, tuple, dict)
    return Key(_CORRECTED.get(name, hint), default if is_plain else None)


# --- Classes made from their source. ---


class _AnyName(type):
    """The type of `_Unknown`, so that its attributes, its items and what it returns are unknown too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __getitem__(cls, item: object) -> Any:
        return cls

    def __call__(cls, *given: object, **named: object) -> Any:
        return cls


class _Unknown(metaclass=_AnyName):
    """Stands for whatever the source of a class names, and its module imports or computes."""


# What names mean in the source of a class. An enumeration of transformers is one of text.
_KNOWN = {name: getattr(typing, name) for name in typing.__all__}
_KNOWN |= {"field": dataclasses.field, "enum": enum, "Enum": enum.Enum, "ExplicitEnum": enum.StrEnum}


def _made_class(package: str, name: str, *paths: str) -> type:
    """Return a class made from its source alone, with those of its bases that lie in `paths`, bases first.

    Its fields, the parameters of its `__init__` and its `attribute_map` are what importing it would give.
    """
    nodes = _classes(package, *paths)
    if name not in nodes:
        raise RecipeError(
            f"A recipe's keys are the fields of {name}, but {package} {version(package)} has no such class in "
            f"{paths[-1]}. Install a version of {package} that constraints.txt names."
        )
    bases = {each: [ast.unparse(base) for base in node.bases] for each, node in nodes.items()}
    enums = {each for each in nodes if any("Enum" in base for base in bases[each])}
    wanted = {name, *enums}
    for each in reversed(nodes):
        wanted |= {*bases[each]} if each in wanted else set()
    namespace: dict[str, Any] = {"__name__": package, **_KNOWN}
    for node in (nodes[each] for each in nodes if each in wanted):
        known = {**vars(builtins), **namespace}
        made = copy.copy(node)
        # A base from elsewhere, such as a mixin, has no fields.
        made.bases = [base for base in node.bases if known.get(ast.unparse(base).split(".")[0], _Unknown) != _Unknown]
        made.decorator_list, made.keywords = [], []
        made.body = [*(each for each in node.body if node.name in enums or _is_asked(each)), ast.Pass()]
        names = {part.id for statement in made.body for part in ast.walk(statement) if isinstance(part, ast.Name)}
        namespace |= dict.fromkeys(names - known.keys(), _Unknown)
        module = ast.fix_missing_locations(ast.Module([made], []))
        exec(compile(module, paths[-1], "exec", dont_inherit=True), namespace)
    return cast("type", namespace[name])


def _classes(package: str, *paths: str) -> dict[str, ast.ClassDef]:
    """Return the classes in the source of modules, by name."""
    statements = (statement for path in paths for statement in _module(package, path).body)
    return {statement.name: statement for statement in statements if isinstance(statement, ast.ClassDef)}


def _is_asked(statement: ast.stmt) -> bool:
    """Whether a statement declares a field, a method, or other names of fields; the rest may import and compute."""
    return isinstance(statement, ast.AnnAssign | ast.FunctionDef) or ast.unparse(statement).startswith("attribute_map")


@functools.lru_cache
def _module(package: str, path: str) -> ast.Module:
    return ast.parse(_text(package, path))


@functools.lru_cache
def _text(package: str, path: str) -> str:
    file = _folder(package) / path
    return file.read_text(encoding="utf-8") if file.is_file() else ""


@functools.lru_cache
def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RecipeError(f"A recipe needs {package}, which is not installed. Run: pip install {package}")
    return Path(spec.origin).parent


@functools.lru_cache
def version(package: str) -> str:
    """Return the version of an installed package."""
    _folder(package)
    return importlib.metadata.version(package)
