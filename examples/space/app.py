"""The page of `hf-ckpt ui` as a hosted space: this file, requirements.txt and README.md make up its repository."""

from hf_ckpt.cli.ui import launch

launch(is_hosted=True)
