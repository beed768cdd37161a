"""Checks the trace of a run, and the overlap that was computed from it. Times are microseconds."""
import collections
import json
import os
import re

MOST_EVENTS, TRACKS, MOST_US = 20000, 12, 60_000_000
STEPS, DEVICE, LOADER = 0, 2, 4  # tracks; a worker of the loader has LOADER or more
ROUNDING = 0.0021  # of two numbers with three decimals
SLACK = 1000

Span = collections.namedtuple("Span", "name track begin end")


def wrong(run, what):
    return ValueError(f"{run.folder}/trace.json: {what}")


def check_trace(run):
    """The spans of a trace that shows all steps of the run."""
    spans = read_spans(run)
    check_nesting(run, spans)
    check_steps(run, spans)
    check_rows(run, spans)
    return spans


def read_spans(run):
    """The events of the phase X; the others name tracks. ./cnn names its kernels beside the events."""
    try:
        with open(os.path.join(run.folder, "trace.json"), encoding="utf-8") as f:
            about = json.load(f)
    except OSError:
        raise ValueError(f"{run.folder}/trace.json: missing") from None
    except ValueError as why:
        raise ValueError(f"{run.folder}/trace.json is not valid JSON, {why}; was it truncated or edited?") from None
    kernels, events = about.get("otherData", {}).get("kernels"), about["traceEvents"]
    if kernels != run.settings["kernels"]:
        raise wrong(run, f"its kernels are {kernels}, those of run.json {run.settings['kernels']}")
    if len(events) > MOST_EVENTS:
        raise wrong(run, f"more than {MOST_EVENTS} events; trace fewer steps")
    return [read_span(run, i, event) for i, event in enumerate(events) if event["ph"] != "M"]


def read_span(run, i, event):
    if event["ph"] != "X":
        raise wrong(run, f"event {i}: ph should be X or M, found {event['ph']}")
    begin, length = event["ts"], event["dur"]
    if not (begin >= 0 and length >= 0):
        raise wrong(run, f"event {i}, {event['name']}: ts and dur should be 0 or more")
    if event["pid"] != 0 or event["tid"] not in range(TRACKS) or begin + length > MOST_US:
        raise wrong(run, f"event {i}, {event['name']}: expected one rank, at most {TRACKS} tracks and "
                    f"{MOST_US // 1_000_000} s")
    return Span(event["name"], event["tid"], begin, begin + length)


def check_nesting(run, spans):
    """Two spans of a track are one after the other, or one is within the other."""
    for track in range(TRACKS):
        around = []
        for span in sorted((s for s in spans if s.track == track), key=lambda s: (s.begin, -s.end)):
            while around and around[-1].end <= span.begin + ROUNDING:
                around.pop()
            if around and span.end > around[-1].end + ROUNDING and span.begin > around[-1].begin + ROUNDING:
                raise wrong(run, f"track {track}: {span.name} begins within {around[-1].name} and ends after it; "
                            "events have to nest")
            around.append(span)


def check_steps(run, spans):
    """Each step takes as long as in steps.csv, and the network's rows in it no longer."""
    steps = {span.name: span for span in spans if span.track == STEPS}
    rows = run.times
    if len(steps) != len(rows):
        raise wrong(run, f"expected all {len(rows)} steps on the track of the steps, found {len(steps)}: "
                    f"--trace-steps 0:{len(rows)}")
    for i, seconds in enumerate(rows):
        step = steps.get(f"step {i}")
        if not step:
            raise wrong(run, f"there is no step {i}")
        length = step.end - step.begin
        if not 0.95e6 * seconds - SLACK <= length <= 1.05e6 * seconds + SLACK:
            raise wrong(run, f"{step.name} takes {length / 1e3:.3f} ms, in steps.csv {1e3 * seconds:.3f} ms: is it of "
                        "another run?")
        inside = sum(span.end - span.begin for span in spans if span.track == DEVICE
                     and span.begin >= step.begin - SLACK and span.end <= step.end + SLACK)
        if not 0 < inside <= length + SLACK:
            raise wrong(run, f"{step.name} takes {length / 1e3:.3f} ms, and the rows of the network in it "
                        f"{inside / 1e3:.3f} ms")


def check_rows(run, spans):
    """Rows of the network, and batches, are there once for each step."""
    steps = len(run.times)
    names = collections.Counter((min(span.track, LOADER), span.name) for span in spans)
    for name in ("conv1 forward", "conv2 backward", "fc1 backward"):
        if names[DEVICE, name] != steps:
            raise wrong(run, f'expected {steps} times "{name}" on the track of the device, found {names[DEVICE, name]}')
    made, uploaded = names[LOADER, "make a batch"], names[LOADER, "upload"]
    if (made, uploaded) != (steps, steps):
        raise wrong(run, f"expected {steps} batches that a loader's worker makes and uploads, found {made} and "
                    f"{uploaded}: --resident off")


def paint(spans, length):
    """A byte for each microsecond: 1 where one of the spans is."""
    row = bytearray(length)
    for span in spans:
        begin, end = int(span.begin), int(span.end)
        row[begin:end] = b"\1" * (end - begin)
    return row


def check_overlap(run, spans):
    """The sums in overlap.txt, within 1 % and a microsecond for each event."""
    path = os.path.join(run.folder, "overlap.txt")
    if not os.path.exists(path):
        raise ValueError(f"{path}: missing; make overlap TRACE={run.folder}/trace.json writes it")
    with open(path, encoding="utf-8", errors="replace") as f:
        found = dict(re.findall(r" (\w+_us)=([0-9.]+)\b", f.read(8192)))
    length = int(max((span.end for span in spans), default=0)) + 1
    device, make, upload = (paint(some, length) for some in (
        [s for s in spans if s.track == DEVICE], [s for s in spans if s.track >= LOADER and s.name != "upload"],
        [s for s in spans if s.track >= LOADER and s.name == "upload"]))
    sums = {"device_us": sum(device), "make_us": sum(make), "upload_us": sum(upload),
            "make_hidden_us": sum(map(int.__and__, device, make)),
            "upload_hidden_us": sum(map(int.__and__, device, upload))}
    for name, wanted in sums.items():
        if not abs(float(found.get(name, "nan")) - wanted) <= 0.01 * wanted + len(spans):
            raise ValueError(f"{path}: {name} should be about {wanted}, found {found.get(name, 'nothing')}")
