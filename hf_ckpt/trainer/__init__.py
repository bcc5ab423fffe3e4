"""What the callback uses during a run of the Trainer."""
