"""Fine-tune as a recipe says: accelerate launch scripts/finetune.py recipes/tiny_llama_lora.yaml [key=value ...]."""

import sys

from hf_ckpt.cli.finetune import main

if __name__ == "__main__":
    sys.exit(main())
