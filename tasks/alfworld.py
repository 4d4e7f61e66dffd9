"""ALFWorld: its own TextWorld engine, a dense measure of progress, and the lists of games.

    Goal, progress   how far the goal has come, in [0, 1], from the engine's own PDDL facts
    Engine           plays one game after another: reset(task), step(action), expert_action()
    list_tasks       which games a split holds, real (`$ALFWORLD_DATA/json_2.1.1`) or generated

The real games are read from `game.tw-pddl` directly; nothing here needs `traj_data.json` or a simulator.
"""

import json
import os
import random
import re
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import mementos.core
from textworld import EnvInfos
from textworld.envs import PddlEnv

# alfworld's import creates the folder that the variable names, right or wrong (by default one in the home folder, which
# may be read-only); so it sees one that exists, and `data_root` says what is wrong with the user's.
ALFWORLD_DATA = os.environ.get("ALFWORLD_DATA", "")
os.environ["ALFWORLD_DATA"] = tempfile.gettempdir()
from alfworld.agents.utils.misc import Demangler

os.environ["ALFWORLD_DATA"] = ALFWORLD_DATA

from tasks import State, Task, UserError
from tasks.alfworld_expert import SearchingExpert
from tasks.alfworld_fast import install_fast_engine
from tasks.alfworld_games import SPLIT_SEEDS, TASK_TYPES, make_game, seeds

SPLITS = tuple(SPLIT_SEEDS)
DATA_FOLDER = "json_2.1.1"
DOWNLOAD = "export ALFWORLD_DATA=$HOME/alfworld_data && alfworld-download"
BANNER = "-= Welcome to TextWorld, ALFRED! =-"
TASK_LINE = re.compile(r"Your task is to: (.*)")


# ------------------------------------------------------------------------------------------------------- progress


@dataclass(frozen=True)
class Goal:
    """What a game asks for, in the engine's lower-case type names; a field is "" where the goal has none of it."""

    obj: str  # "mug"
    rtype: str = ""  # where it must lie: "shelf"
    state: str = ""  # what it must be: "isclean", "ishot" or "iscool"
    lamp: str = ""  # under what it must be looked at: "desklamp"
    count: int = 1  # how many of it must lie in one receptacle

    @property
    def verb(self):
        """The command that brings `state` about, or ""."""
        return {"isclean": "clean", "ishot": "heat", "iscool": "cool"}.get(self.state, "")

    @classmethod
    def parse(cls, pddl_problem):
        """Read the goal of a PDDL problem of one of the six task types.

        Raises:
            ValueError: if it names no object type.
        """
        text = pddl_problem[pddl_problem.rfind("(:goal") :].lower()
        otypes = dict(re.findall(r"\(objecttype \?(\w+) (\w+)type\)", text))
        rtype = re.search(r"\(receptacletype \?r (\w+)type\)", text)
        lamp = otypes.pop("ot", "") if "(istoggled " in text else ""
        if not otypes:
            raise ValueError("the goal names no object")
        state = next((s for s in ("isclean", "ishot", "iscool") if f"({s} " in text), "")
        return cls(next(iter(otypes.values())), rtype[1] if rtype else "", state, lamp, 2 if "?o2" in text else 1)


