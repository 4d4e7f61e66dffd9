"""TextWorld games: made here from a name and a seed, kept in a cache on disk, and played in the real engine.

Names:
    w{W}-o{O}-q{Q}                         what `tw-make custom --world-size W --nb-objects O --quest-length Q` makes
    tw-simple-{sparse,balanced,dense}      TextWorld's own challenges, with the settings in `CHALLENGES`
    tw-cooking, coin-collector, treasure-hunter
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import textworld
import textworld.challenges
from textworld.generator import QuestGenerationError
from textworld.generator.data import KnowledgeBase

from tasks import State, Task, UserError

# Seeds of each split, last one included. Published: train, demos (whose first 101 are the published ones) and test.
SPLITS = {"train": (30001, 35000), "demos": (40001, 50000), "test": (1, 100), "valid": (20001, 20100)}

SIMPLE = {"goal": "detailed", "test": False}
COOKING = {"recipe": 1, "take": 1, "open": True, "cook": True, "cut": True, "drop": False, "go": 1}
CHALLENGES = {  # name -> (TextWorld's challenge, its settings)
    "tw-simple-sparse": ("tw-simple", {"rewards": "sparse", **SIMPLE}),
    "tw-simple-balanced": ("tw-simple", {"rewards": "balanced", **SIMPLE}),
    "tw-simple-dense": ("tw-simple", {"rewards": "dense", **SIMPLE}),
    # One ingredient to find in the kitchen, to cook and to cut as the cookbook says: about 10 turns, 5 points.
    "tw-cooking": ("tw-cooking", {**COOKING, "recipe_seed": 0, "split": None}),
    # 10 rooms: a chain of 5 and a dead end beside each.
    "coin-collector": ("tw-coin_collector", {"level": 105}),
    # 5 rooms without doors, two objects; taking the wrong one loses. 5 turns.
    "treasure-hunter": ("tw-treasure_hunter", {"level": 10}),
}
# Names whose games pay points on the way. The others pay at the end: progress there is how much of the winning plan,
# as long as it was at the start, is done.
SCORED = ("tw-simple-balanced", "tw-simple-dense", "tw-cooking")
CUSTOM = re.compile(r"w([1-9]\d*)-o([1-9]\d*)-q([1-9]\d*)")
CUSTOM_LIMITS = (20, 100, 30)  # rooms, objects, quest length; larger games take minutes to make

# Some seeds give a map on which no quest of the wanted length exists; the game then comes from seed + this, and so on.
SEED_STRIDE = 1_000_003
SEED_TRIES = 20


def list_tasks(names: str, split: str) -> list[Task]:
    """Tasks of a split, by seed; `names` separated by commas take turns, so that any prefix is an equal mixture.

    Raises: UserError for an unknown or repeated name, an unknown split, and a folder that cannot be written.
    """
    known = [name.strip() for name in names.split(",")]
    for name in known:
        custom = CUSTOM.fullmatch(name)
        in_limits = custom and all(int(n) <= limit for n, limit in zip(custom.groups(), CUSTOM_LIMITS, strict=True))
        if name not in CHALLENGES and not in_limits:
            rooms, objects, length = CUSTOM_LIMITS
            numbers = f"W from 1 to {rooms}, O from 1 to {objects}, Q from 1 to {length}"
            valid = ", ".join([f"w{{W}}-o{{O}}-q{{Q}} ({numbers})", *CHALLENGES])
            raise UserError(f"unknown TextWorld task {name!r}; known are {valid}")
    if len(set(known)) < len(known):
        raise UserError(f"a TextWorld task is named twice in {names!r}; a mixture has each name once")
    if split not in SPLITS:
        raise UserError(f"unknown TextWorld split {split!r}; known are {', '.join(SPLITS)}")
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot keep games in {cache_folder()} ($MULTITURN_RL_CACHE): {error.strerror}") from error
    first, last = SPLITS[split]
    return [Task("textworld", name, seed) for seed in range(first, last + 1) for name in known]


def describe(tasks: list[Task], split: str) -> str:
    """One line for the user: which games these are."""
    names = ", ".join(dict.fromkeys(task.name for task in tasks))
    seeds = [task.seed for task in tasks]
    return f"TextWorld {split}: {len(tasks)} games of {names}, seeds {min(seeds)}-{max(seeds)}"


# Making games -------------------------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where games are kept: `$MULTITURN_RL_CACHE/textworld`, by default `~/.cache/multiturn_rl/textworld`."""
    root = os.environ.get("MULTITURN_RL_CACHE") or Path.home() / ".cache" / "multiturn_rl"
    return Path(root).absolute() / "textworld"


