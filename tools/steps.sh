# What the checks of this folder share: how long a step took, and how a check fails.
step=$SECONDS
told() {
  echo "== $1: $((SECONDS - step)) s"
  step=$SECONDS
}
fail() {
  echo "FAILED: $1" >&2
  exit 1
}
