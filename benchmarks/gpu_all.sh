#!/usr/bin/env bash
# Everything that wants a GPU, by one command of at most ten minutes, on a bare machine: benchmarks/gpu_all.md.
#
#     bash benchmarks/gpu_all.sh [--rehearse] [--wheels FOLDER] [--out FOLDER]
#
# Parts follow each other, but for the rivals, which are built and tried beside noria's build and tests; one that fails or
# runs out of its time is told at the end, and the others go on. All JSON, tables, plots and logs come to --out.
# --rehearse: the same parts, small, on a machine without a GPU.
set -u -o pipefail
cd "$(dirname "$0")/.."

rehearse=0 wheels="" out=""
while [ $# -gt 0 ]; do
  case "$1" in
    --rehearse) rehearse=1 ;;
    --wheels) wheels=$(realpath "$2"); shift ;;
    --out) out=$2; shift ;;
    *) echo "expected --rehearse, --wheels FOLDER or --out FOLDER; found $1" >&2; exit 2 ;;
  esac
  shift
done
out=${out:-build/gpu_all}
mkdir -p "$out"
out=$(realpath "$out")
began=$SECONDS
failed=$out/failed.txt
: >"$failed"

# part NAME SECONDS COMMAND...: its output to a log, its last lines here. All parts have BUDGET seconds together.
part() {
  local name=$1 limit=$2 start=$SECONDS left=$((${BUDGET:-590} - (SECONDS - began))) status
  shift 2
  if [ $left -lt 10 ]; then
    echo "$name: no time was left" >>"$failed"
    return
  fi
  [ $limit -gt $left ] && limit=$left
  timeout --kill-after=10 "$limit" "$@" >"$out/$name.log" 2>&1
  status=$?
  if [ $status -eq 124 ]; then
    echo "$name: more than $limit s" >>"$failed"
  elif [ $status -ne 0 ]; then
    echo "$name: exit status $status" >>"$failed"
  fi
  echo "== $name: $((SECONDS - start)) s, exit status $status"
  tail -n 3 "$out/$name.log" | cut -c1-200
}

if [ $rehearse = 1 ]; then
  python=${PYTHON:-python} systems=all
else
  python=$PWD/build/gpu_all_venv/bin/python
  systems="plain,noria max_grad_norm,noria,noria activations,noria backward,zero-2,zero-3 offload weights,fsdp2,trainstream"
  systems="$systems,roundpipe exact,superoffload"
fi
export OMP_WAIT_POLICY=passive

# ---- build: beside the machine's own torch ----
if [ $rehearse = 0 ]; then
  index=()
  [ -n "$wheels" ] && index=(--no-index --find-links "$wheels")
  part environment 60 bash -c "python3 -m venv --system-site-packages build/gpu_all_venv && \
    $python -m pip install -q ${index[*]} -r benchmarks/gpu_all.txt"
  foreign=$(echo "$systems" | tr , '\n' | grep -v noria | paste -sd,)
  part rivals 240 "$python" -m benchmarks.rivals --systems "$foreign" ${wheels:+--wheels "$wheels"} &
  part build 150 "$python" -m pip install -q --no-build-isolation --no-deps -e .
fi
part versions 60 "$python" -m noria.cli doctor

# ---- tests marked gpu, the contract of the backend first ----
part gpu_tests 120 "$python" -m pytest -m gpu --maxfail=30 -rs --durations=10 tests/python/device \
  tests/journeys/test_cuda.py tests/journeys/test_lending_cuda.py

# ---- side by side ----
if [ $rehearse = 1 ]; then
  part rivals 240 "$python" -m benchmarks.rivals --systems "$systems" ${wheels:+--wheels "$wheels"}
  part versus 300 "$python" -m benchmarks.versus --quick --device cpu --out "$out/versus_here.json"
  part largest 240 "$python" -m benchmarks.largest --quick --systems "noria backward" --host-memory 1GiB --first 1 \
    --out "$out/largest_here.json"
  part transfers 60 "$python" benchmarks/transfers.py --quick --out "$out/transfers_here.json"
  part adamw 60 "$python" benchmarks/adamw.py --quick --out "$out/adamw_here.json"
else
  wait
  part versus 200 "$python" -m benchmarks.versus --systems "$systems" --model gpt2-355m --tokens-per-step 1024,4096,16384 \
    --steps 4 --device-memory 12GiB --deadline 150 --out "$out/versus_here.json"
  part transfers 30 "$python" benchmarks/transfers.py --out "$out/transfers_here.json"
  part adamw 60 "$python" benchmarks/adamw.py --threads 1 8 15 --out "$out/adamw_here.json"
  part largest 100 "$python" -m benchmarks.largest --systems "noria backward,zero-2,zero-3 offload weights" \
    --device-memory 1GiB --host-memory 6GiB --fineness 4 --first 8 --deadline 70 --out "$out/largest_here.json"
fi
part break_even 30 "$python" benchmarks/break_even.py "$out/versus_here.json" --out "$out/break_even_here.json"

# ---- the demo: its bits against plain PyTorch's, and a trace to be looked at (demo/trace.json) ----
part demo 90 "$python" examples/02_gpt.py --steps 40 --out "$out/demo"
# Two stages lend each other memory: on a CUDA device each, where there are two, or else on the CPU.
part pipeline 60 "$python" -m torch.distributed.run --standalone --nproc-per-node 2 examples/05_pipeline_d2d.py \
  --steps 10 --trace "$out/pipeline"

echo
echo "$((SECONDS - began)) s in all; results in $out"
sed 's/^/failed: /' "$failed"
[ ! -s "$failed" ]
