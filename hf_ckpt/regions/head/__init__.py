"""The language-model head and the loss without ever holding the logits: some tokens at a time.

The head hands out logits that are not there (`logits`); the loss that is asked of them runs in chunks, each through the
model's own head and recomputed in backward (`chunks`). So the model's own code decides what the loss is, and whatever
stands on the head takes part: adapters, soft-capping, hooks that gather a sharded weight, a quantised weight.

Note [torch's linear_cross_entropy]: torch 2.13 and later has a chunked kernel of its own, which is not used. It is
right for float32 alone (in bf16 it returns the loss in bf16), where it saves a frozen head's recomputation: 1.6 s
against 1.9 s on a CPU core (2,048 tokens, vocabulary 16,000, hidden size 256), and nothing with a trainable head. It
knows no adapter, no soft-capping and no hook, refuses a second backward, and neither its operations nor its memory can
be counted from outside. Liger's is left to govern where it is on (`hf_ckpt.structure.lm_head.governed_by_other`).
"""

from hf_ckpt.regions.head.chunking import Chunking
from hf_ckpt.regions.head.logits import DeferredLogits
from hf_ckpt.regions.head.run import check_reached, run_head

__all__ = ["Chunking", "DeferredLogits", "check_reached", "run_head"]
