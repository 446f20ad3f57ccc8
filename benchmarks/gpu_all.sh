#!/usr/bin/env bash
# Everything that wants a GPU, by one command of at most ten minutes, on a bare machine: benchmarks/gpu_all.md.
#
#     bash benchmarks/gpu_all.sh [--wheels FOLDER] [--out FOLDER] [--only PARTS]
#     bash benchmarks/gpu_all.sh --rehearse [--pretend] [--wheels FOLDER] [--out FOLDER] [--only PARTS]
#
# The parts, their order and their limits: gpu_all.py. --rehearse: the same on a machine without a GPU, with a stand-in
# for the bare machine: `python3` is a virtual environment's, has torch and pip and little else; ensurepip is absent; no
# index can be reached; the tree is a copy of what git knows. Only sizes and limits differ. In build/rehearsal.
# --pretend: with the pretend GPU of tests/pretend_gpu.
set -eu -o pipefail
cd "$(dirname "$0")/.."

if [ "${1:-}" != --rehearse ]; then
  exec "${PYTHON:-python3}" -m benchmarks.gpu_all "$@"
fi
shift

wheels="" out=build/rehearsal/out more=()
while [ $# -gt 0 ]; do
  case "$1" in
    --wheels) wheels=$(realpath "$2"); shift ;;
    --out) out=$2; shift ;;
    *) more+=("$1") ;;
  esac
  shift
done
out=$(realpath -m "$out")
place=$PWD/build/rehearsal
mkdir -p "$place" "$out"

# ---- the stand-in: of $PYTHON, else of the environment that is active, else of `make all`'s ----
python=""
for each in ${PYTHON:+"$PYTHON"} python3 .venv/bin/python; do
  if "$each" -c "import torch" 2>"$place/python.log"; then
    python=$each
    break
  fi
done
[ -n "$python" ] || { echo "expected a python with torch; found none; remedy: make all, or PYTHON=..." >&2; exit 2; }
if [ -z "$wheels" ]; then
  wheels=$place/wheels
  PYTHON=$python bash benchmarks/gpu_wheels.sh "$wheels" --here
fi
"$python" benchmarks/_bare_machine.py "$place/machine"

# ---- the tree, as it is carried there ----
tree=$place/tree
bash tools/copy_tree.sh "$tree"
rm -rf "$tree/build/gpu_all_venv" # what compilers made may stay, the environment is made anew

# ---- the run, which can reach nothing of this machine's settings ----
cd "$tree"
exec env -i HOME="$place" LANG=C.UTF-8 PATH="$place/machine/bin:/usr/local/bin:/usr/bin:/bin" \
  PIP_CONFIG_FILE=/dev/null PIP_INDEX_URL=http://127.0.0.1:9/simple PIP_RETRIES=0 PIP_DISABLE_PIP_VERSION_CHECK=1 \
  bash benchmarks/gpu_all.sh --small --wheels "$wheels" --out "$out" ${more[@]+"${more[@]}"}
