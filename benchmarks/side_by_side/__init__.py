"""Ways to save activation memory, measured on one model in one run."""
