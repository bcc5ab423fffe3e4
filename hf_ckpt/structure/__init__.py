"""Decoder stacks, layers, parts and the head of a model, found by structure."""
