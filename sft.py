"""Supervised fine-tuning for multi-turn agents: clones an expert's episodes, to give RL a prior to start from.

The expert is the engine's own (TextWorld's winning plan; an agent that searches, in ALFWorld); only episodes that win
are kept. The loss is the mean negative log-likelihood of the expert's action tokens, those of every turn,

    (1)  L(theta) = - 1/N sum_i sum_{t in T_i} log pi(t)        N action tokens in the batch

in exactly the token layout that RL's rollout produces: `envs.Chat` makes both. The log-probabilities and
the evaluation are `rloo_multiturn.py`'s, so that the success rates before and after are comparable with RL's.

    python sft.py --env alfworld --num-demos 300
    python rloo_multiturn.py --env alfworld --model runs/<this run>/sft
"""

import math
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rloo_multiturn import evaluate, microbatches, token_logprobs  # sets OMP_WAIT_POLICY: before torch

# isort: split
import torch
from tqdm import tqdm

import envs
import launch


@dataclass
class Args:
    # experiment
    exp_name: str = Path(__file__).stem
    """Name of this experiment; a part of the run folder's name."""
    seed: int = 1
    """Seed of the order of the demonstrations."""
    save_freq: int = 100
    """Save a checkpoint every this many optimizer steps; 0 saves at the end only, and when the run is interrupted."""
    resume: str = ""
    """Folder of a run to go on with from its newest checkpoint, with its arguments."""

    # environment
    env: Literal["textworld", "alfworld"] = "textworld"
    """Which engine to play."""
    task: str = ""
    """Which games: names separated by commas are mixed equally; empty takes w2-o3-q4 (TextWorld) or all (ALFWorld)."""
    max_turns: int = 0
    """Turns in an episode at most; a demonstration that takes longer is dropped. 0 takes 12 (TextWorld) or 24."""
    max_action_tokens: int = 24
    """Tokens in an action at most, in evaluation."""
    show_admissible: bool = False
    """Append the list of the commands that the engine would accept to each observation."""
    alfworld_data: Literal["auto", "real", "generated"] = "auto"
    """ALFWorld's own games, generated ones, or its own where $ALFWORLD_DATA or ~/.cache/alfworld has them."""
    num_workers: int = 2
    """Processes that run the environments."""

    # model
    model: str = str(Path(__file__).parent / "checkpoints" / "tiny")
    """Folder or hub name of a causal language model with a chat template, e.g. Qwen/Qwen2.5-1.5B-Instruct."""
    temperature: float = 1.0
    """Softmax temperature in the loss; cloning is usually done at 1."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Precision of the computation (the trained weights stay float32); auto takes bfloat16 on GPUs."""

    # optimisation
    num_demos: int = 300
    """Winning demonstrations to clone."""
    num_epochs: int = 1
    """Passes over the demonstrations."""
    batch_size: int = 16
    """Demonstrations in an optimizer step."""
    learning_rate: float = 1e-4
    """AdamW's learning rate after the warm-up (a tenth of the steps); it falls to a tenth along a cosine."""
    max_grad_norm: float = 1.0
    """Gradient norm above which the gradient is scaled down; 0 never does."""
    tokens_per_microbatch: int = 8192
    """Padded tokens in one forward and backward pass at most; changes memory and speed, never the result."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass: less memory for one more forward pass; same result."""

    # evaluation
    eval_episodes: int = 100
    """Held-out games in an evaluation, one episode each."""
    eval_temperature: float = 0.4
    """Softmax temperature in evaluation; 0 takes the most likely token."""
    eval_split: str = ""
    """Split to evaluate on; empty takes test (TextWorld) or valid_unseen (ALFWorld)."""

    def __post_init__(self):
        self.task = self.task or envs.ENVIRONMENTS[self.env]["task"]
        self.eval_split = self.eval_split or envs.ENVIRONMENTS[self.env]["eval_split"]
        self.max_turns = self.max_turns or envs.ENVIRONMENTS[self.env]["max_turns"]
        if self.dtype == "auto":
            self.dtype = "bfloat16" if torch.cuda.is_available() else "float32"
        envs.check(self, "max_turns max_action_tokens num_workers eval_episodes", at_least=1)
        envs.check(self, "num_demos num_epochs batch_size", at_least=1)
        envs.check(self, "seed save_freq max_grad_norm eval_temperature", at_least=0)
        envs.check(self, "temperature learning_rate tokens_per_microbatch", above=0)


