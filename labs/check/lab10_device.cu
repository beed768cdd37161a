/* lab10_device.cu - make check LAB=10 appends this to matmul.cu: what lab10.c needs of the device,
   and in the emulator what lab10_counts.h has counted. */

extern "C" {
void *lab_alloc(size_t bytes) {
    void *memory;
    CHECK(cudaMalloc(&memory, bytes));
    return memory;
}

void lab_free(void *memory) {
    CHECK(cudaFree(memory));
}

void lab_copy(void *to, const void *from, size_t bytes, bool to_device) {
    CHECK(cudaMemcpy(to, from, bytes, to_device ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost));
}
}

static void multiply(int change, const int *s, const bf16 *a, const bf16 *b, float *c) {
    changes[change].run({s[0], s[1], s[2]}, a, b, c);
    CHECK(cudaDeviceSynchronize());
}

#ifdef CUDA_ON_CPU
static Counts lab_counted;

extern "C" {
void lab_multiply(int change, const int *s, const bf16 *a, const bf16 *b, float *c) {
    begin_counts();
    multiply(change, s, a, b, c);
    lab_counted = end_counts();
}

double lab_microseconds(int, const int *, const bf16 *, const bf16 *, float *) {
    return NAN;
}

void lab_subtract(bool subtract) {
    lab10::sign = subtract ? -1 : 1;
}

// Of the last product. counts[]: as enum Count of lab10.c. Returns how many steps' tiles were on
// their way on average.
double lab_counts(long *counts) {
    const Counts n = lab_counted;
    const long all[] = {n.mma,
                        n.ldmatrix,
                        n.copies,
                        n.conflicts,
                        n.shared_bytes,
                        n.barriers,
                        n.accesses[emu::GLOBAL_READ],
                        n.bytes[emu::GLOBAL_READ],
                        n.accesses[emu::GLOBAL_WRITE],
                        n.accesses[emu::SHARED_READ],
                        n.lines};
    memcpy(counts, all, sizeof all);
    return tiles_ahead(n, 2 * TILE * LINE * sizeof(Chunk));
}
}
#else
extern "C" {
double lab_microseconds(int change, const int *s, const bf16 *a, const bf16 *b, float *c) {
    const Trial t = {{s[0], s[1], s[2]}, 0,         NULL,      NULL, NULL, NULL,
                     (bf16 *)a,          (bf16 *)b, (float *)c};
    return microseconds(&t, change);
}

void lab_multiply(int change, const int *s, const bf16 *a, const bf16 *b, float *c) {
    multiply(change, s, a, b, c);
}

void lab_subtract(bool) {}
double lab_counts(long *) {
    return 0;
}
}
#endif
