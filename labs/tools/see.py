#!/usr/bin/env python3
"""Shows what a block of a CUDA kernel reads and writes: one HTML page, and a table in the terminal.

    make see LAB=5 KERNEL=tiled_kernel BLOCK=0        runs the emulator, then this program
    labs/tools/see.py RECORD --source FILE.cu [--with PAGE.html] [--out PAGE.html]

Variables of make see: LAB=5: a kernel of that lab's convolution; LAB=4 or 6: one of ./cnn in a step as in that lab;
without LAB, one of a training step, with OPTIONS='--kernels naive' or other options of ./cnn. BLOCK=0: the block's
number; LAUNCH=0: the launch, from 0 on; WITH=PAGE.html: as --with; PAGE=FILE: as --out.

RECORD is what the emulator writes with CUEMU_SEE (tests/emulator/cuda_on_cpu_record.h). --with puts the run of an
earlier page beside this one. The page needs no network and no other file.

The 32 threads of a warp, its lanes, execute an instruction together; at a branch some of them are off, until both
sides meet again. From the way that each thread took, this program finds which lanes executed which load or store
together: one request. Of a request it counts

  sectors     global memory: the pieces of 32 bytes that its lanes touch; four make a line of 128 bytes
  used        global memory: of the bytes of these sectors, those that a lane has asked for
  passes      shared memory has 32 banks of 4 bytes. Lanes that need different words of one bank take turns. Requests
              of 8 and of 16 bytes a lane are served in 2 and 4 parts
  conflicts   the passes beyond those that it would take without different words in one bank
  lanes on    how many of the 32 took part

FLOP are counted as the CPU's compiler has them: additions, subtractions, multiplications, divisions; a multiply-add
is two. Functions such as expf() are not counted. Needs the programs addr2line and objdump (binutils), no packages.
"""
import argparse
import collections
import json
import os
import re
import struct
import subprocess
import sys

WARP, SECTOR, LINE, BANKS, WORD = 32, 32, 128, 32, 4
MOST_DRAWN = 60000  # requests in a page; the table counts all
MOST_ARROWS = 200  # hazards in a page
SPACES = {"R": ("global", "read"), "W": ("global", "write"), "A": ("global", "atomic"),
          "r": ("shared", "read"), "w": ("shared", "write"), "B": ("shared", "atomic")}

Access = collections.namedtuple("Access", "kind place address bytes frame epoch")
Memory = collections.namedtuple("Memory", "name space begin bytes element shape")


class Problem(Exception):
    """What the user has to know; the message says what was expected, what was found and what to do."""


# ---- The record

class Record:
    """What the emulator has written, line by line."""

    def __init__(self, path):
        self.one, self.shared, self.memory, self.arguments, self.places, self.threads = {}, [], [], [], {}, []
        try:
            with open(path, encoding="utf-8") as file:
                for line in file:
                    self.add(*line.rstrip("\n").split(" ", 1))
        except OSError as error:
            raise Problem(f"{path}: {error.strerror}: was the kernel launched? Its name is in the table of counts, "
                          f"make count") from error
        if "kernel" not in self.one or not self.threads:
            raise Problem(f"{path}: expected a record of the emulator (CUEMU_SEE), found something else")

    def add(self, name, rest=""):
        words = rest.split(" ")
        if name == "shared":
            label, kind = words[2], " ".join(words[3:])
            self.shared.append((int(words[0], 16), int(words[1]), label, kind))
        elif name == "memory":
            self.memory.append((int(words[0], 16), int(words[1])))
        elif name == "argument":
            self.arguments.append((int(words[0]), int(words[1]), int(words[2], 16)))
        elif name == "place":
            self.places[int(words[0], 16)] = [int(word, 16) for word in words[1:]]
        elif name == "thread":
            self.threads.append(words[1:])
        else:
            self.one[name] = rest

    def three(self, name):
        return [int(number) for number in self.one[name].split()]


# ---- The program's debug information and machine code

def output_of(command, text=""):
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    except FileNotFoundError as error:
        raise Problem(f"{command[0]} is not installed; on Debian: apt-get install binutils") from error
    except subprocess.CalledProcessError as error:
        raise Problem(f"{' '.join(command[:3])}: {error.stderr.strip()}") from error
    return done.stdout


