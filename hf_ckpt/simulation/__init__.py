"""The memory and time of a training step as it will be, and the plan that suits a budget."""
