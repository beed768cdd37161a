/* lab06_trace.c - checks the trace of a run, and the overlap that was computed from it:

     lab06_trace STEPS steps.csv overlap.txt <FLAT    FLAT: the trace as json.awk prints it

   Exit status 0: all is well; 1: what is wrong is printed. Times are microseconds. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_EVENTS = 20000, TRACKS = 12, MOST_US = 60000000 };
static const double rounding = .0021; // of two numbers with three decimals

typedef struct Event {
    char phase[8], name[64];
    double begin, length;
    long rank, track;
    bool has_begin, has_length;
} Event;

static Event events[MOST_EVENTS];
static size_t count;

#define WRONG(...) (printf("runs/lab06/trace.json: " __VA_ARGS__), puts(""), exit(1))

static void read_events(void) {
    char line[512], key[32], value[256];
    size_t i;
    while (fgets(line, sizeof line, stdin)) {
        if (sscanf(line, "traceEvents[%zu].%31[^\t]\t%255[^\n]", &i, key, value) != 3)
            continue;
        if (i >= MOST_EVENTS)
            WRONG("more than %d events; trace fewer steps", MOST_EVENTS);
        Event *e = &events[i];
        count = i + 1;
        if (strcmp(key, "ph") == 0)
            snprintf(e->phase, sizeof e->phase, "%.7s", value);
        else if (strcmp(key, "name") == 0)
            snprintf(e->name, sizeof e->name, "%.63s", value);
        else if (strcmp(key, "pid") == 0)
            e->rank = strtol(value, NULL, 10);
        else if (strcmp(key, "tid") == 0)
            e->track = strtol(value, NULL, 10);
        else if (strcmp(key, "ts") == 0)
            e->begin = strtod(value, NULL), e->has_begin = true;
        else if (strcmp(key, "dur") == 0)
            e->length = strtod(value, NULL), e->has_length = true;
    }
}

static bool is_span(const Event *e) {
    return strcmp(e->phase, "X") == 0;
}

static double end_of(const Event *e) {
    return e->begin + e->length;
}

static void check_events(void) {
    for (size_t i = 0; i < count; i++) {
        const Event *e = &events[i];
        if (!is_span(e) && strcmp(e->phase, "M") != 0)
            WRONG("event %zu: ph should be X or M, found \"%s\"", i, e->phase);
        if (is_span(e) &&
            (!e->has_begin || !e->has_length || !(e->begin >= 0) || !(e->length >= 0)))
            WRONG("event %zu, %s: ts and dur should be 0 or more", i, e->name);
        if (is_span(e) &&
            (e->rank != 0 || e->track < 0 || e->track >= TRACKS || end_of(e) > MOST_US))
            WRONG("event %zu, %s: expected one rank, at most %d tracks and %d s", i, e->name,
                  TRACKS, MOST_US / 1000000);
    }
}

// Two events of a track are one after the other, or one is within the other.
static void check_nesting(void) {
    for (size_t i = 0; i < count; i++)
        for (size_t j = i + 1; j < count; j++) {
            const Event *a = &events[i], *b = &events[j];
            if (!is_span(a) || !is_span(b) || a->track != b->track)
                continue;
            const Event *first = a->begin <= b->begin ? a : b, *second = first == a ? b : a;
            if (second->begin < end_of(first) - rounding &&
                end_of(second) > end_of(first) + rounding &&
                second->begin > first->begin + rounding)
                WRONG("track %ld: %s begins within %s and ends after it; events have to nest",
                      a->track, second->name, first->name);
        }
}

static size_t how_many(long track, const char *name) {
    size_t n = 0;
    for (size_t i = 0; i < count; i++)
        n += is_span(&events[i]) && (track < 0 ? events[i].track >= 4 : events[i].track == track) &&
             (!name || strcmp(events[i].name, name) == 0);
    return n;
}

static void check_steps(size_t steps, const char *csv) {
    char line[512];
    FILE *file = fopen(csv, "r");
    if (!file || !fgets(line, sizeof line, file))
        WRONG("cannot read %s", csv);
    if (how_many(0, NULL) != steps)
        WRONG("expected all %zu steps on the track of the steps, found %zu: --trace-steps 0:%zu",
              steps, how_many(0, NULL), steps);
    for (size_t i = 0; i < steps; i++) {
        char name[32];
        double seconds = 0, in_step = 0;
        const Event *step = NULL;
        snprintf(name, sizeof name, "step %zu", i);
        for (size_t j = 0; j < count; j++)
            if (is_span(&events[j]) && events[j].track == 0 && strcmp(events[j].name, name) == 0)
                step = &events[j];
        if (!step)
            WRONG("there is no %s", name);
        if (!fgets(line, sizeof line, file) ||
            sscanf(line, "%*[^,],%*[^,],%*[^,],%*[^,],%*[^,],%*[^,],%lf", &seconds) != 1)
            WRONG("steps.csv has no row for %s", name);
        if (step->length < .95e6 * seconds - 1000 || step->length > 1.05e6 * seconds + 1000)
            WRONG("%s takes %.3f ms, in steps.csv %.3f ms: is the trace of another run?", name,
                  step->length / 1e3, 1e3 * seconds);
        for (size_t j = 0; j < count; j++)
            if (is_span(&events[j]) && events[j].track == 2 &&
                events[j].begin >= step->begin - 1000 && end_of(&events[j]) <= end_of(step) + 1000)
                in_step += events[j].length;
        if (!(in_step > 0) || in_step > step->length + 1000)
            WRONG("%s takes %.3f ms, and the rows of the network in it %.3f ms", name,
                  step->length / 1e3, in_step / 1e3);
    }
    fclose(file);
    static const char *const rows[] = {"conv1 forward", "conv2 backward", "fc1 backward"};
    for (size_t i = 0; i < 3; i++)
        if (how_many(2, rows[i]) != steps)
            WRONG("expected %zu times \"%s\" on the track of the device, found %zu", steps, rows[i],
                  how_many(2, rows[i]));
    if (how_many(-1, "make a batch") != steps || how_many(-1, "upload") != steps)
        WRONG("expected %zu batches that a loader's worker makes and uploads, found %zu and %zu: "
              "--resident off",
              steps, how_many(-1, "make a batch"), how_many(-1, "upload"));
}

// A unit of time for each microsecond: bit 0: the device works; 1: a batch is made; 2: an upload
static unsigned char units[MOST_US];

static void paint(void) {
    for (size_t i = 0; i < count; i++) {
        const Event *e = &events[i];
        const int bit = e->track == 2                    ? 1
                        : e->track < 4                   ? 0
                        : strcmp(e->name, "upload") == 0 ? 4
                                                         : 2;
        for (size_t t = (size_t)e->begin; is_span(e) && t < (size_t)end_of(e); t++)
            units[t] |= (unsigned char)bit;
    }
}

static double painted(int bits) {
    double sum = 0;
    for (size_t t = 0; t < MOST_US; t++)
        sum += (units[t] & bits) == bits;
    return sum;
}

static void check_overlaps(const char *path) {
    static const struct {
        const char *key;
        int bits;
    } sums[] = {{"device_us", 1},
                {"make_us", 2},
                {"upload_us", 4},
                {"make_hidden_us", 3},
                {"upload_hidden_us", 5}};
    char text[8192] = "";
    FILE *file = fopen(path, "r");
    const size_t got = file ? fread(text, 1, sizeof text - 1, file) : 0;
    if (got == 0)
        WRONG("there is no overlap.txt beside it; make overlap TRACE=runs/lab06/trace.json writes "
              "it");
    paint();
    for (size_t i = 0; i < sizeof sums / sizeof *sums; i++) {
        char key[40];
        snprintf(key, sizeof key, " %s=", sums[i].key);
        const char *at = strstr(text, key);
        const double found = at ? strtod(at + strlen(key), NULL) : -1, want = painted(sums[i].bits);
        if (found < .99 * want - (double)count || found > 1.01 * want + (double)count)
            WRONG("overlap.txt: %s should be about %.0f, found %.1f", sums[i].key, want, found);
    }
}

int main(int argc, char **argv) {
    if (argc != 4)
        return 2;
    read_events();
    check_events();
    check_nesting();
    check_steps(strtoul(argv[1], NULL, 10), argv[2]);
    check_overlaps(argv[3]);
    return 0;
}
