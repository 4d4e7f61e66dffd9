"""Rollout speed: the scripts' own `rollout`, which carries its cache across turns, against `generate` on all history.

    python benchmark/rollout.py                                   # the embedded policy: 64 episodes of 4 to 32 turns
    python benchmark/rollout.py --model SMOLLM2_FOLDER --episodes 8 --turns 4 8

Both play the same games with the same model, sampling and environments, and take turns within one run: ours, theirs,
ours, ... The alternative is what one writes first with transformers: each turn, the whole conversations of the
unfinished episodes, left-padded, go through `model.generate` with its own cache, which is thrown away. The games are
too hard for the policy, so that nearly all episodes last all turns. Seconds are wall time, the environments' steps
included; the games load before the clock starts, as they do in training, during the update.

Writes rollout.csv (one row per repetition) and rollout.png beside this file; rows of other models are kept.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import rloo_multiturn as rloo  # sets OMP_WAIT_POLICY: before torch

# isort: split
import matplotlib
import torch

import envs
import launch
from benchmark import rows as table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CSV, PNG = ROOT / "benchmark" / "rollout.csv", ROOT / "benchmark" / "rollout.png"
FIELDS = "model parameters method episodes turns repetition seconds turns_played action_tokens cores".split()
TASK = "w4-o6-q8"
LOADING = 15  # seconds in which the workers load the games, before the clock starts
MODEL = str(ROOT / "checkpoints" / "tiny")


@torch.no_grad()
def generate_rollout(model, chat, vec, tasks, args) -> tuple[int, int]:
    """The obvious alternative. Returns the number of turns played and of tokens sampled."""
    ids = [chat.prompt(obs) for obs, _ in vec.reset(tasks)]
    alive, turns, sampled = list(range(len(tasks))), 0, 0
    while alive:
        T = max(len(ids[i]) for i in alive)
        padding = [T - len(ids[i]) for i in alive]
        input_ids = torch.tensor([[chat.eot_id] * n + ids[i] for i, n in zip(alive, padding, strict=True)])  # (b, T)
        output = model.generate(
            input_ids=input_ids,
            attention_mask=(torch.arange(T) >= torch.tensor(padding)[:, None]).long(),
            max_new_tokens=args.max_action_tokens,
            do_sample=True,
            temperature=args.temperature,
            top_k=0,
            top_p=1.0,
            eos_token_id=chat.eot_id,
            pad_token_id=chat.eot_id,
        )
        actions = {}
        for i, tokens in zip(alive, output[:, T:].tolist(), strict=True):
            action = tokens[: tokens.index(chat.eot_id) + 1] if chat.eot_id in tokens else tokens
            ids[i] += action
            actions[i] = chat.text(action)
            sampled += len(action)
        answers = vec.step(actions)
        turns += len(actions)
        alive = [i for i in alive if not (answers[i][2] or answers[i][3])]
        for i in alive:
            ids[i] += chat.follow_up(answers[i][0], ended=ids[i][-1] == chat.eot_id)
    return turns, sampled


def measure(options) -> list[dict]:
    """Both methods in turn, `repeats` times for each number of turns; the first pair warms up and is not counted."""
    rows = []
    args = rloo.Args(model=options.model, task=TASK)
    model, chat = launch.load_model(args.model)
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(1)
    tasks = envs.list_tasks("textworld", TASK, "valid", "auto")[: options.episodes]
    parameters = sum(p.numel() for p in model.parameters())
    about = {"model": Path(options.model).name, "parameters": parameters, "episodes": options.episodes}
    for turns in options.turns:
        args.max_turns = turns
        vec = envs.VecEnv(2, env="textworld", max_turns=turns)
        for repetition in range(options.repeats + 1):
            for method in ("carried cache", "generate"):
                vec.prefetch(tasks)  # as `main` does during the update
                time.sleep(LOADING)
                start = time.time()
                if method == "generate":
                    played, sampled = generate_rollout(model, chat, vec, tasks, args)
                else:
                    batch, _ = rloo.rollout(model, chat, vec, tasks, args, args.temperature, generator)
                    played, sampled = int(batch["num_turns"].sum()), int(batch["response_mask"].sum())
                row = about | {"method": method, "turns": turns, "repetition": repetition, "cores": os.cpu_count()}
                row |= {"seconds": round(time.time() - start, 3), "turns_played": played, "action_tokens": sampled}
                print(row, flush=True)
                if repetition:
                    rows.append(row)
        vec.close()
    return rows


def median(rows: list[dict], **where) -> float:
    return statistics.median(float(r["seconds"]) for r in rows if all(str(r[k]) == str(v) for k, v in where.items()))


def report(rows: list[dict]) -> None:
    """Prints the table, and draws one panel per model: seconds against turns."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    fig, axes = plt.subplots(1, len(models), figsize=(4.5 * len(models), 3.4), squeeze=False)
    print("| model | episodes | turns | carried cache, s | generate, s | ratio | twice the turns cost |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for ax, name in zip(axes[0], models, strict=True):
        some = [row for row in rows if row["model"] == name]
        turns, episodes = sorted({int(row["turns"]) for row in some}), some[0]["episodes"]
        series = {m: [median(some, method=m, turns=t) for t in turns] for m in ("carried cache", "generate")}
        for t, ours, theirs in zip(turns, *series.values(), strict=True):
            growth = f"{ours / median(some, method='carried cache', turns=t // 2):.2f}" if t // 2 in turns else "-"
            print(f"| {name} | {episodes} | {t} | {ours:.1f} | {theirs:.1f} | {theirs / ours:.1f} | {growth} |")
        for (method, seconds), color in zip(series.items(), ("#12507b", "#b5541c"), strict=True):
            ax.plot(turns, seconds, marker="o", color=color, label=method)
        ax.set(title=f"{name}, {episodes} episodes", xlabel="turns", ylabel="seconds", xticks=turns, ylim=(0, None))
        ax.grid(alpha=0.3)
        ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(PNG, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL, help="folder of a model")
    parser.add_argument("--episodes", type=int, default=64, help="episodes side by side")
    parser.add_argument("--turns", type=int, nargs="+", default=[4, 8, 16, 32], help="turn limits")
    parser.add_argument("--repeats", type=int, default=5, help="counted repetitions, after one that warms up")
    parser.add_argument("--draw-only", action="store_true", help="print and draw from the CSV, run nothing")
    options = parser.parse_args()
    if not options.draw_only:
        measured = measure(options)
        table.replace(CSV, FIELDS, measured, by="model")
    report(table.read(CSV))


if __name__ == "__main__":
    main()