class Code:
    """Functions and lines of the program's addresses, and how many FLOP a piece of its code has."""

    def __init__(self, record):
        self.program, base = record.one["program"].rsplit(" ", 1)
        self.source, self.launch_line = record.one["source"].rsplit(" ", 1)
        self.own_files = {os.path.basename(self.source), "<stdin>"}  # sed passes the kernels to the compiler
        with open(self.program, "rb") as file:
            moved = struct.unpack_from("<H", file.read(18), 16)[0] == 3  # ET_DYN: loaded anywhere
        self.base = int(base, 16) if moved else 0
        self.read_lines({address for place in record.places.values() for address in place if address})
        self.places = record.places
        self.flop_of = {}

    def read_lines(self, addresses):
        """self.frames: of an address the functions there, inlined ones first: (name, file, line)."""
        ordered = sorted(addresses)
        # A return address is after the call; one byte before it is the call's own line.
        asked = "".join(f"{address - self.base - 1:x}\n" for address in ordered)
        said = output_of(["addr2line", "-e", self.program, "-a", "-f", "-i", "-C"], asked).split("\n0x")
        self.frames = {}
        for address, answer in zip(ordered, said):
            lines = answer.split("\n")[1:]
            self.frames[address] = [(lines[i], *self.split_place(lines[i + 1])) for i in range(0, len(lines) - 1, 2)]

    @staticmethod
    def split_place(text):
        path, line = text.split(" ")[0].rsplit(":", 1)
        return os.path.basename(path), int(line) if line.isdigit() else 0

    def is_own(self, frame):
        return frame[1] in self.own_files and frame[2] > 0

    def own_frames(self, place):
        """The functions of the kernel's file that were running there, from the innermost to the kernel."""
        return [frame for address in self.places[place] for frame in self.frames.get(address, ())
                if self.is_own(frame)]

    def is_node(self, place):
        """Whether a piece of code belongs to a function of the kernel's file, and not to the emulator."""
        frames = self.frames.get(self.places[place][0]) if self.places[place] else None
        return bool(frames) and frames[-1][1] in self.own_files

    def read_flop(self, places):
        """self.flop_of: by address, the FLOP from there to the next piece of code."""
        starts = sorted({self.places[place][0] - self.base for place in places})
        if not starts:
            return
        code = output_of(["objdump", "-d", "--no-show-raw-insn", f"--start-address={starts[0]}",
                          f"--stop-address={starts[-1] + 65536}", self.program])
        found = re.findall(r"^ +([0-9a-f]+):\t(\S+)(.*)$", code, re.M)
        instructions = {int(address, 16): (name, operands) for address, name, operands in found}
        ordered = list(instructions)
        following = dict(zip(ordered, ordered[1:]))
        for start in starts:
            self.flop_of[start + self.base] = flop_of_piece(start, instructions, following)


def flop_of_piece(start, instructions, following):
    """From there along all jumps to where the next pieces of code begin, each instruction once."""
    flop, seen, ways = 0, set(), [start]
    while ways:
        at = ways.pop()
        while at in instructions and at not in seen:
            seen.add(at)
            name, operands = instructions[at]
            if "__sanitizer_cov_trace_pc" in operands or re.match(r"ret|ud2|hlt|brk|udf", name):
                break
            flop += flop_of_instruction(name, operands)
            target = re.match(r"\s.*?\b([0-9a-f]+) <", operands)
            is_jump = name.startswith(("j", "b.", "cb", "tb")) or name == "b"
            if is_jump and target:
                ways.append(int(target[1], 16))
            if name in ("jmp", "b", "br"):
                break
            at = following.get(at)
    return flop


def flop_of_instruction(name, operands):
    """Of x86-64's SSE, AVX and FMA, and of 64-bit ARM."""
    found = re.fullmatch(r"v?(add|sub|mul|div|fn?m(?:add|sub)\d+)([sp])([sd])", name)
    if found:
        operation, packed, kind = found.groups()
        width = 16 if "zmm" in operands else 8 if "ymm" in operands else 4
        numbers = 1 if packed == "s" else width // (2 if kind == "d" else 1)
        return numbers * (2 if operation.startswith("f") else 1)
    if re.match(r"f(add|sub|mul|div|nmul)$", name):
        return 1
    return 2 if re.match(r"fn?m(add|sub)$", name) else 0


