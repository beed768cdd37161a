/* cuda_on_cpu_record.h: the last part of cuda_on_cpu.h, which records what one block of a kernel
   does, for labs/tools/see.py. With -DCUEMU_COUNT only, by the hooks that count accesses.

   CUEMU_SEE=NAME selects the kernel, as the table of counts names it, with or without its template
   arguments; CUEMU_SEE_BLOCK=N its block, and CUEMU_SEE_LAUNCH=N the launch, both from 0, which is
   the default. The record goes to the file CUEMU_SEE_FILE (see.txt):

     program PATH BASE        where the program was loaded
     kernel NAME / source FILE LINE (of the launch) / grid X Y Z / block X Y Z / index X Y Z /
     number N / launch N
     shared BEGIN BYTES NAME TYPE, memory BEGIN BYTES
     argument N OFFSET ADDRESS   a pointer: argument N of the kernel, or at OFFSET in it
     place ID PC CALLER...    return addresses, from the innermost function to the outermost
     thread N EVENT...        what it did, in its order, one of
         ID                   it has entered a piece of code without a branch
         KIND ID:ADDRESS:BYTES   an access: R, W, A (atomic) of global, r, w, B of shared memory
         X ADDRESS            a copy of cp.async to there has landed
         | ID and / ID        it has passed a barrier of the block, or of its warp
         F N                  N operations of a tensor core

   Addresses are hexadecimal, and so is all in the lines of places and threads but `thread N`. */

