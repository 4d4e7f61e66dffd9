"""Rollout: token in, token out, with a cache that is carried across turns."""

import copy
from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM

import launch
import rloo_multiturn as rloo
from envs import Task, UserError

TURNS = [
    ["You are in a kitchen. You see a fridge 1.", "The fridge 1 is closed.", "Nothing happens."],
    ["A long corridor with many, many doors, every one of them shut.", "Dark."],
    ["Attic.", "A trunk 2 is here.", "The trunk 2 is open. In it, you see a map 1.", "Taken."],
    ["You are in a kitchen. You see a fridge 1.", "Cold."],
]
TASKS = [Task("textworld", "scripted", i) for i in range(len(TURNS))]


def make_args(**changes):
    args = {"max_turns": 4, "max_action_tokens": 6, "temperature": 0.7, "dtype": "float32"}
    return SimpleNamespace(**{**args, "tokens_per_microbatch": 8192, "group_size": 2, **changes})


def play(model, chat, vec, args, seed=0, temperature=None):
    generator = torch.Generator().manual_seed(seed)
    temperature = args.temperature if temperature is None else temperature
    return rloo.rollout(model, chat, vec, TASKS[: len(vec.turns)], args, temperature, generator)


def test_sampler_and_trainer_give_the_same_logprobs(random_model, chat, scripted_vec):
    """The cache carried over turns, ragged rows and leaving rows change nothing: the first ratio is 1 to 1e-5."""
    args = make_args()
    batch, _ = play(random_model, chat, scripted_vec(TURNS), args)
    with torch.no_grad():
        logprobs, _ = rloo.token_logprobs(random_model, batch["input_ids"], batch["response_mask"], args)
    ratio = (logprobs - batch["logprobs"]).exp()
    assert torch.allclose(ratio, torch.ones_like(ratio), atol=1e-5)
    assert (batch["logprobs"][batch["response_mask"]] < -0.1).any()  # not a comparison of zeros


def test_conversation_is_prompt_actions_and_glue_token_for_token(random_model, chat, scripted_vec):
    vec = scripted_vec(TURNS)
    batch, episodes = play(random_model, chat, vec, make_args())
    for i, texts in enumerate(TURNS):
        ids = batch["input_ids"][i][batch["attention_mask"][i]].tolist()
        mask = batch["response_mask"][i].tolist()
        turn_ids = batch["turn_ids"][i].tolist()
        at = len(chat.prompt(texts[0]))
        assert ids[:at] == chat.prompt(texts[0])
        for turn in range(len(texts)):
            n = next(n for n in range(len(ids) + 1 - at) if at + n == len(ids) or not mask[at + n])
            action = ids[at : at + n]
            assert all(mask[at : at + n]) and turn_ids[at : at + n] == [turn] * n
            assert chat.text(action) == episodes[i]["actions"][turn] == vec.seen[turn][i]
            at += n
            if turn + 1 < len(texts):
                glue = chat.follow_up(texts[turn + 1], ended=action[-1] == chat.eot_id)
                assert ids[at : at + len(glue)] == glue and not any(mask[at : at + len(glue)])
                at += len(glue)
        assert at == len(ids)
    assert not batch["response_mask"][~batch["attention_mask"]].any()
    assert not batch["response_mask"][:, 0].any()


def test_nothing_sampled_is_encoded_again(random_model, chat, scripted_vec):
    """The random model samples tokens that the tokenizer would never produce for the same text; they stay."""
    batch, episodes = play(random_model, chat, scripted_vec(TURNS), make_args())
    sampled = [batch["input_ids"][i][batch["response_mask"][i]].tolist() for i in range(len(TURNS))]
    encoded = [[t for action in e["actions"] for t in chat.action(action)] for e in episodes]
    assert sampled != encoded


