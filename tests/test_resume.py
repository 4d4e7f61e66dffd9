"""A run that was stopped and resumed ends where one that was never stopped ends, bit by bit."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM

import envs
import grpo_multiturn
import launch
import ppo_multiturn
import rloo_multiturn
import sft

SMALL = "--env alfworld --alfworld-data generated --num-workers 1 --eval-episodes 2 --max-turns 3"
RL = f"{SMALL} --num-iterations 3 --num-groups 2 --group-size 2 --dense-reward --eval-freq 2 --temperature 1"
COMMANDS = {
    "rloo": (rloo_multiturn, RL),
    "grpo": (grpo_multiturn, f"{RL} --num-minibatches 2"),
    "ppo": (ppo_multiturn, f"{RL} --num-minibatches 2 --critic-warmup 1 --critic-steps 2"),
    "sft": (sft, f"{SMALL} --max-turns 30 --num-demos 6 --batch-size 2"),
}
OF_THE_CLOCK = ("charts/SPS", "charts/rollout_seconds", "charts/update_seconds")


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Runs a script's `main` with a command line, in a folder of its own; gives the run's folder."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(module, arguments, name):
        (tmp_path / name).mkdir(exist_ok=True)
        monkeypatch.chdir(tmp_path / name)
        monkeypatch.setattr(sys, "argv", [module.__file__, *arguments.split()])
        module.main(launch.parse(module.Args))
        (folder,) = (tmp_path / name / "runs").iterdir()
        return folder

    yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


def stop_in(monkeypatch, call):
    """Has SIGTERM arrive while the `call`-th optimizer step is made."""
    step, calls = torch.optim.AdamW.step, []

    def interrupted(*args, **kwargs):
        calls.append(None)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(*args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", interrupted)


def outcome(folder):
    """All that a run has left: weights, training state, scalars by step, episodes."""
    last = launch.newest_checkpoint(folder)
    model = AutoModelForCausalLM.from_pretrained(last, dtype=torch.float32)
    state = torch.load(last / "training_state.pt", weights_only=True)
    state["progress"] = {x: v for x, v in state["progress"].items() if x not in ("seconds", "episodes_bytes")}
    events = EventAccumulator(str(folder)).Reload()
    names = [name for name in events.Tags()["scalars"] if name not in OF_THE_CLOCK]
    scalars = {name: {event.step: event.value for event in events.Scalars(name)} for name in names}
    episodes = [json.loads(line) for line in (folder / "episodes.jsonl").open()]
    return {"name": last.name, "model": dict(model.state_dict()), "state": state, "scalars": scalars, "log": episodes}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("script", COMMANDS)
def test_resumed_run_ends_where_an_uninterrupted_one_ends(start, monkeypatch, capfd, script):
    module, command = COMMANDS[script]
    whole = start(module, command, "whole")
    with monkeypatch.context() as patch:
        stop_in(patch, call=2)
        folder = start(module, command, "stopped")
    stopped_at = launch.newest_checkpoint(folder).name
    assert stopped_at < outcome(whole)["name"]
    assert f"interrupted after {stopped_at}; to go on: --resume" in capfd.readouterr().err
    start(module, f"--resume {folder}", "stopped")
    first, second = outcome(whole), outcome(folder)
    for part in first:
        assert same(first[part], second[part]), part


def test_second_signal_ends_the_run_at_once(tmp_path):
    command = [sys.executable, rloo_multiturn.__file__, *f"{RL} --num-iterations 500".split()]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not process.stdout.readline().startswith("iteration 1/500"):
        pass
    process.send_signal(signal.SIGINT)
    while "once more to end at once" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode == -signal.SIGINT


def test_what_was_logged_after_the_checkpoint_is_set_aside(start, monkeypatch):
    """A run killed in its third iteration has logged its second checkpoint's evaluation already."""
    command = f"{RL} --save-freq 1"
    whole = start(rloo_multiturn, command, "whole")

    class Killed(Exception):
        pass

    scored = rloo_multiturn.compute_advantages

    def dies(batch, args):
        if len(list(folder_of.glob("runs/*/iteration_000002"))):
            raise Killed
        return scored(batch, args)

    folder_of = whole.parents[2] / "killed"
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(rloo_multiturn, "compute_advantages", dies)
        start(rloo_multiturn, command, "killed")
    (folder,) = (folder_of / "runs").iterdir()
    with (folder / "episodes.jsonl").open("a") as file:
        file.write('{"half a li')  # as a kill would leave it
    start(rloo_multiturn, f"--resume {folder}", "killed")
    assert all(same(outcome(whole)[part], outcome(folder)[part]) for part in outcome(whole))
    assert (folder / "episodes_undone.jsonl").read_text().endswith('{"half a li')


