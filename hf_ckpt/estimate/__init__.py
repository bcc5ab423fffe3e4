"""A recipe's training step, predicted: what it needs, what fits, and the plan for a budget. Loads no weights."""
