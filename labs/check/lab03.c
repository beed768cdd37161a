/* lab03.c - tests of the loader's queue for `make check LAB=3`: `lab03 TEST`.

   The tests replace the augmentation by observe(), which is called for each image that is made. It
   counts the call, checks it and can delay it, so the tests see what the workers do, whatever their
   code looks like. The first error ends the program with a line that names it.

   A test runs in a process of its own (apart.h), beside the threads of the queue. It returns a
   digest of each batch that it got; how many there are, and what is in them, is compared here. */

#define _GNU_SOURCE 1
#include <pthread.h>
#include <stdbool.h>
#include <time.h>
#include <unistd.h>

// Random delays before and after locking, and spurious wakeups, which POSIX allows.
static bool restless;

static bool is_restless(void) {
    return __atomic_load_n(&restless, __ATOMIC_RELAXED);
}

static void nap(void) {
    static __thread unsigned calls;
    if (is_restless() && ++calls % 3 == 0)
        usleep(calls * 37 % 200);
}

// The linker puts these in place of pthread's functions: -Wl,--wrap=pthread_mutex_lock and so on.
int __real_pthread_mutex_lock(pthread_mutex_t *);
int __real_pthread_mutex_unlock(pthread_mutex_t *);
int __real_pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *);
int __wrap_pthread_mutex_lock(pthread_mutex_t *);
int __wrap_pthread_mutex_unlock(pthread_mutex_t *);
int __wrap_pthread_cond_wait(pthread_cond_t *, pthread_mutex_t *);

int __wrap_pthread_mutex_lock(pthread_mutex_t *lock) {
    nap();
    return __real_pthread_mutex_lock(lock);
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t *lock) {
    int status = __real_pthread_mutex_unlock(lock);
    nap();
    return status;
}

int __wrap_pthread_cond_wait(pthread_cond_t *changed, pthread_mutex_t *lock) {
    if (!is_restless())
        return __real_pthread_cond_wait(changed, lock);
    struct timespec soon;
    clock_gettime(CLOCK_REALTIME, &soon);
    soon.tv_nsec += 500 * 1000;
    soon.tv_sec += soon.tv_nsec / 1000000000;
    soon.tv_nsec %= 1000000000;
    pthread_cond_timedwait(changed, lock, &soon);
    return 0;
}

#define CNN_NO_MAIN
#define CNN_NO_KERNELS // the queue needs no fast layers
#include "../../cnn.c"
#include "apart.h"
#include "report.h"

// A batch that loader_next() has returned
typedef struct Returned {
    size_t size, epoch, number;
    uint64_t digest; // of its images and labels
} Returned;

enum { MOST_RETURNED = 65536, NO_LIMIT_S = 1000000 };

typedef struct Shared {
    Apart apart;
    size_t test; // its number
    int patience_s;
    bool silent;     // nothing has happened for patience_s
    char said[4096]; // what is wrong
    size_t count;
    Returned returned[MOST_RETURNED];
} Shared;

static Shared *const shared = SHARED_MEMORY;

/* ---- What observe() sees --------------------------------------------------------------------- */

enum { IMAGES = 103, PIXELS = 8, MAX_EPOCHS = 120 };
static int patience_s = 6; // PATIENCE_S of lab03.sh, after a deadlock in an earlier test

typedef enum { ELSEWHERE, IN_START, IN_NEXT, IN_FREE } Whereabouts;

static struct Seen {
    Loader *loader;                // apart from this: the parts get a pointer to it
    size_t size, batches, workers; // of the loader: images in a batch, batches in an epoch
    size_t epoch, due;             // the epoch, and the batch that loader_next() has to return
    Whereabouts place;             // which function the caller is in
    uint32_t order[IMAGES];        // the epoch's permutation
    unsigned begun[MAX_EPOCHS][IMAGES], made[MAX_EPOCHS][IMAGES]; // how many times, by position
    size_t inside, most_inside;     // threads that make a batch, now and at most
    void (*delay)(size_t position); // what a test does while the image at this position is made
} * now_seen; // a new one for each loader: workers of an earlier one may still sleep
#define seen (*now_seen)
static size_t events;                // constant while nothing happens
static _Thread_local bool is_caller; // of loader_next()

