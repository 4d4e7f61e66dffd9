"""The CSV files of the benchmarks. A new run replaces the rows of its own name, and no others."""

import csv
from pathlib import Path


def read(path: Path) -> list[dict]:
    return list(csv.DictReader(path.open())) if path.exists() else []


def write(path: Path, fields: list[str], rows: list[dict]) -> None:
    """Written aside and renamed, so that a crash leaves the old file."""
    with path.with_suffix(".part").open("w", newline="") as file:
        writer = csv.DictWriter(file, fields)
        writer.writeheader()
        writer.writerows(rows)
    path.with_suffix(".part").rename(path)


def replace(path: Path, fields: list[str], measured: list[dict], by: str) -> list[dict]:
    """Puts the measured rows in the place of those that agree with them in the field `by`; all rows."""
    rows = [row for row in read(path) if row[by] != measured[0][by]] + measured
    write(path, fields, rows)
    return rows
