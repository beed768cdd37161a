/* helpers.c - sections 1 and 3 of cnn.c: random numbers, and loops whose iterations are stolen
   by threads that have finished their own. */

// Known answers from the Random123 library.
static void test_philox(void) {
    static const uint32_t want[2][4] = {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
                                        {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}};
    uint32_t got[2][4], f = UINT32_MAX;
    philox4x32(got[0], 0, 0, 0, 0, 0);
    philox4x32(got[1], f, f, f, f, UINT64_MAX);
    if (memcmp(got, want, sizeof want) != 0)
        fail("found %08x... and %08x...", got[0][0], got[1][0]);
    verdict("philox known answers");
}

static void write_text(const char *folder, const char *file, const char *text) {
    char path[PATH_SIZE];
    join_path(path, folder, file);
    for (char *at = path + strlen(folder) + 1; (at = strchr(at, '/')); at++) {
        *at = 0;
        mkdir(path, 0777);
        *at = '/';
    }
    FILE *f = fopen(path, "w");
    if (!f || fputs(text, f) < 0 || fclose(f) != 0)
        fail("cannot write %s", path);
}

// The limits of the process's own group in version 2 of cgroups
static void test_limits(void) {
    char folder[PATH_SIZE], table[PATH_SIZE], command[PATH_SIZE + 16];
    static const struct {
        const char *groups, *name;
        double limit;
    } cases[] = {{"0::/job\n", "memory.max", 3e6},
                 {"0::/job/step\n", "memory.max", 3e6}, // the group above it has a limit
                 {"0::/other\n", "memory.max", 9e6},
                 {"0::/other/step\n", "memory.max", 5e6},
                 {"0::/nothing\n", "memory.max", INFINITY},
                 {"0::/\n", "memory.max", INFINITY},
                 {"", "memory.max", INFINITY},
                 {"5:memory:/job\n", "memory.max", INFINITY},
                 {"4:cpu:/\n0::/job\n", "memory.max", 3e6},
                 {"0::/job\n", "cpu.max", 1.5},
                 {"0::/job/step\n", "cpu.max", 1.5},
                 {"0::/other\n", "cpu.max", INFINITY}};
    temporary_name(folder);
    if (!mkdtemp(folder))
        fail("cannot create %s", folder);
    write_text(folder, "job/memory.max", "3000000\n");
    write_text(folder, "job/cpu.max", "150000 100000\n");
    write_text(folder, "job/step/cpu.max", "max 100000\n");
    write_text(folder, "job/step/memory.max", "max\n");
    write_text(folder, "other/memory.max", "9000000\n");
    write_text(folder, "other/step/memory.max", "5000000\n");
    join_path(table, folder, "table");
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_text(folder, "table", cases[i].groups);
        double found = cgroup_limit(table, folder, cases[i].name);
        if (found != cases[i].limit)
            fail("\"%s\", %s: expected %g, found %g", cases[i].groups, cases[i].name,
                 cases[i].limit, found);
    }
    snprintf(command, sizeof command, "rm -r '%s'", folder);
    if (system(command) != 0)
        fail("%s", command);
    verdict("the limits that cgroups set");
}

static void *measure_stack(void *bytes) {
    pthread_attr_t attributes;
    pthread_getattr_np(pthread_self(), &attributes);
    pthread_attr_getstacksize(&attributes, bytes);
    pthread_attr_destroy(&attributes);
    return NULL;
}

// With musl the default is 128 KiB, less than the images that pooled_ith_slice() keeps there.
static void test_stack(void) {
    pthread_attr_t usual, small;
    pthread_t thread;
    size_t bytes = 0;
    pthread_getattr_default_np(&usual);
    pthread_getattr_default_np(&small);
    pthread_attr_setstacksize(&small, 192 << 10);
    pthread_setattr_default_np(&small);
    start_thread(&thread, measure_stack, &bytes, "a test");
    pthread_join(thread, NULL);
    pthread_setattr_default_np(&usual);
    if (bytes < 8 << 20)
        fail("the stack of a thread has %zu bytes, expected 8 MB", bytes);
    verdict("the stack of a thread");
}

static void test_helpers(void) {
    test_philox();
    test_stack();
    test_limits();
}