#define READ(x) __atomic_load_n(&(x), __ATOMIC_RELAXED) // relaxed: hides no race
#define WRITE(x, value) __atomic_store_n(&(x), value, __ATOMIC_RELAXED)
#define ADD(x, value) __atomic_add_fetch(&(x), value, __ATOMIC_RELAXED)
// Only watch() synchronizes with the others, and reports a deadlock even where there is a race.
#define HAPPENED() ((void)__atomic_add_fetch(&events, 1, __ATOMIC_RELEASE))
#define UNWATCHED __attribute__((no_sanitize("thread")))

static size_t images_of(size_t number) {
    return min_size(seen.size, IMAGES - number * seen.size);
}

// How many images of a batch are counted there.
static size_t count_images(unsigned counts[MAX_EPOCHS][IMAGES], size_t number) {
    size_t count = 0;
    for (size_t i = 0; i < images_of(number); i++)
        count += READ(counts[seen.epoch][number * seen.size + i]) > 0;
    return count;
}

static void check_begin(size_t epoch, size_t position) {
    size_t number = position / seen.size, due = READ(seen.due), slots = seen.loader->slots;
    if (position >= IMAGES)
        wrong("batch %zu was begun, but the epoch has only batches 0 to %zu", number,
              seen.batches - 1);
    if (is_caller)
        wrong("batch %zu was made by the thread that called loader_next(), which cannot train "
              "meanwhile: workers have to make the batches",
              number);
    if (epoch != READ(seen.epoch))
        wrong("a worker began batch %zu of an epoch that was already left", number);
    if (number >= due + slots)
        wrong("batch %zu was begun while batch %zu was in use: with %zu slots, both lie in slot "
              "%zu, so the batch in use is overwritten",
              number, due, slots, number % slots);
    if (ADD(seen.begun[epoch][position], 1) > 1)
        wrong("batch %zu was made twice: two workers took the same number", number);
}

static void observe(uint8_t *out, const uint8_t *in, Shape s, const RandomKey *key) {
    const size_t epoch = key->epoch, position = key->first;
    HAPPENED();
    check_begin(epoch, position);
    size_t inside = ADD(seen.inside, 1);
    if (inside > READ(seen.most_inside))
        WRITE(seen.most_inside, inside);
    void (*delay)(size_t) = READ(seen.delay);
    if (delay)
        delay(position);
    memcpy(out, in, shape_size(s));
    out[1] = (uint8_t)epoch;
    out[2] = (uint8_t)position;
    ADD(seen.inside, -1);
    if (epoch != READ(seen.epoch))
        wrong(
            "a worker was still making batch %zu of epoch %zu when loader_start() had begun epoch "
            "%zu: loader_start() waits until loader->busy, the workers that make a batch, is 0",
            position / seen.size, epoch, READ(seen.epoch));
    ADD(seen.made[epoch][position], 1);
    HAPPENED();
}

/* ---- Nothing happens any more: why? ---------------------------------------------------------- */

UNWATCHED static _Noreturn void explain_next(const Loader *l) {
    size_t due = READ(seen.due);
    if (l->filled[due % l->slots] == due + 1)
        wrong(
            "deadlock: batch %zu is filled, but the caller of loader_next() still sleeps: nothing "
            "woke it. Does a signal wake one thread where several wait for different conditions?",
            due);
    if (count_images(seen.begun, due) == 0)
        wrong(
            "deadlock: loader_next() waits for batch %zu, but all workers sleep or have ended, and "
            "none makes it",
            due);
    if (count_images(seen.made, due) == images_of(due))
        wrong("deadlock: batch %zu is made, but filled[%zu] is %zu, not %zu: loader_next() waits "
              "forever",
              due, due % l->slots, l->filled[due % l->slots], due + 1);
    wrong("batch %zu was begun, but never completed", due);
}

