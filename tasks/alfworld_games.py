"""Procedurally generated ALFWorld games, for machines without the real data set.

A generated game runs on ALFWorld's own domain (`alfred.pddl`), grammar (`alfred.twl2`) and goal library; only the
problem, a room with things in it, is made here. The pieces:

    scene     a room layout: which receptacles, how many; 100 scenes for each of 4 rooms, drawn from the scene's number
    game      a scene, a goal that can be reached in it, and objects in plausible places: drawn from (task type, seed)
    split     a range of seeds; `valid_unseen` alone plays the scenes 1-10, every other split the scenes 11-100

The same (task type, seed) gives the same game on every machine and under every PYTHONHASHSEED: everything is drawn
from lists in a fixed order by `random.Random(str)`, whose seeding from a string does not use Python's `hash`.
"""

import random
from functools import cache

from alfworld.gen.constants import OPENABLE_CLASS_SET, VAL_ACTION_OBJECTS, VAL_RECEPTACLE_OBJECTS
from alfworld.gen.goal_library import gdict
from alfworld.info import ALFRED_PDDL_PATH, ALFRED_TWL2_PATH

from tasks import UserError

TASK_TYPES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)

# The seeds of a split (1-100 are the published test seeds), and how many games `list_tasks` lists: the first seeds of
# the range, the same number for each chosen task type. For all six types, train has 4,998 and demos 9,996.
SPLIT_SEEDS = {
    "valid_unseen": range(1, 10_000),
    "valid_seen": range(10_001, 20_000),
    "train": range(30_001, 35_001),
    "demos": range(40_001, 50_001),
}
SPLIT_GAMES = {
    "valid_unseen": 120,
    "valid_seen": 120,
    "train": 5_000,
    "demos": 10_000,
}  # over all chosen types

TEST_SCENES = range(1, 11)
TRAIN_SCENES = range(11, 101)

# Receptacle type: (fewest, most) in a room. Smaller than the real rooms (a real kitchen has 33 receptacles on
# average), so that a small model with a short context can play; the proportions follow the real ones.
ROOMS = {
    "kitchen": {
        "Cabinet": (2, 6),
        "CoffeeMachine": (1, 1),
        "CounterTop": (1, 3),
        "DiningTable": (0, 1),
        "Drawer": (1, 4),
        "Fridge": (1, 1),
        "GarbageCan": (1, 1),
        "Microwave": (1, 1),
        "Shelf": (0, 2),
        "SinkBasin": (1, 1),
        "StoveBurner": (2, 4),
        "Toaster": (1, 1),
    },
    "livingroom": {
        "ArmChair": (1, 2),
        "CoffeeTable": (0, 1),
        "DiningTable": (0, 1),
        "Drawer": (1, 4),
        "Dresser": (0, 1),
        "GarbageCan": (1, 1),
        "Ottoman": (0, 1),
        "Safe": (0, 1),
        "Shelf": (0, 4),
        "SideTable": (1, 2),
        "Sofa": (1, 1),
    },
    "bedroom": {
        "ArmChair": (0, 1),
        "Bed": (1, 1),
        "Cabinet": (0, 2),
        "Desk": (1, 2),
        "Drawer": (2, 5),
        "Dresser": (0, 1),
        "GarbageCan": (1, 1),
        "LaundryHamper": (0, 1),
        "Safe": (0, 1),
        "Shelf": (0, 4),
        "SideTable": (1, 2),
    },
    "bathroom": {
        "BathtubBasin": (0, 1),
        "Cabinet": (2, 4),
        "Cart": (0, 1),
        "CounterTop": (1, 2),
        "Drawer": (0, 3),
        "GarbageCan": (1, 1),
        "HandTowelHolder": (1, 2),
        "Shelf": (0, 2),
        "SinkBasin": (1, 2),
        "Toilet": (1, 1),
        "ToiletPaperHanger": (1, 1),
        "TowelHolder": (1, 2),
    },
}

