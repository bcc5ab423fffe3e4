"""Ways to save activation memory, measured beside each other on one model in one run."""