def test_action_cut_at_the_limit_is_played_and_the_episode_goes_on(random_model, chat, scripted_vec):
    vec = scripted_vec(TURNS)
    batch, episodes = play(random_model, chat, vec, make_args(max_action_tokens=2))
    ids, mask = batch["input_ids"], batch["response_mask"]
    cut = 0
    for i, episode in enumerate(episodes):
        assert len(episode["actions"]) == len(TURNS[i])
        ends = [t for t in range(mask.shape[1] - 1) if mask[i, t] and not mask[i, t + 1]]
        for t in ends[: len(TURNS[i]) - 1]:  # the last action has nothing behind it
            if ids[i, t] != chat.eot_id:
                cut += 1
                assert ids[i, t + 1] == chat.eot_id and not mask[i, t + 1]
    assert cut > 0


def test_reward_of_a_turn_belongs_to_its_last_sampled_token(random_model, chat, scripted_vec):
    batch, _ = play(random_model, chat, scripted_vec(TURNS), make_args())
    for i, texts in enumerate(TURNS):
        won_in = len(texts) - 1
        assert batch["rewards"][i].tolist() == [float(k == won_in) for k in range(4)]
        last = batch["response_mask"][i].nonzero()[-1]
        assert batch["turn_ids"][i, last] == won_in
        assert batch["num_turns"][i] == len(texts)


def test_model_reads_no_row_whose_action_has_ended_and_less_filler_than_tokens(random_model, chat, scripted_vec):
    decoded, fed, forward = [], [], random_model.forward

    def counted(ids, **inputs):
        (fed if ids.shape[1] > 1 else decoded).append(ids.numel())
        return forward(ids, **inputs)

    random_model.forward = counted
    turns = [*TURNS[:3], ["Attic.", "far " * 50, "a long way " * 60, "end"]]  # a long block beside short ones
    batch, _ = play(random_model, chat, scripted_vec(turns), make_args(max_action_tokens=12))
    mask = torch.nn.functional.pad(batch["response_mask"], (0, 1))
    num_actions = int((mask[:, :-1] & ~mask[:, 1:]).sum())
    assert num_actions == batch["num_turns"].sum()
    ends = (batch["input_ids"] == chat.eot_id) & mask[:, :-1]
    assert 0 < ends.sum() < num_actions and not (ends & mask[:, 1:]).any()  # an ended action has no further token
    assert sum(decoded) == mask.sum() - num_actions  # an action's last token is read with the observation
    assert sum(fed) < 2 * (batch["attention_mask"].sum() - sum(decoded))


def test_batch_that_loses_every_episode_at_the_start_is_whole_but_invalid(random_model, chat, scripted_vec):
    vec = scripted_vec(TURNS)
    reset = vec.reset
    vec.reset = lambda tasks: [(obs, info | {"infra_error": "the worker died"}) for obs, info in reset(tasks)]
    batch, episodes = play(random_model, chat, vec, make_args())
    assert not batch["valid"].any() and not batch["response_mask"].any()
    assert [episode["actions"] for episode in episodes] == [[]] * len(TURNS)


def test_episode_with_an_infrastructure_error_has_no_action_tokens(random_model, chat, scripted_vec):
    batch, episodes = play(random_model, chat, scripted_vec(TURNS, faults=[(2, 2)]), make_args())
    assert batch["valid"].tolist() == [True, True, False, True]
    assert episodes[2]["infra_error"] and not batch["response_mask"][2].any()
    assert batch["response_mask"].any(1).tolist() == [True, True, False, True]


def test_running_out_of_context_ends_the_episode_as_a_failure(random_model, chat, scripted_vec):
    random_model.config.max_position_embeddings = len(chat.prompt(TURNS[0][0])) + 20
    turns = [[TURNS[0][0], "many words " * 20, "more"]]
    batch, episodes = play(random_model, chat, scripted_vec(turns), make_args())
    assert episodes[0]["context_limit"] and batch["truncated"].tolist() == [True]
    assert batch["num_turns"].tolist() == [1] and batch["rewards"].sum() == 0


def test_prompt_that_leaves_no_room_for_an_action_is_refused(random_model, chat, scripted_vec):
    random_model.config.max_position_embeddings = len(chat.prompt(TURNS[0][0])) + 5  # an action may have 6 tokens
    with pytest.raises(UserError, match="context is too short for the first prompt and an action"):
        play(random_model, chat, scripted_vec([[TURNS[0][0], "more"]]), make_args(model="small"))


