"""ALFWorld: generated games, expert, progress and the faster engine; with $ALFWORLD_DATA also the real games."""

import hashlib
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("alfworld")

ROOT = Path(__file__).resolve().parent.parent
# Importing alfworld sets the variable when it is unset; asked before, it tells whether there are real games.
REAL = (Path(os.environ.get("ALFWORLD_DATA") or Path.home() / ".cache" / "alfworld") / "json_2.1.1").is_dir()
sys.path.insert(0, str(ROOT))

from alfworld.gen.constants import VAL_RECEPTACLE_OBJECTS

from benchmark.alfworld_engine import compare
from tasks import Task, UserError, alfworld_games
from tasks.alfworld import TASK_TYPES, Engine, Goal, describe, list_tasks, progress, read_game
from tasks.alfworld_expert import SearchingExpert

real_games = [
    pytest.mark.alfworld,
    pytest.mark.skipif(not REAL, reason="needs the real games: set ALFWORLD_DATA and run alfworld-download"),
]


def real(test):
    for mark in real_games:
        test = mark(test)
    return test


def generated(name, seed):
    return Task("alfworld", name, seed=seed)


@pytest.fixture(scope="module")
def engine():
    return Engine(admissible=True)


def play_walkthrough(engine, task, num_random=0):
    """Play random commands, then the walkthrough. Returns the states; checks progress against `won` at every one."""
    rng = random.Random(task.task_id)
    states = [engine.reset(task)]
    for command in [*[None] * num_random, *read_game(task)["walkthrough"]]:
        states.append(engine.step(command or rng.choice(states[-1].admissible)))
        assert 0.0 <= states[-1].progress <= 1.0
        assert (states[-1].progress == 1.0) == states[-1].won, (task, command)
        if states[-1].won:
            break
    return states


# ------------------------------------------------------------------------------------------------ generated games


@pytest.mark.parametrize("name", TASK_TYPES)
def test_walkthrough_of_generated_game_wins_with_its_last_command_only(engine, name):
    for seed in [*range(1, 4), 10_001, 30_001, 40_001, 40_002]:
        task = generated(name, seed)
        states = play_walkthrough(engine, task)
        assert [s.won for s in states] == [False] * len(read_game(task)["walkthrough"]) + [True]
        assert states[-1].over and states[0].progress < 1.0


def test_progress_is_one_exactly_when_won_under_random_play(engine):
    wins = 0
    for name in TASK_TYPES:
        rng = random.Random(name)
        state = engine.reset(generated(name, 77))
        seen = {state.progress}
        for _ in range(80):  # half random, half sensible: random play alone gets nowhere
            state = engine.step(rng.choice([rng.choice(state.admissible), engine.expert_action()]))
            assert 0.0 <= state.progress <= 1.0 and (state.progress == 1.0) == state.won, name
            seen.add(state.progress)
            if state.won:
                break
        wins += state.won
        assert len(seen) > 1, name
    assert wins >= 5


def test_progress_counts_the_steps_of_a_clean_task(engine):
    states = play_walkthrough(engine, generated("pick_clean_then_place_in_recep", 1))
    done = dict(zip([c.split()[0] for c in read_game(generated("pick_clean_then_place_in_recep", 1))["walkthrough"]],
                    [s.progress for s in states[1:]], strict=True))  # fmt: skip
    assert (done["open"], done["take"], done["clean"], done["move"]) == (0.0, 1 / 3, 2 / 3, 1.0)


def test_progress_never_says_one_without_the_engine_and_always_with_it(engine):
    engine.reset(generated("pick_and_place_simple", 1))
    for command in read_game(generated("pick_and_place_simple", 1))["walkthrough"]:
        engine.step(command)
    facts = list(engine.env.state["_facts"])  # those of a won game
    assert progress(engine.goal, facts, won=False) == 0.99
    engine.reset(generated("pick_and_place_simple", 1))
    assert progress(engine.goal, engine.env.state["_facts"], won=True) == 1.0


def digest(games):
    return hashlib.sha256(json.dumps(games, sort_keys=True).encode()).hexdigest()