def play_demonstrations(vec, tasks, num_demos: int, side_by_side: int = 32) -> list[dict]:
    """Episodes of the expert, in the order of the tasks; those that do not win within the turn limit are dropped.

    Several processes share each lot of tasks, and all get all the demonstrations.

    Args:
        vec: a VecEnv made with `expert=True`.
        tasks: tried in order, `side_by_side` at a time, until `num_demos` have been won, or until four such lots have
            all been lost.

    Returns:
        dicts with `obs` and `actions`, lists of str, K of each (the observation after the last action is left out).
    """
    demos, tasks, tried = [], list(tasks), 0
    with tqdm(total=num_demos, desc="demonstrations", unit="episode", disable=launch.RANK > 0 or None) as bar:
        while tasks and len(demos) < num_demos and (demos or tried < 4 * side_by_side):
            some, tasks = tasks[:side_by_side], tasks[side_by_side:]
            tried += len(some)
            started = vec.reset(launch.share(some))
            episodes = [{"obs": [obs], "actions": [], "info": info} for obs, info in started]
            live = {i: e for i, e in enumerate(episodes) if "expert_action" in e["info"]}
            while live:
                actions = {i: episode["info"]["expert_action"] for i, episode in live.items()}
                for i, (obs, _, terminated, truncated, info) in vec.step(actions).items():
                    episodes[i]["actions"].append(actions[i])
                    episodes[i]["info"] = info
                    if terminated or truncated:
                        del live[i]
                    else:
                        episodes[i]["obs"].append(obs)
            episodes = launch.gather(episodes)
            won = [{"obs": e["obs"], "actions": e["actions"]} for e in episodes if e["info"]["won"]]
            demos += won[: num_demos - len(demos)]
            bar.update(min(len(won), num_demos - bar.n))
    return demos


def tokenize(demos: list[dict], chat: envs.Chat) -> list[tuple[list[int], list[bool]]]:
    """Each demonstration as the ids and the response mask that a rollout with the same text would have produced."""
    rows = []
    for demo in demos:
        ids, mask = [], []
        for turn, (obs, action) in enumerate(zip(demo["obs"], demo["actions"], strict=True)):
            observation = chat.prompt(obs) if turn == 0 else chat.follow_up(obs, ended=True)
            response = chat.action(action)
            ids += observation + response
            mask += [False] * len(observation) + [True] * len(response)
        rows.append((ids, mask))
    return rows


def make_optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)


