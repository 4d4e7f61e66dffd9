"""`main`, run in this process: what happens between rollout and optimizer, seen from the outside."""

import json

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import envs
import grpo_multiturn as grpo
import ppo_multiturn as ppo
import rloo_multiturn as rloo

SIBLINGS = [rloo, grpo, ppo]


@pytest.fixture
def run_main(tmp_path, monkeypatch):
    """Runs `main` in an empty folder with these arguments; gives the folder of the run whose name holds `name`."""

    def start(module, name="__", **arguments):
        monkeypatch.chdir(tmp_path)
        small = {"num_iterations": 1, "num_groups": 2, "group_size": 3, "max_turns": 3, "eval_episodes": 1}
        small |= {"env": "alfworld", "alfworld_data": "generated", "num_workers": 1}
        module.main(module.Args(**small | arguments))
        (folder,) = (tmp_path / "runs").glob(f"*{name}*")
        return folder

    return start


@pytest.fixture
def steps(monkeypatch):
    """The learning rate in every optimizer step, of the policy and of the critic."""
    rates, step = {"policy": [], "critic": []}, torch.optim.AdamW.step

    def record(optimizer, *args, **kwargs):
        (group,) = optimizer.param_groups
        is_critic = any(parameter.shape == (1,) for parameter in group["params"])  # the bias of the value
        rates["critic" if is_critic else "policy"].append(group["lr"])
        return step(optimizer, *args, **kwargs)

    monkeypatch.setattr(torch.optim.AdamW, "step", record)
    return rates


