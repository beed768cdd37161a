/* loops.c - parallel() of cnn_kernels.c: each iteration runs once, whichever threads come, and in
   time for whoever waits. */

enum { MOST_ITERATIONS = 100 };

typedef struct Taken {
    size_t times[MOST_ITERATIONS];
    size_t order[MOST_ITERATIONS], count; // iterations in the order in which they ran
} Taken;

static void take(const void *context, size_t i) {
    Taken *t = (Taken *)context;
    __atomic_add_fetch(&t->times[i], 1, __ATOMIC_RELAXED);
    t->order[__atomic_fetch_add(&t->count, 1, __ATOMIC_RELAXED)] = i;
    if (num_threads != 1)
        fail("a body may compute with %zu threads", num_threads);
}

static void expect_once(const Taken *t, size_t count) {
    for (size_t i = 0; i < MOST_ITERATIONS; i++)
        if (t->times[i] != (i < count))
            fail("iteration %zu of %zu ran %zu times", i, count, t->times[i]);
}

// Thousands of loops in a row, so that helpers come late, spin and sleep.
static void test_each_once(void) {
    static const size_t counts[] = {0, 1, 2, 7, MOST_ITERATIONS};
    for (size_t threads = 1; threads <= 5; threads++) {
        set_num_threads(threads);
        for (size_t loop = 0; loop < (quick ? 2000 : 50000); loop++) {
            Taken taken = {0};
            const size_t count = counts[loop % 5];
            snprintf(context, sizeof context, "%zu threads, loop %zu", threads, loop);
            parallel(count, take, &taken);
            expect_once(&taken, count);
        }
        if (num_threads != threads)
            fail("%zu threads became %zu", threads, num_threads);
    }
    set_num_threads(2);
    verdict("loops: each iteration runs once");
}

// Threads that are never started: the loop of the caller ends without them.
static Threads *absent_threads(size_t count) {
    Threads *t = must_alloc(sizeof *t, "a test");
    t->count = count;
    return t;
}

static void test_absent(void) {
    Threads *t = absent_threads(3);
    Taken taken = {0};
    set_num_threads(1);
    for (size_t loop = 1; loop <= 3; loop++) {
        taken = (Taken){0};
        share_loop(t, MOST_ITERATIONS, take, &taken);
        expect_once(&taken, MOST_ITERATIONS);
    }
    // a helper that has missed them all takes none of the next loop as theirs
    taken = (Taken){0};
    const uint32_t loop = publish_loop(t, MOST_ITERATIONS, take, &taken);
    thread_number = 1;
    for (uint32_t late = 0; late < loop; late++)
        run_iterations(t, late);
    thread_number = 0;
    if (taken.count != 0 || t->done != 0)
        fail("late helpers ran %zu iterations of a loop that is not theirs", taken.count);
    run_iterations(t, loop);
    expect_once(&taken, MOST_ITERATIONS);
    set_num_threads(2);
    free(t);
    verdict("loops: a loop ends without those that do not come, and they take none of the next");
}

// The second of two threads runs its four of eight iterations, then those that are left.
static void test_order(void) {
    enum { COUNT = 8 };
    Threads *t = absent_threads(2);
    Taken taken = {0};
    set_num_threads(1);
    thread_number = 1;
    run_iterations(t, publish_loop(t, COUNT, take, &taken));
    thread_number = 0;
    for (size_t k = 0; k < COUNT; k++)
        if (taken.order[k] != (k + COUNT / 2) % COUNT)
            fail("iteration %zu ran as number %zu", taken.order[k], k);
    set_num_threads(2);
    free(t);
    verdict("loops: a thread's own share first, then what others have left");
}

static void outer(const void *context, size_t i) {
    Taken *t = (Taken *)context;
    parallel(MOST_ITERATIONS, take, &t[i]);
}

static void test_nested(void) {
    static Taken taken[6];
    memset(taken, 0, sizeof taken);
    parallel(6, outer, taken);
    for (size_t i = 0; i < 6; i++) {
        expect_once(&taken[i], MOST_ITERATIONS);
        for (size_t k = 0; k < MOST_ITERATIONS; k++)
            if (taken[i].order[k] != k)
                fail("a loop in a loop ran iteration %zu as number %zu", taken[i].order[k], k);
    }
    verdict("loops: a loop within a loop runs on the thread of its body");
}

static size_t count_tasks(void) {
    size_t count = 0;
    DIR *tasks = opendir("/proc/self/task");
    while (tasks && readdir(tasks))
        count++;
    if (tasks)
        closedir(tasks);
    return count;
}

static void *short_replica(void *unused) {
    Taken taken = {0};
    set_num_threads(3);
    parallel(MOST_ITERATIONS, take, &taken);
    expect_once(&taken, MOST_ITERATIONS);
    return unused;
}

static void test_end(void) {
    pthread_t replicas[2];
    const size_t before = count_tasks();
    for (size_t i = 0; i < 2; i++)
        pthread_create(&replicas[i], NULL, short_replica, NULL);
    for (size_t i = 0; i < 2; i++)
        pthread_join(replicas[i], NULL);
    if (count_tasks() != before)
        fail("expected %zu threads, found %zu", before, count_tasks());
    verdict("loops: helpers end with the replica that they compute for");
}

static void test_loops(void) {
    test_each_once();
    test_absent();
    test_order();
    test_nested();
    test_end();
}
