"""Where the time of an iteration goes, against what the machine could do at best; and whether long runs grow.

    python benchmark/iteration.py rloo --env alfworld --dense-reward --num-iterations 11      # the README's main job
    python benchmark/iteration.py rloo --env alfworld --dense-reward --num-iterations 200 --num-groups 2 --name long

Runs the script's own `main` with these arguments, without evaluations, in an empty folder, and stops the time of what
it calls: the environments (`VecEnv`: the time that the script waits for them), the model, the backward pass, the
optimizer. Memory is the resident memory of the script and of its workers, read after each iteration.

The limit is what the same work would take if it did nothing but multiply matrices at the rate of a product of two
2048 x 2048 ones, or move weights and cache at the rate of a large copy, both measured here before the run: for each
model call the larger of the two.

Writes iteration.csv (one row per iteration; rows of other names are kept) and iteration.png, and prints the medians,
without the first iteration, which warms up.
"""

import argparse
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the scripts do, before torch
ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib
import torch
import tyro

import envs
import launch
from benchmark import rows as table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CSV, PNG = ROOT / "benchmark" / "iteration.csv", ROOT / "benchmark" / "iteration.png"
PARTS = ["environments", "rollout: model", "rollout: rest", "scoring: model", "update: forward", "update: backward"]
PARTS += ["update: optimizer", "rest"]
LIMITS = ["rollout: model", "scoring: model", "update: forward", "update: backward"]
FIELDS = ["name", "command", "iteration", "seconds", *PARTS, *(f"limit of {part}" for part in LIMITS)]
FIELDS += ["tokens", "action_tokens", "script_mib", "workers_mib", "cores"]


def machine_limits() -> tuple[float, float]:
    """Floating-point operations per second of a large matrix product, and bytes per second of a large copy."""
    a, b = torch.randn(2, 2048, 2048).unbind()
    x = torch.zeros(64 * 2**20)  # 256 MiB
    y, flops, rates = torch.zeros_like(x), [], []
    for _ in range(6):
        start = time.perf_counter()
        a @ b
        flops.append(2 * 2048**3 / (time.perf_counter() - start))
        start = time.perf_counter()
        y.copy_(x)
        rates.append(2 * 4 * x.numel() / (time.perf_counter() - start))
    return statistics.median(flops[1:]), statistics.median(rates[1:])


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("VmRSS")).split()[1]) / 1024


class Clock:
    """Adds up seconds by part; parts nest, and the inner one's time is not the outer one's."""

    def __init__(self, flops: float, rate: float):
        self.flops, self.rate = flops, rate
        self.seconds, self.limits, self.inner, self.vec = defaultdict(float), defaultdict(float), [], None
        self.start_iteration()

    def timed(self, part, function):
        """The function, with its time added to `part` (a name, or a function that tells the name at call time)."""

        def run(*args, **kwargs):
            name = part() if callable(part) else part
            self.inner.append((name, 0.0))
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took, (_, nested) = time.perf_counter() - start, self.inner.pop()
                self.seconds[name] += took - nested
                if self.inner:
                    self.inner[-1] = (self.inner[-1][0], self.inner[-1][1] + took)

        return run

    def model_part(self) -> str:
        """Which part of the iteration a call of a model belongs to."""
        if any(name == "rollout: rest" for name, _ in self.inner):
            return "rollout: model"
        return "update: forward" if torch.is_grad_enabled() else "scoring: model"

    def add_limit(self, model, input_ids, response_tokens, length) -> None:
        """Adds the least time of one forward pass over (b, q) tokens whose rows have `length` tokens in all."""
        (b, q), config, part = input_ids.shape, model.config, self.model_part()
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        weights = sum(p.numel() for p in model.parameters() if p.dim() == 2 and p is not embedding and p is not head)
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        seen = length if q < length else (q + 1) / 2  # tokens that a token attends to, on average
        attention = 4 * config.num_hidden_layers * config.num_attention_heads * size * b * q * seen
        flops = 2 * weights * b * q + attention + 2 * head.numel() * response_tokens
        cache = 2 * config.num_hidden_layers * config.num_key_value_heads * size * b * length
        seconds = max(flops / self.flops, 4 * (weights + head.numel() + cache) / self.rate)
        self.limits[part] += seconds
        if part == "update: forward":
            self.limits["update: backward"] += 2 * flops / self.flops
        self.tokens += b * q if part == "update: forward" else 0
        self.action_tokens += response_tokens if part == "update: forward" else 0

    def start_iteration(self) -> None:
        self.start, self.tokens, self.action_tokens = time.perf_counter(), 0, 0
        self.seconds.clear()
        self.limits.clear()

    def end_iteration(self) -> dict:
        seconds = time.perf_counter() - self.start
        self.seconds["rest"] = seconds - sum(self.seconds.values())
        row = {"seconds": seconds} | {part: self.seconds[part] for part in PARTS}
        row |= {f"limit of {part}": self.limits[part] for part in LIMITS}
        row = {name: round(value, 4) for name, value in row.items()}
        workers = sum(resident_mib(process.pid) for process, _ in self.vec.workers)
        row |= {"tokens": self.tokens, "action_tokens": self.action_tokens}
        return row | {"script_mib": round(resident_mib(os.getpid())), "workers_mib": round(workers)}


