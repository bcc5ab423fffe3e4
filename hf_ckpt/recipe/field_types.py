"""What the value of a field may be, and the fields of the upstream classes that recipes fill in, with their types.

The types come from the annotations in the source of the installed libraries. Reading source with `ast` holds for every
supported version, and imports neither torch nor transformers nor peft: a recipe is checked in a fraction of a second.
Where upstream's annotations understate a type, a table here corrects it.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_ckpt.errors import RecipeError, did_you_mean
from hf_ckpt.upstream.trl import BASE_CONFIG

Kind = Literal["any", "null", "bool", "int", "float", "str", "list", "dict", "choice", "union", "object"]

_WORDS: dict[Kind, str] = {
    "any": "anything",
    "null": "null",
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "dict": "a mapping",
    "object": "a Python object, which a recipe cannot hold",
}
_SIMPLE: dict[str, Kind] = {
    "Any": "any",
    "None": "null",
    "bool": "bool",
    "int": "int",
    "float": "float",
    "str": "str",
    "list": "list",
    "tuple": "list",
    "dict": "dict",
}
# YAML 1.1 reads these as true and false. A recipe reads them as text, so that `save_strategy: no` means what it says.
_SPOKEN_BOOLEANS = {"yes": True, "on": True, "y": True, "true": True}
_SPOKEN_BOOLEANS |= {"no": False, "off": False, "n": False, "false": False}


@dataclass(frozen=True)
class Type:
    """What one value may be."""

    kind: Kind  # What it is.
    parts: tuple[Type, ...] = ()  # Of a union its members, of a list its element, of a dict its value.
    choices: tuple[object, ...] = ()
    """The words that are valid, of kind `choice`. `[...]` in a word stands for a number."""

    def accepts(self, value: object) -> bool:
        """Tell whether `value` is of this type. A whole number is a number; `true` is neither."""
        if self.kind == "union":
            return any(part.accepts(value) for part in self.parts)
        if self.kind == "choice":
            return any(_is_choice(value, choice) for choice in self.choices)
        if self.kind == "list":
            return isinstance(value, list) and all(part.accepts(item) for part in self.parts for item in value)
        if self.kind == "dict":
            return isinstance(value, dict) and all(part.accepts(v) for part in self.parts for v in value.values())
        return _is_simple(value, self.kind)

    def members(self) -> tuple[Type, ...]:
        """Return the members of a union, or the type itself."""
        return self.parts if self.kind == "union" else (self,)

    def words(self) -> tuple[str, ...]:
        """Return the words that are valid, if any are listed."""
        return tuple(str(word) for member in self.members() for word in member.choices if isinstance(word, str))

    def describe(self) -> str:
        """Return the type in words, for "expected ..."."""
        if self.kind == "union":
            return " or ".join(part.describe() for part in sorted(self.parts, key=lambda part: part.kind == "object"))
        if self.kind == "choice":
            return "one of " + ", ".join(show(choice) for choice in self.choices)
        if self.kind == "list":
            return "a list" + "".join(f" of {_plural(part)}" for part in self.parts)
        return _WORDS[self.kind]


def parse_type(
    annotation: ast.expr | str, enums: Mapping[str, Sequence[str]] | None = None, unknown: Kind = "object"
) -> Type:
    """Read an annotation. `annotation`: such as `int | None`, as text or as parsed."""
    node = ast.parse(annotation, mode="eval").body if isinstance(annotation, str) else annotation
    members = [_parse_member(member, enums or {}, unknown) for member in _union_members(node)]
    if any(isinstance(word, str) for member in members for word in member.choices):
        # Upstream writes `OptimizerNames | str`: the text has to be one of the words.
        members = [member for member in members if member.kind != "str"]
    unique = tuple(dict.fromkeys(members))
    return unique[0] if len(unique) == 1 else Type("union", unique)


def advice(value: object, expected: Type) -> str:
    """Return what to write instead of `value`, as `" Write 1000."`, or an empty string where nothing is likely."""
    candidate = _intended(value, expected)
    if candidate is not None:
        return f" Write {candidate}."
    return did_you_mean(value, expected.words())


def show(value: object) -> str:
    """Return `value` as it stands in a recipe."""
    return json.dumps(value, ensure_ascii=False, default=str)


def _union_members(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union_members(node.left) + _union_members(node.right)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return _union_members(ast.parse(node.value, mode="eval").body)
    name, arguments = _subscript(node)
    if name == "Optional":
        return [*_union_members(arguments[0]), ast.Constant(None)]
    if name == "Union":
        return [member for argument in arguments for member in _union_members(argument)]
    return [node]


def _subscript(node: ast.expr) -> tuple[str, list[ast.expr]]:
    """Return name and arguments of `name[arguments]`."""
    if not isinstance(node, ast.Subscript):
        return "", []
    arguments = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return ast.unparse(node.value).removeprefix("typing."), arguments


def _parse_member(node: ast.expr, enums: Mapping[str, Sequence[str]], unknown: Kind) -> Type:
    name, arguments = _subscript(node)
    if name == "Literal":
        return Type("choice", choices=tuple(ast.literal_eval(argument) for argument in arguments))
    if name in ("list", "List", "Sequence", "tuple"):
        return Type("list", (parse_type(arguments[0], enums, unknown),))
    if name in ("dict", "Dict", "Mapping"):
        return Type("dict", (parse_type(arguments[-1], enums, unknown),))
    plain = ast.unparse(node)
    if plain in enums:
        return Type("choice", choices=tuple(enums[plain]))
    return Type(_SIMPLE.get(plain, unknown))


def _is_simple(value: object, kind: Kind) -> bool:
    if kind == "any":
        return True
    if kind == "null":
        return value is None
    if isinstance(value, bool):
        return kind == "bool"
    if kind == "float":
        return isinstance(value, int | float) and not math.isnan(value)
    return (kind == "int" and isinstance(value, int)) or (kind == "str" and isinstance(value, str))


def _is_choice(value: object, choice: object) -> bool:
    if isinstance(value, str) and isinstance(choice, str) and "[" in choice:
        return re.fullmatch(re.sub(r"\\\[.*?\\\]", r"\\d+", re.escape(choice)), value) is not None
    return type(value) is type(choice) and value == choice


def _plural(element: Type) -> str:
    words = {"int": "whole numbers", "float": "numbers", "str": "texts", "list": "lists", "dict": "mappings"}
    return words.get(element.kind, element.describe())


def _intended(value: object, expected: Type) -> str | None:
    """Return what the user probably meant, as YAML."""
    if expected.accepts([value]):
        return show([value])
    if isinstance(value, str):
        return next((show(meant) for meant in _readings(value) if expected.accepts(meant)), None)
    if isinstance(value, float) and value.is_integer() and expected.accepts(int(value)):
        return show(int(value))
    if isinstance(value, int | float) and expected.accepts("text"):
        return "it in quotes, as text"
    return None


def _readings(text: str) -> list[object]:
    """Return what else `text` may stand for: true, false, null or a number."""
    if text.lower() in _SPOKEN_BOOLEANS:
        return [_SPOKEN_BOOLEANS[text.lower()]]
    if text == "None":
        return [None]
    readings: list[object] = []
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            readings.append(convert(text))
    return readings


@dataclass(frozen=True)
class Key:
    """What is known of one key."""

    type: Type  # What its value may be.
    default: Any = None  # Upstream's default, where it is a plain value.


Keys = Mapping[str, Key]


DTYPES = ("float32", "bfloat16", "float16")
_LOG_LEVELS = ["detail", "debug", "info", "warning", "error", "critical", "passive"]

# `fsdp: true` is documented, and the choices of the log levels are computed.
_TRAINING_TYPES = {
    "fsdp": "bool | str | list[str] | None",
    "log_level": f"Literal{_LOG_LEVELS}",
    "log_level_replica": f"Literal{_LOG_LEVELS}",
}
# LoHa and LoKr share the fields of a class that lies here.
_SHARED_CONFIG = "tuners/lycoris_utils.py"
# The class has no annotations: these are the parameters whose default does not say what they take.
_QUANTIZATION_TYPES = {
    "llm_int8_skip_modules": "list[str] | None",
    "bnb_4bit_quant_type": "Literal['fp4', 'nf4']",
    "bnb_4bit_compute_dtype": f"Literal{list(DTYPES)} | None",
    "bnb_4bit_quant_storage": "Literal['float16', 'float32', 'int8', 'uint8', 'float64', 'bfloat16'] | None",
}
# The base class of configs takes these out of its keyword arguments.
_CONFIG_KEYWORDS = (
    *("model_type", "attn_implementation", "experts_implementation", "output_attentions", "per_layer_config"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "num_labels"),
    *("rope_theta", "rope_scaling", "partial_rotary_factor", "tie_word_embeddings", "use_cache", "torch_dtype"),
)


@functools.lru_cache
def version(package: str) -> str:
    """Return the version of an installed package."""
    _folder(package)
    return importlib.metadata.version(package)


@functools.lru_cache
def training_keys(of_trl: str = "") -> Keys:
    """Return the fields of `transformers.TrainingArguments`, or of the arguments of a trainer of trl, such as `DPO`."""
    if of_trl:
        node = _class("trl", f"trainer/{of_trl.lower()}_config.py", f"{of_trl}Config")
        base = _fields(_class("trl", "trainer/base_config.py", BASE_CONFIG))
        return {**training_keys(""), **base, **_fields(node), **_listed_in_help(node)}
    enums: dict[str, Sequence[str]] = {}
    for path in ("trainer_utils.py", "debug_utils.py", "training_args.py"):
        enums |= _enums(_tree("transformers", path))
    found = _fields(_class("transformers", "training_args.py", "TrainingArguments"), enums)
    return _corrected(found, _TRAINING_TYPES)


def _listed_in_help(node: ast.ClassDef) -> dict[str, Key]:
    """Return the fields whose choices a class lists in their help only; one of several may be written as text."""
    found: dict[str, Key] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and ast.unparse(statement.annotation) in ("str", "list[str]"):
            text = ast.unparse(statement.value) if statement.value is not None else ""
            listed = re.search(r"Possible values are:? (.*?)\. ", text)
            words = tuple(re.findall(r"`'?(\w+)'?`", listed[1])) if listed and "'choices'" not in text else ()
            if len(words) > 1:
                choice, is_list = Type("choice", choices=words), ast.unparse(statement.annotation) == "list[str]"
                type_ = Type("union", (choice, Type("list", (choice,)))) if is_list else choice
                found[ast.unparse(statement.target)] = Key(type_, _default(statement.value))
    return found


def trl_version() -> tuple[int, ...] | None:
    """Return the numbers of the version of trl that is installed; None without it."""
    if importlib.util.find_spec("trl") is None:
        return None
    return tuple(int(number) for number in re.findall(r"\d+", importlib.metadata.version("trl"))[:2])


@functools.lru_cache
def adapter_classes() -> Mapping[str, tuple[str, str]]:
    """Return, for each kind of adapter that PEFT registers, the file and the name of its config class."""
    found: dict[str, tuple[str, str]] = {}
    tuners = _folder("peft") / "tuners"
    for path in sorted(tuners.glob("*/__init__.py")):
        for call in re.findall(r"register_peft_method\((.*?)\)", path.read_text(encoding="utf-8"), re.DOTALL):
            words = dict(re.findall(r"(name|config_cls)=[\"']?(\w+)", call))
            found[words["name"]] = f"tuners/{path.parent.name}/config.py", words["config_cls"]
    return found


@functools.lru_cache
def adapter_keys(kind: str) -> Keys:
    """Return the fields of PEFT's config of a kind of adapter, such as `lora`; its bases' included."""
    enums: dict[str, Sequence[str]] = dict(_enums(_tree("peft", "utils/peft_types.py")))
    found: dict[str, Key] = {}
    for path, name in _adapter_lineage(*adapter_classes()[kind]):
        enums |= _enums(_tree("peft", path))
        found |= _fields(_class("peft", path, name), enums)
    return found


@functools.lru_cache
def has_virtual_tokens(kind: str) -> bool:
    """Whether a kind of adapter puts tokens of its own before a row's, or keys and values before theirs."""
    return any(name == "PromptLearningConfig" for _, name in _adapter_lineage(*adapter_classes()[kind]))