namespace emu {
const size_t MOST_EVENTS = 24 << 20; // of a block
enum { MOST_FRAMES = 32, MOST_PLACES = 1 << 16 };
struct Place { // in the code: the return addresses from the innermost function to the outermost
    int frames;
    uintptr_t addresses[MOST_FRAMES];
};
struct Recording {
    std::vector<std::string> threads;
    std::vector<Place> places;
    unsigned numbers[MOST_PLACES]; // of places, plus 1, by a hash of the addresses
    size_t events;
};
static thread_local Recording *recording; // of the block that this thread of the CPU runs
static thread_local bool in_hook; // what the hooks themselves do is neither counted nor recorded
extern "C" const char __executable_start; // by the linker

// The return addresses above this frame, on the stack of the running CUDA thread
inline EMU_UNCOUNTED void find_callers(Place *place, const uintptr_t *frame) {
    const uintptr_t begin = (uintptr_t)self->fiber->stack, end = begin + self->fiber->stack_bytes;
    const uintptr_t *last = nullptr;
    place->frames = 0;
    while (frame > last && (uintptr_t)frame >= begin && (uintptr_t)(frame + 2) <= end &&
           place->frames < MOST_FRAMES) {
        place->addresses[place->frames++] = frame[1];
        last = frame;
        frame = (const uintptr_t *)frame[0];
    }
}
inline EMU_UNCOUNTED bool same_place(const Place &a, const Place &b) {
    bool same = a.frames == b.frames;
    for (int i = 0; same && i < a.frames; i++)
        same = a.addresses[i] == b.addresses[i];
    return same;
}
inline EMU_UNCOUNTED unsigned number_of_place(const uintptr_t *frame) {
    Place place;
    find_callers(&place, frame);
    uint64_t hash = 14695981039346656037u;
    for (int i = 0; i < place.frames; i++)
        hash = (hash ^ place.addresses[i]) * 1099511628211u;
    for (unsigned at = (unsigned)(hash >> 32);; at++) {
        unsigned &number = recording->numbers[at % MOST_PLACES];
        if (number == 0) {
            recording->places.push_back(place);
            number = (unsigned)recording->places.size();
        }
        if (same_place(recording->places.data()[number - 1], place))
            return number - 1;
        if (recording->places.size() == MOST_PLACES)
            die("CUEMU_SEE: this block goes through more than %d places of the code", MOST_PLACES);
    }
}

inline EMU_UNCOUNTED char *put_number(char *to, unsigned long number) {
    int digits = 1;
    while (digits < 16 && number >> 4 * digits)
        digits++;
    while (digits-- > 0)
        *to++ = "0123456789abcdef"[number >> 4 * digits & 15];
    return to;
}

// kind: 0 for the beginning of a piece of code; frame: of the function that the compiler calls
// there; bytes: of an access, else 0.
inline EMU_UNCOUNTED void add_event(char kind, const void *frame, const void *address, long bytes) {
    char text[80], *end = text;
    *end++ = ' ';
    if (kind)
        *end++ = kind;
    if (frame)
        end = put_number(end, number_of_place((const uintptr_t *)frame));
    if (bytes > 0)
        *end++ = ':';
    if (address)
        end = put_number(end, (unsigned long)address);
    if (bytes > 0) {
        *end++ = ':';
        end = put_number(end, (unsigned long)bytes);
    }
    recording->threads.data()[self->number].append(text, (size_t)(end - text));
    if (++recording->events > MOST_EVENTS)
        die("CUEMU_SEE: this block does more than %zu things; choose a smaller network or batch",
            MOST_EVENTS);
}
inline EMU_UNCOUNTED void record(char kind, const void *frame, const void *address, long bytes) {
    if (!recording || !self || !self->in_kernel || in_hook)
        return;
    in_hook = true;
    add_event(kind, frame, address, bytes);
    in_hook = false;
}

// An access or a barrier of the function that calls these: their frame has its return address.
inline EMU_UNCOUNTED __attribute__((noinline)) void record_here(char kind, const void *address,
                                                                long bytes) {
    record(kind, __builtin_frame_address(0), address, bytes);
}
inline EMU_UNCOUNTED __attribute__((noinline)) void record_barrier(char kind) {
    record(kind, __builtin_frame_address(0), nullptr, 0);
}
inline EMU_UNCOUNTED void record_landing(const void *address) {
    record('X', nullptr, address, 0);
}
inline EMU_UNCOUNTED void record_flop(long count) {
    record('F', nullptr, (const void *)count, 0);
}

// With -fsanitize-coverage=trace-pc the compiler calls this at the beginning of each piece of code
// without a branch, so that a reader sees which lanes of a warp went the same way.
extern "C" EMU_UNCOUNTED __attribute__((used)) void __sanitizer_cov_trace_pc() {
    record(0, __builtin_frame_address(0), nullptr, 0);
}

/* ---- Which block is recorded */

static const std::string seen_kernel = getenv("CUEMU_SEE") ? getenv("CUEMU_SEE") : "";
static const long seen_block = setting("CUEMU_SEE_BLOCK", 0);
static const long seen_launch = setting("CUEMU_SEE_LAUNCH", 0);
static std::map<std::string, long> launches_seen; // by kernel, if one is to be seen
static bool block_seen;

inline bool is_seen(const std::string &name) {
    return name == seen_kernel || name.substr(0, name.find('<')) == seen_kernel;
}

// Called for each launch, one after the other
inline bool wants_record(const Launch *launch) {
    if (seen_kernel.empty())
        return false;
    launches_seen[launch->name]++;
    static long launches;
    if (!is_seen(launch->name) || launches++ != seen_launch)
        return false;
    const long blocks = (long)launch->grid.x * launch->grid.y * launch->grid.z;
    if (seen_block < 0 || seen_block >= blocks)
        die("CUEMU_SEE_BLOCK=%ld: this launch has blocks 0 to %ld", seen_block, blocks - 1);
    return true;
}
static struct NotSeen {
    ~NotSeen() { // at exit
        if (seen_kernel.empty() || block_seen)
            return;
        fprintf(stderr, "cuda_on_cpu: CUEMU_SEE=%s: launch %ld of it was not found; launched were:",
                seen_kernel.c_str(), seen_launch);
        for (auto &[name, launches] : launches_seen)
            fprintf(stderr, " %s (%ld)", name.c_str(), launches);
        fprintf(stderr, "\n");
    }
} not_seen;

inline void print_place(FILE *file, size_t number, const Place &place) {
    fprintf(file, "place %zx", number);
    for (int i = 0; i < place.frames; i++)
        fprintf(file, " %lx", (unsigned long)place.addresses[i]);
    fprintf(file, "\n");
}
inline void print_size(FILE *file, const char *name, uint3 size) {
    fprintf(file, "%s %u %u %u\n", name, size.x, size.y, size.z);
}
inline void write_record(long number) {
    const char *name = getenv("CUEMU_SEE_FILE");
    char program[4096] = "";
    FILE *file = fopen(name && *name ? name : "see.txt", "w");
    if (!file || readlink("/proc/self/exe", program, sizeof program - 1) < 0)
        die("CUEMU_SEE_FILE: cannot write %s", name ? name : "see.txt");
    fprintf(file, "program %s %lx\n", program, (unsigned long)&__executable_start);
    fprintf(file, "kernel %s\nsource %s %d\n", launched->name, launched->location.file,
            launched->location.line);
    print_size(file, "grid", launched->grid);
    print_size(file, "block", launched->block);
    print_size(file, "index", block->index);
    fprintf(file, "number %ld\nlaunch %ld\n", number, seen_launch);
    for (const SharedArray &array : block->shared)
        fprintf(file, "shared %lx %zu %s\n", (unsigned long)array.begin, array.bytes, array.name);
    for (auto &[begin, allocation] : allocations)
        fprintf(file, "memory %lx %zu\n", (unsigned long)begin, allocation.bytes);
    for (const PointerArgument &argument : launched->pointers)
        fprintf(file, "argument %d %zu %lx\n", argument.number, argument.offset,
                (unsigned long)argument.address);
    for (size_t i = 0; i < recording->places.size(); i++)
        print_place(file, i, recording->places[i]);
    for (size_t thread = 0; thread < recording->threads.size(); thread++)
        fprintf(file, "thread %zu%s\n", thread, recording->threads[thread].c_str());
    if (fclose(file) != 0)
        die("CUEMU_SEE_FILE: cannot write %s: the disk is full", name);
}

// Around a block: begins, and writes the record.
inline EMU_UNCOUNTED void begin_recording(unsigned number) {
    if (!launched->recorded || number != (unsigned long)seen_block)
        return;
    recording = new Recording{};
    recording->threads.resize(block->threads.size());
}
inline EMU_UNCOUNTED void end_recording(unsigned number) {
    if (!recording)
        return;
    in_hook = true;
    write_record(number);
    delete recording;
    recording = nullptr;
    in_hook = false;
    block_seen = true;
}
} // namespace emu
