#!/usr/bin/env bash
# The wheels that benchmarks/gpu_all.sh needs on a machine without a network (Python 3.12, x86-64), into a folder.
#
#     . .venv/bin/activate && bash benchmarks/gpu_wheels.sh FOLDER
set -eu
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
mkdir -p "$out" build
grep -v "^torch==" requirements.lock >build/constraints.txt
target=(--python-version 312 --implementation cp --abi cp312 --abi abi3 --abi none --only-binary=:all:
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)

pip download -q -d "$out" -c build/constraints.txt "${target[@]}" -r benchmarks/gpu_all.txt
# The rivals: deepspeed comes as source; the others without what they need, which follows, but torch.
rivals=$(python -c 'from benchmarks.systems.environments import pins; print(*sorted({each for table in pins().values()
  for each in table if not each.startswith("deepspeed")}))')
deepspeed=$(python -c 'from benchmarks.systems.environments import pins; print(pins()["deepspeed"][0])')
pip wheel -q -w "$out" --no-deps --no-build-isolation "$deepspeed"
# shellcheck disable=SC2086
pip download -q -d "$out" "${target[@]}" --no-deps $rivals
pip download -q -d "$out" -c build/constraints.txt "${target[@]}" \
  einops hjson msgpack packaging py-cpuinfo pydantic tqdm beartype typing-extensions huggingface-hub pyyaml safetensors
du -sh "$out"