def make(task: Task) -> Path:
    """Path of the task's `game.z8` (its `game.json` lies beside it), made now (about 1 s) unless the cache holds it.

    Raises: UserError if TextWorld finds no quest for the task's numbers.
    """
    folder = cache_folder() / textworld.__version__ / task.name / str(task.seed)
    if is_whole(folder):
        return folder / "game.z8"
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made aside, in the same file system, and renamed: nobody ever sees half a game.
    aside = Path(tempfile.mkdtemp(prefix=f".{task.seed}-", dir=folder.parent))
    try:
        # Cooking games depend on the order of sets, and TextWorld takes its rules from the working directory if it can.
        if sys.flags.hash_randomization or Path("textworld_data").exists():
            make_in_child(task, aside / "new")
        else:
            make_files(task, aside / "new")
        for attempt in range(10):
            try:
                os.rename(aside / "new", folder)
                break
            except OSError:  # it exists: another process was faster, or what lies there is damaged
                if is_whole(folder):
                    break
                if attempt == 9:
                    raise
                try:
                    os.rename(folder, aside / f"damaged-{attempt}")
                except FileNotFoundError:
                    pass  # another process has just moved it away
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return folder / "game.z8"


def is_whole(folder: Path) -> bool:
    """Whether the folder holds a game whose files are as they were when they were made."""
    try:
        return (folder / "sha256").read_text() == checksums(folder)
    except (OSError, UnicodeDecodeError):
        return False


