#!/usr/bin/env bash
# On a CPU, 4-bit values come back three times as far off where rows are no whole number of blocks, and nothing is said.
#
# Good guess: what `quantize_4bit` packs, `dequantize_4bit` gives back within the rounding of 4 bits, whatever the shape:
# blocks of 64 values are taken one after the other, as on a GPU, and the shape is only how the result is looked at.
# Behaviour: the CPU's kernel numbers its blocks row by row. A matrix of 64 x 96 has a block and a half in each row; values
# are multiplied by scales that belong to others. The same packed values with the shape (96, 64), or flat, come back right.
# Layers of models whose input size is no multiple of 64 compute with such weights on a CPU.
# Versions: bitsandbytes 0.50.2, torch 2.13.0, on an x86-64 CPU with AVX-512.
# Seen, as shares of the norm: {'64 x 128': 0.092, '64 x 96': 0.266, 'as 96 x 64': 0.092, 'flat': 0.092}
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/python" -m pip install --quiet torch==2.13.0 bitsandbytes==0.50.2 numpy
cat > "$folder/rows.py" <<'PYTHON'
import copy
import math

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit


def off(values, shape):
    packed, state = quantize_4bit(values, quant_type="nf4")
    seen = copy.copy(state)
    seen.shape = torch.Size(shape)
    back = dequantize_4bit(packed, seen).reshape(values.shape)
    return float((back - values).norm() / values.norm())


torch.manual_seed(0)
whole, odd = torch.randn(64, 128), torch.randn(64, 96)
found = {
    "64 x 128": off(whole, (64, 128)),
    "64 x 96": off(odd, (64, 96)),
    "as 96 x 64": off(odd, (96, 64)),
    "flat": off(odd, (64 * 96,)),
}
print({name: round(each, 3) for name, each in found.items()})
assert max(found["64 x 128"], found["as 96 x 64"], found["flat"]) < 0.1
assert found["64 x 96"] > 0.2 and math.isfinite(found["64 x 96"])
PYTHON
"$folder/env/bin/python" "$folder/rows.py"
