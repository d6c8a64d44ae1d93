"""results.csv: what stands in it, that programs read it with the right types, and that it is whole at any moment."""

from __future__ import annotations

import csv
import io
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hydra_plugins.hydra_ddp_subprocess_launcher.common.files import SweepPaths
from hydra_plugins.hydra_ddp_subprocess_launcher.records.events import (
    JobEnded,
    JobRecord,
    JobsAdded,
    JobStarted,
    JobState,
    json_value,
)
from hydra_plugins.hydra_ddp_subprocess_launcher.records.journal import SweepRecorder, results_table, write_results


def job(number: int, *overrides: str, value: Any = None, **facts: Any) -> JobRecord:
    state = JobState.FAILED if "cause" in facts else JobState.COMPLETED
    known = {"attempts": 1, "nproc": 2, "devices": ("0", "1"), "run_dir": f"/sweep/{number}", "seconds": 1.5, **facts}
    return JobRecord(number, overrides, state, value=value, **known)


def rows(*jobs: JobRecord) -> list[dict[str, str]]:
    header, *cells = results_table(jobs)
    assert len(set(header)) == len(header)
    return [dict(zip(header, row, strict=True)) for row in cells]


def test_the_columns() -> None:
    """A column a key of an override, then status, value, duration, devices, attempts, run directory, cause."""
    table = results_table([job(0, "lr=0.1", "model=cnn", value=0.5), job(1, "lr=0.2", "model=mlp", cause="bad")])
    assert table == [
        ["job", "lr", "model", "status", "value", "duration_s", "devices", "attempts", "run_dir", "cause"],
        ["0", "0.1", "cnn", "COMPLETED", "0.5", "1.500", "0 1", "1", "/sweep/0", ""],
        ["1", "0.2", "mlp", "FAILED", "", "1.500", "0 1", "1", "/sweep/1", "bad"],
    ]


@pytest.mark.parametrize(
    ("override", "key", "cell"),
    [
        ("lr=1e-3", "lr", "0.001"),
        ("+new=1", "new", "1"),
        ("++new=1", "new", "1"),
        ("~gone", "gone", "(deleted)"),
        ("name='a, b'", "name", "a, b"),
        ('name="it\'s"', "name", "it's"),
        ("flag=true", "flag", "True"),
        ("none=null", "none", ""),
        ("empty=", "empty", ""),
        ("list=[1,2]", "list", "[1,2]"),
        ("dict={a:1}", "dict", "{a:1}"),
        ("db@place=mysql", "db@place", "mysql"),
        ("a.b.c=1", "a.b.c", "1"),
        ("x=${y}", "x", "${y}"),
        ("value=3", "override.value", "3"),
        ("cause=x", "override.cause", "x"),
        ("job=1", "override.job", "1"),
        ("not an override", "not an override", "not an override"),
    ],
)
def test_overrides_in_cells(override: str, key: str, cell: str) -> None:
    """A cell has the value as the job has it, under the key alone; a key that a column of ours has is told apart."""
    (row,) = rows(job(0, override, value=0.5))
    assert row[key] == cell
    assert row["value"] == "0.5" and row["job"] == "0" and row["cause"] == ""


def test_jobs_with_different_keys() -> None:
    """A key that only some jobs have is a column that is empty for the others."""
    assert [(row["a"], row["b"]) for row in rows(job(0, "a=1"), job(1, "b=2"))] == [("1", ""), ("", "2")]


@pytest.mark.parametrize(
    ("value", "cells"),
    [
        (0.5, {"value": "0.5"}),
        (None, {"value": ""}),
        ("NaN", {"value": "NaN"}),
        ({"loss": 1, "acc": {"top1": 0.5}}, {"value.loss": "1", "value.acc.top1": "0.5"}),
        ([1.5, "x"], {"value.0": "1.5", "value.1": "x"}),
        ((1, None), {"value.0": "1", "value.1": ""}),
        ({}, {"value": "{}"}),
        ([], {"value": "[]"}),
        (list(range(100)), {"value": str(list(range(100)))}),
    ],
)
def test_values_in_cells(value: Any, cells: dict[str, str]) -> None:
    """A value has one column, a dict, list or tuple one for each part; of a long list there is one cell."""
    (row,) = rows(job(0, "lr=1", value=value))
    assert {name: cell for name, cell in row.items() if name.startswith("value")} == cells