def test_generation_does_not_depend_on_pythonhashseed():
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\n"
        "from tasks.alfworld_games import make_game, TASK_TYPES\n"
        "from tasks.alfworld import list_tasks\n"
        "games = [make_game(name, seed) for name in TASK_TYPES for seed in (1, 2, 10001, 40001)]\n"
        "games.append([task.task_id for task in list_tasks('all', 'train', 'generated')])\n"
        "json.dump(games, sys.stdout)\n"
    )
    digests = set()
    for hash_seed in ("0", "1", "4711"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        out = subprocess.run(
            [sys.executable, "-c", code, ROOT], env=environment, capture_output=True, text=True, check=True
        )
        digests.add(digest(json.loads(out.stdout)))
    here = [alfworld_games.make_game(name, seed) for name in TASK_TYPES for seed in (1, 2, 10001, 40001)]
    here.append([task.task_id for task in list_tasks("all", "train", "generated")])
    assert digests == {digest(here)}


def test_published_game_stays_the_same():
    """Changing the generator changes every published number: do it knowingly, with the new digest here."""
    games = [alfworld_games.make_game(name, 1)["pddl_problem"] for name in TASK_TYPES]
    assert digest(games) == "9b1e885cabfe14077d91194517eeeb17da9a11108bb4a66e767208e19db49fce"


def test_no_name_is_both_an_object_type_and_a_receptacle_type():
    rtypes = {rtype for room in alfworld_games.ROOMS.values() for rtype in room}
    otypes = {otype for room in alfworld_games.ROOM_OBJECTS.values() for otype in room} | set(alfworld_games.LAMPS)
    assert rtypes <= set(VAL_RECEPTACLE_OBJECTS) | {"Toaster"}
    assert not rtypes & otypes


def test_test_scenes_are_layouts_that_training_never_shows():
    for room in alfworld_games.ROOMS:
        layouts = alfworld_games.scenes(room)
        test = [layouts[number] for number in alfworld_games.TEST_SCENES]
        assert len(test) == 10 and len(layouts) == 100
        assert not [layout for number, layout in layouts.items() if number > 10 and layout in test]
    rng = random.Random(0)
    for split, seeds in alfworld_games.SPLIT_SEEDS.items():
        drawn = {alfworld_games.draw_scene(rng, TASK_TYPES[0], seed)[1] for seed in (seeds[0], seeds[-1])}
        assert all((number <= 10) == (split == "valid_unseen") for number in drawn)


def test_splits_share_no_seed_and_hold_the_published_number_of_games():
    seen = set()
    for split, count in {"valid_unseen": 120, "valid_seen": 120, "train": 4998, "demos": 9996}.items():
        tasks = list_tasks("all", split, "generated")
        assert len(tasks) == len(set(tasks)) == count
        assert {t.name for t in tasks[:6]} == set(TASK_TYPES)  # the types take turns
        assert not {t.task_id for t in tasks} & seen
        seen |= {t.task_id for t in tasks}


def test_expert_wins_generated_games_within_thirty_turns(engine):
    for name in TASK_TYPES:
        for seed in range(1, 6):
            state = engine.reset(generated(name, seed))
            for _ in range(30):
                action = engine.expert_action()
                assert action in state.admissible, (name, seed, action)
                state = engine.step(action)
                if state.won:
                    break
            assert state.won, (name, seed)


def test_expert_recovers_from_somebody_elses_moves(engine):
    for name in TASK_TYPES:
        rng = random.Random(name)
        state = engine.reset(generated(name, 5))
        for turn in range(80):
            state = engine.step(rng.choice(state.admissible) if turn < 15 else engine.expert_action())
            if state.won:
                break
        assert state.won, name


def test_expert_uses_only_what_the_observations_say():
    goal = Goal("mug", rtype="shelf", state="ishot")
    expert = SearchingExpert(goal, "You are in the middle of a room. Looking quickly around you, you see a cabinet 1, "
                                   "a countertop 1, a microwave 1, a shelf 1, and a sinkbasin 1.")  # fmt: skip
    turns = [
        ("go to countertop 1", "You arrive at countertop 1. On the countertop 1, you see a apple 1, and a mugger 1."),
        ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see nothing."),
        ("go to sinkbasin 1", "You arrive at sinkbasin 1. On the sinkbasin 1, you see nothing."),
        ("go to cabinet 1", "You arrive at cabinet 1. The cabinet 1 is closed."),
        ("open cabinet 1", "You open the cabinet 1. The cabinet 1 is open. In it, you see a cup 1, and a mug 2."),
        ("take mug 2 from cabinet 1", "You pick up the mug 2 from the cabinet 1."),
        ("go to microwave 1", "You arrive at microwave 1. The microwave 1 is closed."),
        ("heat mug 2 with microwave 1", "You heat the mug 2 using the microwave 1."),
        ("go to shelf 1", "You arrive at shelf 1. On the shelf 1, you see nothing."),
        ("move mug 2 to shelf 1", "You move the mug 2 to the shelf 1."),
    ]
    for action, obs in turns:
        assert expert.act() == action
        expert.observe(action, obs)


# ------------------------------------------------------------------------------------------------------ the engine


def test_fast_engine_says_what_the_stock_engine_says():
    tasks = [generated(name, 100 + i) for i, name in enumerate(TASK_TYPES)]
    for task, (stock, fast) in zip(tasks, compare(tasks, warm_up=False), strict=True):
        assert stock["hash"] == fast["hash"], task
        assert stock["steps"] == fast["steps"] > 5


def test_observation_is_without_banner_and_task_line(engine):
    state = engine.reset(generated("pick_two_obj_and_place", 1))
    assert state.goal == "put two winebottle in fridge."
    assert state.obs.startswith("You are in the middle of a room. Looking quickly around you, you see a cabinet ")
    assert state.obs.endswith(".") and "\n" not in state.obs
    assert (state.won, state.over, state.progress, state.max_score) == (False, False, 0.0, 1.0)
    state = engine.step("go to fridge 1")
    assert state.obs == "You arrive at fridge 1. The fridge 1 is closed." and state.goal == ""
    assert "open fridge 1" in state.admissible


@pytest.mark.parametrize("action", ["", "Go To fridge 1", "look at me", "go to", "take", "x" * 500, "{eval}", "a | b"])
def test_invalid_or_miscased_action_does_nothing(engine, action):
    engine.reset(generated("pick_two_obj_and_place", 1))
    before = engine.step("go to fridge 1")
    after = engine.step(action)
    assert after.obs == "Nothing happens."
    assert (after.won, after.progress, after.admissible) == (False, before.progress, before.admissible)


def test_admissible_commands_are_there_only_if_asked_for():
    assert Engine().reset(generated("pick_and_place_simple", 1)).admissible == []


def test_state_does_not_leak_between_games_of_a_reused_engine(engine):
    tasks = [generated(name, seed) for name in TASK_TYPES[:3] for seed in (3, 4)]
    for task in reversed(tasks):  # another order, other games in between, one abandoned in the middle
        play_walkthrough(engine, task)
        engine.reset(generated("pick_heat_then_place_in_recep", task.seed))
        engine.step(engine.expert_action())
    for task in tasks:
        assert play_walkthrough(engine, task, 5) == play_walkthrough(Engine(admissible=True), task, 5)


def test_engines_of_one_process_do_not_disturb_each_other(engine):
    """A worker plays several episodes at once, some of them on the same game."""
    tasks = [generated("pick_heat_then_place_in_recep", 3), generated("pick_heat_then_place_in_recep", 3),
             generated("pick_two_obj_and_place", 3), generated("look_at_obj_in_light", 3)]  # fmt: skip
    alone = [play_walkthrough(engine, task) for task in tasks]
    engines = [Engine(admissible=True) for _ in tasks]
    together = [[engine.reset(task)] for engine, task in zip(engines, tasks, strict=True)]
    for turn in range(max(len(states) for states in alone) - 1):
        for engine, task, states in zip(engines, tasks, together, strict=True):
            commands = read_game(task)["walkthrough"]
            if turn < len(commands):
                states.append(engine.step(commands[turn]))
    assert together == alone


def test_engine_leaves_argv_and_stdout_alone(engine):
    argv, stdout = list(sys.argv), sys.stdout
    engine.reset(generated("pick_and_place_simple", 4242))
    assert sys.argv == argv and sys.stdout is stdout


def write_game(folder, **changes):
    game = {**alfworld_games.make_game("pick_and_place_simple", 1), **changes}
    file = folder / "json_2.1.1" / "valid_seen" / "pick_and_place_simple-X-None-Y-1" / "trial_1" / "game.tw-pddl"
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(game))
    return file