UNWATCHED static _Noreturn void explain_silence(void) {
    static const char *const names[] = {"the test", "loader_start()", "loader_next()",
                                        "loader_free()"};
    Loader *l = seen.loader;
    Whereabouts place = READ(seen.place);
    if (pthread_mutex_trylock(&l->lock) != 0)
        wrong("deadlock in %s: a thread holds the lock and never unlocks it", names[place]);
    if (place == IN_NEXT)
        explain_next(l);
    if (place == IN_START && l->busy > 0)
        wrong(
            "deadlock: loader_start() waits for busy workers, and busy stays %zu though none makes "
            "a batch",
            l->busy);
    if (place == IN_START)
        wrong("deadlock: no worker is busy any more, but nothing woke loader_start()");
    if (place == IN_FREE)
        wrong("deadlock: quit is set, but loader_free() waits for a worker that does not end");
    wrong("nothing happened for %d s", patience_s);
}

static void *watch(void *unused) {
    (void)unused;
    size_t before = 0, quiet_s = 0;
    for (; quiet_s < (size_t)patience_s; quiet_s++) {
        sleep(1);
        size_t count = __atomic_load_n(&events, __ATOMIC_ACQUIRE);
        if (before != count)
            quiet_s = 0;
        before = count;
    }
    shared->silent = true;
    explain_silence();
}

// Waits until `condition` holds; false: it does not, even shortly before watch() gives up.
#define HAPPENS(condition)                      \
    ({                                          \
        double limit = now() + patience_s - 1.; \
        while (!(condition) && now() < limit)   \
            usleep(1000);                       \
        (condition);                            \
    })

/* ---- The caller ------------------------------------------------------------------------------ */

static const DatasetInfo info = {
    .name = "numbered", .shape = {2, 4, 1}, .classes = 10, .counts = {IMAGES}, .std = {1, 1, 1}};
static const uint64_t seed = 7;

static uint8_t images[IMAGES * PIXELS], labels[IMAGES];
static const Dataset data = {&info, IMAGES, images, labels};

// Image number i holds i in its first byte, and a pattern of its own after it.
static void make_images(void) {
    for (size_t i = 0; i < IMAGES * PIXELS; i++)
        images[i] = (uint8_t)(i / PIXELS * (1 + i % PIXELS * 3));
    for (size_t i = 0; i < IMAGES; i++)
        labels[i] = (uint8_t)(i % 10);
}

static void enter(Whereabouts place) {
    WRITE(seen.place, place);
    HAPPENED();
}

static void open_loader(size_t size, size_t workers, void (*delay)(size_t position)) {
    const Consumer on_cpu = {.device = &cpu_device, .ranks = 1};
    now_seen = must_alloc(sizeof *now_seen, "a test");
    seen.size = size;
    seen.batches = ceil_div(IMAGES, size);
    seen.workers = workers;
    seen.loader = must_alloc(sizeof *seen.loader, "a test");
    is_caller = true;
    seen.delay = delay;
    loader_plan(seen.loader, &data, size, workers, AUGMENT_NONE, on_cpu);
    seen.loader->augment = observe;
    loader_init(seen.loader);
}

// Each epoch of a loader has another number: 1, 2, ...
static void start_epoch_at(size_t first) {
    enter(IN_START);
    size_t epoch = seen.epoch + 1;
    for (size_t i = 0; i < IMAGES; i++)
        seen.order[i] = (uint32_t)i;
    shuffle(seen.order, IMAGES, seed, epoch);
    // between the last worker of the old epoch and the first of the new one: within loader_start()
    pthread_mutex_lock(&seen.loader->lock);
    seen.loader->started = seen.loader->batches = 0;
    while (seen.loader->busy > 0)
        pthread_cond_wait(&seen.loader->changed, &seen.loader->lock);
    WRITE(seen.epoch, epoch);
    WRITE(seen.due, first);
    pthread_mutex_unlock(&seen.loader->lock);
    loader_start(seen.loader, seed, epoch, first);
    enter(ELSEWHERE);
}

