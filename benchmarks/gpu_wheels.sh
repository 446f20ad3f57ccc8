#!/usr/bin/env bash
# The wheels that benchmarks/gpu_all.sh needs on a machine without a network, into a folder: for Python 3.12 on x86-64,
# or with --here for the Python that runs this.
#
#     . .venv/bin/activate && bash benchmarks/gpu_wheels.sh FOLDER [--here]
set -eu
python=${PYTHON:-python}
out=$(realpath -m "$1")
cd "$(dirname "$0")/.."
mkdir -p "$out" build
version=312
[ "${2:-}" = --here ] && version=$("$python" -c 'import sys; print("%d%d" % sys.version_info[:2])')
grep -v "^torch==" requirements.lock >build/constraints.txt
target=(--python-version "$version" --implementation cp --abi "cp$version" --abi abi3 --abi none --only-binary=:all:
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)

wanting_torch="accelerate peft"
grep -vxE "${wanting_torch// /|}" benchmarks/gpu_all.txt >build/requirements.txt
"$python" -m pip download -q -d "$out" -c build/constraints.txt "${target[@]}" -r build/requirements.txt
# shellcheck disable=SC2086
"$python" -m pip download -q -d "$out" -c build/constraints.txt "${target[@]}" --no-deps $wanting_torch
# The rivals: deepspeed comes as source; the others without what they need, which follows, but torch.
rivals=$("$python" -c 'from benchmarks.systems.environments import pins; print(*sorted({each
  for table in pins().values() for each in table if not each.startswith("deepspeed")}))')
deepspeed=$("$python" -c 'from benchmarks.systems.environments import pins; print(pins()["deepspeed"][0])')
"$python" -m pip wheel -q -w "$out" --no-deps --no-build-isolation "$deepspeed"
# shellcheck disable=SC2086
"$python" -m pip download -q -d "$out" "${target[@]}" --no-deps $rivals
"$python" -m pip download -q -d "$out" -c build/constraints.txt "${target[@]}" \
  einops hjson msgpack packaging py-cpuinfo pydantic tqdm beartype typing-extensions huggingface-hub pyyaml safetensors
du -sh "$out"