def test_only_the_newest_checkpoint_keeps_its_training_state(start):
    folder = start(rloo_multiturn, f"{RL} --save-freq 1", "run")
    assert [path.parent.name for path in folder.glob("*/training_state.pt")] == ["iteration_000003"]
    assert sorted(path.name for path in folder.glob("iteration_*")) == [f"iteration_00000{n}" for n in (1, 2, 3)]


def test_changed_arguments_are_refused_by_name(start, monkeypatch, tmp_path):
    folder = start(rloo_multiturn, f"{RL} --num-iterations 1", "run")

    def parsed(module, arguments):
        monkeypatch.setattr(sys, "argv", [module.__file__, *arguments.split()])
        return launch.parse(module.Args)

    args = parsed(rloo_multiturn, f"--resume {folder} --num-iterations 4 --eval-freq 1")
    assert (args.num_iterations, args.eval_freq, args.group_size, args.temperature) == (4, 1, 2, 1.0)
    with pytest.raises(envs.UserError, match="learning_rate was 0.0003, not 0.1; seed was 1, not 2"):
        parsed(rloo_multiturn, f"--resume {folder} --seed 2 --learning-rate 0.1")
    with pytest.raises(envs.UserError, match="made by another script"):
        parsed(ppo_multiturn, f"--resume {folder}")
    with pytest.raises(envs.UserError, match="holds no checkpoint that can be resumed"):
        parsed(rloo_multiturn, f"--resume {tmp_path}")


def test_full_disk_stops_the_run_with_one_line_and_leaves_the_last_checkpoint_whole(tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=60m", "tmpfs", disk]).returncode:
        pytest.skip("a small disk can be mounted by root alone")
    try:
        done = subprocess.run(
            [sys.executable, rloo_multiturn.__file__, *f"{RL} --num-iterations 50 --save-freq 1".split()],
            cwd=disk, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        (folder,) = (disk / "runs").iterdir()
        last = launch.newest_checkpoint(folder)
        assert done.returncode == 2, done.stderr
        error = done.stderr.splitlines()[-1]
        assert error.startswith("error: runs/") and "cannot write" in error
        assert error.endswith(f"the last whole checkpoint is {last.relative_to(disk)}")
        assert "Traceback" not in done.stderr
        AutoModelForCausalLM.from_pretrained(last)
        assert torch.load(last / "training_state.pt", weights_only=True)["progress"]["iteration"] == int(last.name[-6:])
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


def test_run_that_is_killed_at_twenty_random_moments_ends_with_the_same_weights(start, tmp_path):
    """In the imports, the rollout, the update, the saving: a random time after a start, or after a checkpoint."""
    command = f"{RL} --num-iterations 50 --save-freq 1"
    began = time.time()
    whole = start(rloo_multiturn, command, "whole")
    pace = (time.time() - began) / 50  # seconds an iteration
    (tmp_path / "killed").mkdir()
    rng, folder, killed_after = random.Random(1), None, []
    while True:
        words = f"--resume {folder}" if folder else command
        process = subprocess.Popen([sys.executable, rloo_multiturn.__file__, *words.split()], cwd=tmp_path / "killed")
        if len(killed_after) == 20:
            assert process.wait(300) == 0
            break
        last = folder and launch.newest_checkpoint(folder)
        if len(killed_after) % 3:
            deadline = time.time() + 120
            while not (newest := newest_in(tmp_path / "killed")) or newest == last:
                assert process.poll() is None and time.time() < deadline
                time.sleep(0.02)
            time.sleep(rng.uniform(0, 2 * pace))
        else:
            time.sleep(rng.uniform(0, 8))
        assert process.poll() is None, "through before twenty kills"
        process.kill()
        process.wait()
        newest = newest_in(tmp_path / "killed")
        folder = newest and newest.parent
        killed_after.append(newest and newest.name)
    print(killed_after)
    first, second = outcome(whole), outcome(folder)
    for part in first:
        assert same(first[part], second[part]), part


def newest_in(folder):
    """The newest checkpoint of the runs in a folder; a run that was killed before its first one is left alone."""
    return max(filter(None, map(launch.newest_checkpoint, folder.glob("runs/*"))), default=None)