def progress(goal, facts, won):
    """The potential of a state: how much of the goal is done, in [0, 1], and 1 exactly when `won`.

    With o an object of the goal's type, r a receptacle of its type, [x] = 1 if x holds, else 0:

        look_at_obj_in_light      ([some o is held] + [a lit lamp of the goal's type is where the agent is]) / 2
        pick_and_place_simple     max over o, r of  place(o, r) = 1 if o is in r, 1/2 if o is held, else 0
        pick_{clean,heat,cool}    max over o, r of  1 if o is in r and has the state (clean, hot, cool),
                                  else ([o is held or has the state] + [o has the state]) / 3
        pick_two_obj_and_place    max over r of the mean of the two largest place(o, r)

    The formula alone was never seen to disagree with the engine's `won`. Should it ever, `won` has the last word,
    and a state that is not won gives at most 0.99.

    Args:
        goal: a `Goal`.
        facts: the engine's propositions.
        won: the engine's own flag.
    """
    if won:
        return 1.0
    true = {}
    for fact in facts:
        true.setdefault(fact.name, set()).add(tuple(argument.name for argument in fact.arguments))
    objects = [o for o, otype in true["objecttype"] if otype == f"{goal.obj}type"]
    held = {o for _, o in true.get("holds", ())}
    inside = true.get("inreceptacle", set())
    if goal.lamp:
        here = {location for _, location in true["atlocation"]}
        near = {r for r, location in true["receptacleatlocation"] if location in here}
        lamps = {o for o, otype in true["objecttype"] if otype == f"{goal.lamp}type"}
        lit = lamps & {o for (o,) in true.get("istoggled", ())}
        potential = (bool(held & set(objects)) + any(o in lit and r in near for o, r in inside)) / 2
        return min(potential, 0.99)
    treated = {o for (o,) in true.get(goal.state, ())}

    def part(o, r):
        if not goal.state:
            return 1.0 if (o, r) in inside else 0.5 if o in held else 0.0
        if (o, r) in inside and o in treated:
            return 1.0
        return ((o in held or o in treated) + (o in treated)) / 3

    potential = 0.0
    for r, rtype in true["receptacletype"]:
        if rtype == f"{goal.rtype}type":
            best = sorted((part(o, r) for o in objects), reverse=True)[: goal.count]
            potential = max(potential, sum(best) / goal.count)
    return min(potential, 0.99)


# --------------------------------------------------------------------------------------------------------- engine


class Engine:
    """Plays ALFWorld games, one after another; several engines of a process do not disturb each other.

    Every engine loads a planner library of its own and never gives its 6 MB back: keep engines and `reset` them.
    """

    def __init__(self, *, admissible: bool = False):
        """Args: admissible, whether states list the commands that the game would accept."""
        install_fast_engine()
        self.admissible = admissible
        self.env = PddlEnv(EnvInfos(won=True, admissible_commands=admissible))
        self.goal = None
        self.expert = None

    def reset(self, task: Task) -> State:
        """Load the task's game and start it.

        Raises:
            UserError: if the game's file is missing or damaged, naming the file.
        """
        if len(mementos.core._memento_cache) > 30_000:
            # TextWorld remembers every proposition that it ever made. They are compared by value: forgetting is safe.
            mementos.core._memento_cache.clear()
        try:
            game = read_game(task)
            self.goal = Goal.parse(game["pddl_problem"])
            self.env.load(game)
            names = Demangler(game_infos=self.env._entity_infos)
            for info in self.env._entity_infos.values():
                info.name = names.demangle_alfred_name(info.id)
            state = self.env.reset()
        except (Exception, SystemExit) as error:  # the translator leaves with `SystemExit` on bad PDDL
            what = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"cannot play the ALFWorld game {task.path or task.task_id}: {what}") from error
        text = state.feedback.replace(BANNER, "").strip()
        sentence = TASK_LINE.search(text)
        obs = TASK_LINE.sub("", text).strip()
        self.expert = SearchingExpert(self.goal, obs)
        return self._state(state, obs, sentence[1].strip() if sentence else "")

    def step(self, action: str) -> State:
        """Play one turn. What the game does not understand, it answers with "Nothing happens."."""
        state, _, _ = self.env.step(action)
        self.expert.observe(action.strip(), state.feedback)
        return self._state(state, state.feedback.strip())

    def expert_action(self) -> str:
        """What the searching expert would do now, from what the episode's observations have shown."""
        return self.expert.act()

    def _state(self, state, obs, goal=""):
        won = bool(state["won"])
        return State(
            obs=obs,
            progress=progress(self.goal, state["_facts"], won),
            won=won,
            over=won,  # an ALFWorld game cannot be lost
            goal=goal,
            admissible=list(state["admissible_commands"]) if self.admissible else [],
        )