def _adapter_lineage(path: str, name: str) -> list[tuple[str, str]]:
    """Return the files and names of a config class of PEFT and of its bases, bases first."""
    places = {own: file for file, own in adapter_classes().values()}
    for node in (*_tree("peft", "config.py").body, *_tree("peft", _SHARED_CONFIG).body):
        if isinstance(node, ast.ClassDef):
            places[node.name] = "config.py" if node in _tree("peft", "config.py").body else _SHARED_CONFIG
    bases = (ast.unparse(base) for base in _class("peft", path, name).bases)
    return [each for base in bases if base in places for each in _adapter_lineage(places[base], base)] + [(path, name)]


@functools.lru_cache
def quantization_keys() -> Keys:
    """Return the parameters of `transformers.BitsAndBytesConfig`."""
    found = _parameters(_class("transformers", "utils/quantization_config.py", "BitsAndBytesConfig"))
    return _corrected(found, _QUANTIZATION_TYPES)


@functools.lru_cache
def model_types(task: str = "CAUSAL_LM") -> tuple[str, ...]:
    """Return the values of `model_type` for which there is a model of a task, as transformers names its mappings."""
    mapping = f"MODEL_FOR_{task}_MAPPING_NAMES"
    for statement in _tree("transformers", "models/auto/modeling_auto.py").body:
        if isinstance(statement, ast.Assign) and mapping in map(ast.unparse, statement.targets):
            return tuple(dict.fromkeys(key for key, _ in _pairs_of_text(statement)))
    return ()


