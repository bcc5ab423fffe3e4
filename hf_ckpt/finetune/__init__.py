"""Recipes: the only part of the package that knows YAML, data sets and tokenizers.

Nothing outside this folder and the command line knows what a recipe is.
"""