def checksums(folder: Path) -> str:
    """One line per game file: its SHA-256 and its name."""
    files = ("game.json", "game.z8")
    return "".join(f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n" for name in files)


def make_in_child(task: Task, folder: Path) -> None:
    """`make_files` in a process of its own (3 s more), with fixed hashing and an empty working directory."""
    root = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    code = (
        "import sys; from pathlib import Path; from tasks import Task; from tasks.textworld import make_files; "
        "make_files(Task('textworld', sys.argv[1], int(sys.argv[2])), Path(sys.argv[3]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, task.name, str(task.seed), str(folder)],
        env={**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": path},
        cwd=folder.parent,
        capture_output=True,
        text=True,
    )
    if result.returncode:
        lines = result.stderr.strip().splitlines() or [f"exit status {result.returncode}"]
        raise UserError(f"cannot make {task.task_id}: {lines[-1]}")


def make_files(task: Task, folder: Path) -> None:
    """Writes `game.z8`, `game.json` and their checksums to a new folder; the same task gives the same game anywhere.

    Raises: UserError if TextWorld finds no quest for the task's numbers.
    """
    for attempt in range(SEED_TRIES):
        try:
            # GameMaker draws from this global generator; whatever was made before must not matter.
            textworld.g_rng.set_seed(task.seed)
            game, options = generate(task.name, task.seed + attempt * SEED_STRIDE)
            break
        except QuestGenerationError:
            continue
    else:
        raise UserError(f"TextWorld finds no quest for {task.name!r} (seed {task.seed}); try other numbers")
    folder.mkdir()
    options.path = str(folder / "game.z8")
    textworld.generator.compile_game(game, options)
    (folder / "game.ni").unlink()  # the Inform 7 source, not needed to play
    # What depends on the machine and the day, and not on the game: a path that only game making reads, and the serial
    # number in the Z-machine's header (bytes 18 to 23, outside its checksum), which is the date.
    data = json.loads((folder / "game.json").read_text())
    data["KB"]["text_grammars_path"] = ""
    (folder / "game.json").write_text(json.dumps(data))
    with open(folder / "game.z8", "r+b") as file:
        file.seek(18)
        file.write(b"000000")
    (folder / "sha256").write_text(checksums(folder))


def generate(name: str, seed: int) -> tuple[textworld.Game, textworld.GameOptions]:
    """The game of a name and a seed, not compiled yet, and the options it was made with."""
    options = textworld.GameOptions()
    options.seeds = seed
    if name in CHALLENGES:
        challenge, settings = CHALLENGES[name]
        _, make_game, _ = textworld.challenges.CHALLENGES[challenge]
        return make_game(dict(settings), options), options
    # As `tw-make custom` sets them. Breadth is up to 5 there, so that some quests have two parts and two points.
    options.nb_rooms, options.nb_objects, options.quest_length = map(int, CUSTOM.fullmatch(name).groups())
    options.chaining.min_depth, options.chaining.min_breadth, options.chaining.max_breadth = 1, 1, 5
    options.grammar.theme = "house"
    options.kb = KnowledgeBase.default()  # what is taken anyway, but not read anew (0.3 s)
    return textworld.generator.make_game(options), options


# Playing ------------------------------------------------------------------------------------------------------------

# Commands to the interpreter, not to the game: they trap it in a yes/no question (quit, restart), write files (save,
# script), turn off the room descriptions (superbrief), repeat what the wrapper sent last (again), or print what the
# engine knows (tw-print). By their first 8 letters: the interpreter reads 9, so that "transcripts" is "transcript".
META = frozenset(
    """quit q restart restore save undo script transcri noscript unscript verify version superbri short verbose long
    brief normal nouns pronouns notify again g oops o restrict enable disable print_st tw-trace tw-extra
    tw-print""".split()
)
NOT_A_COMMAND = "That's not a command of this game."
ONE_AT_A_TIME = "One command at a time, please."

STATUS_LINE = re.compile(r">?[ ]{20,}-= [^\n]*$")  # the prompt, then room and score right-aligned; always the last line
END_QUESTION = re.compile(r"Would you like to RESTART, RESTORE a saved game, QUIT or UNDO the last command\?\s*$")


def refusal(action: str) -> str:
    """What to answer instead of passing the action to the interpreter; empty for an action that may pass."""
    words = action.lower().split()
    if not words:
        return ""
    # "X. Y" and "X, Y" are several actions in one turn, "X then Y" crashes TextWorld's parser (TextWorld#366).
    if re.search(r"[.,;]", action) or "then" in words:
        return ONE_AT_A_TIME
    # A backslash starts an escape of the interpreter; "***" is how the end of a game is recognised.
    if words[0][:8] in META or re.search(r"[\\*]", action):
        return NOT_A_COMMAND
    return ""


def compact(text: str) -> str:
    """The text without blank lines and runs of spaces."""
    return "\n".join(" ".join(line.split()) for line in text.splitlines() if line.strip())


def clean(feedback: str) -> str:
    """What the game said: the whole feedback without banner, prompt and status line."""
    text = STATUS_LINE.sub("", feedback.rstrip())
    text = END_QUESTION.sub("", text).rstrip().removesuffix("\n>")
    lines = text.splitlines()
    banner = [i for i, line in enumerate(lines) if "$$" in line]
    return compact("\n".join(lines[banner[-1] + 1 :] if banner else lines))


class Engine:
    """Plays one TextWorld game after another; see `tasks` for the contract."""

    def __init__(self, admissible: bool = False):
        """`admissible`: whether `State.admissible` is filled (costs time each turn)."""
        self.infos = textworld.EnvInfos(
            feedback=True,
            inventory=True,
            won=True,
            lost=True,
            score=True,
            max_score=True,
            objective=True,
            policy_commands=True,
            admissible_commands=admissible,
        )
        self.env = None

    def reset(self, task: Task) -> State:
        """Makes the game if need be, starts it, and returns the first look around; `goal` holds the objective."""
        path = str(make(task))
        if self.env is None:
            self.env = textworld.start(path, self.infos)
        else:
            # The interpreter keeps every game file it ever read, and the memory of a game that is not shut down.
            interpreter = self.env.unwrapped._jericho
            interpreter._cache.clear()
            interpreter.close()
            self.env.load(path)
        self.env.seed(1)  # the interpreter's own generator starts from the clock otherwise (0 means that, too)
        self.task = task
        self.game = self.env.reset()
        self.walkthrough = list(self.game.game.metadata.get("walkthrough") or [])
        self.plan_length = len(self.game.policy_commands)
        self.state = None
        goal = " ".join(self.game.objective.split())
        # The objective stands between the banner and the first room; it goes into `goal`.
        text = clean(self.game.feedback)
        return self._state(text[max(text.find("-= "), 0) :], goal)

    def step(self, action: str) -> State:
        """One turn. An action that is no command of the game changes nothing but is answered, hence costs a turn.

        Raises: RuntimeError before `reset` and after the end of the game.
        """
        if self.env is None or self.state is None or self.state.over:
            raise RuntimeError("no game is running: call reset(task) first")
        action = action.strip().rstrip(".!").rstrip()
        if text := refusal(action):
            return self._state(text)
        if self.walkthrough and self.walkthrough[0] == action:
            self.walkthrough.pop(0)
        else:
            self.walkthrough = []
        self.game, _, _ = self.env.step(action)
        return self._state(clean(self.game.feedback))

    def expert_action(self) -> str:
        """The next command of the engine's winning plan; "look" where it has none, as in a game that is lost.

        In cooking games it is the walkthrough while that was followed: the engine's plan never reads the cookbook.
        """
        if self.walkthrough and self.task.name == "tw-cooking":
            return self.walkthrough[0]
        plan = self.game.policy_commands or self.walkthrough
        return plan[0] if plan else "look"

    def _state(self, text: str, goal: str = "") -> State:
        inventory = compact(self.game.inventory or "")
        won, lost = bool(self.game.won), bool(self.game.lost)
        self.state = State(
            obs=text if inventory in text else f"{text}\n{inventory}".strip(),
            progress=self._progress(won, lost),
            won=won,
            over=won or lost,
            goal=goal,
            max_score=float(self.game.max_score),
            admissible=list(self.game.admissible_commands or []),
        )
        return self.state

    def _progress(self, won: bool, lost: bool) -> float:
        if won or lost:
            return float(won)
        if self.task.name in SCORED:
            return min(self.game.score / self.game.max_score, 1 - 1e-6)
        # No plan although the game goes on: it cannot be won any more.
        left = len(self.game.policy_commands)
        return max(0.0, 1 - left / self.plan_length) if left and self.plan_length else 0.0