@functools.lru_cache
def config_keys(model_type: str) -> tuple[str, Keys] | None:
    """Return the config class of `model_type` and the keys that it takes, or nothing where its source does not say."""
    class_name = _config_class_name(model_type)
    tree = None if class_name is None else _config_tree(model_type, class_name)
    if tree is None or class_name is None:
        return None
    anything = parse_type("Any")
    found: dict[str, Key] = {name: Key(anything) for name in _CONFIG_KEYWORDS}
    for node in (_class("transformers", "configuration_utils.py", "PreTrainedConfig"), *_lineage(tree, class_name)):
        # Upstream holds dataclass fields to their annotations. Those of an `__init__` may be wrong (`int = 1e-6`).
        found |= dict.fromkeys((*_parameters(node), *_aliases(node), *_assigned(node)), Key(anything))
        found |= _fields(node, unknown="any")
    return class_name, found


# --- Config classes. ---


def _config_class_name(model_type: str) -> str | None:
    for path in ("models/auto/auto_mappings.py", "models/auto/configuration_auto.py"):
        for statement in _tree("transformers", path).body:
            for key, value in _pairs_of_text(statement):
                if key == model_type and value.endswith("Config"):
                    return value
    return None


def _config_tree(model_type: str, class_name: str) -> ast.Module | None:
    module = model_type.replace("-", "_")
    models = _folder("transformers") / "models"
    declaration = re.compile(rf"^class {class_name}\b", re.MULTILINE)
    # A model's folder is named after its type, with few exceptions; those are found by looking.
    likely = models / module / f"configuration_{module}.py"
    for path in (likely, *sorted(models.glob("*/configuration_*.py"))):
        if path.is_file() and declaration.search(path.read_text(encoding="utf-8")):
            return _tree("transformers", str(path.relative_to(models.parent)))
    return None


