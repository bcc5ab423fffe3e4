"""`hf-ckpt verify`: a recipe run a few steps with and without its plan, and everything compared."""
