/* trials.h - tests of kernels for labs 6 and 7, included after cnn.c. The kernels run in a process
   of their own, which has neither the checker's token nor the right results. This process gives it
   the arrays' contents, and checks what it leaves there: outputs are initialized to a NaN, and each
   array lies between guard zones.

     begin_trial();
     Array *in = new_input("in", bytes), *out = new_output("out", bytes);     // and fill in->before
     run_trial(job);        // calls job() there, in which in->device is the array
     then compare out->after with what is right */
#include "draw.h"
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { GUARD_BYTES = 8192, MOST_ARRAYS = 12, PATIENCE_S = 60 };

typedef struct Array {
    const char *name;
    void *before, *after; // its contents; after: shared with the other process
    void *device;
    size_t bytes;
    bool is_input; // must not be changed
} Array;

typedef struct Shared {
    bool finished;
    size_t launches, threads; // of all launches; the emulator counts them
} Shared;

static Array arrays[MOST_ARRAYS];
static size_t array_count;
static Shared *shared;
static const Kernels *gpu;

/* ---- Arrays ---------------------------------------------------------------------------------- */

static const uint32_t unwritten = 0xFFFFFFFF; // a NaN

/* What surrounds an array: of an input a NaN, so that a result shows that it was read; of an output
   a number, which no thread can have computed from that NaN and written there. */
static uint32_t guard_word(const Array *a) {
    return a->is_input ? 0x7FC00000 : 0x3FB3C6EF;
}

// What a test says where the process of the kernels is ended
static const char *why_ended = "";

static void *shared_memory(size_t bytes) {
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        wrong("no memory for %zu bytes", bytes);
    return memory;
}

static void begin_trial(void) {
    for (size_t i = 0; i < array_count; i++) {
        free(arrays[i].before);
        munmap((char *)arrays[i].after - GUARD_BYTES, arrays[i].bytes + 2 * GUARD_BYTES);
    }
    array_count = 0;
    if (!shared)
        shared = shared_memory(sizeof *shared);
    *shared = (Shared){.finished = false};
}

static Array *new_array(const char *name, size_t bytes, bool is_input) {
    if (array_count == MOST_ARRAYS)
        wrong("more than %d arrays", MOST_ARRAYS);
    Array *a = &arrays[array_count++];
    *a = (Array){.name = name, .bytes = bytes, .is_input = is_input};
    a->before = must_alloc(bytes, "a test");
    a->after = (char *)shared_memory(bytes + 2 * GUARD_BYTES) + GUARD_BYTES;
    memset(a->before, is_input ? 0 : 0xFF, bytes);
    return a;
}

static Array *new_input(const char *name, size_t bytes) {
    return new_array(name, bytes, true);
}

static Array *new_output(const char *name, size_t bytes) {
    return new_array(name, bytes, false);
}

// All of an array with its guard zones, from the device to this process.
static void send_array(Array *a) {
    uint32_t *all = (uint32_t *)((char *)a->after - GUARD_BYTES);
    for (size_t i = 0; i < (a->bytes + 2 * GUARD_BYTES) / 4; i++)
        all[i] = guard_word(a);
    memcpy(a->after, a->before, a->bytes);
    a->device = (char *)gpu->device->alloc(a->bytes + 2 * GUARD_BYTES) + GUARD_BYTES;
    gpu->device->copy((char *)a->device - GUARD_BYTES, all, a->bytes + 2 * GUARD_BYTES);
}

static void fetch_array(Array *a) {
    gpu->device->copy((char *)a->after - GUARD_BYTES, (char *)a->device - GUARD_BYTES,
                      a->bytes + 2 * GUARD_BYTES);
}

static void check_guards(const Array *a) {
    const char *zones[] = {(const char *)a->after - GUARD_BYTES, (const char *)a->after + a->bytes};
    for (size_t z = 0; z < 2; z++)
        for (size_t i = 0; i < GUARD_BYTES / 4; i++) {
            // after an array whose bytes are no multiple of 4 the words are shifted
            const size_t shift = z == 1 ? (4 - a->bytes % 4) % 4 : 0;
            uint32_t word;
            memcpy(&word, zones[z] + shift + i * 4, sizeof word);
            if (i + 1 < GUARD_BYTES / 4 && word != guard_word(a))
                wrong(
                    "%s: memory %s was written, %zu bytes %s: threads beyond the last element must "
                    "do nothing",
                    a->name, z == 0 ? "before its beginning" : "beyond its end",
                    z == 0 ? GUARD_BYTES - i * 4 : i * 4 + shift, z == 0 ? "before" : "beyond");
        }
    if (a->is_input && memcmp(a->before, a->after, a->bytes) != 0)
        wrong("%s is an input, but it was changed", a->name);
}

/* ---- The other process ----------------------------------------------------------------------- */

// Called by the emulator at each launch (lab04_launches.h)
void lab_launched(const char *kernel, size_t threads);
void lab_launched(const char *kernel, size_t threads) {
    (void)kernel;
    shared->launches++;
    shared->threads += threads;
}

static _Noreturn void other_process(void (*job)(void)) {
    const int nowhere = open("/dev/null", O_RDWR);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    dup2(nowhere, 0);
    dup2(nowhere, 8);
    dup2(nowhere, 9);
    alarm(PATIENCE_S);
    gpu->device->use(0, 0, die);
    for (size_t i = 0; i < array_count; i++)
        send_array(&arrays[i]);
    gpu->device->synchronize();
    job();
    gpu->device->synchronize();
    for (size_t i = 0; i < array_count; i++)
        fetch_array(&arrays[i]);
    gpu->device->synchronize();
    shared->finished = true;
    exit(0); // the emulator may print a table
}

// Runs job() in another process, with the arrays on the device.
static void run_trial(void (*job)(void)) {
    int status = 0;
    prctl(PR_SET_DUMPABLE, 0); // no access to this process's memory through /proc
    fflush(stdout);
    const pid_t child = fork();
    if (child < 0)
        wrong("cannot start a process");
    if (child == 0)
        other_process(job);
    waitpid(child, &status, 0);
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        wrong("the kernels do not end within %d s: an endless loop?", PATIENCE_S);
    if (WIFSIGNALED(status))
        wrong("the process of the kernels was ended by signal %d%s; see below", WTERMSIG(status),
              why_ended);
    if (!shared->finished)
        wrong("the process of the kernels has ended before they were done%s; see below", why_ended);
    for (size_t i = 0; i < array_count; i++)
        check_guards(&arrays[i]);
}

// The GPU's kernels of this name, or of any (KERNELS_BEST), in this precision
static const Kernels *kernels_in(KernelsChoice name, Precision precision) {
    for (size_t i = 0; cuda_kernels(i); i++) {
        const Kernels *k = cuda_kernels(i);
        if (k->precision == precision && (name == KERNELS_BEST || name == k->choice))
            return k;
    }
    wrong("there are no kernels for %s", choice_word("--precision", (int)precision));
}
