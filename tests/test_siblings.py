"""The three algorithm files differ inside their ESTIMATOR regions and nowhere else."""

import difflib
import inspect
import re
from pathlib import Path

import pytest

import grpo_multiturn
import ppo_multiturn
import rloo_multiturn

ROOT = Path(__file__).resolve().parents[1]
OPEN, CLOSE = re.compile(r"^\s*# >>> ESTIMATOR: (\w+)$"), re.compile(r"^\s*# <<< ESTIMATOR$")
SIBLINGS = {"grpo_multiturn.py": grpo_multiturn, "ppo_multiturn.py": ppo_multiturn}
ORDER = ["args", "checks", "critic", "advantage", "loss", "critic", "values", "critic", "metrics"]
REGION_LINES = {"rloo_multiturn.py": 60, "grpo_multiturn.py": 80, "ppo_multiturn.py": 180}


def split(path):
    """The lines outside the regions, with the module docstring dropped and each region as `<name>`; the names; and
    the number of lines inside."""
    lines, shared, names, inside, count = path.read_text().splitlines(), [], [], False, 0
    end = next(i for i, line in enumerate(lines) if line.endswith('"""'))
    for n, line in enumerate(lines[end + 1 :], end + 2):
        if match := OPEN.match(line):
            assert not inside, f"{path.name}:{n}: nested region"
            inside = True
            names.append(match[1])
            shared.append(f"<{match[1]}>")
        elif CLOSE.match(line):
            assert inside, f"{path.name}:{n}: close without open"
            inside = False
        elif inside:
            count += 1
        else:
            shared.append(line)
    assert not inside, f"{path.name}: region {names[-1]} never closed"
    return shared, names, count


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_siblings_differ_only_in_estimator_regions(sibling):
    ours, theirs = split(ROOT / "rloo_multiturn.py")[0], split(ROOT / sibling)[0]
    diff = "\n".join(difflib.unified_diff(ours, theirs, "rloo_multiturn.py", sibling, lineterm="", n=1))
    assert not diff, "code outside ESTIMATOR regions drifted:\n" + diff


@pytest.mark.parametrize("name", REGION_LINES)
def test_regions_come_in_order_and_do_not_swallow_the_file(name):
    _, names, count = split(ROOT / name)
    assert names == ORDER
    assert count <= REGION_LINES[name]


def test_guard_sees_a_single_stray_space(tmp_path):
    text = (ROOT / "rloo_multiturn.py").read_text()
    (tmp_path / "stray.py").write_text(text.replace("    model, chat = launch.", "    model,  chat = launch."))
    assert split(tmp_path / "stray.py")[0] != split(ROOT / "rloo_multiturn.py")[0]


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_committed_diff_is_the_diff(sibling):
    """docs/ shows the lesson itself, readable on the web: `diff -u` of the two files.

    To renew it: python -m tests.test_siblings
    """
    assert (ROOT / "docs" / diff_name(sibling)).read_text() == unified(sibling)


def diff_name(sibling):
    return f"rloo_vs_{sibling.split('_')[0]}.diff"


def unified(sibling):
    ours, theirs = ((ROOT / name).read_text().splitlines(keepends=True) for name in ("rloo_multiturn.py", sibling))
    return "".join(difflib.unified_diff(ours, theirs, "rloo_multiturn.py", sibling))


@pytest.mark.parametrize("sibling", SIBLINGS)
def test_shared_functions_are_the_same_text(sibling):
    for name in ("token_logprobs", "microbatches", "KVCache", "rollout", "evaluate"):
        ours, theirs = (inspect.getsource(getattr(module, name)) for module in (rloo_multiturn, SIBLINGS[sibling]))
        assert ours == theirs


LINK = re.compile(r'\((\w+_multiturn\.py)#L\d+-L\d+ "(\w+)"\)')  # the link's title names the region
LINKING = [ROOT / "README.md"]


def with_line_links(text):
    """The text with its links to regions pointing at the lines where those regions stand now."""

    def renewed(match):
        lines = (ROOT / match[1]).read_text().splitlines()
        first = next(i for i, line in enumerate(lines) if (m := OPEN.match(line)) and m[1] == match[2])
        last = next(i for i in range(first, len(lines)) if CLOSE.match(lines[i]))
        return f'({match[1]}#L{first + 1}-L{last + 1} "{match[2]}")'

    return LINK.sub(renewed, text)


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.name)
def test_links_lead_to_the_lines_of_their_regions(path):
    """To renew them: python -m tests.test_siblings"""
    text = path.read_text()
    linked = {match[:2] for match in LINK.findall(text)}
    assert linked >= {(name, region) for name in REGION_LINES for region in ("advantage", "loss")}
    assert text == with_line_links(text)


if __name__ == "__main__":
    for sibling in SIBLINGS:
        (ROOT / "docs" / diff_name(sibling)).write_text(unified(sibling))
    for path in LINKING:
        path.write_text(with_line_links(path.read_text()))