def measure(algorithm: str, arguments: list[str], name: str) -> list[dict]:
    """Runs the script's `main` with stop watches in the functions that it calls; one row per iteration."""
    module = importlib.import_module(f"{algorithm}_multiturn")
    args = tyro.cli(module.Args, args=[*arguments, "--eval-freq", "0", "--eval-episodes", "1"])
    clock, rows = Clock(*machine_limits()), []
    command = f"python benchmark/iteration.py {algorithm} {' '.join(arguments)}"
    print(f"{clock.flops / 1e9:.0f} GFLOP/s in a matrix product, {clock.rate / 1e9:.1f} GB/s in a copy", flush=True)

    vec_env, shard, run_log, rollout = envs.VecEnv, launch.shard, launch.Run.log, module.rollout
    for method in ("prefetch", "reset", "step"):
        setattr(vec_env, method, clock.timed("environments", getattr(vec_env, method)))
    for cls, method, part in [
        (torch.Tensor, "backward", "update: backward"),
        (torch.optim.AdamW, "step", "update: optimizer"),
        (torch.nn.utils, "clip_grad_norm_", "update: optimizer"),
    ]:
        setattr(cls, method, clock.timed(part, getattr(cls, method)))

    def remembering(*args, **kwargs):
        clock.vec = vec_env(*args, **kwargs)
        return clock.vec

    def sharded(model, *args, **kwargs):
        model, read = shard(model, *args, **kwargs), 0
        forward = model.forward

        def counted(input_ids, *, position_ids, **options):
            nonlocal read
            read = int(position_ids.max()) + 1
            output = forward(input_ids, position_ids=position_ids, **options)
            chosen = output.logits.shape[0] * (output.logits.shape[1] if output.logits.dim() == 3 else 1)
            clock.add_limit(model, input_ids, chosen, read)
            return output

        model.forward = clock.timed(clock.model_part, counted)
        return model

    def logged(run, metrics, step):
        run_log(run, metrics, step)
        if "charts/success_rate" in metrics:
            rows.append({"name": name, "command": command, "iteration": len(rows) + 1, "cores": os.cpu_count()})
            rows[-1] |= clock.end_iteration()
        clock.start_iteration()

    envs.VecEnv, launch.shard, launch.Run.log = remembering, sharded, logged
    module.rollout = clock.timed("rollout: rest", rollout)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        module.main(args)
    return rows


def report(rows: list[dict]) -> None:
    """Prints the medians of each run, and draws where the time goes."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    fig, axes = plt.subplots(1, len(names), figsize=(5.5 * len(names), 3.2), squeeze=False)
    for ax, name in zip(axes[0], names, strict=True):
        some = [row for row in rows if row["name"] == name][1:]
        median = {f: statistics.median(float(row[f]) for row in some) for f in FIELDS[3:-1]}
        print(f"\n{name}: {some[0]['command']}\n\n| part | seconds | share | limit, s |\n| --- | --- | --- | --- |")
        for part in PARTS:
            limit = f"{median[f'limit of {part}']:.2f}" if part in LIMITS else "-"
            print(f"| {part} | {median[part]:.2f} | {median[part] / median['seconds']:.0%} | {limit} |")
        print(f"| whole iteration | {median['seconds']:.2f} | | |")
        memory = [float(row["script_mib"]) + float(row["workers_mib"]) for row in rows if row["name"] == name]
        settled = memory[min(20, len(memory)) - 1]
        print(
            f"\nMemory after iteration {min(20, len(memory))}: {settled:.0f} MiB; at most {max(memory):.0f} MiB after"
        )
        ax.barh(PARTS[::-1], [median[part] for part in PARTS[::-1]], color="#12507b", label="measured")
        limits = [median.get(f"limit of {part}", 0) for part in PARTS[::-1]]
        ax.barh(PARTS[::-1], limits, height=0.35, color="#b5541c", label="limit of the machine")
        ax.set(title=f"{name}: {median['seconds']:.1f} s an iteration", xlabel="seconds")
        ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(PNG, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("algorithm", nargs="?", choices=["rloo", "grpo", "ppo"], default="rloo")
    parser.add_argument("--name", default="", help="name of the rows; without it, the algorithm's")
    parser.add_argument("--draw-only", action="store_true", help="print and draw from the CSV, run nothing")
    options, arguments = parser.parse_known_args()
    if not options.draw_only:
        measured = measure(options.algorithm, arguments, options.name or options.algorithm.upper())
        table.replace(CSV, FIELDS, measured, by="name")
    report(table.read(CSV))


if __name__ == "__main__":
    main()
