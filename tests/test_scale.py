"""Several processes: the same update as one, and an end with a clear error when one of them dies.

`torchrun` starts this very file as a script in each process (see the end): it runs `main` on a batch that was played
beforehand.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import envs
import grpo_multiturn
import launch
import ppo_multiturn
import rloo_multiturn

ROOT = Path(__file__).resolve().parents[1]
MODULES = {"rloo": rloo_multiturn, "grpo": grpo_multiturn, "ppo": ppo_multiturn}
# Three groups of three: neither 2 nor 4 processes get equal shares, and in minibatches of two or three some get no row.
SIZES = {"num_iterations": 2, "num_groups": 3, "group_size": 3, "max_turns": 4, "eval_episodes": 6, "num_workers": 1}
SIZES |= {"env": "alfworld", "alfworld_data": "generated", "dense_reward": True, "kl_coef": 0.01, "learning_rate": 0.1}
SIZES |= {"tokens_per_microbatch": 1500, "temperature": 1.0, "anneal_lr": False}
SEVERAL_STEPS = {"update_epochs": 2, "num_minibatches": 4}
EXTRA = {"rloo": {}, "grpo": SEVERAL_STEPS, "ppo": SEVERAL_STEPS | {"critic_warmup": 1, "critic_learning_rate": 0.1}}
TIMES = ("charts/SPS", "charts/rollout_seconds", "charts/update_seconds")


def torchrun(processes, folder, *arguments, script=__file__):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environ = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command += [str(script), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)


@pytest.fixture(scope="module")
def updates(tmp_path_factory):
    """Weights and metrics of two iterations on one batch, {(algorithm, number of processes): (weights, metrics)}."""
    folder = tmp_path_factory.mktemp("scale")
    args = rloo_multiturn.Args(**SIZES)
    model, chat = launch.load_model(args.model)
    tasks = envs.TaskSampler(envs.list_tasks("alfworld", "all", "train", "generated"), 1).take(3, copies=3)
    vec = envs.VecEnv(1, env="alfworld", max_turns=args.max_turns, dense_reward=True)
    rng = torch.Generator().manual_seed(1)
    batch, episodes = rloo_multiturn.rollout(model, chat, vec, tasks, args, args.temperature, rng)
    vec.close()
    batch["valid"][4], batch["response_mask"][4] = False, False  # as after an infrastructure error
    played = torch.arange(args.max_turns) < batch["num_turns"][:, None]  # (B, K)
    batch["rewards"] = torch.rand(played.shape, generator=rng) * played  # so that there is something to learn
    torch.save((batch, episodes), folder / "batch.pt")
    results = {}
    for name, processes in itertools.product(MODULES, (1, 2, 4)):
        (out := folder / f"{name}_{processes}").mkdir()
        done = torchrun(processes, out, name, folder / "batch.pt")
        assert done.returncode == 0, done.stderr[-3000:]
        (run,) = (out / "runs").iterdir()
        log = EventAccumulator(str(run)).Reload()
        metrics = {tag: [event.value for event in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
        results[name, processes] = load_file(run / "iteration_000002" / "model.safetensors"), metrics
    return results


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize("name", MODULES)
def test_processes_share_a_batch_and_update_as_one_would(updates, name, processes):
    (weights, metrics), (expected, expected_metrics) = updates[name, processes], updates[name, 1]
    before = load_file(ROOT / "checkpoints" / "tiny" / "model.safetensors")
    assert weights.keys() == expected.keys() == before.keys()
    moved = max((expected[key] - before[key]).abs().max().item() for key in before)
    assert moved > 1e-3
    assert max((weights[key] - expected[key]).abs().max().item() for key in before) < 1e-5
    assert metrics.keys() == expected_metrics.keys()
    for tag in metrics.keys() - {*TIMES}:
        assert metrics[tag] == pytest.approx(expected_metrics[tag], rel=1e-4, abs=1e-5), tag


SMALL = "--env alfworld --alfworld-data generated --max-turns 4 --eval-episodes 5 --num-workers 1".split()


def test_checkpoint_of_two_processes_is_an_ordinary_model_and_one_of_them_alone_writes(tmp_path):
    sizes = (
        "--num-iterations 2 --num-groups 3 --group-size 3 --save-freq 1 --max-turns 30 --dense-reward --temperature 1"
    )
    arguments = [*SMALL, *sizes.split()]
    done = torchrun(2, tmp_path, *arguments, script=ROOT / "rloo_multiturn.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("iteration 2/2: success") == 1
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(x.name for x in run.glob("iteration_*")) == ["iteration_000001", "iteration_000002"]
    lines = [json.loads(line) for line in (run / "episodes.jsonl").read_text().splitlines()]
    played = [line for line in lines if line["split"] == "train" and line["iteration"] == 1]
    assert [line["group"] for line in played] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({(line["group"], line["task_id"]) for line in played}) == 3
    assert len({tuple(line["actions"]) for line in played}) > 5  # the processes do not share random numbers
    (first, _), (last, _) = map(launch.load_model, (rloo_multiturn.Args().model, str(run / "iteration_000002")))
    assert type(last).__name__ == "LlamaForCausalLM"
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), last.parameters(), strict=True))
    arguments = [*SMALL, "--model", run / "iteration_000002", "--num-demos", 5, "--batch-size", 2, "--max-turns", 40]
    done = torchrun(2, tmp_path, *arguments, script=ROOT / "sft.py")
    assert done.returncode == 0, done.stderr[-3000:]
    launch.load_model(str(next((tmp_path / "runs").glob("*sft*")) / "sft"))


def test_run_of_two_processes_is_resumed_by_two_bit_by_bit_and_by_one(tmp_path):
    """With the same random numbers: both processes' are those of the iteration, whoever plays it."""
    sizes = [*SMALL, *"--num-groups 3 --group-size 3 --dense-reward --no-anneal-lr --save-freq 1 --eval-freq 0".split()]
    for name, iterations in (("whole", 2), ("parts", 1)):
        (tmp_path / name).mkdir()
        arguments = [*sizes, "--num-iterations", iterations]
        done = torchrun(2, tmp_path / name, *arguments, script=ROOT / "rloo_multiturn.py")
        assert done.returncode == 0, done.stderr[-3000:]
    (whole,), (parts,) = ((tmp_path / name / "runs").iterdir() for name in ("whole", "parts"))
    for processes, iterations in ((2, 2), (1, 3)):
        arguments = ["--resume", parts, "--num-iterations", iterations]
        done = torchrun(processes, tmp_path / "parts", *arguments, script=ROOT / "rloo_multiturn.py")
        assert done.returncode == 0, done.stderr[-3000:]
    (one, _), (two, _) = (launch.load_model(str(path / "iteration_000002")) for path in (whole, parts))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert launch.newest_checkpoint(parts).name == "iteration_000003"