def test_game_file_below_alfworld_data_is_listed_and_played(engine, tmp_path, monkeypatch):
    write_game(tmp_path)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    (task,) = list_tasks("all", "valid_seen")
    assert task.path == "valid_seen/pick_and_place_simple-X-None-Y-1/trial_1/game.tw-pddl"
    assert play_walkthrough(engine, task)[-1].won
    assert "1 real games (pick_and_place_simple 1)" in describe([task], "valid_seen")


def test_game_marked_unsolvable_is_not_listed(tmp_path, monkeypatch):
    write_game(tmp_path, solvable=False)
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(UserError, match="no games"):
        list_tasks("all", "valid_seen")


@pytest.mark.parametrize("damage", ["missing", "cut", "not json", "no problem", "bad pddl"])
def test_damaged_game_file_is_named_in_one_line(engine, tmp_path, monkeypatch, damage):
    file = write_game(tmp_path, **({"pddl_problem": "(define (problem"} if damage == "bad pddl" else {}))
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    task = Task("alfworld", "pick_and_place_simple", path=file.relative_to(tmp_path / "json_2.1.1").as_posix())
    if damage == "missing":
        task = replace(task, path=task.path.replace("trial_1", "trial_2"))
    elif damage == "no problem":
        file.write_text("{}")
    elif damage != "bad pddl":
        file.write_text("not json" if damage == "not json" else file.read_text()[:3000])
    with pytest.raises(UserError) as error:
        engine.reset(task)
    assert task.path in str(error.value) and "\n" not in str(error.value)
    assert play_walkthrough(engine, generated("pick_and_place_simple", 2))[-1].won  # and the engine still plays