def train(model, optimizer, rows, args, on_step=None, steps_done: int = 0) -> None:
    """Maximises the likelihood of the action tokens; equation (1).

    Args:
        rows: (ids, response mask) of each demonstration, from `tokenize`.
        on_step: called after each optimizer step with (step, metrics); a true answer ends the training.
        steps_done: optimizer steps that an earlier run has made, and that this one skips.
    """
    device, rng = model.device, random.Random(args.seed)
    steps_per_epoch = -(-len(rows) // args.batch_size)
    total = steps_per_epoch * args.num_epochs
    warmup = max(1, total // 10)
    bar = tqdm(total=total, desc="cloning", unit="step", disable=launch.RANK > 0 or None)
    step = 0
    for _ in range(args.num_epochs):
        order = rng.sample(range(len(rows)), len(rows))
        for start in range(0, len(rows), args.batch_size):
            learning_rate = args.learning_rate * min(
                (step + 1) / warmup, 0.55 + 0.45 * math.cos(math.pi * step / total)
            )
            step += 1
            bar.update()
            if step <= steps_done:
                continue
            some = [rows[i] for i in order[start : start + args.batch_size]]
            T = max(len(ids) for ids, _ in some)
            batch = {
                "input_ids": torch.tensor([ids + [0] * (T - len(ids)) for ids, _ in some], device=device),  # (B, T)
                "attention_mask": torch.tensor([[True] * len(ids) + [False] * (T - len(ids)) for ids, _ in some]),
                "response_mask": torch.tensor([mask + [False] * (T - len(mask)) for _, mask in some], device=device),
            }
            num_tokens = int(batch["response_mask"].sum())
            loss_sum, entropy_sum = 0.0, 0.0
            pieces = microbatches(batch, launch.share(torch.arange(len(some))), args)
            for piece in launch.together(pieces, batch):
                logprobs, entropy = token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
                loss = -logprobs.sum() / num_tokens
                loss.backward()
                loss_sum, entropy_sum = loss_sum + float(loss.detach()), entropy_sum + float(entropy.sum())
            loss_sum, entropy_sum = map(sum, zip(*launch.gather([(loss_sum, entropy_sum)]), strict=True))
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or float("inf"))
            if not math.isfinite(float(grad_norm)):
                raise envs.UserError(f"step {step}: the gradient is not finite; try a lower --learning-rate")
            optimizer.param_groups[0]["lr"] = learning_rate
            optimizer.step()
            optimizer.zero_grad()
            bar.set_postfix(loss=f"{loss_sum:.3f}")
            metrics = {"charts/learning_rate": learning_rate, "losses/policy_loss": loss_sum}
            metrics |= {"losses/entropy": entropy_sum / num_tokens, "losses/grad_norm": float(grad_norm)}
            if on_step and on_step(step, metrics):
                bar.close()
                return
    bar.close()


def main(args: Args) -> None:
    # 1. Games and model.
    device = launch.start(args.dtype)
    torch.manual_seed(args.seed)
    demo_tasks = envs.list_tasks(args.env, args.task, "demos", args.alfworld_data)
    eval_tasks = envs.list_tasks(args.env, args.task, args.eval_split, args.alfworld_data)[: args.eval_episodes]
    print(envs.describe(demo_tasks, "demos"), envs.describe(eval_tasks, args.eval_split), sep="\n", flush=True)
    if len(eval_tasks) < launch.WORLD_SIZE:
        raise envs.UserError(f"{launch.WORLD_SIZE} processes are too many to share {len(eval_tasks)} episodes")
    model, chat = launch.load_model(args.model)
    launch.shard(model, device, args, plays=True)
    optimizer = make_optimizer(model)
    trained = {"model": (model, optimizer)}

    # 2. The run's folder, with --resume as its newest checkpoint left it. Evaluate, clone, evaluate.
    run = launch.Run(args)
    progress = run.restore(trained)
    settings = {"env": args.env, "max_turns": args.max_turns, "show_admissible": args.show_admissible}
    vec = envs.VecEnv(args.num_workers, **settings, expert=True)
    resumed, progress = bool(progress), progress or {"step": 0, "global_step": 0}
    if not resumed:
        progress["before"], _ = evaluate(model, chat, vec, launch.share(eval_tasks), args)
    print(f"before: {args.eval_split} success {progress['before']['success_rate']:.0%}", flush=True)
    demos = play_demonstrations(vec, demo_tasks, args.num_demos)
    if not resumed:
        run.log_episodes(demos, iteration=0, split="demos", group_size=1)
    if len(demos) < args.num_demos:
        print(f"only {len(demos)} of {args.num_demos} demonstrations were won within {args.max_turns} turns")
    if not demos:
        raise envs.UserError(f"--max-turns {args.max_turns}: the expert wins no game in that time")

    rows = [row for row in tokenize(demos, chat) if len(row[0]) <= model.config.max_position_embeddings]
    if len(rows) < len(demos):
        print(f"{len(demos) - len(rows)} demonstrations are longer than the model's context and are left out")
    if not rows:
        raise envs.UserError(f"--model {args.model}: its context is too short for every demonstration")

    def on_step(step: int, metrics: dict) -> bool:
        """Logs and saves; a true answer ends the training."""
        run.log(metrics, step)
        progress["step"] = progress["global_step"] = step
        interrupted = run.interrupted()
        if interrupted or (args.save_freq and step % args.save_freq == 0):
            run.save(f"iteration_{step:06d}", trained, chat.tokenizer, progress)
        return interrupted

    train(model, optimizer, rows, args, on_step, steps_done=progress["step"])
    if run.interrupted():
        vec.close()
        run.close()
        return
    before = progress["before"]
    after, _ = evaluate(model, chat, vec, launch.share(eval_tasks), args)
    for step, scores in ((0, before), (1, after)):
        run.log({f"eval/{name}": value for name, value in scores.items()}, step)

    # 3. Save an ordinary Hugging Face folder.
    run.save("sft", trained, chat.tokenizer, progress)
    vec.close()
    run.close()
    print(
        f"\n{args.eval_split} success: {before['success_rate']:.0%} -> {after['success_rate']:.0%} "
        f"[{after['low']:.0%}, {after['high']:.0%}] after {len(rows)} demonstrations\nmodel: {run.checkpoint}"
    )


if __name__ == "__main__":
    try:
        main(launch.parse(Args))
    except envs.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