# ---- What each thread did: its way through pieces of code (nodes), each with its accesses

BEGIN, END = -1, -2  # nodes


class Way:
    """A thread's way: its nodes, and the accesses in each."""

    def __init__(self, events, nodes):
        self.nodes, self.bodies, self.at = [BEGIN], [[]], 0
        self.barriers, self.landings = [], []  # places; (address, frame) of copies that have landed
        self.epoch, self.flop = 0, 0  # barriers of the warp; FLOP of tensor cores
        for event in events:
            self.add(event, event[0], nodes)
        self.enter(END)

    def enter(self, node):
        self.nodes.append(node)
        self.bodies.append([])

    def add(self, event, kind, nodes):
        if event in nodes:
            self.enter(nodes[event])
        elif kind in SPACES:
            place, address, size = (int(word, 16) for word in event[1:].split(":"))
            if not nodes:  # the compiler did not tell where pieces of code begin: each access is one
                self.enter(place)
            self.bodies[-1].append(Access(kind, place, address, size, len(self.barriers), self.epoch))
        elif kind == "|":
            self.barriers.append(int(event[1:], 16))
        elif kind == "/":
            self.epoch += 1
        elif kind == "X":
            self.landings.append((int(event[1:], 16), len(self.barriers)))
        elif kind == "F":
            self.flop += int(event[1:], 16)


def meeting_points(ways):
    """Of each node the first one that every thread passes after it: its immediate postdominator.

    Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm (2001), on the reversed graph of all ways.
    """
    after, before = collections.defaultdict(set), collections.defaultdict(set)
    for way in ways:
        for a, b in set(zip(way.nodes, way.nodes[1:])):
            after[a].add(b)
            before[b].add(a)
    order, seen, stack = [], {END}, [(END, iter(sorted(before[END])))]
    while stack:
        node, rest = stack[-1]
        following = next((n for n in rest if n not in seen), None)
        if following is None:
            order.append(node)
            stack.pop()
        else:
            seen.add(following)
            stack.append((following, iter(sorted(before[following]))))
    rank = {node: i for i, node in enumerate(order)}
    meets, changed = {END: END}, True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            found = [n for n in after[node] if n in meets]
            common = found[0]
            for other in found[1:]:
                while common != other:
                    if rank[common] < rank[other]:
                        common = meets[common]
                    else:
                        other = meets[other]
            changed |= meets.get(node) != common
            meets[node] = common
    return meets


class Warp:
    """Its lanes on their ways, side by side; self.requests: dictionaries from lane to access."""

    def __init__(self, ways, meets):
        self.ways, self.meets, self.requests = ways, meets, []
        self.run(range(len(ways)), None)

    def run(self, lanes, stop):
        """Lanes that are at the same node, until they are at the node `stop`."""
        node = self.ways[lanes[0]].nodes[self.ways[lanes[0]].at]
        while node != stop:
            self.execute(lanes)
            if node == END:
                return
            sides = collections.defaultdict(list)
            for lane in lanes:
                way = self.ways[lane]
                way.at += 1
                sides[way.nodes[way.at]].append(lane)
            node = next(iter(sides)) if len(sides) == 1 else self.meets[node]
            for side, some in sides.items():
                if side != node:
                    self.run(some, node)

    def execute(self, lanes):
        """The accesses of a piece of code: the nth of each of its places is one request."""
        requests, ways = {}, self.ways
        if not ways[lanes[0]].bodies[ways[lanes[0]].at] and len(lanes) == 1:
            return
        for lane in lanes:
            times = collections.Counter()
            for access in ways[lane].bodies[ways[lane].at]:
                key = access.place, access.kind
                times[key] += 1
                requests.setdefault((*key, times[key]), {})[lane] = access
        self.requests.extend(requests.values())