def test_learned_positions_are_used_up_to_the_last_and_never_beyond(chat, scripted_vec):
    """Filler in front of a short observation must not reach behind the context, as the longest row's block does."""
    args = make_args()
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(chat.tokenizer), n_embd=32, n_layer=2, n_head=4, initializer_range=0.3)
    turns = [["A hall.", "long " * 40, "end"], ["A hall with a very long name " * 4, "short", "end"]]
    large = GPT2LMHeadModel(config).eval()
    used = int(play(large, chat, scripted_vec(turns), args)[0]["attention_mask"].sum(1).max())
    exact = copy.deepcopy(large)
    exact.config.max_position_embeddings = exact.config.n_positions = used + args.max_action_tokens
    exact.transformer.wpe.weight.data = large.transformer.wpe.weight[: used + args.max_action_tokens].clone()
    batch, _ = play(exact, chat, scripted_vec(turns), args)
    assert batch["num_turns"].tolist() == [3, 3] and not batch["truncated"].any()
    with torch.no_grad():
        logprobs, _ = rloo.token_logprobs(exact, batch["input_ids"], batch["response_mask"], args)
    assert torch.allclose(logprobs, batch["logprobs"], atol=1e-4)


def test_one_seed_one_batch(random_model, chat, scripted_vec):
    first, again = (play(random_model, chat, scripted_vec(TURNS), make_args(), seed=3)[0] for _ in range(2))
    other = play(random_model, chat, scripted_vec(TURNS), make_args(), seed=4)[0]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert first["input_ids"].shape != other["input_ids"].shape or not torch.equal(
        first["input_ids"], other["input_ids"]
    )


def test_temperature_zero_takes_the_most_likely_token(random_model, chat, scripted_vec):
    batch, _ = play(random_model, chat, scripted_vec(TURNS), make_args(), temperature=0)
    logits = random_model(batch["input_ids"][:1]).logits[0]
    for t in batch["response_mask"][0].nonzero().flatten().tolist():
        assert logits[t - 1].argmax() == batch["input_ids"][0, t]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_actions_are_drawn_from_the_tempered_softmax(random_model, chat, scripted_vec, temperature):
    n, args = 3000, make_args(max_turns=1, max_action_tokens=1)
    tasks = [Task("textworld", "scripted", i) for i in range(n)]
    rng, vec = torch.Generator().manual_seed(0), scripted_vec([["A cellar."]] * n)
    batch, _ = rloo.rollout(random_model, chat, vec, tasks, args, temperature, rng)
    drawn = batch["input_ids"][batch["response_mask"]]
    prompt = torch.tensor([chat.prompt("A cellar.")])
    p = torch.softmax(random_model(prompt).logits[0, -1] / temperature, -1).detach()
    for token in p.topk(5).indices.tolist():
        error = (p[token] * (1 - p[token]) / n) ** 0.5
        assert (drawn == token).float().mean().item() == pytest.approx(p[token].item(), abs=4 * error.item())
    assert p.max() > 0.01  # uniform draws would be seen


def test_evaluation_has_a_temperature_of_its_own_and_an_interval(monkeypatch):
    """Wilson's interval for 50 of 100 is 0.404 to 0.596; an episode with an infrastructure error is not among them."""
    temperatures = []

    def played(model, chat, vec, tasks, args, temperature, generator):
        temperatures.append(temperature)
        episodes = [{"won": i < 50, "rewards": [float(i < 50)] * 2, "infra_error": None} for i in range(100)]
        return {}, [*episodes, {"won": False, "rewards": [0.0], "infra_error": "the worker died"}]

    monkeypatch.setattr(rloo, "rollout", played)
    args = make_args(eval_temperature=0.4, seed=1)
    scores, episodes = rloo.evaluate(SimpleNamespace(device="cpu"), None, None, None, args)
    assert temperatures == [0.4] and len(episodes) == 100
    expected = {"success_rate": 0.5, "low": 0.4038, "high": 0.5962, "episodic_return": 1.0, "episodic_length": 2.0}
    assert scores == pytest.approx(expected, abs=1e-4)


