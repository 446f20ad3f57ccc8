"""A model whose home is twice `host_memory` trains with state in files, is killed in the middle of a step, and resumes.

    python examples/10_files.py
    python examples/10_files.py --folder /nvme --width 512

First the model trains in memory, without a break. Then a process does the same steps with `files=`, and saves every few
of them. The script kills it, and a second process goes on from the checkpoint. In the end all bits must be those of the
first run. The exit status is 1 if they are not. Nothing is left in the folder.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import subprocess
import sys
import tempfile
from itertools import islice
from pathlib import Path

# Both must be set before torch is loaded, also in the processes that this one starts.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the same bits every time, on CUDA too

import noria
import torch
from gpt import GPT, GPTConfig
from noria.testing import first_difference
from text import Tokenizer, batches, load_text

CONTEXT, BATCH = 64, 2
MIB = 2**20


def main() -> int:
    args = parse_arguments()
    if args.checkpoint is not None:
        train(args)
        return 0
    args.folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="noria-", dir=args.folder) as folder:
        whole, killed, files = (Path(folder) / name for name in ("whole.pt", "killed.pt", "files"))
        print("in memory", flush=True)
        run(args, whole)
        print("in files", flush=True)
        was_killed = run(args, killed, files, kill_at=args.kill_at) < 0
        print(f"killed in step {args.kill_at}; {len(os.listdir(files))} files are left in the folder", flush=True)
        run(args, killed, files)
        kept = [(was_killed and not os.listdir(files), "one process was killed, and no file of either is left")]
        kept += compare(torch.load(whole, weights_only=True), torch.load(killed, weights_only=True))
    for is_kept, promise in kept:
        print(f"{'yes' if is_kept else 'NO '}  {promise}")
    return 0 if all(is_kept for is_kept, _ in kept) else 1


def run(args: argparse.Namespace, checkpoint: Path, files: Path | None = None, kill_at: int | None = None) -> int:
    """Trains in a process of its own, and shows what that prints. Gives its exit status, negative if it was killed."""
    command = [sys.executable, __file__, *sys.argv[1:], "--checkpoint", str(checkpoint)]
    command += ["--files", str(files)] if files is not None else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print("  " + line, end="", flush=True)
            if kill_at is not None and line.startswith(f"step {kill_at:>3} "):
                process.kill()
    if process.returncode > 0:  # it has said why
        sys.exit(process.returncode)
    return process.returncode


def train(args: argparse.Namespace) -> None:
    """The ordinary loop, from the checkpoint on if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.use_deterministic_algorithms(device.type == "cuda")
    text = load_text(args.text_bytes)
    tokenizer = Tokenizer(text, vocab_size=args.vocab)
    tokens = tokenizer.encode(text)
    torch.manual_seed(0)
    model = GPT(GPTConfig(tokenizer.vocab_size, CONTEXT, args.layers, num_heads=args.width // 64, width=args.width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3, betas=(0.9, 0.95), weight_decay=0.1)

    # Gradients lie in a ring, so that the home is weights and moments. Files take the moments.
    policy = noria.Policy(device=str(device), update="backward")
    home = noria.plan(model, optimizer, policy).home_bytes
    if args.files is not None:
        policy = dataclasses.replace(policy, files=args.files, host_memory=home // 2)
    model, optimizer = noria.wrap(model, optimizer, policy)  # <- the one call
    limit = "" if args.files is None else f", host_memory is {home / 2 / MIB:.1f} MiB"
    print(f"the home is {home / MIB:.1f} MiB{limit}: {places(noria.report(model))}")

    losses = []
    if args.checkpoint.exists():
        losses = noria.load(args.checkpoint, model, optimizer)["losses"]
        print(f"resumed after step {len(losses)}")
    moved = {}
    for inputs, targets in islice(batches(tokens, BATCH, CONTEXT), len(losses), args.steps):
        before = moved_by(model)
        _, loss = model(inputs.to(device), targets.to(device))
        losses.append(loss.item())
        step = f"step {len(losses):>3}"
        print(f"{step}  loss {losses[-1]:.4f}", flush=True)  # here the script kills: backward reads and writes files
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = {lane: num_bytes - before[lane] for lane, num_bytes in moved_by(model).items()}
        if len(losses) % args.save_every == 0 or len(losses) == args.steps:
            noria.save(args.checkpoint, model, optimizer, losses=losses)
            print(f"{step}  saved", flush=True)
    if "read" in moved:
        print(f"the last step read {moved['read'] / MIB:.1f} MiB of files, and wrote {moved['write'] / MIB:.1f} MiB")


def places(report: noria.Report) -> str:
    taken = {place: sum(row.taken for row in report.ledger if row.place == place) for place in ("host", "files")}
    return f"{taken['host'] / MIB:.1f} MiB are taken there, {taken['files'] / MIB:.1f} MiB in files"


def moved_by(model: torch.nn.Module) -> dict[str, int]:
    """Bytes since the wrap call, by lane."""
    return {lane.lane: lane.bytes for lane in noria.report(model).lanes}


def compare(whole: dict, resumed: dict) -> list[tuple[bool, str]]:
    """Of two checkpoints: whether their bits are equal, and what that says."""
    kept = [(resumed["losses"] == whole["losses"], f"{len(whole['losses'])} losses have the bits of the run in memory")]
    for name in ("weights", "moments"):
        ours, theirs = (values_of(checkpoint, name) for checkpoint in (resumed, whole))
        difference = first_difference(list(ours.values()), [theirs[key] for key in ours], list(ours))
        kept.append((difference is None, f"all {name} have them, too" if difference is None else difference))
    return kept


def values_of(checkpoint: dict, name: str) -> dict[str, torch.Tensor]:
    if name == "weights":
        return checkpoint["model"]
    states = checkpoint["optimizer"]["state"].items()
    return {f"{number}.{key}": value for number, state in states for key, value in state.items()}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on a fast disk, not in memory")
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--kill-at", type=int, default=5, help="the step in which the first process is killed")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=128, help="a multiple of 64")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--text-bytes", type=int, default=200_000)
    parser.add_argument("--checkpoint", type=Path, help="train with this checkpoint, and compare nothing")
    parser.add_argument("--files", type=Path, help="with --checkpoint: where state lies; default: in memory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
