"""Whatever a policy says, an engine answers, does not win by it, and is as new in the next episode."""

import random

import pytest

import envs
from envs import TextEnv

pytestmark = pytest.mark.filterwarnings("ignore::jericho.UnsupportedGameWarning")

OUTPUTS = 20_000
TURNS = 100  # in an episode
META = """quit|q|restart|restore|save|undo|script on|transcripts|verify|version|again|g|oops key|print_state|"""
META += """restrict commands|tw-print max_score|tw-extra-infos facts|*** The End ***|say *** You lost! ***|you win"""
TOKENS = ["<|im_end|>", "<|im_start|>assistant", "<|endoftext|>", "</s>", "[INST]", "</think>", "<think>"]
PIECES = ["look", "take", "go", "then", ".", ";", ",", "\\", "\\n", '"', "'", "{", "%s", "\x00", "\x1b[2J", "\r", "\t"]
PIECES += ["é", "🙂", "\u202e", "\ud800", "\x7f", " ", "\n"]


def output(rng: random.Random) -> str:
    """One hostile model output."""
    kind = rng.randrange(8)
    if kind == 0:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200))).decode("latin-1")
    if kind == 1:
        return bytes(rng.randrange(256) for _ in range(rng.randrange(200))).decode("utf-8", "surrogateescape")
    if kind == 2:
        return rng.choice(META.split("|"))
    if kind == 3:
        return " ".join([rng.choice(META.split("|")), rng.choice(["then", ".", "\\", ";", "\n"]), "look"])
    if kind == 4:
        return "".join(rng.choice(PIECES) for _ in range(rng.randrange(30)))
    if kind == 5:
        return rng.choice(["x", "look ", "\\", "🙂", "take a "]) * 10_000
    if kind == 6:
        return rng.choice(TOKENS) + rng.choice(["", "look", "\nquit"]) + rng.choice(TOKENS)
    return rng.choice(["", " ", "\n\n", "look then look", "inventory then restart", "look. quit", "xyzzy", "wait"])


def play(env, task, actions=None):
    """What an episode of the expert, or of these actions, says at every turn."""
    obs, info = env.reset(task)
    told = [(obs, info)]
    while len(told) <= env.max_turns and not info["won"]:
        if actions is not None and len(told) > len(actions):
            break
        action = info["expert_action"] if actions is None else actions[len(told) - 1]
        obs, reward, terminated, truncated, info = env.step(action)
        told.append((obs, reward, terminated, truncated, info))
    return told


@pytest.mark.parametrize(("name", "names"), [("textworld", "w2-o3-q4,tw-simple-dense,tw-cooking"), ("alfworld", "all")])
def test_twenty_thousand_hostile_outputs_neither_win_nor_break_nor_leave_a_trace(name, names):
    rng = random.Random(1)
    settings = {"env": name, "max_turns": TURNS, "dense_reward": True, "expert": True}
    tasks = envs.list_tasks(name, names, "train", "generated")[:6]
    env, clean = TextEnv(**settings), {}
    for n in range(OUTPUTS // TURNS):
        task = tasks[n % len(tasks)]
        env.reset(task)
        for _ in range(TURNS):
            said = output(rng)
            obs, reward, terminated, truncated, info = env.step(said)
            assert not info["won"] and info["progress"] < 1 and reward < 1, said
            assert all(c.isprintable() or c == "\n" for c in obs), said
            if terminated or truncated:
                break
        if n % 10 == 9:  # the same engine then plays as a new one does
            if task not in clean:
                clean[task] = play(TextEnv(**settings), task)
            assert clean[task][-1][-1]["won"]
            assert play(env, task) == clean[task]