// Checks the images in a batch's slot. `when`: for the message.
static void check_images(const Batch *batch, size_t number, const char *when) {
    for (size_t i = 0; i < images_of(number); i++) {
        const size_t position = number * seen.size + i, image = seen.order[position];
        uint8_t want[PIXELS], got[PIXELS];
        memcpy(want, images + image * PIXELS, PIXELS);
        want[1] = (uint8_t)seen.epoch;
        want[2] = (uint8_t)position;
        for (size_t p = 0; p < PIXELS; p++)
            got[p] = (uint8_t)lround((double)batch->images[i * PIXELS + p] * 255);
        if (memcmp(got, want, PIXELS) == 0 && batch->labels[i] == image % 10)
            continue;
        if (got[1] == seen.epoch && got[2] != position)
            wrong("batch %zu %s: its image %zu is one of batch %zu", number, when, i,
                  got[2] / seen.size);
        if (got[1] != seen.epoch)
            wrong("batch %zu %s: its image %zu is of an earlier epoch", number, when, i);
        wrong("batch %zu %s: its image %zu should be number %zu with label %zu, and is number %u "
              "with label %u",
              number, when, i, image, image % 10, got[0], batch->labels[i]);
    }
}

static void check_batch(const Batch *batch, size_t number) {
    size_t ready = count_images(seen.made, number);
    if (!batch)
        wrong("loader_next() returned NULL, the end of the epoch, instead of batch %zu of %zu",
              number, seen.batches);
    if (batch->number != number && batch != &seen.loader->ring[number % seen.loader->slots])
        wrong("batch %zu was returned instead of batch %zu: the order has to be that of the "
              "permutation, whichever batch is filled first",
              batch->number, number);
    if (count_images(seen.begun, number) == 0)
        wrong(
            "batch %zu was returned before any worker had begun it: the slot holds an older batch",
            number);
    if (ready < images_of(number))
        wrong("batch %zu was returned while it was being written: %zu of its %zu images were "
              "complete",
              number, ready, images_of(number));
    if (batch->number != number || batch->n != images_of(number))
        wrong("batch %zu has %zu images, expected %zu", number, batch->n, images_of(number));
    check_images(batch, number, "is not what the permutation says");
}

static const Batch *next_batch_of_loader(size_t number) {
    WRITE(seen.due, number);
    enter(IN_NEXT);
    const Batch *batch = loader_next(seen.loader);
    enter(ELSEWHERE);
    return batch;
}

// Continues a digest with a byte (FNV-1a).
static uint64_t digest_byte(uint64_t digest, uint8_t byte) {
    return (digest ^ byte) * 0x100000001B3;
}

static void note_returned(const Batch *batch, size_t number) {
    Returned r = {.size = seen.size, .epoch = seen.epoch, .number = number};
    for (size_t i = 0; i < batch->n * PIXELS; i++)
        r.digest = digest_byte(r.digest, (uint8_t)lround((double)batch->images[i] * 255));
    for (size_t i = 0; i < batch->n; i++)
        r.digest = digest_byte(r.digest, batch->labels[i]);
    if (shared->count < MOST_RETURNED)
        shared->returned[shared->count++] = r;
}

static const Batch *take_batch(size_t number) {
    const Batch *batch = next_batch_of_loader(number);
    check_batch(batch, number);
    note_returned(batch, number);
    return batch;
}

static void finish_epoch_from(size_t first) {
    for (size_t number = first; number < seen.batches; number++)
        take_batch(number);
    for (size_t again = 0; again < 2; again++)
        if (next_batch_of_loader(seen.batches - 1))
            wrong("the epoch has %zu batches, but loader_next() returns another one after them",
                  seen.batches);
}

/* Ends the epoch and tells the workers to quit, without waiting for them: only test_end() requires
   that they do, in end_loader(). What they use stays allocated. */