def test_process_that_dies_ends_the_job_and_is_named(tmp_path):
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, rloo_multiturn\n"
        "score = rloo_multiturn.compute_advantages\n"
        "rloo_multiturn.compute_advantages = lambda *x: os._exit(7) if os.environ['RANK'] == '1' else score(*x)\n"
        "sizes = dict(env='alfworld', alfworld_data='generated', max_turns=2, eval_episodes=2, num_groups=2)\n"
        "rloo_multiturn.main(rloo_multiturn.Args(**sizes, group_size=2, num_workers=1))\n"
    )
    done = torchrun(2, tmp_path, script=script)
    assert done.returncode == 1
    assert re.search(r"rank\s*: 1 .*\n\s*exitcode\s*: 7", done.stderr), done.stderr[-3000:]


def test_more_processes_than_episodes_are_refused(tmp_path):
    done = torchrun(3, tmp_path, *SMALL, "--eval-episodes", 2, script=ROOT / "rloo_multiturn.py")
    assert "error: 3 processes are too many to share 2 episodes" in done.stderr and done.returncode == 1


def test_pool_plays_no_episodes_where_a_process_has_no_share():
    vec = envs.VecEnv(1, env="alfworld", max_turns=2)
    assert vec.reset([]) == []
    vec.close()


def test_gpu_check_goes_through_on_the_cpu(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark" / "gpu_check.py"), "--smoke"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout[done.stdout.rindex("\n{\n") :])
    assert 0 < found["speed"]["update, share of the peak"] < 1
    assert found["main job"]["output"][-1].startswith("iteration 2: valid_unseen success")


def test_readme_has_the_table_of_memory():
    done = subprocess.run([sys.executable, str(ROOT / "benchmark" / "memory.py")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in (ROOT / "README.md").read_text()


if __name__ == "__main__":
    name, batch_file = sys.argv[1:]
    # Plain gradient descent: Adam would blow up rounding errors of gradients that are nearly zero.
    torch.optim.AdamW = lambda weights, lr, weight_decay: torch.optim.SGD(weights, lr)
    MODULES[name].rollout = lambda *_: torch.load(batch_file, weights_only=False)
    MODULES[name].main(MODULES[name].Args(**SIZES | EXTRA[name]))
