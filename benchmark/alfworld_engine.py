"""Compare the stock ALFWorld engine with the fast one: the same games, the same commands, traces compared by hash.

    ALFWORLD_DATA=... python benchmark/alfworld_engine.py              # all 274 real validation games, about 10 minutes
    python benchmark/alfworld_engine.py --games 12 --data generated    # 12 games, evenly spaced over the list

Each engine lives in its own process (the fast one is made of patches) and plays one game after another; the two take
turns game by game, so that a machine that gets slower does so for both. A game is loaded (every eighth one twice: the
second time is what the other episodes of a group cost), then played: random admissible commands, two invalid ones, then
the walkthrough. The hash covers observations, admissible commands, rewards, `won` and all facts after every command.
Times are CPU seconds of the process, so that other load on the machine counts little.

Prints a table, writes benchmark/alfworld_engine.csv, and exits with 1 if any trace differs.
"""

import argparse
import csv
import hashlib
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tasks import Task

NUM_RANDOM = 6  # random commands before the walkthrough


def play(env, task, reload):
    """Load the task's game, once more if `reload`, and play it, in this process.

    Returns:
        A dict: hash (of the whole trace), load_s and reload_s (load + reset, first and second time; the second None
        without `reload`), steps, step_s.
    """
    from alfworld.agents.utils.misc import Demangler

    from tasks.alfworld import read_game

    game = read_game(task)
    seconds = []
    for _ in range(2 if reload else 1):
        start = time.process_time()
        env.load(game)
        names = Demangler(game_infos=env._entity_infos)
        for info in env._entity_infos.values():
            info.name = names.demangle_alfred_name(info.id)
        state = env.reset()
        seconds.append(time.process_time() - start)
    rng = random.Random(task.task_id)
    trace = hashlib.sha256(repr((state.feedback, state["admissible_commands"])).encode())
    steps, step_s = 0, 0.0
    commands = [*[None] * NUM_RANDOM, "open the pod bay doors", "LOOK", *game["walkthrough"]]
    for command in commands:
        command = command or rng.choice(state["admissible_commands"])
        start = time.process_time()
        state, reward, done = env.step(command)
        step_s += time.process_time() - start
        steps += 1
        facts = sorted(map(str, state["facts"]))
        trace.update(repr((command, state.feedback, state["admissible_commands"], reward, done, facts)).encode())
        if done:
            break
    return {
        "hash": trace.hexdigest(),
        "load_s": seconds[0],
        "reload_s": seconds[1] if reload else None,
        "steps": steps,
        "step_s": step_s,
    }


def serve(engine):
    """The worker: one task a line on standard input, one result a line on standard output."""
    from textworld import EnvInfos
    from textworld.envs import PddlEnv

    from tasks.alfworld_fast import install_fast_engine

    if engine == "fast":
        install_fast_engine()
    env = PddlEnv(EnvInfos(won=True, admissible_commands=True, facts=True))
    for line in sys.stdin:
        task, reload = json.loads(line)
        print(json.dumps(play(env, Task(**task), reload)), flush=True)


def compare(tasks, warm_up=True):
    """Play the tasks with both engines, each in its own process.

    Args:
        tasks: the games.
        warm_up: play the first one once more in advance, so that imports and first parses are not measured.

    Returns:
        One (stock, fast) pair of `play` results per task.

    Raises:
        RuntimeError: if a worker dies.
    """
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--serve", engine], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for engine in ("stock", "fast")
    ]

    def ask(worker, task, reload=False):
        worker.stdin.write(json.dumps([asdict(task), reload]) + "\n")
        worker.stdin.flush()
        answer = worker.stdout.readline()
        if not answer:
            raise RuntimeError(f"the engine's process died on {task.task_id}")
        return json.loads(answer)

    try:
        if warm_up:
            for worker in workers:
                ask(worker, tasks[-1])
        return [tuple(ask(worker, task, i % 8 == 0) for worker in workers) for i, task in enumerate(tasks)]
    finally:
        for worker in workers:
            worker.stdin.close()
            worker.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--games", type=int, default=0, help="how many games, evenly spaced; 0 for all")
    parser.add_argument("--data", choices=["real", "generated"], default="real", help="which games")
    parser.add_argument("--csv", type=Path, default=ROOT / "benchmark" / "alfworld_engine.csv", help="where to write")
    parser.add_argument("--serve", choices=["stock", "fast"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.serve)

    from tasks.alfworld import list_tasks

    tasks = [task for split in ("valid_seen", "valid_unseen") for task in list_tasks("all", split, args.data)]
    tasks.sort(key=lambda task: task.task_id)
    if args.games:
        tasks = [tasks[i * len(tasks) // args.games] for i in range(args.games)]
    pairs = compare(tasks)
    identical = sum(stock["hash"] == fast["hash"] for stock, fast in pairs)
    rows = []
    for which, unit in (("load_s", "loads/s"), ("reload_s", "repeated loads/s"), ("step_s", "steps/s")):
        rates = []
        for results in zip(*pairs, strict=True):
            results = [result for result in results if result[which] is not None]
            count = sum(result["steps"] for result in results) if which == "step_s" else len(results)
            rates.append(count / sum(result[which] for result in results))
        rows.append([unit, f"{rates[0]:.2f}", f"{rates[1]:.2f}", f"{rates[1] / rates[0]:.1f}"])
    versions = " ".join(f"{name} {importlib.metadata.version(name)}" for name in ("textworld", "alfworld"))
    facts = f"python {platform.python_version()} {versions}, {platform.machine()}, {os.cpu_count()} cores"
    with open(args.csv, "w", newline="") as f:
        writer = csv.writer(f, lineterminator="\n")
        writer.writerow(["measure", "stock", "fast", "ratio", "games", "identical_traces", "data", "machine"])
        for row in rows:
            writer.writerow([*row, len(pairs), identical, args.data, facts])
    print(f"{len(pairs)} {args.data} games, {identical} traces identical ({facts})")
    for row in rows:
        print("{:18s} stock {:>8s}   fast {:>8s}   ratio {}".format(*row))
    for task, (stock, fast) in zip(tasks, pairs, strict=True):
        if stock["hash"] != fast["hash"]:
            print(f"DIFFERS: {task.task_id}")
    return int(identical != len(pairs))


if __name__ == "__main__":
    sys.exit(main())
