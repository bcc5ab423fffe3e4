"""Write what each recipe is predicted to need into its header: python scripts/recipe_headers.py [recipe.yaml ...]."""

import sys
from pathlib import Path

from benchmarks.recipe_headers import needs_of, with_needs

RECIPES = Path(__file__).parents[1] / "recipes"


def main(names: list[str]) -> None:
    """Predict and write; all shipped recipes where none are named."""
    for path in [Path(name) for name in names] or sorted(RECIPES.glob("*.yaml")):
        needs = needs_of(path)
        path.write_text(with_needs(path.read_text(encoding="utf-8"), needs), encoding="utf-8")
        print(f"{path.stem}: {needs.describe()}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
