"""The images of a run: the processor that reads them, and the bounds that a recipe puts on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from datasets import Dataset
from transformers import AutoProcessor

from hf_ckpt.errors import DataError, RecipeError
from hf_ckpt.loading.config_files import source_options
from hf_ckpt.loading.tokenizer import complete_tokenizer
from hf_ckpt.recipe.schema import DEFAULT_MAX_LENGTH

TOKENS_AROUND = 2  # That begin and end an image.


def load_processor(model_section: Mapping[str, Any], data_section: Mapping[str, Any]) -> Any:
    """Load the processor of a model that reads images, with a complete tokenizer. See `load_tokenizer`."""
    name = model_section.get("tokenizer", model_section["name_or_path"])
    options = source_options(model_section, "revision")
    try:
        processor = AutoProcessor.from_pretrained(name, **options)  # type: ignore[no-untyped-call]  # upstream
    except (OSError, ValueError, ImportError, AttributeError) as error:
        raise DataError(
            f'The processor of "{name}", which reads images, cannot be loaded: {str(error).strip().splitlines()[0]}. '
            "Many need torchvision: pip install torchvision."
        ) from error
    if getattr(processor, "tokenizer", None) is None or getattr(processor, "image_processor", None) is None:
        raise DataError(f'"{name}" has no processor of images. Name a model that reads images, or drop data.format.')
    complete_tokenizer(processor.tokenizer, data_section)
    if "chat_template" in data_section:
        processor.chat_template = processor.tokenizer.chat_template
    if "max_pixels" in data_section:
        # Larger images are made smaller.
        reader, most = processor.image_processor, data_section["max_pixels"]
        if not all(hasattr(reader, name) for name in ("patch_size", "merge_size")):
            raise DataError(
                f"data.max_pixels = {most}: {type(reader).__name__} gives images a size of its own. Remove "
                "data.max_pixels."
            )
        # Of such a reader these edges are numbers of pixels.
        edges = {"longest_edge": most, "shortest_edge": min(most, reader.size["shortest_edge"])}
        reader.size = type(reader.size)(**edges)
        check_images_fit(data_section, most // (reader.patch_size * reader.merge_size) ** 2)
    return processor


def check_images_fit(section: Mapping[str, Any], tokens_per_image: int) -> None:
    """Refuse bounds under which a row may be cut within an image."""
    num_images, length = section.get("max_images", 1), section.get("max_length", DEFAULT_MAX_LENGTH)
    num_tokens = num_images * (max(1, tokens_per_image) + TOKENS_AROUND)
    if num_tokens >= length:
        images = "an image" if num_images == 1 else f"{num_images} images"
        raise RecipeError(
            f"data.max_length = {length}: {images} of data.max_pixels = {section['max_pixels']} are up to "
            f"{num_tokens:,} tokens, before any text, and an image cannot be cut. Raise data.max_length, or lower the "
            "others."
        )


def check_number_of_images(rows: Dataset, section: Mapping[str, Any]) -> Dataset:
    """Return rows with images, none of which has more of them than a recipe says."""
    # Offsets alone are read, and no image.
    chunks = rows.data.column("images").chunks
    most = max((length or 0 for chunk in chunks for length in chunk.value_lengths().to_pylist()), default=0)
    if most > section.get("max_images", most):
        raise DataError(
            f"data.max_images is {section['max_images']}, but an example has {most} images. Raise it, or leave such "
            "examples out of the data set."
        )
    return rows
