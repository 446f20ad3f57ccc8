#!/usr/bin/env bash
# The tree as git knows it, with what is not committed yet, into a folder: as if it had been carried to another machine.
# What that folder has in build/ stays, so that the next build there is a short one.
#
#     bash tools/copy_tree.sh FOLDER
set -eu -o pipefail
to=$(realpath -m "$1")
cd "$(dirname "$0")/.."
mkdir -p "$to"
find "$to" -mindepth 1 -maxdepth 1 ! -name build -exec rm -rf {} +
git ls-files -z --cached --others --exclude-standard | while IFS= read -r -d "" file; do
  if [ -e "$file" ]; then printf '%s\0' "$file"; fi
done | xargs -0 cp --parents --preserve=timestamps -t "$to"
