"""The tables and plots of a result of `benchmarks.versus`, from its JSON alone.

python -m benchmarks.versus.tables benchmarks/results/versus_....json
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

GIB, MIB = 1 << 30, 1 << 20


def summary_of(samples: dict[str, Any], plain: str) -> dict[str, Any]:
    """By system and tokens per step. Ratios are of turns of the same round and race; losses are compared step by step.
    What was in several races is told of the first one that it has finished."""
    found: dict[str, Any] = {}
    for race in samples["races"]:
        for name, rows in _of_race(race, plain, samples["turn"]).items():
            found[name] = rows | found.get(name, {})
    return found


def _of_race(race: dict[str, Any], plain: str, turn: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    theirs = race["systems"].get(plain, {})
    for name, by_tokens in race["systems"].items():
        about = race["about"][name]
        found[name] = {}
        for tokens, each in by_tokens.items():
            seconds = each["seconds"]
            if not seconds or "peak_host_bytes" not in each:
                continue
            ordered = sorted(seconds)
            moved = each.get("moved_bytes")
            row: dict[str, Any] = {
                "step_s": median(seconds),
                "q25_s": ordered[len(ordered) // 4],
                "q75_s": ordered[(3 * len(ordered)) // 4 - (len(ordered) % 4 == 0)],
                "tokens_per_s": int(tokens) / median(seconds),
                "host_bytes": each["peak_host_bytes"],
                "device_bytes": each["device_bytes"],
                "parameters": about["parameters"],
                "moved_bytes": {
                    way: (moved["after"][way] - moved["before"][way]) / (len(seconds) * turn) for way in ("down", "up")
                }
                if moved
                else None,
                "clips": about["clips"],
                "accumulates": about["accumulates"],
                "is_exact": about["is_exact"],
                "activations": about["activations"],
            }
            plainly = theirs.get(tokens)
            if plainly and len(plainly["seconds"]) == len(seconds):
                row["efficiency"] = median(b / a for a, b in zip(seconds, plainly["seconds"], strict=True))
                row["loss_distance"] = max(abs(a - b) for a, b in zip(each["losses"], plainly["losses"], strict=True))
            found[name][tokens] = row
    return found


def markdown(result: dict[str, Any]) -> str:
    """All that the result has, as a page."""
    task, hardware = result["settings"]["task"], result["hardware"]
    has_device = task["device"] == "cuda"
    lines = [
        f"# {task['model']}, {task['dtype']}, on {hardware.get('gpu', hardware['cpu'])}",
        "",
        f"`{result['command']}`, {result['date']}, torch {result['versions']['torch']}; {hardware['cores']} cores, "
        f"load {hardware['load_1min']} before. AdamW, norms of gradients clipped to {task['clip']}, "
        f"{task['micro_batches']} micro-batch{'es' if task['micro_batches'] > 1 else ''} a step, "
        f"{result['settings']['steps']} measured steps each, in turns of {result['settings']['turn']}: a step is a "
        "turn's time over its steps, and quartiles are of turns. No system was stopped and resumed. Loss off by: the "
        "largest difference to plain PyTorch's in any step, which grows from the first one on; who clips by a norm of "
        "its own, or cannot clip, parts from it.",
        "",
    ]
    if has_device:
        lines += [
            "Host: the kernel's count of the process, pinned memory included, beyond its imports. Device: what torch's "
            "allocator had reserved at most, and what a system took beside it. What moved each system counts itself.",
            "",
        ]
    else:
        lines += [
            "This machine has no device: all systems compute on the same cores, and what would lie on a device is host "
            "memory too. Process: the kernel's count beyond its imports, with what autograd keeps; how much of that "
            "would lie on a device is computed from the sizes of tensors and buffers, and has its own column. Nothing "
            "here tells how fast anybody is over a real link.",
            "",
        ]
    all_tokens = sorted({int(each) for found in result["summary"].values() for each in found})
    for tokens in all_tokens:
        lines += [
            f"## {tokens} tokens a step",
            "",
            "| | step | quartiles | tokens/s | of plain | "
            + ("host | B/parameter | device" if has_device else "process | B/parameter | for a device (computed)")
            + " | moved a step, down / up | loss off by | clips | accumulates | exact | activations |",
            "|---" * 14 + "|",
        ]
        for name, by_tokens in result["summary"].items():
            if str(tokens) in by_tokens:
                lines.append(_row(name, by_tokens[str(tokens)], task["micro_batches"]))
        lines.append("")
    if refused := result["samples"]["refused"]:
        lines += ["## Not run", ""]
        lines += [f"- {name}: {reason}" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, row: dict[str, Any], micro_batches: int) -> str:
    moved = row["moved_bytes"]
    link = f"{moved['down'] / MIB:.0f} / {moved['up'] / MIB:.0f} MiB" if moved else "not known"
    cells = [
        name,
        f"{1e3 * row['step_s']:.0f} ms",
        f"{1e3 * row['q25_s']:.0f}-{1e3 * row['q75_s']:.0f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['efficiency']:.2f}" if "efficiency" in row else "-",
        f"{row['host_bytes'] / GIB:.2f} GiB",
        f"{row['host_bytes'] / row['parameters']:.1f}",
        f"{row['device_bytes'] / GIB:.2f} GiB",
        link if name != "plain PyTorch" else "0",
        f"{row['loss_distance']:.1e}" if "loss_distance" in row else "-",
        "yes" if row["clips"] else "no",
        "-" if micro_batches == 1 else "yes" if row["accumulates"] else "no",
        "yes" if row["is_exact"] else "no",
        row["activations"],
    ]
    return "| " + " | ".join(cells) + " |"


def plot(result: dict[str, Any], path: Path) -> None:
    """Tokens per second, over tokens per step, of plain PyTorch's where that fits; and host bytes per parameter."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 5))
    summary = result["summary"]
    is_relative = any("efficiency" in row for found in summary.values() for row in found.values())
    value = "efficiency" if is_relative else "tokens_per_s"
    for name, found in summary.items():
        points = [(int(tokens), row[value]) for tokens, row in found.items() if value in row]
        left.plot(*zip(*points, strict=True), marker="o", label=name, linewidth=2.5 if "noria" in name else 1.2)
    left.set_xscale("log", base=2)
    left.set_xlabel("tokens per step")
    left.set_ylabel("speed, of plain PyTorch on the device" if is_relative else "tokens per second")
    left.grid(alpha=0.3)
    left.legend(fontsize=7)
    sizes = {
        name: max(row["host_bytes"] / row["parameters"] for row in found.values())
        for name, found in summary.items()
        if found
    }
    right.barh(list(sizes), list(sizes.values()))
    right.invert_yaxis()
    what = "host bytes" if result["settings"]["task"]["device"] == "cuda" else "bytes of the process"
    right.set_xlabel(f"{what} per parameter, at most")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def show(path: Path) -> None:
    """Writes the page and the plot beside the result, and prints the page."""
    result = json.loads(path.read_text())
    page = markdown(result)
    path.with_suffix(".md").write_text(page)
    print(page)
    print(f"written: {path.with_suffix('.md')}")
    if importlib.util.find_spec("matplotlib") is None:
        print("no plot: matplotlib is not installed")
        return
    plot(result, path.with_suffix(".svg"))
    print(f"written: {path.with_suffix('.svg')}")


if __name__ == "__main__":
    show(Path(sys.argv[1]))
