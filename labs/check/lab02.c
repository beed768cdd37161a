/* lab02.c - in which order do the loops of TODO 2.1 go through the memory?

   part.c, sections 1 and 2 of cnn.c with the student's part, is compiled with -fsanitize=thread: so
   each load and store calls a function, one of those below. For each instruction they count how
   often the number that it reads or writes lies next to the one before. Vectors can be loaded and
   stored only where the innermost loop goes from one number to the next. The part runs in a process
   of its own (apart.h). */
#define CNN_DECLARATIONS_ONLY
#include "../../cnn.c"

#include "apart.h"
#include "report.h"

enum { SITES = 256, IMAGES = 2, SIZE = 6, CHANNELS_IN = 12, CHANNELS_OUT = 20, KERNEL = 3 };
enum { WEIGHTS = KERNEL * KERNEL * CHANNELS_IN * CHANNELS_OUT, OUT_SIZE = SIZE - KERNEL + 1 };
enum { OUTPUTS = IMAGES * OUT_SIZE * OUT_SIZE * CHANNELS_OUT };

void part(Work w); // conv2d_forward_naive()

// The accesses of each instruction to an array. `adjacent`: to the number next to the one before,
// in either direction. `apart`: numbers between two accesses that are not adjacent.
typedef struct Watched {
    const char *name;
    const real *array;
    size_t count, sites, accesses, adjacent;
    const void *site[SITES];
    const real *last[SITES];
    ptrdiff_t apart;
} Watched;

typedef struct Shared {
    Apart apart;
    Watched reads, writes; // when the part has returned
    real in[IMAGES * SIZE * SIZE * CHANNELS_IN], weight[WEIGHTS], out[OUTPUTS];
} Shared;

static Shared *const shared = SHARED_MEMORY;

// What the worker counts; a part does not know where, unlike in the shared memory.
static Watched counted_reads, counted_writes;

static void access_at(Watched *w, const void *address, const void *site) {
    const real *number = address;
    size_t i = 0;
    if (number < w->array || number >= w->array + w->count)
        return;
    while (i < w->sites && w->site[i] != site)
        i++;
    if (i == SITES)
        return; // which check_order() reports
    w->sites += i == w->sites;
    w->accesses++;
    if (w->site[i] == site) {
        const ptrdiff_t apart = number - w->last[i];
        const bool adjacent = apart == 1 || apart == -1;
        w->adjacent += adjacent;
        w->apart = adjacent ? w->apart : apart;
    }
    w->site[i] = site;
    w->last[i] = number;
}

#define HOOK(name, watched)                                       \
    void __tsan_##name(void *);                                   \
    void __tsan_##name(void *address) {                           \
        access_at(watched, address, __builtin_return_address(0)); \
    }
HOOK(read4, &counted_reads)
HOOK(write4, &counted_writes)
HOOK(unaligned_read4, &counted_reads)
HOOK(unaligned_write4, &counted_writes)
HOOK(read_write4, &counted_writes) // of clang

#define NO_HOOK(name)                   \
    void __tsan_##name(void *);         \
    void __tsan_##name(void *address) { \
        (void)address;                  \
    }
NO_HOOK(read1)
NO_HOOK(read2)
NO_HOOK(read8)
NO_HOOK(read16)
NO_HOOK(write1)
NO_HOOK(write2)
NO_HOOK(write8)
NO_HOOK(write16)
NO_HOOK(unaligned_read2)
NO_HOOK(unaligned_read8)
NO_HOOK(unaligned_read16)
NO_HOOK(unaligned_write2)
NO_HOOK(unaligned_write8)
NO_HOOK(unaligned_write16)
NO_HOOK(func_entry)

void __tsan_init(void);
void __tsan_init(void) {}
void __tsan_func_exit(void);
void __tsan_func_exit(void) {}
void __tsan_read_range(void *, size_t);
void __tsan_read_range(void *address, size_t size) {
    (void)address, (void)size;
}
void __tsan_write_range(void *, size_t);
void __tsan_write_range(void *address, size_t size) {
    (void)address, (void)size;
}

static const char *loop_of(const Watched *w) {
    const ptrdiff_t apart = w->apart < 0 ? -w->apart : w->apart;
    if (w->array == shared->out)
        return apart % CHANNELS_OUT == 0 ? "output pixels" : "something else";
    return apart == 0                                  ? "output pixels"
           : apart == CHANNELS_OUT                     ? "input channels"
           : apart % (CHANNELS_IN * CHANNELS_OUT) == 0 ? "taps of the filter"
                                                       : "something else";
}

static void check_order(const Watched *w, size_t least) {
    if (w->sites >= SITES)
        wrong("at least %d instructions access %s: use loops", SITES, w->name);
    if (w->accesses < least)
        wrong("%s was accessed %zu times, expected at least %zu: each product reads its weight, "
              "and each "
              "output is written, with plain loops",
              w->name, w->accesses, least);
    if (2 * w->adjacent < w->accesses)
        wrong("of %zu accesses to %s only %zu are to the number next to the one before; others are "
              "%td numbers "
              "apart: the innermost loop runs over the %s. It has to run over the output channels, "
              "which are "
              "adjacent in weight and in out",
              w->accesses, w->name, w->adjacent, w->apart, loop_of(w));
}

// In the worker
static void run_part(void) {
    Layer l = {.kind = CONV2D, .kernel_size = KERNEL, .stride = 1, .weight_count = WEIGHTS};
    l.in = (Shape){SIZE, SIZE, CHANNELS_IN};
    l.out = (Shape){OUT_SIZE, OUT_SIZE, CHANNELS_OUT};
    counted_reads = (Watched){.array = shared->weight, .count = WEIGHTS};
    counted_writes = (Watched){.array = shared->out, .count = OUTPUTS};
    part((Work){
        .l = &l, .n = IMAGES, .in = shared->in, .weight = shared->weight, .out = shared->out});
    shared->reads = counted_reads;
    shared->writes = counted_writes;
}

// The pointers are the checker's, whatever the worker has left there.
static Watched named(Watched counted, const char *name, const real *array) {
    counted.name = name;
    counted.array = array;
    return counted;
}

int main(int argc, char **argv) {
    if (is_worker(argc, argv))
        serve(run_part);
    start_worker("./lab02", sizeof(Shared));
    const char *end = run_apart();
    if (end)
        wrong("your code %s", end);
    const Watched reads = named(shared->reads, "weight", shared->weight);
    const Watched writes = named(shared->writes, "out", shared->out);
    check_order(&reads, OUTPUTS * KERNEL * KERNEL * CHANNELS_IN / 2);
    check_order(&writes, OUTPUTS / 2);
    send_token();
    return 0;
}
