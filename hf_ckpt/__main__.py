"""`python -m hf_ckpt`: the `hf-ckpt` command."""

from hf_ckpt.cli.main import run

if __name__ == "__main__":
    run()
