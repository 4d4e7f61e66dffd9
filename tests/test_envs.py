"""The environment protocol and the worker pool, on real TextWorld games."""

import os
import signal

import pytest

import envs
from tasks import State, Task

NAME = "w2-o3-q4"


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    old = os.environ.get("MULTITURN_RL_CACHE")
    os.environ["MULTITURN_RL_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    del os.environ["MULTITURN_RL_CACHE"]
    if old is not None:
        os.environ["MULTITURN_RL_CACHE"] = old


@pytest.fixture
def make_vec():
    made = []

    def make(num_workers=2, **settings):
        made.append(envs.VecEnv(num_workers, **{"env": "textworld", "max_turns": 6, "expert": True, **settings}))
        return made[-1]

    yield make
    for vec in made:
        vec.close()


def play(vec, tasks, turns=6, before_turn=lambda turn: None):
    """Every episode follows the expert; a list of all answers by turn."""
    history = [dict(enumerate(vec.reset(tasks)))]
    live = {i: answer[1] for i, answer in history[0].items() if "infra_error" not in answer[1]}
    for turn in range(turns):
        if not live:
            break
        before_turn(turn)
        answers = vec.step({i: info["expert_action"] for i, info in live.items()})
        history.append(answers)
        live = {i: answer[4] for i, answer in answers.items() if not answer[2] and not answer[3]}
    return history


TASKS = [Task("textworld", NAME, seed) for seed in (20001, 20001, 20002, 20003)]
# Four episodes of each adapter, and a game that its engine cannot load.
ADAPTERS = {
    "textworld": (TASKS, Task("textworld", "no-such-game", 1)),
    "alfworld": (
        [Task("alfworld", "pick_and_place_simple", seed=seed) for seed in (1, 1, 2, 3)],
        Task("alfworld", "pick_and_place_simple", path="valid_seen/no/such/game.tw-pddl"),
    ),
}


def test_action_is_the_first_line_after_the_reasoning():
    assert envs.parse_action("<think>\ngo west?\n</think>\n\n  open   box 1 \nthen more") == "open box 1"
    assert envs.parse_action("</think>a</think>take key") == "take key"
    assert envs.parse_action("\n\n") == "" == envs.parse_action("")


def test_only_bounded_printable_text_reaches_an_engine():
    assert envs.parse_action("open\x13 b\\ox\x00\u2028 1\x7f") == "open b ox"
    assert envs.parse_action("caf\u00e9 \U0001f600 door") == "caf door"
    assert len(envs.parse_action("x" * 10_000)) == envs.MAX_ACTION_CHARS


def test_same_task_same_episode_whatever_the_number_of_workers(make_vec):
    one, three = play(make_vec(1), TASKS), play(make_vec(3), TASKS)
    assert one == three
    assert all(answers[0] == answers[1] for answers in one if 0 in answers)  # the first two share a task
    assert any(answer[2] and answer[4]["won"] for answers in one[1:] for answer in answers.values())


def test_prefetched_games_are_the_same_games(make_vec):
    plain, ahead = make_vec(2), make_vec(2)
    play(ahead, TASKS[:2])
    ahead.prefetch(TASKS)
    assert ahead.reset(TASKS) == plain.reset(TASKS)
    ahead.prefetch(TASKS[:2])  # the plan changed: what was prefetched is dropped
    assert ahead.reset(TASKS) == plain.reset(TASKS)


@pytest.mark.parametrize("env", ADAPTERS)
def test_killed_worker_costs_one_episode_and_the_others_go_on_as_if_nothing_was(make_vec, env):
    tasks, _ = ADAPTERS[env]
    undisturbed = play(make_vec(2, env=env), tasks)
    vec = make_vec(2, env=env)

    def kill(turn):
        if turn == 2:
            os.kill(vec.workers[0][0].pid, signal.SIGKILL)
            vec.workers[0][0].wait()

    disturbed = play(vec, tasks, before_turn=kill)
    lost = [i for i, answer in disturbed[3].items() if "infra_error" in answer[4]]
    assert lost == [0] and disturbed[3][0][3] and "died" in disturbed[3][0][4]["infra_error"]
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert {i: a for i, a in before.items() if i != 0} == {i: a for i, a in after.items() if i != 0}


@pytest.mark.parametrize("env", ADAPTERS)
def test_hanging_worker_is_replaced_after_the_time_limit(make_vec, env):
    tasks, _ = ADAPTERS[env]
    vec = make_vec(2, env=env, timeout=10.0)  # long enough for a new worker to bring the other episode back
    vec.reset(tasks)
    hung = vec.workers[1][0].pid
    os.kill(hung, signal.SIGSTOP)
    answers = vec.step(dict.fromkeys(range(4), "look"))
    assert [i for i, answer in answers.items() if "infra_error" in answer[4]] == [2]
    assert "no answer within 10 s" in answers[2][4]["infra_error"]
    assert vec.workers[1][0].pid != hung
    assert set(vec.step({0: "look", 1: "look", 3: "look"})) == {0, 1, 3}


@pytest.mark.parametrize("env", ADAPTERS)
def test_engine_that_raises_costs_its_episode_alone(make_vec, capfd, env):
    (good, *_), bad = ADAPTERS[env]
    vec = make_vec(1, env=env)
    started = vec.reset([good, bad, good])
    assert started[1][1]["infra_error"] and f"infra_error in {bad.task_id}: " in capfd.readouterr().err
    assert started[0] == started[2] and "infra_error" not in started[0][1]
    assert set(vec.step({0: "look", 2: "look"})) == {0, 2}
    with pytest.raises(envs.UserError, match="all episodes of the batch were lost"):
        vec.reset([bad, bad])


def test_episode_that_is_lost_while_it_is_brought_back_ends_once_and_the_others_go_on(make_vec):
    tasks = [Task("alfworld", "pick_and_place_simple", seed=seed) for seed in (1, 2, 3)]
    vec, undisturbed = make_vec(1, env="alfworld"), make_vec(1, env="alfworld")
    for pool in (vec, undisturbed):
        pool.reset(tasks)
        for _ in range(2):
            pool.step(dict.fromkeys(range(3), "look"))
    # Its game is gone by the time that the worker dies: the replayed reset fails, and so does each action behind it.
    vec.played[1][0] = Task("alfworld", "pick_and_place_simple", path="valid_seen/no/such/game.tw-pddl")
    vec.workers[0][0].kill()
    vec.workers[0][0].wait()
    answers, expected = (pool.step(dict.fromkeys(range(3), "inventory")) for pool in (vec, undisturbed))
    assert "died" in answers[0][4]["infra_error"]  # the one that was being played
    assert "valid_seen/no/such/game.tw-pddl" in answers[1][4]["infra_error"] and answers[1][3]
    assert answers[2] == expected[2]
    assert vec.step({2: "look"}) == undisturbed.step({2: "look"})


class CannedEngine:
    """Says a list of states; for what the engines cannot be made to say."""

    def __init__(self, states):
        self.states = iter(states)

    def reset(self, task):
        return next(self.states)

    def step(self, action):
        return next(self.states)


def rewards_of(states, dense_reward, max_turns=9):
    env = envs.TextEnv("textworld", max_turns=max_turns, dense_reward=dense_reward)
    env.engine = CannedEngine(states)
    env.reset(TASKS[0])
    answers = [env.step("x") for _ in states[1:]]
    assert all(0 <= answer[4]["progress"] <= 1 for answer in answers)
    assert all((answer[4]["progress"] == 1) == answer[4]["won"] for answer in answers)
    return [answer[1] for answer in answers], answers[-1]


def test_sparse_reward_is_paid_for_winning_alone():
    won = [State("", 0.0), State("", 0.5), State("", 1.0, won=True, over=True)]
    lost = [State("", 0.0), State("", 0.9), State("", 0.0, over=True)]
    assert rewards_of(won, False)[0] == [0, 1]
    rewards, (_, _, terminated, truncated, info) = rewards_of(lost, False)
    assert rewards == [0, 0] and terminated and not truncated and not info["won"]  # done is not won


def test_dense_rewards_of_an_episode_sum_to_one_exactly_when_it_is_won():
    for start in (0.0, 0.25):  # some games start with a part of the goal fulfilled
        won = [State("", start), State("", 0.5), State("", 0.1), State("", 1.0, won=True, over=True)]
        almost = [State("", start), State("", 0.5), State("", 0.99)]
        lost = [State("", start), State("", 0.5), State("", 0.0, over=True)]
        assert sum(rewards_of(won, True)[0]) == pytest.approx(1, abs=1e-12)
        assert 0.9 < sum(rewards_of(almost, True)[0]) < 1
        assert sum(rewards_of(lost, True)[0]) == pytest.approx(0, abs=1e-12)


def test_an_engine_that_is_done_but_not_won_never_reaches_progress_one():
    rewards, last = rewards_of([State("", 0.0), State("", 1.0, over=True)], True)
    assert last[4]["progress"] < 1 and sum(rewards) < 1


def test_turn_limit_ends_the_episode_as_truncated():
    states = [State("", 0.0)] * 3
    _, (_, reward, terminated, truncated, info) = rewards_of(states, False, max_turns=2)
    assert truncated and not terminated and not info["won"] and reward == 0


def test_messages_are_task_and_state_then_state(make_vec):
    vec = make_vec(1, show_admissible=True)
    (obs, info), *_ = vec.reset(TASKS[:1])
    assert obs.startswith("Your task is: ") and "\nstate: " in obs and obs.endswith("\nyour action:")
    assert info["task_id"] == f"{NAME}/20001" and info["task_type"] == NAME and info["max_score"] >= 1
    commands = obs.split("commands: ")[1].splitlines()[0].split(", ")
    assert info["expert_action"] in commands
    obs = vec.step({0: "look"})[0][0]
    assert obs.startswith("state: ") and "Your task is" not in obs


def test_sampler_takes_every_task_once_before_any_twice():
    tasks = [Task("textworld", NAME, seed) for seed in range(10)]
    first, again, other = (envs.TaskSampler(tasks, seed) for seed in (1, 1, 2))
    taken = first.take(3) + first.take(7)
    assert sorted(task.seed for task in taken) == list(range(10)) and taken == again.take(10)
    assert taken != other.take(10)
    assert len(first.take(25)) == 25
    a, b = other.take(2)
    assert a != b and envs.TaskSampler(tasks, 2).take(12, copies=3)[30:] == [a] * 3 + [b] * 3  # a group has one task


def test_unknown_environment_is_refused():
    with pytest.raises(envs.UserError, match="--env nethack: unknown environment, choose from textworld, alfworld"):
        envs.list_tasks("nethack", "", "train")
