"""What users would pick instead: one file for each library that it comes from."""
