"""The commands of `hf-ckpt`, one file each: arguments in, text out."""