static void close_loader(void) {
    Loader *l = seen.loader;
    WRITE(seen.delay, NULL);
    enter(IN_START);
    pthread_mutex_lock(&l->lock);
    l->started = l->batches = 0;
    while (l->busy > 0)
        pthread_cond_wait(&l->changed, &l->lock);
    l->quit = true;
    pthread_cond_broadcast(&l->changed);
    pthread_mutex_unlock(&l->lock);
    enter(ELSEWHERE);
}

static void end_loader(void) {
    WRITE(seen.delay, NULL);
    enter(IN_FREE);
    loader_free(seen.loader);
    enter(ELSEWHERE);
}

static void read_epochs(size_t size, size_t workers, size_t epochs) {
    open_loader(size, workers, NULL);
    for (size_t e = 0; e < epochs; e++) {
        start_epoch_at(0);
        finish_epoch_from(0);
    }
    close_loader();
}

/* ---- The tests ------------------------------------------------------------------------------- */

static const size_t some_workers[] = {1, 2, 3, 8};
enum { SOME = sizeof some_workers / sizeof *some_workers };

static void test_order(void) {
    for (size_t w = 0; w < SOME; w++)
        read_epochs(8, some_workers[w], 4);
}

static void test_sizes(void) {
    static const size_t sizes[] = {1, 2, 25, IMAGES - 1, IMAGES, 2 * IMAGES};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (size_t w = 0; w < SOME; w++)
            read_epochs(sizes[i], some_workers[w], 3);
}

// As in a run that resumes from a checkpoint in the middle of an epoch.
static void test_first(void) {
    for (size_t w = 0; w < SOME; w++) {
        open_loader(8, some_workers[w], NULL);
        for (size_t first = 1; first < seen.batches; first += 5) {
            start_epoch_at(first);
            finish_epoch_from(first);
        }
        close_loader();
    }
}

static void test_restless(void) {
    WRITE(restless, true);
    for (size_t w = 0; w < SOME; w++) {
        read_epochs(8, some_workers[w], 5);
        read_epochs(1, some_workers[w], 2);
    }
    WRITE(restless, false);
}

static bool is_made(size_t first, size_t end) { // all batches from first to end - 1
    for (size_t number = first; number < end; number++)
        if (count_images(seen.made, number) < images_of(number))
            return false;
    return true;
}

// While a batch is in use, all other slots are filled, and its own is not overwritten.
static void test_ahead(void) {
    for (size_t w = 0; w < SOME; w++) {
        open_loader(4, some_workers[w], NULL);
        start_epoch_at(0);
        const size_t slots = seen.loader->slots;
        for (size_t number = 0; number + slots < seen.batches; number++) {
            const Batch *batch = take_batch(number);
            if (!HAPPENS(is_made(number + 1, number + slots)))
                wrong("while batch %zu was in use, the workers (%zu) did not fill the other %zu "
                      "slots: batch %zu was not prefetched",
                      number, seen.workers, slots - 1, number + slots - 1);
            usleep(number < 3 ? 50000 : 1000); // time enough to fill one slot too many
            check_images(batch, number, "was overwritten while it was in use");
        }
        close_loader();
    }
}

static void wait_for_all_workers(size_t position) {
    (void)position;
    if (!HAPPENS(READ(seen.most_inside) >= seen.workers))
        wrong("of %zu workers only %zu made a batch at the same time, though slots were free: is "
              "the lock held while a batch is made?",
              seen.workers, READ(seen.most_inside));
}

static void test_concurrent(void) {
    for (size_t w = 0; w < SOME; w++) {
        open_loader(4, some_workers[w], wait_for_all_workers);
        start_epoch_at(0);
        finish_epoch_from(0);
        close_loader();
    }
}

static void delay_first(size_t position) {
    if (position > 0)
        return;
    HAPPENS(READ(seen.place) == IN_NEXT);
    if (!HAPPENS(is_made(1, seen.loader->slots)))
        wrong("while one worker made batch 0, which took long, the others did not make batches 1 "
              "to %zu: loader_next() increments `handed` and wakes the workers before it waits",
              seen.loader->slots - 1);
    usleep(20000);
}