def read_game(task: Task) -> dict:
    """The mapping that the engine loads: made from (name, seed), or read from the task's file."""
    if not task.path:
        return make_game(task.name, task.seed)
    root = data_root()
    path = Path(task.path) if root is None else root / task.path
    return json.loads(path.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------------------------------------------- games


def data_root():
    """The folder of the real games, or None if there are none and nobody said that there are.

    Raises:
        UserError: if $ALFWORLD_DATA is set to a folder that lacks them.
    """
    folder = os.environ.get("ALFWORLD_DATA", "")
    root = Path(folder or "~/.cache/alfworld").expanduser() / DATA_FOLDER
    if root.is_dir():
        return root
    if folder:
        raise UserError(
            f"ALFWORLD_DATA is {folder}, which has no {DATA_FOLDER}: run alfworld-download, "
            "point the variable to the folder that has it, or unset it to play generated games"
        )
    return None


def list_tasks(names: str, split: str, data: str = "auto") -> list[Task]:
    """The games of a split, the same list on every machine.

    The types take turns, each with its games in a seeded order, so the beginning of the list is an equal mixture.
    When the shortest type has run out, the others go on in turn: every game of the split is there once.

    Args:
        names: task types joined by commas, or "all".
        split: train, demos, valid_seen or valid_unseen; with real data, demos is the train split.
        data: "real", "generated" or "auto" (real where the data set is).

    Raises:
        UserError: for an unknown or repeated type, an unknown split or data, for real data that are not there, and for
            a wrong $ALFWORLD_DATA.
    """
    chosen = list(TASK_TYPES) if names.strip() == "all" else [name.strip() for name in names.split(",")]
    for name in chosen:
        if name == "all":
            raise UserError(f"--task {names}: all stands alone, it is every ALFWorld task type")
        if name not in TASK_TYPES:
            raise UserError(f"unknown ALFWorld task type {name!r}; valid: all, {', '.join(TASK_TYPES)}")
    if len(set(chosen)) < len(chosen):
        raise UserError(f"an ALFWorld task type is named twice in {names!r}")
    if split not in SPLITS:
        raise UserError(f"unknown ALFWorld split {split!r}; valid: {', '.join(SPLITS)}")
    if data not in ("auto", "real", "generated"):
        raise UserError(f"unknown ALFWorld data {data!r}; valid: auto, real, generated")
    root = None if data == "generated" else data_root()
    if root is None and data == "real":
        raise UserError(f"no real ALFWorld games here; to download them: {DOWNLOAD}")
    by_type = {name: [] for name in chosen}
    if root is None:
        for name in chosen:
            by_type[name] = [Task("alfworld", name, seed=seed) for seed in seeds(split, len(chosen))]
    else:
        folder = "train" if split == "demos" else split
        for file in sorted(root.glob(f"{folder}/*/*/game.tw-pddl")):
            path = file.relative_to(root).as_posix()
            name = path.split("/")[1].split("-")[0]
            # The package leaves out sliced and movable-receptacle goals in the same way.
            if name in by_type and "Sliced" not in path and "movable" not in path and _solvable(file):
                by_type[name].append(Task("alfworld", name, path=path))
        if not any(by_type.values()):
            raise UserError(f"no games of {names} in {root / folder}: run alfworld-download")
    for name, tasks in by_type.items():
        random.Random(f"alfworld list {split} {name}").shuffle(tasks)
    turns = range(max(len(tasks) for tasks in by_type.values()))
    return [tasks[turn] for turn in turns for tasks in by_type.values() if turn < len(tasks)]


def _solvable(file):
    """Whether the game's file says that it can be won. The flag stands near the end, so the end is read first."""
    try:
        with open(file, "rb") as f:
            f.seek(max(0, f.seek(0, os.SEEK_END) - 2048))
            tail = re.search(rb'"solvable":\s*(true|false)', f.read())
        return tail[1] == b"true" if tail else bool(json.loads(file.read_bytes()).get("solvable"))
    except (ValueError, AttributeError, OSError) as error:  # AttributeError: JSON, but no object
        raise UserError(f"damaged ALFWorld game file {file}: {error}") from error


def describe(tasks: list[Task], split: str) -> str:
    """One line for the start of a run: real or generated games, how many of each type, how to get the real ones."""
    counts = Counter(task.name for task in tasks)
    types = ", ".join(f"{name} {counts[name]}" for name in TASK_TYPES if counts[name])
    if any(task.path for task in tasks):
        return f"ALFWorld {split}: {len(tasks)} real games ({types})"
    return f"ALFWorld {split}: {len(tasks)} generated games ({types}); for the real data set: {DOWNLOAD}"
