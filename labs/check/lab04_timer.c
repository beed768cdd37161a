/* lab04_timer.c - lab 4's timer on a simulated device: its clock is simulated, too, so that the
   right answer is known exactly. Queuing a kernel takes almost no time; kernels are executed in
   order, while the host continues. The timer runs in a process of its own (apart.h).

     lab04_timer 8|9   a test; then it sends back the token that it reads (see check.sh) */
#define CNN_DECLARATIONS_ONLY
#include "../../cnn.c"
#include "apart.h"
#include "report.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

// Weak, since it is not linked to the checker
__attribute__((weak)) double seconds_of(const Device *d, void (*work)(void *job), void *job,
                                        size_t times);

typedef struct Shared {
    Apart apart;
    double duration, first, before; // seconds
    size_t times;
    double seconds; // what the timer returns
    size_t calls;   // of work()
} Shared;

static Shared *const shared = SHARED_MEMORY;

static double duration; // of a call of work() on the device

/* ---- The worker ------------------------------------------------------------------------------ */

static double host;   // the host's time, seconds
static double device; // the time when the device will have finished all queued work
static double marks[MARKS];

// Reading a clock takes time, too.
int lab_clock_gettime(clockid_t id, struct timespec *t) {
    (void)id;
    host += 1e-7;
    t->tv_sec = (time_t)host;
    t->tv_nsec = (long)((host - floor(host)) * 1e9);
    return 0;
}

static void queue(double seconds) {
    host += 2e-6;
    device = fmax(device, host) + seconds;
}

static void work(void *job) {
    (void)job;
    queue(shared->calls++ ? shared->duration : shared->first);
}

static void synchronize(void) {
    host = fmax(host, device) + 1e-6;
}

static void copy(void *to, const void *from, size_t bytes) {
    (void)to, (void)from, (void)bytes;
    synchronize();
}

static void mark(size_t i) {
    marks[i] = fmax(device, host);
}

static void wait(size_t replica, size_t i) {
    (void)replica;
    host = fmax(host, marks[i]);
}

static double elapsed(size_t from, size_t to) {
    wait(0, to);
    return marks[to] - marks[from];
}

static void call_timer(void) {
    const Device made_up = {
        .synchronize = synchronize, .mark = mark, .elapsed = elapsed, .wait = wait, .copy = copy};
    host = 1000;
    device = 0;
    shared->calls = 0;
    queue(shared->before);
    shared->seconds = seconds_of(&made_up, work, NULL, shared->times);
}

/* ---- The checker ----------------------------------------------------------------------------- */

// What the student's timer returns if the first call takes `first` seconds and `before` seconds of
// work are already queued.
static double measured(double first, double before, size_t times) {
    shared->duration = duration;
    shared->first = first;
    shared->before = before;
    shared->times = times;
    const char *end = run_apart();
    if (end)
        wrong("seconds_of() %s", end);
    if (shared->calls < times)
        wrong("work() was called %zu times, expected at least %zu, the argument times",
              shared->calls, times);
    return shared->seconds;
}

static bool near(double seconds, double wanted) {
    return fabs(seconds - wanted) <= .03 * wanted;
}

// A timer that does not wait for the device measures only the queuing.
static void check_waited(double seconds) {
    if (seconds < duration / 3)
        wrong("the timer returns %.4f ms per call, but each keeps the device busy for %.3f ms: the "
              "clock was read while it still worked. Calls only queue; what waits for the device?",
              1e3 * seconds, 1e3 * duration);
}

static void test_waits(size_t times) {
    double seconds = measured(duration, 0, times);
    check_waited(seconds);
    if (near(seconds, duration * (double)times))
        wrong("the timer returns the %.3f ms of all %zu calls together, expected those of one "
              "call, %.3f ms",
              1e3 * seconds, times, 1e3 * duration);
    // counting a warm-up call is the subject of the next test
    if (!near(seconds, duration) && !near(seconds, duration * (double)(times + 1) / (double)times))
        wrong("the timer returns %.4f ms per call, expected the %.3f ms for which each of %zu "
              "calls keeps the device busy",
              1e3 * seconds, 1e3 * duration, times);
}

static void test_counts_no_more(size_t times) {
    const double slow = 0.2, before = 0.5;
    double seconds = measured(slow, 0, times);
    check_waited(seconds);
    if (!near(seconds, duration))
        wrong(
            "each call takes the device %.3f ms, the first one %.0f ms; the timer returns %.3f ms: "
            "the slow first call is counted. Make one before the clock starts, and wait for it",
            1e3 * duration, 1e3 * slow, 1e3 * seconds);
    seconds = measured(slow, before, times);
    if (!near(seconds, duration))
        wrong(
            "each call takes the device %.3f ms, but it is still busy for %.0f ms with earlier "
            "work, and the timer returns %.3f ms: the clock starts too early. Who has to wait for "
            "what before the clock is read the first time?",
            1e3 * duration, 1e3 * before, 1e3 * seconds);
}

int main(int argc, char **argv) {
    if (is_worker(argc, argv))
        serve(call_timer);
    start_worker("./lab04_timer", sizeof(Shared));
    unsigned seed = (unsigned)time(NULL) ^ (unsigned)getpid();
    size_t times = 5 + seed % 20;
    duration = 1e-6 * (300 + seed / 32 % 600);
    if (argc == 2 && strcmp(argv[1], "8") == 0)
        test_waits(times);
    else if (argc == 2 && strcmp(argv[1], "9") == 0)
        test_counts_no_more(times);
    else
        wrong("lab04_timer: there is no such test");
    send_token();
    return 0;
}
