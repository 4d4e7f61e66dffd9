"""Does the agent get better? The README's main job and its TextWorld siblings, three seeds each, every run reported.

    python benchmark/learning_curves.py             runs what the CSV does not hold yet, then draws
    python benchmark/learning_curves.py --draw-only

Writes learning_curves.csv (one row per evaluation on held-out games) and learning_curves.png beside this file.
"""

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CSV, PNG = HERE / "learning_curves.csv", HERE / "learning_curves.png"
COMMANDS = {
    "ALFWorld, dense reward": "rloo_multiturn.py --env alfworld --alfworld-data generated --dense-reward",
    "TextWorld w2-o3-q4, sparse reward": "rloo_multiturn.py --env textworld --task w2-o3-q4",
    "TextWorld w2-o3-q4, dense reward": "rloo_multiturn.py --env textworld --task w2-o3-q4 --dense-reward",
}
SEEDS = (1, 2, 3)
FIELDS = "setting seed iteration episodes turns success games seconds commit cores command".split()


def measure(setting: str, command: str, seed: int) -> list[dict]:
    """Runs one command to its end and reads its evaluations back."""
    before, start = set((ROOT / "runs").glob("*")), time.time()
    subprocess.run([sys.executable, *shlex.split(command), "--seed", str(seed)], cwd=ROOT, check=True)
    seconds = time.time() - start
    (run,) = set((ROOT / "runs").glob("*")) - before
    about = json.loads((run / "args.json").read_text())
    args = about["args"]
    # The log is read rather than the printed summary: it has every evaluation, with its number of games.
    wins = {}
    for line in (run / "episodes.jsonl").open():
        episode = json.loads(line)
        if episode["split"] == args["eval_split"]:
            wins.setdefault(episode["iteration"], []).append(episode["won"])
    steps = [event.step for event in EventAccumulator(str(run)).Reload().Scalars("eval/success_rate")]
    return [
        {
            "setting": setting,
            "seed": seed,
            "iteration": iteration,
            "episodes": iteration * args["num_groups"] * args["group_size"],
            "turns": step,
            "success": sum(won) / len(won),
            "games": len(won),
            "seconds": round(seconds),
            "commit": about["commit"],
            "cores": os.cpu_count(),
            "command": f"python {command} --seed {seed}",
        }
        for (iteration, won), step in zip(sorted(wins.items()), steps, strict=True)
    ]


def draw(rows: list[dict]) -> None:
    """One panel per setting: a thin line per seed, a thick one for their mean."""
    fig, axes = plt.subplots(1, len(COMMANDS), figsize=(4 * len(COMMANDS), 3.3), sharey=True)
    for ax, setting in zip(axes, COMMANDS, strict=True):
        curves = {}
        for row in rows:
            if row["setting"] == setting:
                curves.setdefault(int(row["seed"]), {})[int(row["episodes"])] = float(row["success"])
        for curve in curves.values():
            ax.plot(list(curve), list(curve.values()), color="#9db4c8", linewidth=1)
        if curves:
            xs = sorted(set.intersection(*(set(curve) for curve in curves.values())))
            means = [sum(curve[x] for curve in curves.values()) / len(curves) for x in xs]
            ax.plot(xs, means, color="#12507b", linewidth=2.5)
            ax.annotate(f"{means[0]:.0%}", (xs[0], means[0]), xytext=(4, -14), textcoords="offset points")
            ax.annotate(f"{means[-1]:.0%}", (xs[-1], means[-1]), xytext=(-24, 8), textcoords="offset points")
        ax.set(title=setting, xlabel="training episodes", ylim=(0, 1))
        ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("success on held-out games")
    fig.tight_layout()
    fig.savefig(PNG, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw-only", action="store_true", help="draw from the CSV, run nothing")
    options = parser.parse_args()
    rows = list(csv.DictReader(CSV.open())) if CSV.exists() else []
    for seed in SEEDS:
        for setting, command in COMMANDS.items():
            if options.draw_only or any(r["setting"] == setting and int(r["seed"]) == seed for r in rows):
                continue
            rows += measure(setting, command, seed)
            with CSV.with_suffix(".part").open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows)
            CSV.with_suffix(".part").rename(CSV)
    draw(rows)
    for setting in COMMANDS:
        for seed in SEEDS:
            some = [r for r in rows if r["setting"] == setting and int(r["seed"]) == seed]
            if some:
                first, last = float(some[0]["success"]), float(some[-1]["success"])
                print(f"{setting}, seed {seed}: {first:.0%} -> {last:.0%} ({some[0]['seconds']} s)")


if __name__ == "__main__":
    main()
