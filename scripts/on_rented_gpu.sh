#!/usr/bin/env bash
# Measure on a bare machine with one GPU: nothing of ours need be installed there, and nothing is fetched there.
#
#   scripts/on_rented_gpu.sh pack          # beforehand, with a network: the wheels to carry along, into .whl/
#   scripts/on_rented_gpu.sh SECONDS       # there: the lean programme, into $OUT
#
# A second call on the same machine goes on where the first one stopped. benchmarks/README.md has both calls.
set -euo pipefail
began=$SECONDS
cd "$(dirname "$0")/.."

# What the newest settings of the Trainer need (5.23 and later), and 4-bit weights. Needs of both are on any machine with torch.
wheels="transformers==5.24.0 bitsandbytes==0.50.2"
# Of the libraries in bitsandbytes' wheel only these: the machine's CUDA, and the CPU.
libraries="libbitsandbytes_cuda130 libbitsandbytes_cpu"

if [ "${1:-}" = pack ]; then
    python3 -m pip --version > /dev/null || { echo 'pack needs a python3 with pip' >&2; exit 2; }
    rm -rf .whl && mkdir .whl
    python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_24_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --dest .whl $wheels
    LIBRARIES="$libraries" python3 - <<'PYTHON'
import os, pathlib, zipfile

kept = tuple(os.environ["LIBRARIES"].split())
(path,) = pathlib.Path(".whl").glob("bitsandbytes-*.whl")
slim = path.with_suffix(".new")
with zipfile.ZipFile(path) as old, zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as new:
    for name in old.namelist():
        file = name.rpartition("/")[2]
        if not file.startswith("libbitsandbytes_") or file.startswith(kept):
            new.writestr(old.getinfo(name), old.read(name))
slim.replace(path)
PYTHON
    du -sh .whl
    exit
fi

seconds=${1:?"seconds are missing: scripts/on_rented_gpu.sh 585"}
shift
[[ $seconds =~ ^[1-9][0-9]+$ ]] || { echo "SECONDS is a whole number from 10 on, such as 585, not '$seconds'" >&2; exit 2; }
: "${OUT:?"OUT is missing: the folder whose files come home"}"
state=${STATE:-/tmp/hf_ckpt_gpu}  # stays on the machine between two calls
python=${PYTHON:-python3}
mkdir -p "$OUT" "$state"
if [ ! -e "$state/site/.installed" ]; then
    compgen -G '.whl/*.whl' > /dev/null || { echo '.whl/ holds no wheels: carry it along (scripts/on_rented_gpu.sh pack)' >&2; exit 2; }
    $python -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$state/site" .whl/*.whl
    touch "$state/site/.installed"
fi
export PYTHONPATH="$state/site${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
[ ! -e "$state/results.json" ] || set -- "$@" --resume "$state/results.json"
# A copy for the next call, also where this one is killed. Each result file is there whole or not at all.
keep() { cp "$OUT/results.json" "$state/results.json" 2> /dev/null || true; }
(while sleep 3 && kill -0 $$ 2> /dev/null; do keep; done) &
copying=$!
trap 'keep; kill $copying 2> /dev/null || true' EXIT
# The programme's own limit comes before the caller's.
$python -m benchmarks.on_gpu --out "$OUT" --seconds $((seconds - (SECONDS - began) - 8)) "$@"
