"""The update: how much of the machine it uses, what the head at action positions alone saves, and its peak memory.

    python benchmark/update.py                                      # the embedded policy, 64 episodes
    python benchmark/update.py --model SMOLLM2_FOLDER --episodes 8 --turns 8

One batch is played, then passed forward and backward by the scripts' own functions, in three ways that take turns
within one run: as the scripts do it; with logits at every position (what a model returns unless told otherwise); and a
product of two 2048 x 2048 matrices, whose floating-point operations per second are called the peak. Operations of the
update are counted by formula: 6 per weight and token, attention at half of its square, the head at action positions.

Peak memory is that of a fresh process that plays a batch and updates once, less what it held before the update; one
process per batch size and way.

Writes update.csv (one row per repetition or process) beside this file; rows of other models are kept.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import rloo_multiturn as rloo  # sets OMP_WAIT_POLICY: before torch

# isort: split
import torch

import envs
import launch
from benchmark import rows as table

CSV = ROOT / "benchmark" / "update.csv"
FIELDS = "model method episodes repetition seconds flops tokens action_tokens peak_mib cores".split()
METHODS = ("action positions", "all positions", "matrix product")
MATRIX = 2048


def all_positions_logprobs(model, input_ids, response_mask, args):
    """`token_logprobs` without its hook: logits and softmax of every position, of which those of actions are taken."""
    logits = model(input_ids, use_cache=False).logits[:, :-1].float() / args.temperature  # (B, T - 1, V)
    chosen = torch.log_softmax(logits, dim=-1).gather(2, input_ids[:, 1:, None]).squeeze(2)  # (B, T - 1)
    return torch.nn.functional.pad(chosen, (1, 0)) * response_mask, None


def play(model, chat, args, episodes: int) -> dict:
    """A batch of real episodes with an advantage of 1 on every action token."""
    tasks = envs.list_tasks(args.env, args.task, "valid", "auto")[:8]
    tasks = [tasks[i % len(tasks)] for i in range(episodes)]
    vec = envs.VecEnv(2, env=args.env, max_turns=args.max_turns)
    batch, _ = rloo.rollout(model, chat, vec, tasks, args, args.temperature, torch.Generator().manual_seed(1))
    vec.close()
    return batch | {"advantages": batch["response_mask"].float()}


def update(model, optimizer, batch, args, logprobs_of) -> None:
    optimizer.zero_grad()
    rows = torch.arange(len(batch["input_ids"]))
    for piece in rloo.microbatches(batch, rows, args):
        piece["new_logprobs"], _ = logprobs_of(model, piece["input_ids"], piece["response_mask"], args)
        rloo.compute_loss(piece | {"num_episodes": len(rows)}, args)[0].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()


def flops_of_update(model, batch) -> float:
    """Multiplications and additions that the update cannot do without: forward once, backward twice."""
    embedding = model.get_output_embeddings().weight
    weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and p.shape != embedding.shape)
    lengths, config = batch["attention_mask"].sum(1).double(), model.config
    heads = config.num_attention_heads * getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
    attention = config.num_hidden_layers * 2 * heads * float((lengths**2).sum())  # scores and values, causal: half
    head = 2 * embedding.numel() * int(batch["response_mask"].sum())
    return 3 * (2 * weights * float(lengths.sum()) + attention + head)


def measure_speed(options) -> list[dict]:
    args = rloo.Args(model=options.model, task="w4-o6-q8", max_turns=options.turns)
    model, chat = launch.load_model(args.model)
    batch = play(model, chat, args, options.episodes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    a, b = torch.randn(2, MATRIX, MATRIX).unbind()
    flops = {METHODS[0]: flops_of_update(model, batch), METHODS[2]: 10 * 2.0 * MATRIX**3}
    rows = []
    for repetition in range(options.repeats + 1):
        for method in METHODS:
            start = time.time()
            if method == METHODS[2]:
                for _ in range(10):
                    a @ b
            else:
                function = rloo.token_logprobs if method == METHODS[0] else all_positions_logprobs
                update(model, optimizer, batch, args, function)
            row = {"method": method, "repetition": repetition, "seconds": round(time.time() - start, 4)}
            row |= {"tokens": int(batch["attention_mask"].sum()), "action_tokens": int(batch["response_mask"].sum())}
            row |= {"episodes": options.episodes, "flops": flops.get(method, "")}
            print(row, flush=True)
            if repetition:  # the first round warms up
                rows.append(row)
    return rows


def peak_memory(options, method: str, episodes: int) -> dict:
    """Runs this script once more, in a fresh process, for one update."""
    command = [sys.executable, __file__, "--model", options.model, "--turns", str(options.turns)]
    command += ["--episodes", str(episodes), "--one-update", method]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1]
    return {"method": method, "episodes": episodes, "peak_mib": answer}


def one_update(options) -> None:
    """Prints by how much one update raises the process's peak memory, MiB."""
    args = rloo.Args(model=options.model, task="w4-o6-q8", max_turns=options.turns)
    model, chat = launch.load_model(args.model)
    batch = play(model, chat, args, options.episodes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    before = int(
        next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmRSS")).split()[1]
    )
    function = rloo.token_logprobs if options.one_update == METHODS[0] else all_positions_logprobs
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of the rollout
    update(model, optimizer, batch, args, function)
    peak = int(next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM")).split()[1])
    print(f"{(peak - before) / 1024:.1f}")


def report(rows: list[dict]) -> None:
    for name in dict.fromkeys(row["model"] for row in rows):
        some = [row for row in rows if row["model"] == name and row["seconds"]]
        seconds = {m: statistics.median(float(r["seconds"]) for r in some if r["method"] == m) for m in METHODS}
        flops = {row["method"]: float(row["flops"]) for row in some if row["flops"]}
        rate, peak = (flops[m] / seconds[m] for m in (METHODS[0], METHODS[2]))
        print(f"{name}: update {seconds[METHODS[0]]:.2f} s, {rate / 1e9:.0f} of {peak / 1e9:.0f} GFLOP/s = "
              f"{rate / peak:.0%} of the peak; logits everywhere {seconds[METHODS[1]]:.2f} s, "
              f"{seconds[METHODS[1]] / seconds[METHODS[0]]:.2f} times as long")  # fmt: skip
        for row in rows:
            if row["model"] == name and row["peak_mib"]:
                print(f"  {row['episodes']} episodes, {row['method']}: {row['peak_mib']} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "tiny"), help="folder of a model")
    parser.add_argument("--episodes", type=int, default=64, help="episodes in the batch whose update is timed")
    parser.add_argument("--turns", type=int, default=12, help="turns in an episode")
    parser.add_argument("--batches", type=int, nargs="*", default=[8, 64, 256], help="batch sizes for the memory")
    parser.add_argument("--repeats", type=int, default=5, help="counted repetitions, after one that warms up")
    parser.add_argument("--one-update", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_update:
        one_update(options)
        return
    measured = measure_speed(options)
    measured += [peak_memory(options, METHODS[0], n) for n in options.batches]
    measured += [peak_memory(options, METHODS[1], min(options.batches))] if options.batches else []
    name = Path(options.model).name
    measured = [dict.fromkeys(FIELDS, "") | {"model": name, "cores": os.cpu_count()} | row for row in measured]
    report(table.replace(CSV, FIELDS, measured, by="model"))


if __name__ == "__main__":
    main()
