#!/usr/bin/env python3
"""Prints what two runs with the same results must have in common in their run folders.

usage: run_folder.py DIR

All of epochs.csv and steps.csv except times, rates and the warmup mark: a run that was stopped and
resumed must print the same as one that was not.
"""
import csv
import re
import sys

EXEMPT = re.compile(r"(^|_)s(econds)?$|^warmup$")


def show(where, row):
    print(where, *(f"{name}={value}" for name, value in row.items() if not EXEMPT.search(str(name))))


for file in "epochs.csv", "steps.csv":
    with open(f"{sys.argv[1]}/{file}", encoding="utf-8", newline="") as text:
        for row in csv.DictReader(text):
            show(file, row)
