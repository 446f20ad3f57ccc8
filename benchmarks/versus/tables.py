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
    """By system and tokens per step. Ratios are of steps of the same round; losses are compared step by step."""
    found: dict[str, Any] = {}
    theirs = samples["systems"].get(plain, {})
    for name, by_tokens in samples["systems"].items():
        about = samples["about"][name]
        found[name] = {}
        for tokens, each in by_tokens.items():
            seconds = each["seconds"]
            if not seconds:
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
                    way: (moved["after"][way] - moved["before"][way]) / len(seconds) for way in ("down", "up")
                }
                if moved
                else None,
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
        f"{result['settings']['steps']} measured steps each, taken in turns; no system was stopped and resumed.",
        "",
    ]
    if has_device:
        lines += ["Host: the kernel's count of the process, pinned memory included, beyond its imports.", ""]
    else:
        lines += [
            "This machine has no device: all systems compute on the same cores, and what would lie on a device is host "
            "memory too. It is known (`device`) and taken off `host`, which holds what autograd keeps as well. Nothing "
            "here tells how fast anybody is over a real link.",
            "",
        ]
    all_tokens = sorted({int(each) for found in result["summary"].values() for each in found})
    for tokens in all_tokens:
        lines += [
            f"## {tokens} tokens a step",
            "",
            "| | step | quartiles | tokens/s | of plain | host | B/parameter | device | link, down / up a step "
            "| loss off by | clips | exact |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
        ]
        for name, by_tokens in result["summary"].items():
            if str(tokens) in by_tokens:
                lines.append(_row(name, by_tokens[str(tokens)], result["samples"]["about"][name], has_device))
        lines.append("")
    if refused := result["samples"]["refused"]:
        lines += ["## Not run", ""]
        lines += [f"- {name}: {reason}" for name, reason in refused.items()]
    return "\n".join(lines) + "\n"


def _row(name: str, row: dict[str, Any], about: dict[str, Any], has_device: bool) -> str:
    host = row["host_bytes"] - (0 if has_device else row["device_bytes"])
    moved = row["moved_bytes"]
    link = f"{moved['down'] / MIB:.0f} / {moved['up'] / MIB:.0f} MiB" if moved else "not known"
    cells = [
        name,
        f"{1e3 * row['step_s']:.0f} ms",
        f"{1e3 * row['q25_s']:.0f}-{1e3 * row['q75_s']:.0f}",
        f"{row['tokens_per_s']:.0f}",
        f"{row['efficiency']:.2f}" if "efficiency" in row else "-",
        f"{host / GIB:.2f} GiB",
        f"{host / row['parameters']:.1f}",
        f"{row['device_bytes'] / GIB:.2f} GiB",
        link if name != "plain PyTorch" else "0",
        f"{row['loss_distance']:.1e}" if "loss_distance" in row else "-",
        "yes" if about["clips"] else "no",
        "yes" if about["is_exact"] else "no",
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
    has_device = result["settings"]["task"]["device"] == "cuda"
    names, sizes = [], []
    for name, found in summary.items():
        if found:
            rows = list(found.values())
            most = max(row["host_bytes"] - (0 if has_device else row["device_bytes"]) for row in rows)
            names.append(name)
            sizes.append(most / rows[0]["parameters"])
    right.barh(names, sizes)
    right.invert_yaxis()
    right.set_xlabel("host bytes per parameter, at most")
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