def bare(name):
    """The name of a function without its type, template arguments and parameters."""
    return re.sub(r"[(<].*", "", name).split(" ")[-1]


# ---- What a request costs

def sectors_of(accesses, size=SECTOR):
    return {piece for a in accesses for piece in range(a.address // size, (a.address + a.bytes - 1) // size + 1)}


def distinct_bytes(accesses):
    return len({byte for a in accesses for byte in range(a.address, a.address + a.bytes)})


def passes_of(request):
    """How often the banks are read or written: of the lanes that are served together, the most words in a bank."""
    most = max(a.bytes for a in request.values())
    together = {16: 8, 8: 16}.get(most, WARP)
    passes = least = 0
    for begin in range(0, WARP, together):
        words = {word for lane in range(begin, begin + together) if lane in request
                 for word in sectors_of([request[lane]], WORD)}
        if words:
            passes += max(collections.Counter(word % BANKS for word in words).values())
            least += 1
    return passes, least


def cost_of(request, space):
    accesses = list(request.values())
    cost = {"requests": 1, "lanes": len(accesses), "bytes": sum(a.bytes for a in accesses)}
    if space == "global":
        cost.update(sectors=len(sectors_of(accesses)), lines=len(sectors_of(accesses, LINE)),
                    used=distinct_bytes(accesses))
    else:
        cost["passes"], cost["least"] = passes_of(request)
    return cost


# ---- Names of memory

def parameters(source_text, kernel):
    """The kernel's parameters as (type, name); none if its definition was not found."""
    name = re.escape(kernel.split("<")[0])
    found = re.search(rf"__global__[^;{{}}]*?\b{name}\s*\(([^{{;]*?)\)\s*\{{", source_text)
    if not found:
        return []
    words = [re.sub(r"\s+", " ", part).strip() for part in re.split(r",(?![^<]*>)", found[1])]
    return [re.fullmatch(r"(.*?)(\w*)", word).groups() for word in words]


def element_bytes(kind, accesses):
    for names, size in ((r"double|int64|size_t|float2", 8), (r"float4|int4|double2", 16), (r"half|bfloat16|16_t", 2),
                        (r"char|int8|bool", 1), (r"float|int|real|unsigned", 4)):
        if re.search(names, kind):
            return size
    return min((a.bytes for a in accesses), default=4)


def name_memories(record, accesses, source_text):
    """The arrays in shared memory, and the arguments or else areas of global memory, by address."""
    memories = []
    for begin, size, name, kind in record.shared:
        inside = [a for a in accesses if begin <= a.address < begin + size]
        shape = [int(n) for n in re.findall(r"\[(\d+)\]", kind)]
        memories.append(Memory(name, "shared", begin, size, element_bytes(kind, inside), shape))
    known = parameters(source_text, record.one["kernel"])
    for number, (begin, size) in enumerate(record.memory):
        starts = {begin: (f"memory {number}", "")}
        for argument, offset, address in record.arguments:
            if begin <= address < begin + size:
                kind, name = known[argument - 1] if argument <= len(known) else ("", f"argument {argument}")
                starts[address] = (name if offset == 0 and "*" in kind else f"{name}, byte {offset}", kind)
        ends = [*sorted(starts)[1:], begin + size]
        for at, end in zip(sorted(starts), ends):
            inside = [a for a in accesses if at <= a.address < end]
            memories.append(Memory(starts[at][0], "global", at, end - at, element_bytes(starts[at][1], inside), []))
    return memories


# ---- Reads and writes that no barrier separates

def find_hazards(threads, landings):
    """Pairs of accesses to the same bytes by two threads, at least one a write, with no barrier between them.

    Lanes of one warp are also separated by __syncwarp(). Two atomic operations may meet. A copy of cp.async
    writes from its start until it is waited for. Returns {(frame, space, place, place): [(thread, thread, address)]}.
    """
    grain = {space: min((a.bytes for accesses in threads for a in accesses if SPACES[a.kind][0] == space), default=1)
             for space in ("global", "shared")}
    writers = collections.defaultdict(dict)  # by frame and unit of memory: an access by thread
    for thread, accesses in enumerate(threads):
        ends = dict(landings[thread])
        for a in accesses:
            if SPACES[a.kind][1] != "read":
                size = grain[SPACES[a.kind][0]]
                for frame in range(a.frame, max(a.frame, ends.get(a.address, 0)) + 1):
                    for unit in range(a.address // size, (a.address + a.bytes - 1) // size + 1):
                        writers[frame, SPACES[a.kind][0], unit].setdefault(thread, a)
    hazards = collections.defaultdict(dict)
    for thread, accesses in enumerate(threads):
        for a in accesses:
            space, does = SPACES[a.kind]
            for unit in range(a.address // grain[space], (a.address + a.bytes - 1) // grain[space] + 1):
                for other, write in writers.get((a.frame, space, unit), {}).items():
                    if (other == thread or (other // WARP == thread // WARP and write.epoch != a.epoch)
                            or (does == "atomic" and SPACES[write.kind][1] == "atomic")
                            or (does == "write" and other > thread)):
                        continue
                    pairs = hazards[a.frame, space, write.place, a.place]
                    pairs.setdefault((other, thread), unit * grain[space])
    return hazards


# ---- The page's data

class Run:
    """One block of one launch, counted; self.data is what the page shows."""

    def __init__(self, record, source_path):
        self.record, self.code = record, Code(record)
        self.source = self.read_source(source_path)
        with_code = sorted(p for p in record.places if self.code.is_node(p))
        events = {event for thread in record.threads for event in thread}
        nodes = {f"{place:x}": place for place in with_code if f"{place:x}" in events}
        self.ways = [Way(thread, nodes) for thread in record.threads]
        self.threads = [[a for body in way.bodies for a in body] for way in self.ways]
        self.flop = self.count_flop(nodes)
        self.requests = self.make_requests()
        self.memories = name_memories(record, [a for some in self.threads for a in some], self.source)
        self.memory_at = {}
        self.data = self.make_data()

    def read_source(self, path):
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except OSError as error:
            raise Problem(f"--source: {path}: {error.strerror}; expected the file with the kernel") from error

    def count_flop(self, nodes):
        self.code.read_flop(nodes.values())
        times = collections.Counter(node for way in self.ways for node in way.nodes if node >= 0)
        pieces = sum(count * self.code.flop_of.get(self.record.places[node][0], 0)
                     for node, count in times.items()) if nodes else 0
        return (pieces + sum(way.flop for way in self.ways)) if nodes else None

    def make_requests(self):
        """(frame, warp, request), in the order of frames, then of warps, then of execution."""
        meets = meeting_points(self.ways)
        requests = []
        for begin in range(0, len(self.ways), WARP):
            warp = Warp(self.ways[begin : begin + WARP], meets)
            requests += [(min(a.frame for a in request.values()), begin // WARP, request) for request in warp.requests]
        return sorted(requests, key=lambda r: r[:2])

    def memory_of(self, address):
        page = address // SECTOR
        if page not in self.memory_at:
            inside = [i for i, m in enumerate(self.memories) if m.begin <= address < m.begin + max(m.bytes, 1)]
            self.memory_at[page] = inside[0] if inside else None
        return self.memory_at[page]

    def describe(self, place, kind, memory):
        """(line of the kernel, functions inside, space, what, memory): requests that share this are one row."""
        frames = self.code.own_frames(place) or [("?", "", 0)]
        inside = [[bare(name), line] for name, _, line in reversed(frames[:-1])]
        return frames[-1][2], json.dumps(inside), *SPACES[kind], memory

    def make_data(self):
        record = self.record
        rows, patterns, drawn = {}, {}, []
        costs = {}
        for frame, warp, request in self.requests:
            first = min(request)
            base = min(a.address for a in request.values())
            memory = self.memory_of(request[first].address)
            access = request[first]
            row = rows.setdefault(self.describe(access.place, access.kind, memory), collections.Counter())
            shape = (tuple((lane, a.address - base) for lane, a in sorted(request.items())), access.bytes)
            key = shape, base % LINE, SPACES[access.kind][0]
            if key not in costs:
                costs[key] = cost_of(request, SPACES[access.kind][0])
            row.update(costs[key])
            if len(drawn) < MOST_DRAWN:
                offset = base - (self.memories[memory].begin if memory is not None else 0)
                drawn.append([frame, warp, list(rows).index(self.describe(access.place, access.kind, memory)),
                              patterns.setdefault(shape, len(patterns)), offset])
        ops = [self.op_of(key, counts) for key, counts in rows.items()]
        return {
            "kernel": record.one["kernel"], "file": self.code.source, "launch_line": int(self.code.launch_line),
            "grid": record.three("grid"), "block": record.three("block"), "index": record.three("index"),
            "number": int(record.one["number"]), "launch": int(record.one["launch"]),
            "source": self.source_lines(ops), "frames": self.frames(),
            "memories": [{"name": m.name, "space": m.space, "align": m.begin % LINE, "bytes": m.bytes,
                          "element": m.element, "shape": m.shape} for m in self.memories],
            "ops": ops, "patterns": [pattern_of(shape) for shape in patterns], "requests": drawn,
            "left_out": len(self.requests) - len(drawn), "hazards": self.hazards(rows), "totals": self.totals(ops),
        }

    def op_of(self, key, counts):
        line, inside, space, does, memory = key
        names = ("requests", "lanes", "bytes") + (("sectors", "lines", "used") if space == "global" else
                                                  ("passes", "least"))
        return {"line": line, "inside": json.loads(inside), "space": space, "does": does, "memory": memory,
                **{name: counts[name] for name in names}}

    def frames(self):
        longest = max((way.barriers for way in self.ways), key=len)
        lines = [(self.code.own_frames(place) or [("", "", 0)])[-1][2] for place in longest]
        return [0, *lines]  # the line of the barrier with which a frame begins; 0: of the kernel's beginning

    def source_lines(self, ops):
        """[number, text] of the kernel, and of the functions that it calls for its accesses."""
        lines = self.source.split("\n")
        wanted = set()
        for line in {op["line"] for op in ops} | {line for op in ops for _, line in op["inside"]} | set(self.frames()):
            if 0 < line <= len(lines):
                wanted.update(function_around(lines, line))
        return [[n, lines[n - 1]] for n in sorted(wanted)]

    def hazards(self, rows):
        found = find_hazards(self.threads, [way.landings for way in self.ways])
        numbers = {key: i for i, key in enumerate(rows)}
        kinds = {}
        for accesses in self.threads:
            for a in accesses:
                kinds.setdefault((a.place, SPACES[a.kind][0]), a.kind)
        result = []
        for (frame, space, write, other), pairs in sorted(found.items())[:MOST_ARROWS]:
            (first, second), address = min(pairs.items())
            memory = self.memory_of(address)
            ops = [numbers.get(self.describe(place, kinds[place, space], memory)) for place in (write, other)]
            result.append({"frame": frame, "ops": ops, "pairs": [list(p) for p in sorted(pairs)[:64]],
                           "count": len(pairs), "memory": memory,
                           "offset": address - (self.memories[memory].begin if memory is not None else 0)})
        return result

    def totals(self, ops):
        total = {space: collections.Counter() for space in ("global", "shared")}
        for op in ops:
            total[op["space"]].update({k: v for k, v in op.items() if k not in ("line", "inside", "space", "does",
                                                                               "memory")})
            total[op["space"]][op["does"] + "_bytes"] += op["bytes"]
            total[op["space"]][op["does"] + "s"] += op["lanes"]
        return {**{space: dict(counts) for space, counts in total.items()}, "flop": self.flop}


def pattern_of(shape):
    """Of a request: bytes a lane, and by lane its address relative to the lowest one, or null if the lane is off."""
    offsets = dict(shape[0])
    return [shape[1], [offsets.get(lane) for lane in range(WARP)]]


def function_around(lines, line):
    """The numbers of the lines of the function there, in code that begins and ends functions in the first column."""
    begin = end = line
    while begin > 1 and lines[begin - 2].strip() and not lines[begin - 2].startswith(("}", "/*", "#")):
        begin -= 1
    while begin > 1 and lines[begin - 1].startswith((" ", "\t")) and line - begin < 200:
        begin -= 1
    while end < len(lines) and not lines[end - 1].startswith("}") and end - line < 200:
        end += 1
    return range(begin, end + 1)


# ---- The table and the page

def percent(part, whole):
    """Rounded as the page rounds: 12.5 to 13."""
    return int(100 * part / whole + 0.5)


def average(a, b):
    return f"{a / b:.1f}" if b else ""


def print_table(data):
    names = [m["name"] for m in data["memories"]]
    x, y, z = data["index"]
    phases = "1 frame" if len(data["frames"]) == 1 else f"{len(data['frames'])} frames"
    print(f"{data['kernel']}, block {data['number']} ({x}, {y}, {z}), {phases} between barriers")
    head = ("line", "what", "requests", "lanes on", "bytes", "sectors", "a request", "used %", "passes", "conflicts")
    print("{:>5} {:28} {:>9} {:>8} {:>9} {:>8} {:>9} {:>6} {:>8} {:>9}".format(*head))
    for op in sorted(data["ops"], key=lambda op: op["line"]):
        name = names[op["memory"]] if op["memory"] is not None else "?"
        shared = op["space"] == "shared"
        cells = (op["line"], f"{op['does']} {op['space']} {name}", op["requests"],
                 average(op["lanes"], op["requests"]), op["bytes"],
                 *(("", "", "", op["passes"], op["passes"] - op["least"]) if shared else
                   (op["sectors"], average(op["sectors"], op["requests"]),
                    percent(op["used"], SECTOR * op["sectors"]), "", "")))
        print("{:>5} {:28} {:>9} {:>8} {:>9} {:>8} {:>9} {:>6} {:>8} {:>9}".format(*cells))
    total = data["totals"]
    reads = total["global"].get("read_bytes", 0)
    if total["flop"] is not None and reads:
        print(f"{total['flop']} FLOP, {reads} bytes of global memory read: {total['flop'] / reads:.2f} FLOP a byte")
    for hazard in data["hazards"]:
        lines = [data["ops"][op]["line"] if op is not None else "?" for op in hazard["ops"]]
        writer, reader = hazard["pairs"][0]
        print(f"no barrier between: thread {writer} writes in line {lines[0]}, thread {reader} uses the same bytes in "
              f"line {lines[1]} ({hazard['count']} pairs of threads, frame {hazard['frame']})")


DATA = re.compile(r'(<script type="application/json" id="runs">)(.*?)(</script>)', re.S)


def read_page(path):
    """The last run of an earlier page."""
    try:
        with open(path, encoding="utf-8") as file:
            return json.loads(DATA.search(file.read())[2])[-1]
    except (OSError, TypeError, ValueError) as error:
        raise Problem(f"--with: {path}: expected a page of this program, found: {error}") from error


def write_page(path, runs):
    with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "see.html"), encoding="utf-8") as file:
        template = file.read()
    # < is written as \u003c, so that no text of a source ends the script.
    text = json.dumps(runs, separators=(",", ":")).replace("<", "\\u003c")
    title = " and ".join(f"{run['kernel']}, block {run['number']}" for run in runs).replace("<", "&lt;")
    page = DATA.sub(lambda found: found[1] + text + found[3], template.replace("TITLE", title))
    folder = os.path.dirname(path)
    if folder:
        os.makedirs(folder, exist_ok=True)
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
    print(f"{path}: open it in a browser ({len(page) / 1e6:.1f} MB, needs no network)")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", metavar="RECORD")
    parser.add_argument("--source", required=True, metavar="FILE.cu", help="the file with the kernel")
    parser.add_argument("--with", dest="other", metavar="PAGE.html", help="an earlier page, to be shown beside it")
    parser.add_argument("--out", metavar="PAGE.html", help="the page; without it, only the table is printed")
    options = parser.parse_args()
    try:
        runs = [read_page(options.other)] if options.other else []
        runs.append(Run(Record(options.record), options.source).data)
        print_table(runs[-1])
        if options.out:
            write_page(options.out, runs)
    except Problem as problem:
        sys.exit(f"see.py: error: {problem}")


if __name__ == "__main__":
    main()
