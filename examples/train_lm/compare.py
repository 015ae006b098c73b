#!/usr/bin/env python3
"""Reports of several runs side by side: a table, and their losses in one picture.

python examples/train_lm/train.py --backend overlap --json overlap.json
python examples/train_lm/train.py --backend fla --mixers kda --json fla.json
python examples/train_lm/compare.py overlap.json fla.json --svg losses.svg
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

COLORS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700")
WIDTH, HEIGHT, MARGIN = 720, 360, 50


def table(runs: list[dict]) -> str:
    """As Markdown; ratios are to the last run."""
    last = runs[-1]
    rows = [
        "| backend | ranks | step | delta rules, forward | backward | rest | tokens/s | / last | peak memory | last loss |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        times = [f"{run[name]:.1f} ms" for name in ("step_ms", "rules_forward_ms", "rules_backward_ms", "rest_ms")]
        rate, memory = run["tokens_per_s"], run["peak_memory_bytes"] / (1 << 20)
        row = [run["backend"], str(run["ranks"]), *times, f"{rate:.0f}", f"{rate / last['tokens_per_s']:.2f}"]
        rows.append("| " + " | ".join([*row, f"{memory:.0f} MiB", f"{run['losses'][-1]:.4f}"]) + " |")
    return "\n".join(rows)


def picture(runs: list[dict]) -> str:
    """The losses as SVG."""
    most = max(len(run["losses"]) for run in runs)
    low, high = (of(loss for run in runs for loss in run["losses"]) for of in (min, max))
    span = (high - low) or 1.0

    def place(step: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / max(most - 1, 1)
        return f"{x:.1f},{HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (loss - low) / span:.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">step</text>',
        f'<text x="12" y="{MARGIN - 14}">loss</text>',
    ]
    for loss in (low, (low + high) / 2, high):
        _, y = place(0, loss).split(",")
        lines.append(f'<line x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        lines.append(f'<text x="{MARGIN - 6}" y="{y}" text-anchor="end" dominant-baseline="middle">{loss:.2f}</text>')
    for step in (0, most - 1):
        x, _ = place(step, low).split(",")
        lines.append(f'<text x="{x}" y="{HEIGHT - MARGIN + 18}" text-anchor="middle">{step + 1}</text>')
    for i, run in enumerate(runs):
        color = COLORS[i % len(COLORS)]
        points = " ".join(place(step, loss) for step, loss in enumerate(run["losses"]))
        # Curves that coincide must all be seen: later ones are thinner.
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{max(5 - 2 * i, 1)}"/>')
        label = f"{run['backend']}, {run['ranks']} rank" + ("s" if run["ranks"] > 1 else "")
        lines.append(f'<text x="{WIDTH - MARGIN}" y="{MARGIN + 16 * i}" text-anchor="end" fill="{color}">{label}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", nargs="+", type=Path, help="what train.py wrote with --json")
    parser.add_argument("--svg", type=Path, help="where to draw the losses")
    options = parser.parse_args()
    runs = [json.loads(path.read_text()) for path in options.reports]
    print(table(runs))
    if options.svg:
        options.svg.write_text(picture(runs))


if __name__ == "__main__":
    main()
