"""What happens when a run goes out of memory: undone, put under a leaner plan, and run again."""