def test_token_logprobs_are_those_of_the_tempered_softmax(random_model, chat, scripted_vec):
    args = make_args(temperature=0.5)
    batch, _ = play(random_model, chat, scripted_vec(TURNS), args)
    ids, mask = batch["input_ids"], batch["response_mask"]
    logprobs, entropy = rloo.token_logprobs(random_model, ids, mask, args)
    expected = torch.log_softmax(random_model(ids).logits / 0.5, -1)  # (B, T, V)
    for i, t in mask.nonzero().tolist():
        assert logprobs[i, t].item() == pytest.approx(expected[i, t - 1, ids[i, t]].item(), abs=1e-4)
        p = expected[i, t - 1].exp()
        assert entropy[i, t].item() == pytest.approx(-(p * p.log()).sum().item(), abs=1e-4)
    assert (logprobs[~mask] == 0).all() and (entropy[~mask] == 0).all()


def gradient(model, batch, args, rows=None):
    rows = torch.arange(len(batch["valid"])) if rows is None else rows
    counts = {"num_episodes": len(rows), "num_tokens": int(batch["response_mask"][rows].sum())}
    model.zero_grad()
    for piece in rloo.microbatches(batch, rows, args):
        piece["new_logprobs"], _ = rloo.token_logprobs(model, piece["input_ids"], piece["response_mask"], args)
        rloo.compute_loss(piece | counts, args)[0].backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def test_gradient_depends_on_neither_microbatches_nor_padding_nor_order(random_model, chat, scripted_vec):
    args = make_args()
    batch, _ = play(random_model, chat, scripted_vec(TURNS), args)
    batch["advantages"] = torch.randn(len(TURNS), 1) * batch["response_mask"]
    whole = gradient(random_model, batch, make_args(tokens_per_microbatch=10**6))
    assert whole.abs().max() > 1e-3
    longest = batch["input_ids"].shape[1]
    for tokens in (1, 2 * longest):  # one row a micro-batch, two rows a micro-batch
        assert torch.allclose(gradient(random_model, batch, make_args(tokens_per_microbatch=tokens)), whole, atol=1e-5)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.allclose(gradient(random_model, batch, args, order), whole, atol=1e-5)
    padded = {
        k: torch.nn.functional.pad(x, (0, 17)) if x.dim() == 2 and k != "rewards" else x for k, x in batch.items()
    }
    padded["input_ids"][~padded["attention_mask"]] = 7  # whatever the padding is
    assert torch.allclose(gradient(random_model, padded, args), whole, atol=1e-5)


def test_loss_ignores_observation_tokens_as_targets(random_model, chat, scripted_vec):
    """An observation token is read by what comes after it, and is no target itself."""
    args = make_args()
    batch, _ = play(random_model, chat, scripted_vec(TURNS), args)
    mask = batch["response_mask"]
    before = rloo.token_logprobs(random_model, batch["input_ids"], mask, args)[0][2]
    t = max(t for t in (~mask[2]).nonzero().flatten().tolist() if mask[2, t:].any())  # the last one that is read
    batch["input_ids"][2, t] = 9
    after = rloo.token_logprobs(random_model, batch["input_ids"], mask, args)[0][2]
    assert after[t] == 0 and torch.allclose(before[:t], after[:t], atol=1e-6)
    assert (before[t + 1 :] - after[t + 1 :]).abs().max() > 1e-3


def test_model_whose_attention_forgets_is_refused(chat, tmp_path):
    """The sampler's cache attends to everything, so a sliding window in the trainer would be off-policy, silently."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": len(chat.tokenizer)}
    for window in (16, None):
        MistralConfig(sliding_window=window, **sizes).save_pretrained(tmp_path / str(window))
        chat.tokenizer.save_pretrained(tmp_path / str(window))
    MistralForCausalLM(MistralConfig(sliding_window=None, **sizes)).save_pretrained(tmp_path / "None")
    with pytest.raises(UserError, match="sliding or linear attention"):  # before the weights are looked for
        launch.load_model(str(tmp_path / "16"))
    launch.load_model(str(tmp_path / "None"))