@pytest.mark.parametrize("data", ["auto", "real"])
def test_alfworld_data_without_the_games_is_refused(tmp_path, monkeypatch, data):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    with pytest.raises(UserError, match=r"ALFWORLD_DATA is .* no json_2\.1\.1: run alfworld-download"):
        list_tasks("all", "train", data)
    assert len(list_tasks("all", "valid_seen", "generated")) == 120


def test_without_alfworld_data_the_generated_games_are_played_and_said_so(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    tasks = list_tasks("pick_and_place_simple, look_at_obj_in_light", "valid_unseen")
    assert len(tasks) == 120 and not any(task.path for task in tasks)
    line = describe(tasks, "valid_unseen")
    assert "120 generated games (pick_and_place_simple 60, look_at_obj_in_light 60)" in line
    assert "alfworld-download" in line and "\n" not in line
    with pytest.raises(UserError, match="no real ALFWorld games here.*alfworld-download"):
        list_tasks("all", "train", "real")


def test_task_type_named_twice_is_refused():
    with pytest.raises(UserError, match="named twice"):
        list_tasks("pick_two_obj_and_place,pick_two_obj_and_place", "train")


@pytest.mark.parametrize(
    ("names", "split", "data", "value"),
    [("pick", "train", "auto", "pick"), ("", "train", "auto", ""), ("all", "test", "auto", "test"),
     ("all", "train", "fake", "fake")],
)  # fmt: skip
def test_unknown_type_split_or_data_is_named_with_the_valid_ones(names, split, data, value):
    with pytest.raises(UserError, match=f"unknown ALFWorld .*{value!r}; valid: ") as error:
        list_tasks(names, split, data)
    assert "\n" not in str(error.value)


# -------------------------------------------------------------------------------------------------- the real games


@real
def test_all_real_games_are_listed_once():
    for split, count in {"valid_seen": 140, "valid_unseen": 134, "train": 3553, "demos": 3553}.items():
        tasks = list_tasks("all", split, "real")
        assert len(tasks) == len(set(tasks)) == count
        assert [t.name for t in tasks[:12]] == list(TASK_TYPES) * 2


@real
@pytest.mark.parametrize("split", ["valid_seen", "valid_unseen"])
def test_every_real_walkthrough_wins_and_progress_agrees_at_every_step(engine, split):
    for task in list_tasks("all", split, "real"):
        assert play_walkthrough(engine, task)[-1].won, task


@real
def test_progress_agrees_with_the_engine_under_random_play_of_real_games(engine):
    for task in list_tasks("all", "valid_seen", "real")[::4]:
        state = engine.reset(task)
        rng = random.Random(task.task_id)
        for _ in range(40):
            state = engine.step(rng.choice(state.admissible))
            assert (state.progress == 1.0) == state.won, task
            if state.won:
                break


@real
def test_expert_wins_nearly_all_real_games_within_fifty_turns(engine):
    tasks = list_tasks("all", "valid_unseen", "real")[::2]
    won = 0
    for task in tasks:
        state = engine.reset(task)
        for _ in range(50):
            state = engine.step(engine.expert_action())
            if state.won:
                break
        won += state.won
    assert won >= 0.97 * len(tasks)


@real
def test_fast_engine_says_what_the_stock_engine_says_in_real_games():
    tasks = list_tasks("all", "valid_unseen", "real")[:6]  # one of each type
    for task, (stock, fast) in zip(tasks, compare(tasks, warm_up=False), strict=True):
        assert stock["hash"] == fast["hash"], task
