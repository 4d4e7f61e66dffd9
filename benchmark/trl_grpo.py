"""Whole iterations, rollout and update, against TRL's multi-turn GRPO: same model, same games, same batch size.

    python3 -m venv TRL_VENV && TRL_VENV/bin/pip install -r benchmark/trl_requirements.txt
    python benchmark/trl_grpo.py --trl-python TRL_VENV/bin/python

Each side is a process of its own that loads the model, then plays and updates when told to: ours, TRL, ours, ... in one
run, never both at once, with the same number of threads, on the CPU. The clock runs from the reset of the environments
to the end of the optimizer's step. The games are too hard for the policy, so that nearly all episodes last all turns;
the sides sample actions of their own, so turns and action tokens stand beside the seconds. Both play `envs.VecEnv` by
the layout of `envs.Chat`, with sparse rewards, in float32; both take one AdamW step per batch on GRPO's published loss,
over action tokens alone, without a reference model, at a learning rate that leaves the policy all but unchanged.

Ours: steps 4 to 6 of `grpo_multiturn.main`, by that file's own functions. It scores the batch once before the update;
TRL does not. TRL: `GRPOTrainer` with `rollout_func`, in which one writes the loop over turns; each turn, the trainer
generates from the whole histories of the unfinished episodes, by the method that its own tool loop calls. The way that
TRL recommends, `environment_factory`, refuses this policy, whose chat template has no tool calls: it would play parsed
tool calls alone, and the policy answers with the command itself. Of TRL's settings the fastest found, on one thread: 8
episodes in each pass, not 2, 4, 16 or 64; `generate`, not transformers' continuous batching.

Writes trl_grpo.csv (one row per repetition and side) beside this file; rows of other models are kept.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import envs
from benchmark import rows as table  # everything else is imported by the side that has it installed

CSV = ROOT / "benchmark" / "trl_grpo.csv"
FIELDS = "model side groups episodes turns repetition seconds turns_played action_tokens optimizer_steps".split()
FIELDS += ["threads", "cores", "trl_version"]
TASK, SIDES = "w4-o6-q8", ("ours", "TRL")
TEMPERATURE, MAX_ACTION_TOKENS, LEARNING_RATE = 0.7, 24, 1e-6
TRL_ROWS = 8  # episodes in each of TRL's forward and backward passes


def wait_for_go() -> float:
    """Blocks until the parent wants the next iteration; the time at which it starts."""
    if sys.stdin.readline() != "go\n":
        sys.exit()  # the parent is gone
    return time.perf_counter()


def answer(start: float, **row) -> None:
    print("row", json.dumps({"seconds": round(time.perf_counter() - start, 3)} | row), flush=True)


def ours(options, tasks, vec) -> None:
    """Steps 4 to 6 of `grpo_multiturn.main`, without its reference model (`--kl-coef 0`)."""
    import torch

    import grpo_multiturn as grpo
    import launch

    settings = {"max_turns": options.turns, "max_action_tokens": MAX_ACTION_TOKENS, "temperature": TEMPERATURE}
    settings |= {"learning_rate": LEARNING_RATE, "group_size": options.group_size, "kl_coef": 0.0}
    args = grpo.Args(model=options.model, **settings)
    model, chat = launch.load_model(args.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(args.seed)
    answer(time.perf_counter())  # ready
    for iteration in range(options.repeats + 1):
        start = wait_for_go()
        batch, _ = grpo.rollout(model, chat, vec, tasks, args, args.temperature, generator)
        assert batch["valid"].all(), "an episode was lost to the infra_error printed above"
        rows = torch.arange(len(tasks))
        logprobs = torch.zeros_like(batch["logprobs"])  # (B, T)
        with torch.no_grad():
            for piece in grpo.microbatches(batch, rows, args):
                at = piece["rows"], slice(piece["input_ids"].shape[1])
                logprobs[at], _ = grpo.token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
        batch |= {"logprobs": logprobs, "ref_logprobs": logprobs} | grpo.compute_advantages(batch, args)
        optimizer.zero_grad()
        for piece in grpo.microbatches(batch, rows, args):
            piece["new_logprobs"], _ = grpo.token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
            grpo.compute_loss(piece | {"num_episodes": len(rows)}, args)[0].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm, error_if_nonfinite=True)
        optimizer.step()
        played = {"turns_played": int(batch["num_turns"].sum()), "action_tokens": int(batch["response_mask"].sum())}
        answer(start, episodes=len(rows), **played, optimizer_steps=iteration + 1, threads=torch.get_num_threads())


def trl(options, tasks, vec) -> None:
    """TRL's trainer, whose callbacks wait for the parent before each step and answer it after."""
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    chat = envs.Chat(transformers.AutoTokenizer.from_pretrained(options.model))
    task_of = {task.task_id: task for task in tasks}
    played = {}  # of the last batch, for the row

    def rollout(prompts: list[str], trainer) -> dict:
        """One episode per prompt, which names its game. `env_mask` is 1 on action tokens."""
        prompt_ids = [chat.prompt(obs) for obs, _ in vec.reset([task_of[prompt] for prompt in prompts])]
        completion_ids, masks, returns = [[] for _ in prompts], [[] for _ in prompts], [0.0] * len(prompts)
        alive, turns = list(range(len(prompts))), 0
        while alive:
            histories = [prompt_ids[i] + completion_ids[i] for i in alive]
            sampled, _ = trainer._generate_single_turn(histories, images=None, multimodal_fields={}, num_generations=1)
            actions = dict(zip(alive, sampled, strict=True))
            for i, action in actions.items():
                completion_ids[i] += action
                masks[i] += [1] * len(action)
            turns, alive = turns + len(alive), []
            answers = vec.step({i: chat.text(action) for i, action in actions.items()})
            for i, (obs, reward, terminated, truncated, info) in answers.items():
                assert not info.get("infra_error"), "an episode was lost to the infra_error printed above"
                returns[i] += reward
                if not (terminated or truncated):
                    alive.append(i)
                    completion_ids[i] += chat.follow_up(obs, ended=completion_ids[i][-1] == chat.eot_id)
                    masks[i] += [0] * (len(completion_ids[i]) - len(masks[i]))
        played.update(episodes=len(prompts), turns_played=turns, action_tokens=sum(map(sum, masks)))
        batch = {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "env_mask": masks}
        return batch | {"logprobs": None, "episode_return": returns}  # log-probabilities are for vLLM alone

    class WaitAndAnswer(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):  # before the rollout
            self.start = wait_for_go()

        def on_step_end(self, args, state, control, **kwargs):  # after the optimizer's step
            answer(self.start, **played, optimizer_steps=state.global_step, threads=torch.get_num_threads())

    settings = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False, "report_to": "none"}
    settings |= {"logging_strategy": "no", "save_strategy": "no", "disable_tqdm": True, "shuffle_dataset": False}
    settings |= {"max_steps": options.repeats + 1, "num_generations": options.group_size, "temperature": TEMPERATURE}
    settings |= {"lr_scheduler_type": "constant", "max_completion_length": MAX_ACTION_TOKENS}  # in one generation
    settings |= {"per_device_train_batch_size": (n := math.gcd(TRL_ROWS, len(tasks))), "loss_type": "grpo"}
    settings |= {"gradient_accumulation_steps": len(tasks) // n, "learning_rate": LEARNING_RATE, "beta": 0.0}
    games = datasets.Dataset.from_dict({"prompt": list(task_of)})  # in each batch, every game `num_generations` times
    parts = {"processing_class": chat.tokenizer, "rollout_func": rollout, "callbacks": [WaitAndAnswer()]}
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(output_dir=folder, **settings)
        trainer = GRPOTrainer(options.model, lambda episode_return, **kwargs: episode_return, config, games, **parts)
        answer(time.perf_counter())  # ready
        trainer.train()


def trl_version(python: str) -> str:
    """The version of TRL that an interpreter has. Raises UserError: it cannot be run, or lacks TRL or the games."""
    check = "import importlib.metadata, datasets, textworld, trl; print(importlib.metadata.version('trl'))"
    try:
        found = subprocess.run([python, "-c", check], capture_output=True, text=True)
    except OSError as error:
        raise envs.UserError(f"--trl-python {python}: cannot be run ({error.strerror})") from error
    if found.returncode:
        reason = found.stderr.strip().splitlines()[-1]
        raise envs.UserError(f"--trl-python {python}: {reason}; install benchmark/trl_requirements.txt there")
    return found.stdout.split()[-1]


def receive(side: str, process: subprocess.Popen) -> dict:
    for line in process.stdout:  # TRL may print, too
        if line.startswith("row "):
            return json.loads(line[4:])
    raise envs.UserError(f"the process of {side} ended early; its error is printed above")


def measure(options) -> list[dict]:
    """Both sides in turn; the first pair warms up and is not counted."""
    python = {"ours": sys.executable, "TRL": options.trl_python}
    about = {"model": Path(options.model).name, "groups": options.groups, "turns": options.turns}
    about |= {"cores": os.cpu_count(), "trl_version": trl_version(options.trl_python)}
    environ = {"OMP_NUM_THREADS": str(options.threads), "OMP_WAIT_POLICY": "PASSIVE", "CUDA_VISIBLE_DEVICES": ""}
    environ |= {"HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    environ |= {"TRANSFORMERS_SDPA_FORCE_GQA": "1"}  # launch.py has it on CPUs: faster attention for both sides
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": os.environ | environ}
    processes, rows = {}, []
    try:
        for side in SIDES:
            command = [python[side], __file__, *sys.argv[1:], "--side", side]
            processes[side] = subprocess.Popen(command, **pipes)
            receive(side, processes[side])  # ready
        for repetition in range(options.repeats + 1):
            for side, process in processes.items():
                process.stdin.write("go\n")
                process.stdin.flush()
                row = about | {"side": side, "repetition": repetition} | receive(side, process)
                print(row, flush=True)
                rows += [row] if repetition else []
    finally:
        for process in processes.values():
            process.stdin.close()  # a side that waits for us ends
            process.wait()
    return rows


def report(rows: list[dict]) -> None:
    """Prints one line per model and side: medians over the repetitions."""
    print("| model | side | iteration, s | episodes/s | turns played | action tokens | episodes/s against TRL |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in dict.fromkeys(row["model"] for row in rows):
        speed = {}
        for side in reversed(SIDES):  # TRL first, to compare with
            some = [row for row in rows if row["model"] == name and row["side"] == side]
            columns = ("seconds", "turns_played", "action_tokens")
            seconds, turns, tokens = (statistics.median(float(row[column]) for row in some) for column in columns)
            speed[side] = int(some[0]["episodes"]) / seconds
            times = speed[side] / speed["TRL"]
            print(f"| {name} | {side} | {seconds:.2f} | {speed[side]:.2f} | {turns:.0f} | {tokens:.0f} | {times:.2f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", default="TRL_VENV/bin/python", help="the python that has TRL")
    parser.add_argument("--model", default=str(ROOT / "checkpoints" / "tiny"), help="folder of a model")
    parser.add_argument("--groups", type=int, default=8, help="games in a batch")
    parser.add_argument("--group-size", type=int, default=8, help="episodes of each game")
    parser.add_argument("--turns", type=int, default=12, help="turns in an episode at most")
    parser.add_argument("--repeats", type=int, default=5, help="counted repetitions, after one that warms up")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="threads of each side")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)  # which child process this is
    options = parser.parse_args()
    if options.side:
        games = envs.list_tasks("textworld", TASK, "valid", "auto")[: options.groups]
        vec = envs.VecEnv(2, env="textworld", max_turns=options.turns)
        play = {"ours": ours, "TRL": trl}[options.side]
        return play(options, [game for game in games for _ in range(options.group_size)], vec)
    envs.check(options, "groups turns repeats threads", at_least=1)
    measured = measure(options)
    report(table.replace(CSV, FIELDS, measured, by="model"))


if __name__ == "__main__":
    try:
        main()
    except envs.UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
