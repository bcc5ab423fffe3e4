"""Plugins of other trainers; each file needs what it is for, and can be read without."""
