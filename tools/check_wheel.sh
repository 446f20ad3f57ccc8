#!/usr/bin/env bash
# Does the wheel work where nothing else of noria is?
#
#     bash tools/check_wheel.sh [--torch VERSION] [WHEEL]
#
# The wheel: by default the one in dist/, where `make wheel` puts it. The torch: by default the one in requirements.lock,
# whichever build of it the package index has. Looks at the wheel's tag and at what it asks for. The rest happens in an
# empty environment of the Python in $PYTHON (default: python3), from an empty folder. No rpath may be absolute. torch
# and TBB must come from that environment. README's example runs, and a wrapped training has the bits of plain torch.
# noria.testing and the doctor work. At last pytest must find the tests of an sdist of this tree. All in
# build/check_wheel.
set -eu -o pipefail
cd "$(dirname "$0")/.."
tree=$PWD
torch=$(sed -n 's/^torch==//p' requirements.lock) wheel=""
while [ $# -gt 0 ]; do
  case "$1" in
    --torch) torch=$2; shift ;;
    -*) echo "expected --torch VERSION or a wheel; found $1" >&2; exit 2 ;;
    *) wheel=$1 ;;
  esac
  shift
done

. tools/steps.sh

# ---- which wheel, and what it says ----
if [ -z "$wheel" ]; then
  found=(dist/noria-*.whl)
  [ ${#found[@]} = 1 ] && [ -e "${found[0]}" ] ||
    fail "expected one wheel in dist/; found ${found[*]}; remedy: make wheel, or name one"
  wheel=${found[0]}
fi
wheel=$(realpath "$wheel")
echo "$(basename "$wheel"): $(stat -c %s "$wheel") bytes"
[[ $wheel == *-manylinux_*.whl ]] || fail "its tag names no manylinux"
python=${PYTHON:-python3}
asked=$("$python" -c '
import sys, zipfile
wheel = zipfile.ZipFile(sys.argv[1])
[metadata] = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
print(wheel.read(metadata).decode())' "$wheel" | sed -n '/extra ==/d; s/^Requires-Dist: //p')
minor=$(echo "$torch" | cut -d. -f1,2)
echo "$asked" | grep -qxF "torch==$minor.*" || fail "it does not ask for torch==$minor.*; it asks for: $asked"
echo "$asked" | grep -q "^tbb>=" || fail "it does not ask for tbb; it asks for: $asked"

# ---- an empty environment, and an empty folder ----
place=$tree/build/check_wheel
rm -rf "$place"
mkdir -p "$place/empty"
"$python" -m venv "$place/environment"
python=$place/environment/bin/python
env -u PYTHONPATH "$python" -m pip install -q "torch==$torch" "$wheel" transformers # which README's example names
told "environment"
cd "$place/empty"
alone() { env -i HOME="$HOME" LANG=C.UTF-8 PATH="$place/environment/bin:/usr/bin:/bin" OMP_WAIT_POLICY=passive "$@"; }

# ---- libraries are found by where the wheel lies, and in no other way ----
package=$(alone "$python" -c 'import importlib.util; print(importlib.util.find_spec("noria").submodule_search_locations[0])')
[[ $package == "$place"/environment/* ]] || fail "noria was found in $package"
libraries=$(find "$package" "$package.libs" -name '*.so*' 2>/dev/null || true)
[ -n "$libraries" ] || fail "no library in $package"
for library in $libraries; do
  rpaths=$(readelf -d "$library" | sed -nE 's/.*\((RPATH|RUNPATH)\).*\[(.*)\]/\2/p' | tr : '\n')
  # shellcheck disable=SC2016
  absolute=$(echo "$rpaths" | grep -v '^\$ORIGIN\(/\|$\)' | grep . || true)
  [ -z "$absolute" ] || fail "$(basename "$library") has rpaths that are not relative: $absolute"
  ! grep -qaE "$tree/|-packages/torch/include/" "$library" ||
    fail "$(basename "$library") names folders of the machine that built it"
  echo "$(basename "$library"): $(echo "$rpaths" | tr '\n' ' ')"
done
alone "$python" - "$place/environment/" <<'END_PYTHON'
import sys

import noria
import torch

used = {line.split()[-1] for line in open("/proc/self/maps") if "/" in line}
for name in ("libtbb.so", "libtorch_cpu.so", "libtorch_python.so", "libc10.so"):
    found = [path for path in used if f"/{name}" in path]
    assert found and all(path.startswith(sys.argv[1]) for path in found), f"{name} comes from {found}"
print(f"noria {noria.__version__}, torch {torch.__version__}; torch and TBB come from the environment")
END_PYTHON
told "libraries"

# ---- README's example, as it is printed there ----
# shellcheck disable=SC2016
awk '/^```python$/ { on = 1; next } /^```$/ && on { exit } on' "$tree/README.md" >"$place/example.py"  # the first
grep -q "noria.wrap" "$place/example.py" || fail "README.md has no example that wraps a model"
alone "$python" "$place/example.py" >"$place/example.log" 2>&1 ||
  { tail -n 30 "$place/example.log"; fail "README's example: $place/example.log"; }
grep -qE "[1-9][0-9]* fetches" "$place/example.log" || fail "README's example moved nothing: $place/example.log"
told "README's example"

# ---- the bits of plain torch ----
alone "$python" - <<'END_PYTHON'
import re

import noria  # enough for noria.testing
import torch

torch.set_num_threads(1)
torch.manual_seed(3)
batches = torch.randn(5, 8, 64)


def train(wrapped):
    torch.manual_seed(4)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh()) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if wrapped:  # a layer has 16.25 KiB of weights
        model, optimizer = noria.wrap(model, optimizer, device="cpu", device_memory="66KiB", kernel="torch")
    losses = {}
    for step, batch in enumerate(batches):
        loss = model(batch).square().mean()
        losses[f"loss {step}"] = loss.detach()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {**losses, **model.state_dict()}, model


(plain, _), (wrapped, model) = train(False), train(True)
noria.testing.assert_same_bits(wrapped, plain)
fetches = sum(map(int, re.findall(r"(\d+) fetches", str(noria.report(model)))))
assert fetches > 8, f"{fetches} fetches in the last passes: the layers did not take turns"
plain["loss 4"] += 1e-6
try:
    noria.testing.assert_same_bits(wrapped, plain)
except AssertionError as difference:
    print(f"{len(plain)} losses and weights are the same; {fetches} fetches. Of a wrong one it says: {difference}")
else:
    raise AssertionError("noria.testing saw no difference where there is one")
END_PYTHON
told "the bits of plain torch, and noria.testing"
alone "$place/environment/bin/noria" doctor >"$place/doctor.log" 2>&1 || { cat "$place/doctor.log"; fail "noria doctor"; }
grep -q "built against torch $minor" "$place/doctor.log" || fail "the doctor did not say what noria was built against"
told "noria doctor"

# ---- the sdist's tests, with the wheel's noria ----
bash "$tree/tools/copy_tree.sh" "$place/tree"
env -u PYTHONPATH "$python" -m pip install -q "setuptools>=77,<82" "${wheel}[test]"
cd "$place/tree"
alone "$python" -c 'import setuptools.build_meta as backend; backend.build_sdist("..")' >"$place/sdist.log" 2>&1 ||
  { tail -n 30 "$place/sdist.log"; fail "the sdist: $place/sdist.log"; }
mkdir "$place/sdist"
tar -xzf "$place"/noria-*.tar.gz -C "$place/sdist" --strip-components=1
cd "$place/sdist"
alone "$python" -m pytest -p no:cacheprovider --collect-only >"$place/collect.log" 2>&1 ||
  { tail -n 30 "$place/collect.log"; fail "tests of the sdist cannot be collected: $place/collect.log"; }
tail -n 1 "$place/collect.log"
told "the sdist's tests are found"
echo "ok: $(basename "$wheel")"
