"""What users write, and what it resolves to for one model. Pure Python: knows no torch."""