static void delay_last(size_t position) {
    if (position < (seen.batches - 1) * seen.size)
        return;
    HAPPENS(READ(seen.place) == IN_NEXT && READ(seen.due) == seen.batches - 1);
    usleep(20000); // until the caller sleeps as well
}

// The caller waits for a slow batch while the other workers wait for a slot or for the next epoch.
static void test_slow_batch(void) {
    for (size_t w = 1; w < SOME; w++) {
        open_loader(4, some_workers[w], delay_first);
        start_epoch_at(0);
        finish_epoch_from(0);
        WRITE(seen.delay, delay_last);
        for (size_t round = 0; round < 5; round++) {
            start_epoch_at(0);
            finish_epoch_from(0);
        }
        close_loader();
    }
}

static void delay_some(size_t position) {
    if (position % 5 == 0)
        usleep(2000);
}

static void test_left_early(void) {
    for (size_t w = 0; w < SOME; w++) {
        open_loader(8, some_workers[w], delay_some);
        for (size_t taken = 0; taken < seen.batches; taken += 1 + taken / 4) {
            start_epoch_at(0);
            for (size_t number = 0; number < taken; number++)
                take_batch(number);
        }
        start_epoch_at(0);
        finish_epoch_from(0);
        close_loader();
    }
}

static void test_end(void) {
    for (size_t w = 0; w < SOME; w++) {
        open_loader(8, some_workers[w], NULL); // before the first epoch
        end_loader();
        open_loader(8, some_workers[w], delay_some); // while batches are made
        start_epoch_at(0);
        take_batch(0);
        end_loader();
        open_loader(8, some_workers[w], NULL); // while the ring is full
        start_epoch_at(0);
        take_batch(0);
        HAPPENS(is_made(0, min_size(seen.loader->slots, seen.batches)));
        usleep(20000);
        end_loader();
    }
    open_loader(8, 3, NULL); // at the end of an epoch
    start_epoch_at(0);
    finish_epoch_from(0);
    end_loader();
}

