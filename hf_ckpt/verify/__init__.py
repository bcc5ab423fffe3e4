"""`hf-ckpt verify`: a recipe run a few steps with and without its plan, and everything compared.

reduce_model -> trial (each leaves a record) -> compare, state_checks, saved -> localize -> report
"""
