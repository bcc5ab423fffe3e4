"""What others have measured on GPUs, with a configuration precise enough to simulate it, and our prediction."""
