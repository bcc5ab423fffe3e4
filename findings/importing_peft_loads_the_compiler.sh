#!/usr/bin/env bash
# Importing peft where bitsandbytes is installed loads torch's compiler, also on a machine that never compiles anything.
#
# Good guess: `import peft` defines adapters, and `import bitsandbytes` registers kernels; torch's compiler is loaded by
# whoever first calls what `torch.compile` has returned.
# Behaviour: bitsandbytes decorates two functions of its default backend with `torch.compile` when it is imported, and
# `torch.compile` imports the compiler at once to ask the backend for its settings, long before anything is compiled.
# peft imports bitsandbytes wherever it is installed, used or not. With TORCHDYNAMO_DISABLE=1 in the environment
# `torch.compile` hands the function back, and nothing is loaded. Seen: a fifth of what the import takes.
# Versions: torch 2.13.0, bitsandbytes 0.50.2, peft 0.21.2, transformers 5.24.0.
# Seen: "peft: compiler loaded", "peft without bitsandbytes: compiler not loaded", "peft, TORCHDYNAMO_DISABLE=1: compiler
# not loaded".
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
python="$folder/env/bin/python"
"$python" -m pip install --quiet torch==2.13.0 transformers==5.24.0 peft==0.21.2 bitsandbytes==0.50.2
export HF_HUB_OFFLINE=1

is_loaded() {
    "$python" -W ignore -c 'import sys, peft; print("compiler", "loaded" if "torch._inductor.compile_fx" in sys.modules else "not loaded")' \
        2> /dev/null | tail -1
}

found="peft: $(is_loaded)
peft, TORCHDYNAMO_DISABLE=1: $(TORCHDYNAMO_DISABLE=1 is_loaded)"
"$python" -m pip uninstall --quiet --yes bitsandbytes
found="$found
peft without bitsandbytes: $(is_loaded)"
echo "$found"
expected="peft: compiler loaded
peft, TORCHDYNAMO_DISABLE=1: compiler not loaded
peft without bitsandbytes: compiler not loaded"
[ "$found" = "$expected" ] || { echo "this has changed"; exit 1; }