def _lineage(tree: ast.Module, name: str) -> list[ast.ClassDef]:
    """Return a class and its bases in the same file, bases first."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    node = classes.get(name)
    if node is None:
        return []
    return [ancestor for base in node.bases for ancestor in _lineage(tree, ast.unparse(base))] + [node]


def _aliases(node: ast.ClassDef) -> list[str]:
    """Return the other names that a config class gives its own fields, such as `n_embd` for `hidden_size`."""
    for statement in node.body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "attribute_map":
            return [str(name) for pair in ast.literal_eval(statement.value).items() for name in pair]
    return []


def _assigned(node: ast.ClassDef) -> list[str]:
    """Return what a class sets on itself: derived values, which a saved config holds as well."""
    stores = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)]
    return [store.attr for store in stores if ast.unparse(store.value) == "self" and not store.attr.startswith("_")]


# --- Reading source. ---


@functools.lru_cache
def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise RecipeError(f"A recipe needs {package}, which is not installed. Run: pip install {package}")
    return Path(spec.origin).parent


@functools.lru_cache
def _tree(package: str, path: str) -> ast.Module:
    file = _folder(package) / path
    return ast.parse(file.read_text(encoding="utf-8")) if file.is_file() else ast.Module([], [])


def _class(package: str, path: str, name: str) -> ast.ClassDef:
    for node in _tree(package, path).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise RecipeError(
        f"A recipe's keys are the fields of {name}, but {package} {version(package)} has no such class in {path}. "
        f"Install a version of {package} that constraints.txt names."
    )


def _fields(
    node: ast.ClassDef, enums: Mapping[str, Sequence[str]] | None = None, unknown: Kind = "object"
) -> dict[str, Key]:
    """Return the annotated fields of a class."""
    found: dict[str, Key] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            annotation = ast.unparse(statement.annotation)
            if not statement.target.id.startswith("_") and "ClassVar" not in annotation:
                type_ = _with_choices(parse_type(statement.annotation, enums, unknown), statement.value)
                found[statement.target.id] = Key(type_, _default(statement.value))
    return found


def _parameters(node: ast.ClassDef) -> dict[str, Key]:
    """Return the parameters of a class's `__init__` that can be given by keyword."""
    for method in node.body:
        if isinstance(method, ast.FunctionDef) and method.name == "__init__":
            given = method.args
            padding = [None] * (len(given.args) - len(given.defaults))
            named = dict(zip(given.args, [*padding, *given.defaults], strict=True))
            named |= zip(given.kwonlyargs, given.kw_defaults, strict=True)
            return {arg.arg: _parameter(arg, default) for arg, default in named.items() if arg.arg != "self"}
    return {}


