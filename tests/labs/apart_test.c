/* apart_test.c - what a worker of labs/check/apart.h can reach: `apart_test WORKER ATTACK` prints
   what the attack has found, and how the worker ended. See test_apart.sh. */
#define _GNU_SOURCE 1
#include "../../labs/check/apart.h"
#include "../../labs/check/report.h"
#include <fcntl.h>
#include <stdint.h>

enum { MOST_REGIONS = 256, DESCRIPTORS = 256 };

typedef struct Shared {
    Apart apart;
    char attack[16];
    long found;           // descriptors, bytes or places, as the attack says
    uint32_t inverted[2]; // the secret, so that the worker knows what to look for
} Shared;

static Shared *const shared = SHARED_MEMORY;
static uint64_t secret; // the checker's, like a right result

/* ---- The worker ------------------------------------------------------------------------------ */

static struct {
    uintptr_t begin, end;
} regions[MOST_REGIONS]; // that can be read, before nothing can be opened any more
static size_t region_count;

static void note_regions(void) {
    char line[512], mode[8];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps && region_count < MOST_REGIONS && fgets(line, sizeof line, maps)) {
        const int read = sscanf(line, "%lx-%lx %7s", &regions[region_count].begin,
                                &regions[region_count].end, mode);
        region_count += read == 3 && mode[0] == 'r' && !strstr(line, "[v");
    }
    if (maps)
        fclose(maps);
}

static void write_everywhere(void) {
    for (int file = 0; file < DESCRIPTORS; file++)
        shared->found += file > 2 && write(file, "passed\n", 7) == 7;
}

static void read_everywhere(void) {
    char text[64];
    for (int file = 0; file < DESCRIPTORS; file++)
        shared->found += file != 1 && file != 2 && read(file, text, sizeof text) > 0;
}

// What the checker has, and in place of what is closed
static void open_everything(void) {
    static const char *const names[] = {"mem", "maps", "environ", "fd/0", "fd/8", "fd/9", "exe"};
    char path[64];
    for (size_t i = 0; i < 2 * sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", (int)getppid(), names[i / 2]);
        shared->found += open(path, i % 2 ? O_RDWR : O_RDONLY) >= 0;
    }
    close(0);
    shared->found += open("/dev/null", O_RDONLY) >= 0;
}

static void search_memory(void) {
    const uint32_t half = ~shared->inverted[0], other = ~shared->inverted[1];
    for (size_t r = 0; r < region_count; r++)
        for (uintptr_t at = regions[r].begin; at + sizeof secret <= regions[r].end;
             at += sizeof half) {
            const volatile uint32_t *words = (const volatile uint32_t *)at;
            shared->found += words[0] == half && words[1] == other;
        }
}

static void attack(void) {
    const char *name = shared->attack;
    if (strcmp(name, "writes") == 0)
        write_everywhere();
    if (strcmp(name, "reads") == 0)
        read_everywhere();
    if (strcmp(name, "opens") == 0)
        open_everything();
    if (strcmp(name, "searches") == 0)
        search_memory();
    if (strcmp(name, "ends") == 0) {
        puts("passed");
        exit(0);
    }
    while (strcmp(name, "loops") == 0)
        ;
    if (strcmp(name, "null") == 0)
        *(volatile int *)0 = 1;
    if (strcmp(name, "far") == 0)
        *(volatile int *)(uintptr_t)(-1 - 4095) = 1;
    if (strcmp(name, "aborts") == 0)
        abort();
}

/* ---- The checker ----------------------------------------------------------------------------- */

int main(int argc, char **argv) {
    if (is_worker(argc, argv)) {
        note_regions();
        serve(attack);
    }
    FILE *random = fopen("/dev/urandom", "r");
    if (argc != 3 || !random || fread(&secret, sizeof secret, 1, random) != 1)
        wrong("usage: apart_test WORKER ATTACK");
    start_worker(argv[1], sizeof(Shared));
    snprintf(shared->attack, sizeof shared->attack, "%s", argv[2]);
    for (size_t half = 0; half < 2; half++) {
        uint32_t word;
        memcpy(&word, (char *)&secret + half * sizeof word, sizeof word);
        shared->inverted[half] = ~word;
    }
    const char *end = run_apart_for(2);
    printf("found %ld, %s\n", shared->found, end ? end : "returned");
    send_token();
    return 0;
}