# What lies around in each room. No name here is also a receptacle type in ROOMS.
ROOM_OBJECTS = {
    "kitchen": (
        "Apple Book Bowl Bread ButterKnife Cup DishSponge Egg Fork Glassbottle Kettle Knife Ladle Lettuce Mug Pan "
        "PepperShaker Plate Pot Potato SaltShaker SoapBottle Spatula Spoon Tomato Vase WineBottle"
    ).split(),
    "livingroom": (
        "Book Bowl Box Candle CellPhone CreditCard KeyChain Laptop Newspaper Pen Pencil Pillow Plate RemoteControl "
        "Statue TissueBox Vase Watch WateringCan"
    ).split(),
    "bedroom": (
        "AlarmClock BaseballBat BasketBall Book Bowl Box CD CellPhone Cloth CreditCard KeyChain Laptop Mug Pen Pencil "
        "Pillow RemoteControl Statue TennisRacket TissueBox Vase Watch"
    ).split(),
    "bathroom": (
        "Candle Cloth DishSponge HandTowel Plunger SoapBar SoapBottle SprayBottle TissueBox ToiletPaper Towel"
    ).split(),
}

LAMPS = ("DeskLamp", "FloorLamp")
LAMP_PLACES = ("CoffeeTable", "Desk", "DiningTable", "Dresser", "Shelf", "SideTable")
NUM_DISTRACTORS = (8, 16)  # objects besides those of the goal

# What a goal needs besides moving a thing: (property of the object, receptacle type that does it, verb)
TREATMENTS = {
    "pick_clean_then_place_in_recep": ("Cleanable", "SinkBasin", "clean"),
    "pick_heat_then_place_in_recep": ("Heatable", "Microwave", "heat"),
    "pick_cool_then_place_in_recep": ("Coolable", "Fridge", "cool"),
}
GOAL_ROOMS = {
    "pick_and_place_simple": ("kitchen", "livingroom", "bedroom", "bathroom"),
    "look_at_obj_in_light": ("livingroom", "bedroom"),
    "pick_clean_then_place_in_recep": ("kitchen", "bathroom"),
    "pick_heat_then_place_in_recep": ("kitchen",),
    "pick_cool_then_place_in_recep": ("kitchen",),
    "pick_two_obj_and_place": ("kitchen", "livingroom", "bedroom", "bathroom"),
}

# The domain names these types in its actions, so every problem declares them.
DOMAIN_OTYPES = ("ButterKnife", "Knife")
DOMAIN_RTYPES = ("Fridge", "Microwave", "SinkBasin")


@cache  # four rooms
def scenes(room):
    """The room's 100 layouts, {scene number: {receptacle type: count}}; no two are equal, so that a test scene is
    new as a layout and not only as a number."""
    rng = random.Random(f"alfworld scenes {room}")
    layouts = []
    while len(layouts) < TRAIN_SCENES[-1]:
        layout = {rtype: rng.randint(*bounds) for rtype, bounds in ROOMS[room].items()}
        if layout not in layouts:
            layouts.append(layout)
    return dict(enumerate(layouts, start=1))


@cache  # two files
def _text(path):
    with open(path, encoding="utf-8") as f:
        return f.read()


