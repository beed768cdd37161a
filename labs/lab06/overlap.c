/* overlap.c - lab 6: how much of the loader's work is hidden by the device's?

     build/overlap TRACE.json      a trace that ./cnn --trace has written, of one rank

   Prints a row for each step and a line of sums, key=value. A trace has a track (tid) for each of:
   0 the steps, 1 the lines of train(), 2 the device, 3 communication, 4 and up the loader's
   workers; an event has a beginning `ts` and a duration `dur`, in microseconds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct Span {
    double begin, end; // microseconds
} Span;

enum { MOST_EVENTS = 100000 };
typedef struct Spans {
    Span at[MOST_EVENTS];
    size_t count;
} Spans;

/* The time in which something of a and something of b is running. The spans of each are in any
   order, may overlap each other, and may be empty; time counts once, however many of them are
   running. So overlap(a, a) is the time in which anything of a is running.
   (Not static, since make check calls it from another file.) */
double overlap(const Span *a, size_t a_count, const Span *b, size_t b_count) {
    /* LAB 6.3 BEGIN overlap */
    // between one begin or end and the next, nothing changes
    double sum = 0, from = -1e300;
    for (;;) {
        double to = 1e300;
        int in_a = 0, in_b = 0;
        for (size_t i = 0; i < a_count + b_count; i++) {
            const Span s = i < a_count ? a[i] : b[i - a_count];
            to = s.begin > from && s.begin < to ? s.begin : to;
            to = s.end > from && s.end < to ? s.end : to;
            if (s.begin <= from && from < s.end)
                *(i < a_count ? &in_a : &in_b) = 1;
        }
        if (to == 1e300)
            return sum;
        sum += in_a && in_b ? to - from : 0;
        from = to;
    }
    /* LAB 6.3 END */
}

static Spans steps, device, making, uploads;

static void add_event(int track, const char *name, Span s) {
    Spans *to = track == 0                    ? &steps
                : track == 2                  ? &device
                : track < 4                   ? NULL
                : strcmp(name, "upload") == 0 ? &uploads
                                              : &making;
    if (to && to->count < MOST_EVENTS)
        to->at[to->count++] = s;
}

static void read_trace(const char *path) {
    char line[1024], name[128];
    int rank, track;
    double begin, length;
    FILE *file = fopen(path, "r");
    if (!file) {
        perror(path);
        exit(1);
    }
    while (fgets(line, sizeof line, file))
        if (sscanf(
                line,
                "{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%lf,\"dur\":%lf,\"name\":\"%127[^\"]",
                &rank, &track, &begin, &length, name) == 5 &&
            rank == 0)
            add_event(track, name, (Span){begin, begin + length});
    fclose(file);
    if (steps.count == 0) {
        fprintf(stderr, "%s: expected a trace with steps, found none; ./cnn --trace writes one\n",
                path);
        exit(1);
    }
}

static double busy(const Spans *s) {
    return overlap(s->at, s->count, s->at, s->count);
}

static double common(const Spans *a, const Spans *b) {
    return overlap(a->at, a->count, b->at, b->count);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: overlap TRACE.json\n");
        return 2;
    }
    read_trace(argv[1]);
    printf("step       ms  device ms  idle %%  make ms  upload ms\n");
    for (size_t i = 0; i < steps.count; i++) {
        const Span *s = &steps.at[i];
        const double whole = s->end - s->begin, works = overlap(s, 1, device.at, device.count);
        printf("%4zu %8.3f %10.3f %7.1f %8.3f %10.3f\n", i + 1, whole / 1e3, works / 1e3,
               100 * (1 - works / whole), overlap(s, 1, making.at, making.count) / 1e3,
               overlap(s, 1, uploads.at, uploads.count) / 1e3);
    }
    printf("steps=%zu device_us=%.1f make_us=%.1f upload_us=%.1f make_hidden_us=%.1f "
           "upload_hidden_us=%.1f\n",
           steps.count, busy(&device), busy(&making), busy(&uploads), common(&making, &device),
           common(&uploads, &device));
    return 0;
}