def scalar(folder, tag):
    return [event.value for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


@pytest.mark.parametrize("module", [grpo, ppo])
def test_a_pass_takes_exactly_as_many_optimizer_steps_as_asked(run_main, steps, module):
    run_main(module, update_epochs=2, num_minibatches=4)  # of 6 episodes: pieces of 2, 2, 1, 1
    assert len(steps["policy"]) == 2 * 4


def test_critic_takes_its_own_number_of_steps(run_main, steps):
    run_main(ppo, critic_steps=4, critic_learning_rate=2e-3, num_iterations=2)
    assert steps["critic"] == [2e-3] * 8 and len(steps["policy"]) == 2


@pytest.mark.parametrize(("module", "arguments"), [(grpo, {}), (ppo, {"critic_warmup": 0})])
def test_first_ratio_is_one(run_main, module, arguments):
    folder = run_main(module, num_minibatches=1, **arguments)
    assert scalar(folder, "losses/ratio") == pytest.approx([1], abs=1e-5)
    assert scalar(folder, "losses/clipfrac") == [0] and scalar(folder, "losses/approx_kl") == pytest.approx(
        [0], abs=1e-6
    )


@pytest.mark.parametrize(("module", "others"), [(rloo, {}), (ppo, {"critic_warmup": 0})])
def test_recomputed_activations_change_nothing(run_main, monkeypatch, module, others):
    passes = []
    forward = LlamaDecoderLayer.forward

    def counted(*args, **kwargs):
        passes.append(torch.is_grad_enabled())
        return forward(*args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", counted)
    weights, recomputed = [], []
    for checkpointing in (False, True):
        passes.clear()
        name = f"checkpointing_{checkpointing}"
        arguments = {"max_turns": 12, "dense_reward": True, "exp_name": name} | others
        folder = run_main(module, name, gradient_checkpointing=checkpointing, **arguments)
        weights.append(AutoModelForCausalLM.from_pretrained(folder / "iteration_000001").state_dict())
        recomputed.append(sum(passes))
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    assert recomputed[1] == 2 * recomputed[0]


@pytest.mark.parametrize("module", SIBLINGS)
def test_learning_rate_falls_linearly_and_would_reach_zero_after_the_last_iteration(run_main, steps, module):
    folder = run_main(module, num_iterations=4, learning_rate=1e-4, num_groups=1, max_turns=2)
    expected = [1e-4, 0.75e-4, 0.5e-4, 0.25e-4]
    assert steps["policy"] == pytest.approx(expected)
    assert scalar(folder, "charts/learning_rate") == pytest.approx(expected)


def test_learning_rate_stays_without_annealing(run_main, steps):
    run_main(rloo, num_iterations=3, learning_rate=1e-4, num_groups=1, max_turns=2, anneal_lr=False)
    assert steps["policy"] == [1e-4] * 3


@pytest.mark.parametrize("module", SIBLINGS)
def test_gradient_that_is_not_finite_stops_the_run_before_the_step(run_main, steps, monkeypatch, tmp_path, module):
    compute_loss = module.compute_loss

    def broken(batch, args):
        loss, sums = compute_loss(batch, args)
        return loss * float("nan"), sums

    monkeypatch.setattr(module, "compute_loss", broken)
    with pytest.raises(envs.UserError, match="^not finite: the gradient; the batch is kept in runs/.*/not_finite.pt$"):
        run_main(module)
    assert steps["policy"] == [] and not list(tmp_path.glob("runs/*/iteration_*"))
    (kept,) = tmp_path.glob("runs/*/not_finite.pt")
    assert torch.load(kept, weights_only=True)["advantages"].shape[0] == 6


@pytest.mark.parametrize("module", SIBLINGS)
def test_reward_that_is_not_finite_is_named_with_all_that_it_spoils(run_main, steps, monkeypatch, module):
    rollout = module.rollout

    def spoiled(*args):
        batch, episodes = rollout(*args)
        batch["rewards"][0, 0] = float("nan")
        return batch, episodes

    monkeypatch.setattr(module, "rollout", spoiled)
    with pytest.raises(envs.UserError, match="^not finite: the gradient, rewards, .*advantages"):
        run_main(module)
    assert steps["policy"] == []


@pytest.mark.parametrize("module", SIBLINGS)
def test_too_many_infrastructure_errors_stop_the_run(run_main, monkeypatch, module):
    rollout = module.rollout

    def lossy(*args):
        batch, episodes = rollout(*args)
        batch["valid"][:2], batch["response_mask"][:2] = False, False
        return batch, episodes

    monkeypatch.setattr(module, "rollout", lossy)
    with pytest.raises(envs.UserError, match="^2 of 6 episodes were lost, .*; --max-infra-frac 0.25 allows no more$"):
        run_main(module)
    run_main(module, exp_name="allowed", name="allowed", max_infra_frac=0.4)


def test_critic_starts_at_zero_and_learns_while_the_policy_waits(run_main, monkeypatch):
    compute_loss, values = ppo.compute_loss, {}

    def record(batch, args):
        values.setdefault(batch["iteration"], []).append(batch["values"].abs().max().item())
        return compute_loss(batch, args)

    monkeypatch.setattr(ppo, "compute_loss", record)
    rollout = ppo.rollout

    def rewarded(*args):
        batch, episodes = rollout(*args)
        return batch | {"rewards": batch["rewards"] + 1}, episodes

    monkeypatch.setattr(ppo, "rollout", rewarded)
    folder = run_main(ppo, critic_warmup=2, num_iterations=3, save_freq=1)
    assert max(values[0]) == 0 and min(values[1]) > 0.01 and min(values[2]) > 0.01
    losses = scalar(folder, "losses/value_loss")
    assert losses[0] > losses[1] > losses[2]
    start, waited, moved = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
        for path in (ppo.Args().model, folder / "iteration_000002", folder / "iteration_000003")
    )
    assert all(torch.equal(start[name], waited[name]) for name in start)
    assert any(not torch.equal(start[name], moved[name]) for name in start)


def test_critic_is_made_of_any_causal_model(run_main, tokenizer, tmp_path):
    """GPT-2: learned positions, a tied head, and no class for token classification with a `score`."""
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=1024, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    folder = run_main(ppo, model=str(tmp_path / "gpt2"), critic_warmup=0, max_turns=2, dense_reward=True)
    assert scalar(folder, "losses/value_loss")[0] >= 0


@pytest.mark.parametrize("module", SIBLINGS)
def test_logged_means_are_those_of_the_whole_episodes(run_main, monkeypatch, module):
    """Group 0: returns 1/3, 1/3, and one episode that was lost; group 1: 0, 1, 0."""
    rollout = module.rollout

    def rewarded(model, chat, vec, tasks, args, *rest):
        batch, episodes = rollout(model, chat, vec, tasks, args, *rest)
        if len(episodes) == 6:  # the training batch
            batch["rewards"][:] = 0
            batch["rewards"][[0, 1, 2], 0] = torch.tensor([1 / 3, 1 / 3, 9.0])
            batch["rewards"][4, 1] = 1.0
            batch["valid"][2], batch["response_mask"][2] = False, False
            batch["won"][:] = torch.tensor([0, 0, 1, 0, 1, 0]).bool()
        return batch, episodes

    divisors, compute_loss = [], module.compute_loss

    def recorded(batch, args):
        divisors.append(batch["num_episodes"])
        return compute_loss(batch, args)

    monkeypatch.setattr(module, "rollout", rewarded)
    monkeypatch.setattr(module, "compute_loss", recorded)
    folder = run_main(module, dense_reward=True, num_minibatches=1)
    assert set(divisors) == {5}
    assert scalar(folder, "estimator/zero_advantage_frac") == [0.5]
    assert scalar(folder, "charts/episodic_return") == pytest.approx([(2 / 3 + 1) / 5])
    assert scalar(folder, "charts/success_rate") == pytest.approx([1 / 5])
    assert scalar(folder, "charts/infra_errors") == [1]


def test_logged_means_agree_with_the_logged_episodes(run_main):
    folder = run_main(rloo, num_groups=3, max_turns=6, dense_reward=True)
    lines = [json.loads(line) for line in (folder / "episodes.jsonl").read_text().splitlines()]
    played = [line for line in lines if line["split"] == "train"]
    assert [line["group"] for line in played] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len({(line["group"], line["task_id"]) for line in played}) == 3
    mean = lambda values: pytest.approx([sum(values) / len(played)])  # noqa: E731
    assert scalar(folder, "charts/episodic_return") == mean([sum(line["rewards"]) for line in played])
    assert scalar(folder, "charts/episodic_length") == mean([len(line["actions"]) for line in played])
    assert scalar(folder, "charts/truncated_frac") == mean([line["truncated"] for line in played])