def seeds(split, num_types):
    """The seeds that `split` plays for one task type, where `num_types` types share the split's games."""
    return SPLIT_SEEDS[split][: SPLIT_GAMES[split] // num_types]


def draw_scene(rng, task_type, seed):
    """The room and the scene number of a game: a test scene exactly for the seeds of `valid_unseen`."""
    room = rng.choice(GOAL_ROOMS[task_type])
    return room, rng.choice(TEST_SCENES if seed in SPLIT_SEEDS["valid_unseen"] else TRAIN_SCENES)


def _holds(rtype, otype):
    """Whether a receptacle of this type is a plausible place for such an object."""
    if otype in LAMPS:
        return rtype in LAMP_PLACES
    return otype in VAL_RECEPTACLE_OBJECTS.get(rtype, ())


def _draw_goal(rng, task_type, room, layout):
    """A reachable goal: (object type, destination type, lamp type); the last two are "" where the goal has none."""
    here = [rtype for rtype, count in layout.items() if count]
    if task_type == "look_at_obj_in_light":
        return rng.choice(ROOM_OBJECTS[room]), "", rng.choice(LAMPS)
    needed, device, _ = TREATMENTS.get(task_type, ("", "", ""))
    pairs = {}
    for otype in ROOM_OBJECTS[room]:
        if needed and otype not in VAL_ACTION_OBJECTS[needed]:
            continue
        homes = [rtype for rtype in here if _holds(rtype, otype)]
        # Another place must be left to start from, and "heat it and leave it in the microwave" is no goal.
        destinations = [rtype for rtype in homes if len(homes) > 1 and rtype != device]
        if destinations:
            pairs[otype] = destinations
    otype = rng.choice(list(pairs))  # the object first: otherwise those with many homes would be most of the games
    return otype, rng.choice(pairs[otype]), ""


def make_game(task_type, seed):
    """Make one game, as the mapping that the engine loads.

    Args:
        task_type: one of TASK_TYPES.
        seed: the game's seed, which also decides between test and training scenes (see SPLIT_SEEDS).

    Returns:
        `pddl_domain`, `grammar`, `pddl_problem` (texts), `solvable` (True) and `walkthrough` (commands that win).

    Raises:
        UserError: for an unknown task type.
    """
    if task_type not in TASK_TYPES:
        raise UserError(f"unknown ALFWorld task type {task_type!r}; valid: {', '.join(TASK_TYPES)}")
    rng = random.Random(f"alfworld game {task_type} {seed}")
    room, scene = draw_scene(rng, task_type, seed)
    layout = scenes(room)[scene]
    otype, destination, lamp = _draw_goal(rng, task_type, room, layout)

    receptacles = [(rtype, number) for rtype, count in layout.items() for number in range(1, count + 1)]
    placed = []  # (object type, receptacle)

    def place(thing, exclude=""):
        homes = [r for r in receptacles if _holds(r[0], thing) and r[0] != exclude]
        placed.append((thing, rng.choice(homes)))

    for _ in range(2 if task_type == "pick_two_obj_and_place" else 1):
        place(otype, exclude=destination)
    if lamp:
        place(lamp)
    homed = [o for o in ROOM_OBJECTS[room] if o != otype and any(_holds(r[0], o) for r in receptacles)]
    for _ in range(rng.randint(*NUM_DISTRACTORS)):
        place(rng.choice(homed))
    counts = {}
    objects = []  # (object type, number, receptacle)
    for thing, receptacle in placed:
        counts[thing] = counts.get(thing, 0) + 1
        objects.append((thing, counts[thing], receptacle))

    names = {"obj": otype, "recep": destination, "toggle": lamp}
    sentence = rng.choice(gdict[task_type]["templates"]).format(**{k: v.lower() for k, v in names.items()})
    goal = gdict[task_type]["pddl"].format(**names).replace("#", "-")  # "#" stands for "-" in the goal library
    return {
        "pddl_domain": _text(ALFRED_PDDL_PATH),
        "grammar": _text(ALFRED_TWL2_PATH).replace("UNKNOWN GOAL", sentence),
        "pddl_problem": _problem(f"{task_type}_{seed}", receptacles, objects, counts, layout, goal),
        "solvable": True,
        "walkthrough": _walkthrough(task_type, otype, destination, lamp, receptacles, objects),
    }


def _problem(name, receptacles, objects, counts, layout, goal):
    """The PDDL problem. The engine names the things of a type from the last id to the first ("mug 2" is the first
    of two ids in alphabetical order), so ids count down while names count up."""

    def rid(receptacle):
        rtype, number = receptacle
        last = layout[rtype] + 1 - number
        # The engine calls a thing "sinkbasin" when its id starts with "sink" and ends in "basin", as the real ids do.
        stem = {"SinkBasin": "Sink", "BathtubBasin": "Bathtub"}.get(rtype)
        return f"{stem}_bar_{last:02d}_bar_{rtype}" if stem else f"{rtype}_bar_{last:02d}"

    def oid(thing, number):
        return f"{thing}_bar_{counts[thing] + 1 - number:02d}"

    place = {receptacle: f"loc_bar_{i}" for i, receptacle in enumerate(receptacles, start=1)}
    ids = [(oid(thing, number), thing, receptacle) for thing, number, receptacle in objects]
    otypes = sorted({*counts, *DOMAIN_OTYPES})
    rtypes = sorted({*(rtype for rtype, _ in receptacles), *DOMAIN_RTYPES})
    lines = [f"(define (problem plan_{name})", "(:domain alfred)", "(:objects", "agent1 - agent"]
    lines += [f"{i} - object" for i, _, _ in ids]
    lines += [f"{t}Type - otype" for t in otypes] + [f"{t}Type - rtype" for t in rtypes]
    lines += [f"{rid(r)} - receptacle" for r in receptacles]
    lines += [f"{location} - location" for location in place.values()] + ["loc_bar_0 - location", ")"]
    lines += ["(:init", "(atLocation agent1 loc_bar_0)"]
    for receptacle in receptacles:
        lines.append(f"(receptacleType {rid(receptacle)} {receptacle[0]}Type)")
        lines.append(f"(receptacleAtLocation {rid(receptacle)} {place[receptacle]})")
        if receptacle[0] in OPENABLE_CLASS_SET:
            lines.append(f"(openable {rid(receptacle)})")
    lines += [f"(canContain {r}Type {o}Type)" for r in rtypes for o in otypes if layout.get(r) and _holds(r, o)]
    for i, thing, receptacle in ids:
        lines.append(f"(objectType {i} {thing}Type)")
        lines.append(f"(inReceptacle {i} {rid(receptacle)})")
        lines.append(f"(objectAtLocation {i} {place[receptacle]})")
        if thing not in LAMPS:
            lines.append(f"(pickupable {i})")
        for predicate in ("Cleanable", "Heatable", "Coolable", "Toggleable", "Sliceable"):
            if thing in VAL_ACTION_OBJECTS[predicate]:
                lines.append(f"({predicate.lower()} {i})")
    return "\n".join([*lines, ")", goal])


def _walkthrough(task_type, otype, destination, lamp, receptacles, objects):
    """Commands that win the game, for somebody who knows where everything is."""
    commands, opened, here = [], set(), None

    def go(receptacle):
        nonlocal here
        name = f"{receptacle[0].lower()} {receptacle[1]}"
        if receptacle != here:  # the engine answers "Nothing happens." where one already is
            commands.append(f"go to {name}")
            here = receptacle
        if receptacle[0] in OPENABLE_CLASS_SET and receptacle not in opened:
            commands.append(f"open {name}")
            opened.add(receptacle)
        return name

    target = next((r for r in receptacles if r[0] == destination), None)
    for thing, number, receptacle in objects:
        if thing != otype:
            continue
        name = f"{thing.lower()} {number}"
        commands.append(f"take {name} from {go(receptacle)}")
        if lamp:
            lit = next(o for o in objects if o[0] == lamp)
            go(lit[2])
            commands.append(f"use {lamp.lower()} {lit[1]}")
        if task_type in TREATMENTS:
            _, device, verb = TREATMENTS[task_type]
            commands.append(f"{verb} {name} with {go((device, 1))}")
        if target:
            commands.append(f"move {name} to {go(target)}")
    return commands
