"""What the literature claims about activation checkpointing, each claim with our own figures."""
