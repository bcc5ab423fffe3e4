"""Selective recomputation: a layer is recomputed but for the costly outputs, which are kept.

Imports nothing: proofs of what regions computed import `dispatch`, and `selective_recompute` imports the proofs.
"""