def _parameter(arg: ast.arg, default: ast.expr | None) -> Key:
    value = _default(default)
    if arg.annotation is not None:
        return Key(parse_type(arg.annotation, unknown="any"), value)
    return Key(parse_type("Any" if value is None else type(value).__name__), value)


def _default(node: ast.expr | None) -> Any:
    """Return a default that is a plain value, given as itself or as `field(default=...)`."""
    if isinstance(node, ast.Call):
        node = next((keyword.value for keyword in node.keywords if keyword.arg == "default"), None)
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None


def _with_choices(type_: Type, default: ast.expr | None) -> Type:
    """Narrow text to the choices that `field(metadata={"choices": [...]})` lists."""
    for node in ast.walk(default) if default is not None else ():
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value == "choices" and isinstance(value, ast.List):
                    choice = Type("choice", choices=tuple(ast.literal_eval(value)))
                    others = tuple(part for part in type_.members() if part.kind != "str")
                    return Type("union", (choice, *others))
    return type_


def _corrected(found: Keys, types: Mapping[str, str]) -> Keys:
    return {name: Key(parse_type(types[name]), key.default) if name in types else key for name, key in found.items()}


def _enums(tree: ast.Module) -> dict[str, tuple[str, ...]]:
    """Return the values of the enumerations of text in a module."""
    found: dict[str, tuple[str, ...]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and "Enum" in ast.unparse(node).split(":")[0]:
            values = (statement.value for statement in node.body if isinstance(statement, ast.Assign))
            found[node.name] = tuple(str(value.value) for value in values if isinstance(value, ast.Constant))
    return found


def _pairs_of_text(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """Yield the pairs of a mapping of names, written as `[("llama", "LlamaConfig"), ...]` or as `{"llama": ...}`."""
    for node in ast.walk(statement):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2:
            key, value = node.elts
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant):
                yield str(key.value), str(value.value)
        elif isinstance(node, ast.Dict):
            for name, text in zip(node.keys, node.values, strict=True):
                if isinstance(name, ast.Constant) and isinstance(text, ast.Constant):
                    yield str(name.value), str(text.value)
