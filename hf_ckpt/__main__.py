"""`python -m hf_ckpt`: the `hf-ckpt` command."""

import sys

from hf_ckpt.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
