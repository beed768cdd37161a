/* lab04_timer.c - lab 4's timer, on a device that is made up: its clock is ours, so that what is
   right is known exactly. Kernels are queued in no time and done in order, one after the other; the
   host goes on meanwhile.

     lab04_timer 8|9   a test; then it hands on the word that it reads (see check.sh) */
#define CNN_DECLARATIONS_ONLY
#include "../../cnn.c"
#include "tell.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

double seconds_of(const Backend *b, void (*work)(void *job), void *job, size_t times);

static double host;   // seconds: where the host is
static double device; // when the device will have done all that is queued
static double marks[MARKS];
static double duration, first_duration; // of a call of work() on the device; of the first one
static size_t calls;

// Reading a clock takes a moment.
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
    queue(calls++ ? duration : first_duration);
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

// What the student's timer tells, if `first` is how long the first call takes and `before` seconds
// of work are queued already.
static double told(double first, double before, size_t times) {
    const Backend b = {.name = "made up",
                       .kernels = "made up",
                       .synchronize = synchronize,
                       .mark = mark,
                       .elapsed = elapsed,
                       .wait = wait,
                       .copy = copy};
    host = 1000;
    device = 0;
    calls = 0;
    first_duration = first;
    queue(before);
    double seconds = seconds_of(&b, work, NULL, times);
    if (calls < times)
        wrong("work() was called %zu times, expected at least the %zu that were asked for", calls,
              times);
    return seconds;
}

static bool near(double seconds, double wanted) {
    return fabs(seconds - wanted) <= .03 * wanted;
}

// Who does not wait for the device tells how long it takes to queue.
static void check_waited(double seconds) {
    if (seconds < duration / 3)
        wrong("the timer tells %.4f ms a call, but the device is busy for %.3f ms with each: the "
              "clock was read while it still worked. Calls only queue; what waits for the device?",
              1e3 * seconds, 1e3 * duration);
}

static void test_waits(size_t times) {
    double seconds = told(duration, 0, times);
    check_waited(seconds);
    if (near(seconds, duration * (double)times))
        wrong("the timer tells the %.3f ms of all %zu calls together, expected those of one call, "
              "%.3f ms",
              1e3 * seconds, times, 1e3 * duration);
    // one call too many, which warms up, is for the next test
    if (!near(seconds, duration) && !near(seconds, duration * (double)(times + 1) / (double)times))
        wrong("the timer tells %.4f ms a call, expected the %.3f ms that the device is busy with "
              "each of %zu calls",
              1e3 * seconds, 1e3 * duration, times);
}

static void test_counts_no_more(size_t times) {
    const double slow = 0.2, before = 0.5;
    double seconds = told(slow, 0, times);
    check_waited(seconds);
    if (!near(seconds, duration))
        wrong("each call takes the device %.3f ms, the first one %.0f ms; the timer tells %.3f ms: "
              "the slow first call is counted. Make one before the clock starts, and wait for it",
              1e3 * duration, 1e3 * slow, 1e3 * seconds);
    seconds = told(slow, before, times);
    if (!near(seconds, duration))
        wrong(
            "each call takes the device %.3f ms, but it is still busy for %.0f ms with work from "
            "before, and the timer tells %.3f ms: the clock starts too early. Who has to wait for "
            "what, before it is read first?",
            1e3 * duration, 1e3 * before, 1e3 * seconds);
}

int main(int argc, char **argv) {
    unsigned seed = (unsigned)time(NULL) ^ (unsigned)getpid();
    size_t times = 5 + seed % 20;
    duration = 1e-6 * (300 + seed / 32 % 600);
    if (argc == 2 && strcmp(argv[1], "8") == 0)
        test_waits(times);
    else if (argc == 2 && strcmp(argv[1], "9") == 0)
        test_counts_no_more(times);
    else
        wrong("lab04_timer: there is no such test");
    say_word();
    return 0;
}
