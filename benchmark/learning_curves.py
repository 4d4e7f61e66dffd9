"""Does the agent get better? The README's main job and its TextWorld siblings; every run is reported.

    python benchmark/learning_curves.py             runs what the CSV does not hold yet, then draws
    python benchmark/learning_curves.py --jobs 2    the same, two runs at a time, each with half of the cores
    python benchmark/learning_curves.py --draw-only

RLOO runs with seeds 1, 2, 3 in every setting; GRPO and PPO with as many episodes, seeds 1, 2, 3 on TextWorld and seed 1
on ALFWorld. Writes learning_curves.csv (one row per evaluation on held-out games) and learning_curves.png beside this
file, and prints the README's table.
"""

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
CSV, PNG = HERE / "learning_curves.csv", HERE / "learning_curves.png"
SETTINGS = {
    "ALFWorld, dense reward": "--env alfworld --alfworld-data generated --dense-reward",
    "TextWorld w2-o3-q4, sparse reward": "--env textworld --task w2-o3-q4",
    "TextWorld w2-o3-q4, dense reward": "--env textworld --task w2-o3-q4 --dense-reward",
}
COLORS = {"rloo": "#12507b", "grpo": "#b5541c", "ppo": "#3b7d3a"}
RUNS = [("rloo", setting, seed) for seed in (1, 2, 3) for setting in SETTINGS]
RUNS += [(name, setting, 1) for setting in SETTINGS for name in ("grpo", "ppo")]
RUNS += [(name, setting, seed) for seed in (2, 3) for setting in list(SETTINGS)[1:] for name in ("grpo", "ppo")]
FIELDS = "algorithm setting seed iteration episodes turns success games seconds commit cores command".split()


def measure(algorithm: str, setting: str, seed: int, cores: int) -> list[dict]:
    """Runs one command to its end, in a folder of its own; its rows of the CSV."""
    command = f"{algorithm}_multiturn.py {SETTINGS[setting]} --seed {seed}"
    folder = ROOT / "runs" / "learning_curves" / f"{time.time():.0f}_{algorithm}_{seed}_{list(SETTINGS).index(setting)}"
    folder.mkdir(parents=True)
    environ, start = os.environ | {"OMP_NUM_THREADS": str(cores)}, time.time()
    with (folder / "output.txt").open("w") as output:
        script, *arguments = shlex.split(command)
        command_line = [sys.executable, str(ROOT / script), *arguments]
        subprocess.run(command_line, cwd=folder, env=environ, stdout=output, stderr=output, check=True)
    return read_back(folder, algorithm, setting, seed, cores, time.time() - start)


def read_back(folder: Path, algorithm: str, setting: str, seed: int, cores: int, seconds: float) -> list[dict]:
    """The rows of a finished run, from what it has written into its folder."""
    (run,) = (folder / "runs").iterdir()
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
            "algorithm": algorithm,
            "setting": setting,
            "seed": seed,
            "iteration": iteration,
            "episodes": iteration * args["num_groups"] * args["group_size"],
            "turns": step,
            "success": sum(won) / len(won),
            "games": len(won),
            "seconds": round(seconds),
            "commit": about["commit"],
            "cores": cores,
            "command": f"python {algorithm}_multiturn.py {SETTINGS[setting]} --seed {seed}",
        }
        for (iteration, won), step in zip(sorted(wins.items()), steps, strict=True)
    ]


def curves_of(rows: list[dict], algorithm: str, setting: str) -> dict[int, dict[int, float]]:
    """For each seed, success after each number of training episodes."""
    curves = {}
    for row in rows:
        if row["algorithm"] == algorithm and row["setting"] == setting:
            curves.setdefault(int(row["seed"]), {})[int(row["episodes"])] = float(row["success"])
    return curves


def draw(rows: list[dict]) -> None:
    """One panel per setting, one colour per algorithm: a thin line per seed, a thick one for their mean."""
    fig, axes = plt.subplots(1, len(SETTINGS), figsize=(4 * len(SETTINGS), 3.4), sharey=True)
    for ax, setting in zip(axes, SETTINGS, strict=True):
        for algorithm, color in COLORS.items():
            curves = list(curves_of(rows, algorithm, setting).values())
            for curve in curves:
                ax.plot(list(curve), list(curve.values()), color=color, linewidth=1, alpha=0.35)
            if curves:
                mean = {x: sum(curve[x] for curve in curves) / len(curves) for x in curves[0]}
                label = f"{algorithm.upper()}, {len(curves)} seed{'s' if len(curves) > 1 else ''}"
                ax.plot(list(mean), list(mean.values()), color=color, linewidth=2.5, label=label)
        ax.set(title=setting, xlabel="training episodes", ylim=(0, 1))
        ax.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1))
        ax.grid(alpha=0.3)
        if ax.get_legend_handles_labels()[0]:
            ax.legend(loc="upper left", frameon=False)
    axes[0].set_ylabel("success on held-out games")
    fig.tight_layout()
    fig.savefig(PNG, dpi=130)


def table(rows: list[dict]) -> str:
    """The README's table: success before and after, for each run."""
    lines = ["| setting | algorithm | before -> after, seed by seed | mean gain, points | minutes |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for setting in SETTINGS:
        for algorithm in COLORS:
            curves = curves_of(rows, algorithm, setting)
            if curves:
                ends = [(curve[min(curve)], curve[max(curve)]) for _, curve in sorted(curves.items())]
                each = ", ".join(f"{first:.0%} -> {last:.0%}" for first, last in ends)
                gain = 100 * sum(last - first for first, last in ends) / len(ends)
                some = [int(r["seconds"]) for r in rows if r["setting"] == setting and r["algorithm"] == algorithm]
                minutes = " to ".join(dict.fromkeys(f"{x / 60:.0f}" for x in (min(some), max(some))))
                lines.append(f"| {setting} | {algorithm.upper()} | {each} | {gain:+.0f} | {minutes} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw-only", action="store_true", help="draw from the CSV, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; each gets its share of the cores")
    options = parser.parse_args()
    rows, lock = list(csv.DictReader(CSV.open())) if CSV.exists() else [], threading.Lock()
    left = [run for run in RUNS if run[2] not in curves_of(rows, *run[:2])]

    def measure_and_keep(run: tuple) -> None:
        measured = measure(*run, cores=max(1, os.cpu_count() // options.jobs))
        with lock:
            rows.extend(measured)
            with CSV.with_suffix(".part").open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows)
            CSV.with_suffix(".part").rename(CSV)

    if not options.draw_only:
        with ThreadPoolExecutor(options.jobs) as pool:
            list(pool.map(measure_and_keep, left))
    draw(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
