"""A step that really runs, measured."""
