/* unit.c - tests of the functions of cnn.c and cnn_kernels.c, compiled once with real = float
   and once with real = double; the kernels also for another processor, see avx2.sh. Run it in the
   root of the repository:

     build/test_float                      all sections
     build/test_double layers gradients    only these; the table at the end of this file lists all

   It prints a line for each test: `pass NAME`, `fail NAME: what` or `skip NAME: why`. QUICK=1
   in the environment: fewer shapes and networks. Each section draws its random numbers from a
   fixed seed, so a failure repeats, also when its section runs alone. */

#define CNN_NO_MAIN
#include "../../cnn.c"
#include <dirent.h>

#ifndef SUITE
#define SUITE (is_double ? "double" : "float")
#endif
#include "../check.h"
#include "arrays.h"
#include "networks.h"

// What the sanitizers do not report: LLVM's OpenMP keeps what it has allocated for a thread that
// has ended.
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void) {
    return "leak:libomp";
}

// A name for mkstemp() or mkdtemp() in the folder for temporary files
static void temporary_name(char path[PATH_SIZE]) {
    const char *folder = getenv("TMPDIR");
    snprintf(path, PATH_SIZE, "%s/test_unit.XXXXXX", folder && *folder ? folder : "/tmp");
}

#include "checkpoints.c"
#include "data.c"
#include "golden.c"
#include "gradients.c"
#include "helpers.c"
#include "instruments.c"
#include "kernels.c"
#include "layers.c"
#include "loops.c"
#include "memory_plan.c"
#include "network.c"
#include "optimizers.c"
#include "parallel.c"
#include "steps.c"

static const struct {
    const char *name; // of the file, too
    void (*test)(void);
} sections[] = {
    {"helpers", test_helpers},         {"layers", test_layers},
    {"network", test_network},         {"memory_plan", test_memory_plan},
    {"gradients", test_gradients},     {"optimizers", test_optimizers},
    {"kernels", test_kernels},         {"data", test_data},
    {"parallel", test_parallel},       {"checkpoints", test_checkpoints},
    {"instruments", test_instruments}, {"steps", test_steps},
    {"golden", test_golden},           {"loops", test_loops},
};
enum { SECTIONS = sizeof sections / sizeof *sections };

static void run_section(size_t number) {
    drawn = 0; // the same numbers, whichever sections come before
    sections[number].test();
}

static size_t find_section(const char *name) {
    size_t i = 0;
    while (i < SECTIONS && strcmp(sections[i].name, name) != 0)
        i++;
    return i;
}

int main(int argc, char **argv) {
    const char *wish = getenv("QUICK");
    quick = wish && *wish && strcmp(wish, "0") != 0;
    suite = SUITE;
    set_num_threads(2);
    l2_megabytes = 1; // as where the size is unknown
    for (int i = 1; i < argc; i++)
        if (find_section(argv[i]) == SECTIONS) {
            fprintf(stderr, "%s: error: there is no section %s; the sections are:", argv[0],
                    argv[i]);
            for (size_t s = 0; s < SECTIONS; s++)
                fprintf(stderr, " %s", sections[s].name);
            fprintf(stderr, "\n");
            return 2;
        }
    test_comparison();
    for (int i = 1; i < argc; i++)
        run_section(find_section(argv[i]));
    for (size_t s = 0; s < SECTIONS && argc == 1; s++)
        run_section(s);
    return 0;
}
