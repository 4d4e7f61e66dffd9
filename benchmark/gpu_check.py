"""One command for a machine with a GPU: is it right there, and how fast?

    python benchmark/gpu_check.py            a few minutes; without a hub, and with no more than requirements.txt
    python benchmark/gpu_check.py --smoke    the same steps, small, also on a CPU

1. Parity. One batch of ALFWorld is played on the CPU; its log-probabilities and one update's gradient are computed
   there and on the device, in float32 and, for comparison, in the device's own `--dtype auto`.
2. Speed and memory of a model of the shape of Qwen2.5-0.5B with random weights: tokens sampled per second in a rollout,
   the share of the peak (a large matrix product, in the same run) that the update reaches, and peak memory.
3. The main job: five iterations of `rloo_multiturn.py`, as a user would start it.

Prints what it finds, and writes it to benchmark/gpu_check.json. Exits with 1 if parity fails.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import rloo_multiturn as rloo  # sets OMP_WAIT_POLICY: before torch

# isort: split
import torch
import transformers

import envs
import launch
from benchmark.update import flops_of_update

SHAPE = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}
SHAPE |= {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True}


def play(model, chat, args, episodes: int) -> dict:
    """A batch of episodes with an advantage of 1 on every action token."""
    tasks = envs.list_tasks("alfworld", "all", "train", "generated")[: episodes // 8]
    tasks = [task for task in tasks for _ in range(8)]
    vec = envs.VecEnv(2, env="alfworld", max_turns=args.max_turns)
    vec.prefetch(tasks)
    vec.reset(tasks)  # the games are loaded outside of the clock
    start = time.time()
    generator = torch.Generator(model.device).manual_seed(1)
    batch, _ = rloo.rollout(model, chat, vec, tasks, args, args.temperature, generator)
    args.seconds = time.time() - start
    vec.close()
    return batch | {"advantages": batch["response_mask"].float()}


def update(model, batch, args) -> tuple[torch.Tensor, torch.Tensor]:
    """One forward and backward pass over the batch: log-probabilities (B, T), and the gradient in one row."""
    model.zero_grad()
    rows = torch.arange(len(batch["input_ids"]), device=model.device)
    logprobs = torch.zeros_like(batch["logprobs"])
    for piece in rloo.microbatches(batch, rows, args):
        new, _ = rloo.token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
        rloo.compute_loss(piece | {"new_logprobs": new, "num_episodes": len(rows)}, args)[0].backward()
        logprobs[piece["rows"], : new.shape[1]] = new.detach()
    return logprobs, torch.cat([p.grad.flatten().float() for p in model.parameters() if p.grad is not None])


def timed(function, repeats: int) -> float:
    """Seconds of one call, the best of `repeats` after one that warms up."""
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.time()
        function()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        best = min(best, time.time() - start)
    return best


def parity(device, found: dict, smoke: bool) -> None:
    args = rloo.Args(env="alfworld", max_turns=3 if smoke else 8, dtype="float32")
    model, chat = launch.load_model(args.model)
    batch = play(model, chat, args, 8)
    expected, expected_gradient = update(model, batch, args)
    mask = batch["response_mask"]
    moved = {name: x.to(device) for name, x in batch.items()}
    for name, dtype in {"float32": torch.float32, "auto": getattr(torch, rloo.Args().dtype)}.items():
        logprobs, gradient = update(copy.deepcopy(model).to(device, dtype), moved, args)
        difference = (logprobs.cpu() - expected)[mask].abs()
        error = ((gradient.cpu() - expected_gradient).norm() / expected_gradient.norm()).item()
        found[f"parity {name}"] = {
            "logprobs, largest difference in nats": difference.max().item(),
            "logprobs, mean difference in nats": difference.mean().item(),
            "gradient, relative error": error,
        }


def main_job(found: dict, smoke: bool) -> None:
    command = [sys.executable, str(ROOT / "rloo_multiturn.py"), "--env", "alfworld", "--alfworld-data", "generated"]
    command += ["--dense-reward", "--num-iterations", "2" if smoke else "5", "--eval-episodes", "20"]
    command += ["--num-groups", "2", "--max-turns", "6"] if smoke else ["--num-workers", "8"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"the main job failed:\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("iteration")]
    found["main job"] = {"command": " ".join(command[2:]), "seconds": time.time() - start, "output": lines}


def speed(device, found: dict, smoke: bool) -> None:
    args = rloo.Args(env="alfworld", max_turns=2 if smoke else 16, tokens_per_microbatch=2048 if smoke else 16384)
    _, chat = launch.load_model(args.model)
    shape = SHAPE | ({"hidden_size": 112, "intermediate_size": 608, "num_hidden_layers": 2} if smoke else {})
    config = transformers.Qwen2Config(max_position_embeddings=32768, attn_implementation="sdpa", **shape)
    # bfloat16 throughout, as FSDP computes: the float32 weights beside it are AdamW's business, which is not timed.
    dtype = getattr(torch, args.dtype)
    with device:
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    vocabulary = len(chat.tokenizer)  # the tokenizer is the embedded policy's: nothing else may be sampled
    bias = torch.zeros(config.vocab_size, device=device, dtype=dtype).index_fill(
        0, torch.arange(vocabulary, config.vocab_size, device=device), -1e4
    )
    hook = model.get_output_embeddings().register_forward_hook(lambda _, inputs, output: output + bias)
    episodes = 8 if smoke else 128
    batch = play(model, chat, args, episodes)
    sampled = int(batch["response_mask"].sum())
    hook.remove()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    n = 1024 if smoke else 8192
    a, b = torch.randn(2, n, n, device=device, dtype=dtype).unbind()
    peak = 2 * n**3 / timed(lambda: a @ b, 5)
    rate = flops_of_update(model, batch) / timed(lambda: update(model, batch, args), 2)
    found["speed"] = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "rollout": f"{episodes} episodes of {args.max_turns} turns",
        "rollout seconds, environments included": args.seconds,
        "sampled tokens per second": sampled / args.seconds,
        "update, tokens": int(batch["attention_mask"].sum()),
        "update, TFLOP/s": rate / 1e12,
        "matrix product, TFLOP/s": peak / 1e12,
        "update, share of the peak": rate / peak,
    }
    if device.type == "cuda":
        found["speed"]["update, peak memory in GiB"] = torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="small sizes; also on a CPU, and nothing is written")
    options = parser.parse_args()
    if not (torch.cuda.is_available() or options.smoke):
        sys.exit("error: no GPU here; --smoke goes through the same steps on the CPU")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found = {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}
    start = time.time()
    for step in (parity, speed):
        step(device, found, options.smoke)
        print(json.dumps(found, indent=2), flush=True)
    main_job(found, options.smoke)
    found["seconds"] = time.time() - start
    print(json.dumps(found, indent=2))
    if not options.smoke:
        (ROOT / "benchmark" / "gpu_check.json").write_text(json.dumps(found, indent=2) + "\n")
    # The CPU sums in another order than a GPU; more than this is a mistake.
    exact = found["parity float32"]
    if not (exact["logprobs, largest difference in nats"] < 1e-3 and exact["gradient, relative error"] < 1e-3):
        sys.exit("error: the device does not agree with the CPU in float32")


if __name__ == "__main__":
    main()
