"""A long run on a bad day: the main job, whose workers die or hang every few minutes, and which is killed and resumed.

    python benchmark/long_run.py                          # about 90 minutes on two cores
    python benchmark/long_run.py --num-iterations 8 --fault-every 30 --kill-at 2 5     # a few minutes

Every `--fault-every` seconds a worker gets SIGKILL or SIGSTOP, by turns; at two iterations the script itself gets
SIGKILL, and goes on by `--resume`. Every few seconds this process notes the resident memory of script and workers, the
processes, the open descriptors of the script, and the files in its run folder and its folder for temporary files.

Writes long_run.csv (one row per look) and long_run.png beside this file, and prints the report of docs/reliability.md.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark import rows as table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CSV, PNG = ROOT / "benchmark" / "long_run.csv", ROOT / "benchmark" / "long_run.png"
FIELDS = "seconds start iteration script_mib workers_mib processes descriptors run_files temporary_files event".split()
JOB = "rloo_multiturn.py --env alfworld --alfworld-data generated --dense-reward".split()
LOOK_EVERY, SETTLED = 5, 20  # seconds; iterations after which memory must not grow


def resident_mib(pid: int) -> float:
    """Resident memory of a process; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return int((re.findall(r"VmRSS:\s+(\d+)", status) or [0])[0]) / 1024


def workers_of(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def look(pid: int, folder: Path, **known) -> dict:
    workers = workers_of(pid)
    try:
        descriptors = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        descriptors = 0
    files = {name: sum(path.is_file() for path in (folder / name).rglob("*")) for name in ("runs", "tmp")}
    return known | {
        "script_mib": round(resident_mib(pid)),
        "workers_mib": round(sum(map(resident_mib, workers))),
        "processes": 1 + len(workers),
        "descriptors": descriptors,
        "run_files": files["runs"],
        "temporary_files": files["tmp"],
    }


def measure(options, folder: Path) -> list[dict]:
    """Runs the job to its end, whatever happens to it; one row per look."""
    rows, began, faults, kill_at = [], time.time(), 0, list(options.kill_at)
    next_fault = began + options.fault_every
    (folder / "tmp").mkdir()
    environment = os.environ | {"TMPDIR": str(folder / "tmp")}
    command = [sys.executable, *JOB, "--num-iterations", str(options.num_iterations)]
    command[1] = str(ROOT / command[1])
    for start in range(1, len(kill_at) + 2):
        resume = [f"--resume={run}" for run in (folder / "runs").glob("*")] if start > 1 else []
        with (folder / "output").open("a") as output:
            job = subprocess.Popen([*command, *resume], cwd=folder, env=environment, stdout=output, stderr=output)
        while job.poll() is None:
            time.sleep(LOOK_EVERY)
            done = re.findall(r"^iteration (\d+)/", (folder / "output").read_text(), re.MULTILINE)
            iteration, event, workers = int(done[-1]) if done else 0, "", workers_of(job.pid)
            if kill_at and iteration >= kill_at[0]:
                kill_at.pop(0)
                event = "script killed"
                job.kill()
                job.wait()
            elif time.time() > next_fault and workers:
                event, number = [("worker killed", signal.SIGKILL), ("worker stopped", signal.SIGSTOP)][faults % 2]
                os.kill(workers[faults // 2 % len(workers)], number)
                faults, next_fault = faults + 1, next_fault + options.fault_every
            seconds = round(time.time() - began)
            rows.append(look(job.pid, folder, seconds=seconds, start=start, iteration=iteration, event=event))
            table.write(CSV, FIELDS, rows)
        if job.returncode == 0:
            return rows
        if event != "script killed":
            sys.exit(f"the job ended with exit code {job.returncode}:\n{(folder / 'output').read_text()[-3000:]}")
    return rows


def report(rows: list[dict], folder: Path | None) -> None:
    """Prints what grew and what the run reached, and draws memory over time."""
    number = lambda row, name: float(row[name])  # noqa: E731
    print("| start | iterations | seconds | memory, MiB | largest after | growth | processes | descriptors |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for start in sorted({int(row["start"]) for row in rows}):
        some = [row for row in rows if int(row["start"]) == start and number(row, "script_mib")]
        first, last = (int(number(some[i], "iteration")) for i in (0, -1))
        settled = [row for row in some if number(row, "iteration") >= first + SETTLED]
        memory = [number(row, "script_mib") + number(row, "workers_mib") for row in settled]
        # The first minutes after the 20th iteration stand for it: a single look depends on where in an iteration it is.
        before = max(memory[:24]) if memory else 0
        grown = [f"{before:.0f}", f"{max(memory):.0f}", f"{max(memory) / before - 1:+.0%}"] if memory else ["-"] * 3
        spans = [f"{min(number(r, n) for r in some):.0f}-{max(number(r, n) for r in some):.0f}"
                 for n in ("processes", "descriptors")]  # fmt: skip
        seconds = number(some[-1], "seconds") - number(some[0], "seconds")
        print(f"| {start} | {first}-{last} | {seconds:.0f} | {' | '.join(grown)} | {' | '.join(spans)} |")
    events = [row["event"] for row in rows if row["event"]]
    print(", ".join(f"{events.count(event)} times: {event}" for event in dict.fromkeys(events)))
    print(f"files in the run's folder at most {max(int(row['run_files']) for row in rows)}, for temporary use at most "
          f"{max(int(row['temporary_files']) for row in rows)}, at the end {rows[-1]['temporary_files']}")  # fmt: skip
    if folder:
        (run,) = (folder / "runs").iterdir()
        log = EventAccumulator(str(run), size_guidance={"scalars": 0}).Reload()
        print(f"episodes lost in {sum(event.value for event in log.Scalars('charts/infra_errors')):.0f} infra_errors")
        evaluations = {event.step: event.value for event in log.Scalars("eval/success_rate")}
        print("success in evaluations:", ", ".join(f"{value:.0%}" for value in evaluations.values()))
        print((folder / "output").read_text().strip()[-400:])

    fig, ax = plt.subplots(figsize=(7, 3.4))
    minutes = [number(row, "seconds") / 60 for row in rows]
    for name, color in (("script_mib", "#12507b"), ("workers_mib", "#b5541c")):
        ax.plot(minutes, [number(row, name) for row in rows], color=color, lw=0.8, label=name.replace("_mib", ""))
    for at, row in zip(minutes, rows, strict=True):
        if row["event"]:
            killed = row["event"] == "script killed"
            ax.axvline(at, color="black" if killed else "0.75", lw=1.2 if killed else 0.5, zorder=0)
    ax.set(xlabel="minutes (black: script killed; grey: a worker killed or stopped)", ylabel="resident memory, MiB")
    ax.set_ylim(0, None)
    ax.legend(frameon=False)
    fig.tight_layout()
    fig.savefig(PNG, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-iterations", type=int, default=240)
    parser.add_argument("--fault-every", type=float, default=180, help="seconds from one fault of a worker to the next")
    parser.add_argument("--kill-at", type=int, nargs="*", default=[12, 228], help="iterations after which to kill")
    parser.add_argument("--draw-only", action="store_true", help="print and draw from the CSV, run nothing")
    options = parser.parse_args()
    if options.draw_only:
        return report(table.read(CSV), None)
    with tempfile.TemporaryDirectory() as folder:
        report(measure(options, Path(folder)), Path(folder))


if __name__ == "__main__":
    main()
