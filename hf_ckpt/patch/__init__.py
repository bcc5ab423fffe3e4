"""A plan put onto a model, in place, and taken off again without a trace."""
