"""Processes, and engines of others: what ranks say to each other, FSDP and DeepSpeed."""