static double cpu_s(void) {
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static long switches(void) { // how many times a thread of ours left its core
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return usage.ru_nvcsw + usage.ru_nivcsw;
}

// Ends the test if threads that should sleep have used the CPU since then.
static void check_sleep(const char *who, double since, double cpu_since, long switches_since) {
    const double wall = now() - since, cpu = cpu_s() - cpu_since;
    if (cpu > .1 * wall)
        wrong("%s for %.2f s and used %.2f s of CPU time: they poll instead of sleeping in "
              "pthread_cond_wait(), and take a core from the threads that compute",
              who, wall, cpu);
    if (switches() - switches_since > 40)
        wrong(
            "%s for %.2f s and woke up %ld times meanwhile: they poll; pthread_cond_wait() sleeps "
            "until something has changed",
            who, wall, switches() - switches_since);
}

static void measure_during_last(size_t position) {
    if (position != (seen.batches - 1) * seen.size)
        return;
    HAPPENS(READ(seen.place) == IN_NEXT && READ(seen.due) == seen.batches - 1);
    usleep(20000);
    double since = now(), cpu_since = cpu_s();
    long switches_since = switches();
    usleep(300000);
    check_sleep("the caller and idle workers waited for a slow batch", since, cpu_since,
                switches_since);
}

static void test_sleep(void) {
    for (size_t w = 0; w < SOME; w++) {
        open_loader(4, some_workers[w], measure_during_last);
        start_epoch_at(0);
        take_batch(0);
        HAPPENS(is_made(0, seen.loader->slots));
        usleep(20000);
        double since = now(), cpu_since = cpu_s();
        long switches_since = switches();
        usleep(300000);
        check_sleep("workers waited because the ring was full", since, cpu_since, switches_since);
        finish_epoch_from(1);
        close_loader();
    }
}

// For the thread sanitizer, which finds unprotected accesses even if all results are right.
static void test_races(void) {
    test_order();
    test_left_early();
    test_restless();
}

static const struct {
    const char *name;
    void (*run)(void);
    size_t batches; // that it takes
} tests[] = {{"order", test_order, 208},
             {"sizes", test_sizes, 1968},
             {"first", test_first, 84},
             {"restless", test_restless, 1084},
             {"ahead", test_ahead, 72},
             {"concurrent", test_concurrent, 104},
             {"slow_batch", test_slow_batch, 468},
             {"left_early", test_left_early, 192},
             {"end", test_end, 21},
             {"sleep", test_sleep, 104},
             {"races", test_races, 1484}};
enum { TESTS = sizeof tests / sizeof *tests };

/* ---- The two processes ----------------------------------------------------------------------- */

// In the worker: runs a test.
static void run_test(void) {
    static pthread_t watcher;
    if (!verdict_file) {
        verdict_file = fmemopen(shared->said, sizeof shared->said, "w");
        patience_s = shared->patience_s;
        make_images();
        if (pthread_create(&watcher, NULL, watch, NULL) != 0)
            wrong("no thread can be started");
    }
    tests[shared->test].run();
}

// The digest that a batch has to have
static uint64_t right_digest(const Returned *r) {
    uint32_t order[IMAGES];
    uint64_t digest = 0;
    const size_t first = r->number * r->size, end = min_size(first + r->size, IMAGES);
    for (size_t i = 0; i < IMAGES; i++)
        order[i] = (uint32_t)i;
    shuffle(order, IMAGES, seed, r->epoch);
    for (size_t position = first; position < end; position++)
        for (size_t p = 0; p < PIXELS; p++) {
            uint8_t pixel = images[order[position] * PIXELS + p];
            pixel = p == 1 ? (uint8_t)r->epoch : p == 2 ? (uint8_t)position : pixel;
            digest = digest_byte(digest, pixel);
        }
    for (size_t position = first; position < end; position++)
        digest = digest_byte(digest, labels[order[position]]);
    return digest;
}

static void note_deadlock(void) { // lab03.sh is less patient from now on
    FILE *note = fopen("deadlock", "w");
    if (note)
        fclose(note);
}

static void check_returned(size_t test) {
    const size_t count = min_size(shared->count, MOST_RETURNED), want = tests[test].batches;
    for (size_t i = 0; i < count; i++) {
        const Returned r = shared->returned[i];
        if (r.digest != right_digest(&r))
            wrong("batch %zu of epoch %zu is not what the permutation says", r.number, r.epoch);
    }
    if (count != want)
        wrong("the test ended after %zu batches, expected %zu: does your code end it?", count,
              want);
}

static void try_test(size_t test) {
    shared->test = test;
    shared->count = 0;
    const char *end = run_apart_for(NO_LIMIT_S); // a deadlock is watch()'s business
    if (shared->silent)
        note_deadlock();
    shared->said[sizeof shared->said - 1] = 0;
    if (*shared->said)
        wrong("%.*s", (int)strcspn(shared->said, "\n"), shared->said);
    if (end)
        wrong("your code %s", end);
    check_returned(test);
}

static size_t test_named(const char *name) {
    for (size_t t = 0; t < TESTS; t++)
        if (strcmp(name, tests[t].name) == 0)
            return t;
    wrong("there is no test \"%s\"", name);
}

// lab03 WORKER TEST...: runs the tests that are named, then sends the checker's token.
int main(int argc, char **argv) {
    if (is_worker(argc, argv))
        serve(run_test);
    if (argc < 2)
        wrong("usage: lab03 WORKER TEST...");
    start_worker(argv[1], sizeof(Shared));
    shared->patience_s = getenv("PATIENCE_S") ? atoi(getenv("PATIENCE_S")) : patience_s;
    make_images();
    for (int a = 2; a < argc; a++)
        try_test(test_named(argv[a]));
    send_token();
    return 0;
}