def test_a_value_that_is_no_json() -> None:
    """Of a value that cannot be written there are a few words."""
    (row,) = rows(job(0, value=json_value(object)[0]))
    assert row["value"] == "<class 'object'>"


def test_pandas_reads_the_right_types(tmp_path: Path) -> None:
    """Numbers are numbers, flags are flags, text is text, also with commas, quotes, newlines and other scripts."""
    pandas = pytest.importorskip("pandas")
    path = tmp_path / "results.csv"
    jobs = [
        job(0, "lr=0.1", "n=1", "on=true", "name='a, \"b\"'", value={"loss": 0.5, "best": 3}, seconds=1.25),
        job(1, "lr=1e-3", "n=2", "on=false", "name='zwei\nZeilen 数字'", value={"loss": "NaN", "best": 4}),
        job(2, "lr=1", "n=3", "on=true", "name=x", cause="rank 1: ValueError: a,b\nc"),
    ]
    write_results(str(path), jobs)
    table = pandas.read_csv(path)
    assert len(table) == 3
    assert table["lr"].tolist() == [0.1, 1e-3, 1.0] and table["n"].tolist() == [1, 2, 3]
    assert str(table["n"].dtype) == "int64" and str(table["on"].dtype) == "bool"
    assert table["name"].tolist() == ['a, "b"', "zwei\nZeilen 数字", "x"]
    assert table["value.loss"][0] == 0.5 and math.isnan(table["value.loss"][1])
    assert table["duration_s"][0] == 1.25 and table["attempts"].tolist() == [1, 1, 1]
    assert table["cause"][2] == "rank 1: ValueError: a,b\nc"


def test_carriage_returns(tmp_path: Path) -> None:
    """A carriage return in a cell is a line feed there: alone it would end the row for many programs."""
    path = tmp_path / "results.csv"
    write_results(str(path), [job(0, "s='a\rb'", value="c\r\nd"), job(1, "s=e", value="f\r")])
    pandas = pytest.importorskip("pandas")
    table = pandas.read_csv(path)
    assert table["s"].tolist() == ["a\nb", "e"] and table["value"].tolist() == ["c\nd", "f\n"]


def test_text_that_is_no_text(tmp_path: Path) -> None:
    """Bytes of a file name that are no UTF-8 do not make the file unreadable."""
    path = tmp_path / "results.csv"
    write_results(str(path), [job(0, run_dir=os.fsdecode(b"/sweep/\xff"))])
    (row,) = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    assert row["run_dir"] == "/sweep/\\udcff"


def test_whole_at_any_moment(tmp_path: Path) -> None:
    """Whoever reads while jobs end finds a whole table each time, which only grows."""
    recorder = SweepRecorder(SweepPaths(str(tmp_path)))
    (tmp_path / ".ddp").mkdir()
    recorder.record(JobsAdded(0, 0, tuple((f"x={number}",) for number in range(200)), 1))
    counts: list[int] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            if (tmp_path / ".ddp" / "results.csv").exists():
                text = (tmp_path / ".ddp" / "results.csv").read_text()
                table = list(csv.DictReader(io.StringIO(text)))
                assert text.endswith("\n") and all(row["cause"] is not None for row in table)
                counts.append(len(table))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(200):
        recorder.record(JobStarted(0, number, 0, 1, (), "/run"))
        recorder.record(JobEnded(1, number, True, 0.5, "0.5", "", 1.0))
    recorder.flush(last=True)
    time.sleep(0.05)
    done.set()
    reader.join()
    assert counts == sorted(counts) and counts[-1] == 200


def test_many_jobs_cost_little(tmp_path: Path) -> None:
    """With thousands of jobs the table is not written anew at each end, and yet whole when there is nothing to do."""
    (tmp_path / ".ddp").mkdir()
    recorder = SweepRecorder(SweepPaths(str(tmp_path)))
    recorder.record(JobsAdded(0, 0, tuple((f"x={number}",) for number in range(3000)), 1))
    writes = 0
    last = None
    for number in range(3000):
        recorder.record(JobEnded(1, number, True, 0.5, "0.5", "", 1.0))
        now = (tmp_path / ".ddp" / "results.csv").stat().st_ino
        writes += now != last
        last = now
    recorder.flush(last=True)
    assert writes < 1000
    assert len((tmp_path / ".ddp" / "results.csv").read_text().splitlines()) == 3001
