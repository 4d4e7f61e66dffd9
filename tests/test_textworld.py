"""TextWorld games are the same everywhere, are won only by winning, and cannot be broken by what a policy says."""

import os
import random
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks import Task, UserError
from tasks import textworld as tw

pytestmark = pytest.mark.filterwarnings("ignore::jericho.UnsupportedGameWarning")

ROOT = Path(__file__).resolve().parent.parent
NAMES = [
    "w2-o3-q4",
    "tw-simple-sparse",
    "tw-simple-balanced",
    "tw-simple-dense",
    "tw-cooking",
    "coin-collector",
    "treasure-hunter",
]
KINDS = [name for name in NAMES if name not in ("tw-simple-sparse", "tw-simple-balanced")]


def run_python(code: str, cache: Path, hash_seed: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "PYTHONHASHSEED": hash_seed, "MULTITURN_RL_CACHE": str(cache), "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=env, cwd=cwd, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


MAKE_ALL = """
from tasks import textworld as tw
for name in {names}:
    for task in tw.list_tasks(name, "train")[:{n}]:
        print(task.task_id, *tw.checksums(tw.make(task).parent).split())
"""


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache with five games of each name; made in one process with fixed hashing, which spares a process a game."""
    folder = tmp_path_factory.mktemp("cache")
    run_python(MAKE_ALL.format(names=NAMES, n=5), folder, "0")
    old = os.environ.get("MULTITURN_RL_CACHE")
    os.environ["MULTITURN_RL_CACHE"] = str(folder)
    yield folder
    os.environ.pop("MULTITURN_RL_CACHE")
    if old is not None:
        os.environ["MULTITURN_RL_CACHE"] = old


@pytest.fixture(scope="module")
def engine(cache):
    return tw.Engine(admissible=True)


def first(name: str) -> Task:
    return tw.list_tasks(name, "train")[0]


def play(engine, task, act, turns=40):
    """The states of an episode; `act(engine, state)` gives the actions."""
    states = [engine.reset(task)]
    while not states[-1].over and len(states) <= turns:
        states.append(engine.step(act(engine, states[-1])))
    return states


def expert(engine, state):
    return engine.expert_action()


def test_same_seed_makes_the_same_game_whatever_the_hash_seed_and_the_folder(cache, tmp_path):
    # The working directory holds a folder that TextWorld would read in place of its own rules.
    (tmp_path / "textworld_data" / "logic").mkdir(parents=True)
    there = run_python(MAKE_ALL.format(names=KINDS, n=1), tmp_path / "cache", "5", cwd=tmp_path)
    here = run_python(MAKE_ALL.format(names=KINDS, n=1), cache, "0")
    assert len(here.splitlines()) == len(KINDS)
    assert there == here


def test_game_files_name_neither_the_machine_nor_the_day(cache):
    path = tw.make(first("tw-cooking"))
    assert path.read_bytes()[18:24] == b"000000"
    assert "site-packages" not in path.with_suffix(".json").read_text()


def test_seeds_of_splits_are_as_published_and_disjoint():
    seeds = {split: {task.seed for task in tw.list_tasks("w2-o3-q4", split)} for split in tw.SPLITS}
    assert seeds["train"] == set(range(30001, 35001))
    assert seeds["test"] == set(range(1, 101))
    assert seeds["demos"] >= set(range(40001, 40102))
    assert seeds["valid"] == set(range(20001, 20101))
    assert sum(map(len, seeds.values())) == len(set.union(*seeds.values()))


def test_mixture_is_equal_in_every_prefix():
    tasks = tw.list_tasks("w2-o3-q4, tw-cooking", "test")
    assert [(task.name, task.seed) for task in tasks[:4]] == [
        ("w2-o3-q4", 1),
        ("tw-cooking", 1),
        ("w2-o3-q4", 2),
        ("tw-cooking", 2),
    ]
    assert len(tasks) == 200
    assert "200 games of w2-o3-q4, tw-cooking" in tw.describe(tasks, "test")


@pytest.mark.parametrize(
    "name", ["", "w2-o3", "w0-o3-q4", "w2-o3-q4x", "W2-O3-Q4", "tw-simple", "zork", "w2-o3-q4,,tw-cooking", "w21-o1-q1"]
)
def test_unknown_name_is_refused_in_one_line_that_lists_the_known_ones(name):
    with pytest.raises(UserError, match=r"unknown TextWorld task .*known are .*treasure-hunter") as error:
        tw.list_tasks(name, "train")
    assert "\n" not in str(error.value)


def test_unknown_split_and_repeated_name_are_refused():
    with pytest.raises(UserError, match="split 'validation'; known are train, demos, test, valid"):
        tw.list_tasks("w2-o3-q4", "validation")
    with pytest.raises(UserError, match="twice"):
        tw.list_tasks("w2-o3-q4,w2-o3-q4", "train")


@pytest.mark.parametrize("name", NAMES)
def test_expert_wins_and_progress_is_one_exactly_when_won(engine, name):
    for task in tw.list_tasks(name, "train")[:5]:
        states = play(engine, task, expert, turns=25)
        assert states[-1].won and states[-1].over, task
        assert [state.progress == 1 for state in states] == [state.won for state in states]
        assert states[0].progress == 0
        gains = [after.progress - before.progress for before, after in zip(states, states[1:], strict=False)]
        assert sum(gains) == pytest.approx(1)
        # Some signal before the end, even where the game itself scores only there.
        assert any(0 < state.progress < 1 for state in states)


@pytest.mark.parametrize("name", NAMES)
def test_random_play_has_progress_one_exactly_when_won(engine, name):
    rng = random.Random(0)
    for task in tw.list_tasks(name, "train")[:3]:
        for state in play(engine, task, lambda engine, state: rng.choice(state.admissible), turns=25):
            assert 0 <= state.progress <= 1
            assert (state.progress == 1) == state.won
            assert state.over or not state.won


def test_expert_recovers_from_random_moves(engine):
    rng = random.Random(1)
    for name in ("w2-o3-q4", "coin-collector", "tw-simple-dense"):
        state = engine.reset(first(name))
        for _ in range(3):
            state = engine.step(rng.choice([c for c in state.admissible if not c.startswith("eat")]))
        for _ in range(25):
            if not state.over:
                state = engine.step(engine.expert_action())
        assert state.won, name


def test_losing_is_not_winning_and_has_no_progress(engine):
    """Eating the food that should be cooked loses the game after two of its three points."""
    states = [engine.reset(first("tw-simple-balanced"))]
    while not (action := engine.expert_action()).startswith("put "):
        states.append(engine.step(action))
    assert states[-1].progress == pytest.approx(2 / 3)
    food = action.removeprefix("put ").removesuffix(" on stove")
    state = engine.step(f"eat {food}")
    assert "You lost!" in state.obs
    assert (state.over, state.won, state.progress) == (True, False, 0)
    with pytest.raises(RuntimeError, match="reset"):
        engine.step("look")


def test_game_without_a_winning_plan_has_no_progress(engine):
    engine.reset(first("w2-o3-q4"))
    engine.step(engine.expert_action())
    assert engine._progress(won=False, lost=False) > 0
    engine.game["policy_commands"] = []  # what the engine says once the game cannot be won any more
    assert engine._progress(won=False, lost=False) == 0


def test_text_before_a_score_line_is_kept(engine):
    engine.reset(first("tw-simple-dense"))
    obs = engine.step(engine.expert_action()).obs
    opened, scored, carried = obs.splitlines()
    assert opened.startswith("You open the ") and "revealing" in opened
    assert scored == "Your score has just gone up by one point."
    assert carried == "You are carrying nothing."


@pytest.mark.parametrize("name", NAMES)
def test_banner_prompt_and_status_line_are_gone(engine, name):
    states = play(engine, first(name), expert)
    for state in states:
        assert not any(noise in state.obs for noise in ("$$", "\\", "  ", "\n\n", "RESTART", "[", "<")), state.obs
        assert all(line.strip(" >") for line in state.obs.splitlines()), state.obs
        assert state.obs.count("-= ") <= 1
        assert "You are carrying" in state.obs.splitlines()[-1]
    assert states[0].obs.startswith("-= ")
    assert states[0].goal and "\n" not in states[0].goal
    assert states[0].goal not in states[0].obs
    assert "*** The End ***" in states[-1].obs


def test_the_whole_cookbook_is_read(engine):
    states = play(engine, first("tw-cooking"), expert)
    recipe = next(state.obs for state in states if "Recipe" in state.obs)
    assert [word in recipe for word in ("Ingredients:", "Directions:", "prepare meal")] == [True] * 3


META = """quit|q|restart|RESTART|restore|save|undo|script|script on|transcript|transcripts|verify|version|superbrief
superbriefly|short|verbose|brief|nouns|pronouns|notify off|again|g|oops key|restrict commands|print_state
enable print state option|tw-print max_score|tw-trace-actions|tw-extra-infos description|look. look|look, look
look then look|look; look|go east. go west|then|\\|*** The End ***|say *** You lost! ***|...|say "a\\b" """


def test_commands_to_the_interpreter_change_nothing_but_are_answered(engine, cache, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = first("w2-o3-q4")
    actions = META.replace("\n", "|").split("|")
    before = engine.reset(task)
    for action in actions:
        state = engine.step(action)
        assert not state.over and state.progress == before.progress, action
        assert state.admissible == before.admissible, action
        assert len(state.obs.splitlines()) == 2, (action, state.obs)
    # From here on everything reads as in an engine that never heard them: the room, the score line, the turn count.
    told = [engine.step("look")] + [engine.step(engine.expert_action()) for _ in range(3)]
    fresh = tw.Engine(admissible=True)
    fresh.reset(task)
    untold = [fresh.step("look")] + [fresh.step(fresh.expert_action()) for _ in range(3)]
    assert told == untold
    assert not list(tmp_path.iterdir())  # no transcript, no saved game


def test_full_stop_at_the_end_is_no_second_command(engine):
    engine.reset(first("w2-o3-q4"))
    action = engine.expert_action()
    assert engine.step(f"  {action}. ").progress > 0


@pytest.mark.parametrize("name", ["w2-o3-q4", "tw-cooking"])
def test_state_does_not_leak_between_games_of_a_reused_engine(engine, name):
    task, other = first(name), first("tw-simple-dense")
    fresh = play(tw.Engine(admissible=True), task, expert)
    play(engine, other, expert, turns=4)
    assert play(engine, task, expert) == fresh
    play(engine, task, lambda engine, state: state.admissible[0], turns=3)
    assert play(engine, task, expert) == fresh


def test_reused_engine_keeps_neither_files_nor_memory(engine):
    def usage():
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    tasks = tw.list_tasks("w2-o3-q4", "train")[:5]
    for task in tasks * 4:
        engine.reset(task)
    files, megabytes = usage()
    for task in tasks * 8:
        engine.reset(task)
    assert usage()[0] <= files
    assert usage()[1] < megabytes + 8  # 0.5 MB a game, hence 20, when games are not shut down


@pytest.mark.parametrize("name, damage", [("game.z8", "empty"), ("game.json", "cut"), ("sha256", "gone")])
def test_broken_cached_file_is_made_anew(cache, tmp_path, monkeypatch, name, damage):
    task = first("w2-o3-q4")
    good = tw.make(task).parent
    monkeypatch.setenv("MULTITURN_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(tw, "make_in_child", tw.make_files)  # quicker, and this game does not depend on hashing
    folder = tw.cache_folder() / good.relative_to(Path(cache) / "textworld")
    shutil.copytree(good, folder)
    wanted = tw.checksums(folder)
    data = (folder / name).read_bytes()
    if damage == "gone":
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(data[: len(data) // 2] if damage == "cut" else b"")
    assert tw.make(task) == folder / "game.z8"
    assert tw.checksums(folder) == wanted
    assert tw.is_whole(folder)
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]  # nothing left aside


def test_runs_that_share_a_cache_do_not_harm_each_other(cache, tmp_path):
    """Four processes want the same games of an empty cache at once, one of which lies there damaged."""
    code = MAKE_ALL.format(names=["w2-o3-q4"], n=2)
    alone = run_python(code, cache, "0")
    task = first("w2-o3-q4")
    broken = tmp_path / "textworld" / tw.make(task).parent.relative_to(Path(cache) / "textworld")
    broken.mkdir(parents=True)
    (broken / "game.z8").write_bytes(b"half a g")
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda _: run_python(code, tmp_path, "0"), range(4)))
    assert runs == [alone] * 4
    assert len(list(broken.parent.iterdir())) == 2  # the games, and nothing left aside


def test_numbers_that_textworld_cannot_make_are_refused(monkeypatch, tmp_path):
    def no_quest(name, seed):
        raise tw.QuestGenerationError

    monkeypatch.setattr(tw, "generate", no_quest)
    with pytest.raises(UserError, match="no quest for 'w1-o1-q9'"):
        tw.make_files(Task("textworld", "w1-o1-q9", 1), tmp_path / "game")
