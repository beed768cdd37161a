/* draw.h - random numbers for the tests of kernels, fresh in each run. Included after cnn.c. */
#include "report.h"

static uint64_t random_seed;
static uint32_t drawn;

static size_t draw(size_t least, size_t most) {
    uint32_t r[4];
    philox4x32(r, drawn++, 0, 0, 0xFFFF, random_seed);
    return least + r[0] % (most - least + 1);
}

static void draw_seed(void) {
    FILE *file = fopen("/dev/urandom", "r");
    if (!file || fread(&random_seed, sizeof random_seed, 1, file) != 1)
        wrong("/dev/urandom cannot be read");
    fclose(file);
}
