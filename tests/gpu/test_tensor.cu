/* test_tensor.cu - the layouts in section 7 of cnn_kernels.cu, by elements that are their own index:
   a permutation of K that A and B share does not change their product, so no test of results would
   notice it, and bank conflicts only cost time. Also the tiles that are chosen for the products of
   some networks: test_tensor late lists those whose last blocks leave many multiprocessors idle.

   It is compiled after cnn_kernels.cu, as one file: cat cnn_kernels.cu tests/gpu/test_tensor.cu */

#line 9 "tests/gpu/test_tensor.cu"
#include <stdarg.h>

static void end(int status, const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    exit(status);
}

static void verdict(const char *name, size_t wrong) {
    if (wrong)
        printf("fail cuda/layouts/%s: expected 0 wrong numbers, found %zu\n", name, wrong);
    else
        printf("pass cuda/layouts/%s\n", name);
}

template <class T> static T *to_device(const T *host, size_t count) {
    T *memory = (T *)device_alloc(count * sizeof *memory);
    copy(memory, host, count * sizeof *memory);
    return memory;
}

// The element of number `code`: its bits, of a float the 19 that tf32 keeps.
template <class T> static T element_of(uint32_t code) {
    T element;
    code = sizeof(T) == 4 ? code << 13 : code;
    memcpy((void *)&element, &code, sizeof element);
    return element;
}

enum { FRAGMENT_THREADS = 128 };

/* found[i][pair][thread][r] = register r of the fragments of a tile that is loaded from a matrix.
   Grid: 1 block.   Shared memory: LINES * 128 bytes */
template <class T, int LINES, bool ALONG_K, bool IS_A, int WIDTH>
static __global__ void fragments_kernel(Operand<T> o, uint32_t *found, int end) {
    extern __shared__ __align__(128) float4 tiles[];
    TensorLoader<T, LINES, FRAGMENT_THREADS, false, ALONG_K, WIDTH> loader(o, 0, LINES, 0);
    Fragments<T, LINES, ALONG_K, IS_A> read(threadIdx.x / WARP % 2 * LINES / 2);
    loader.load(o, 0, end, tiles);
    loader.store(tiles);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    for (int i = 0; i < LINES / 32; i++)
        for (int pair = 0; pair < DEPTH_CHUNKS / 2; pair++) {
            uint32_t f[4];
            read.load(f, tiles, i, pair);
            for (int r = 0; r < 4; r++)
                found[((i * 4 + pair) * FRAGMENT_THREADS + threadIdx.x) * 4 + r] = f[r];
        }
}

// PTX, "Matrix fragments for mma.m16n8k16" and "m16n8k8": lane 4 g + q holds of A rows g and g + 8,
// of B column g; of each the q-th 32 bits of the first and of the second half of K.
template <class T, int LINES, bool ALONG_K, bool IS_A, int WIDTH>
static size_t wrong_fragments(int k_end) {
    enum { CHUNK = Chunk<T>::COUNT, DEPTH = DEPTH_CHUNKS * CHUNK, PER = 4 / sizeof(T) };
    enum { COUNT = LINES / 32 * 4 * FRAGMENT_THREADS * 4 };
    T *host = (T *)calloc(LINES * DEPTH, sizeof *host);
    uint32_t *found = (uint32_t *)calloc(COUNT, sizeof *found);
    for (int line = 0; line < LINES; line++)
        for (int k = 0; k < DEPTH; k++)
            host[ALONG_K ? line * DEPTH + k : k * LINES + line] =
                element_of<T>(1 + line * DEPTH + k);
    T *matrix = to_device(host, LINES * DEPTH);
    uint32_t *on_device = to_device(found, COUNT);
    Operand<T> o = {matrix, plain(ALONG_K ? DEPTH : 1), plain(ALONG_K ? 1 : LINES)};
    fragments_kernel<T, LINES, ALONG_K, IS_A, WIDTH>
        <<<1, FRAGMENT_THREADS, LINES * 128, stream()>>>(o, on_device, k_end);
    CHECK_LAUNCH();
    copy(found, on_device, COUNT * sizeof *found);
    size_t wrong = 0;
    for (int at = 0; at < COUNT; at++) {
        int r = at % 4, lane = at / 4 % WARP, warp = at / 4 / WARP % 4;
        int pair = at / 4 / FRAGMENT_THREADS % 4, i = at / 4 / FRAGMENT_THREADS / 4;
        int eight = IS_A ? r % 2 : r / 2, half = IS_A ? r / 2 : r % 2;
        int line = warp % 2 * LINES / 2 + i * 16 + eight * 8 + lane / 4;
        for (int e = 0; e < PER; e++) {
            int k = (pair * 2 + half) * CHUNK + lane % 4 * PER + e;
            uint32_t code = k < k_end ? 1 + line * DEPTH + k : 0;
            uint32_t got = PER == 2 ? found[at] >> 16 * e & 0xffff : found[at] >> 13;
            wrong += got != code;
        }
    }
    device_free(matrix);
    device_free(on_device);
    free(host);
    free(found);
    return wrong;
}

template <class T> static size_t wrong_in_all_fragments(void) {
    enum { WIDE = Chunk<T>::COUNT, ALL = DEPTH_CHUNKS * WIDE };
    return wrong_fragments<T, 128, true, true, WIDE>(ALL) +
           wrong_fragments<T, 128, true, false, WIDE>(ALL - WIDE) + // zeros from there on
           wrong_fragments<T, 128, false, true, WIDE>(ALL) +
           wrong_fragments<T, 128, false, false, WIDE>(ALL - 3) +
           wrong_fragments<T, 64, true, true, 1>(ALL - 1) +
           wrong_fragments<T, 64, true, false, WIDE>(ALL) +
           wrong_fragments<T, 64, false, true, WIDE>(ALL) +
           wrong_fragments<T, 64, false, false, 1>(ALL - 1);
}

// One warp
template <class T>
static __global__ void mma_kernel(real *d, const uint32_t *a, const uint32_t *b) {
    real sums[4];
    for (int i = 0; i < 4; i++)
        sums[i] = d[threadIdx.x * 4 + i];
    mma(T(), sums, a + threadIdx.x * 4, b + threadIdx.x * 2);
    for (int i = 0; i < 4; i++)
        d[threadIdx.x * 4 + i] = sums[i];
}

// Small integers, by the same tables.
template <class T> static size_t wrong_sums(void) {
    enum { K = sizeof(T) == 4 ? 8 : 16, PER = 4 / sizeof(T) };
    int a[16][K], b[K][8], d[16][8];
    uint32_t registers_a[WARP][4], registers_b[WARP][2];
    real sums[WARP][4];
    for (int i = 0; i < 16 * K; i++)
        a[i / K][i % K] = i * 7 % 13 - 6;
    for (int i = 0; i < 8 * K; i++)
        b[i / 8][i % 8] = i * 5 % 11 - 5;
    for (int i = 0; i < 16 * 8; i++)
        d[i / 8][i % 8] = i * 3 % 17;
    for (int lane = 0; lane < WARP; lane++) {
        int g = lane / 4, q = lane % 4;
        for (int r = 0; r < 4; r++)
            for (int e = 0; e < PER; e++) {
                int k = r / 2 * K / 2 + q * PER + e;
                T element = (T)(real)a[g + r % 2 * 8][k];
                memcpy((char *)&registers_a[lane][r] + e * sizeof element, &element,
                       sizeof element);
            }
        for (int r = 0; r < 2; r++)
            for (int e = 0; e < PER; e++) {
                T element = (T)(real)b[r * K / 2 + q * PER + e][g];
                memcpy((char *)&registers_b[lane][r] + e * sizeof element, &element,
                       sizeof element);
            }
        for (int i = 0; i < 4; i++)
            sums[lane][i] = (real)d[g + i / 2 * 8][q * 2 + i % 2];
    }
    real *on_device = to_device(&sums[0][0], WARP * 4);
    uint32_t *of_a = to_device(&registers_a[0][0], WARP * 4);
    uint32_t *of_b = to_device(&registers_b[0][0], WARP * 2);
    mma_kernel<T><<<1, WARP, 0, stream()>>>(on_device, of_a, of_b);
    CHECK_LAUNCH();
    copy(sums, on_device, sizeof sums);
    size_t wrong = 0;
    for (int lane = 0; lane < WARP; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2, want = d[row][column];
            for (int k = 0; k < K; k++)
                want += a[row][k] * b[k][column];
            wrong += sums[lane][i] != (real)want;
        }
    device_free(on_device);
    device_free(of_a);
    device_free(of_b);
    return wrong;
}

/* conflicts[0] += pairs of chunks that are accessed together and have the same banks: 8 of a line,
   one of 8 lines, two of 4 lines.   One thread */
template <int PITCH> static __global__ void conflicts_kernel(int *conflicts) {
    for (int line = 0; line < 64; line++)
        for (int chunk = 0; chunk < PITCH; chunk++)
            for (int i = 0; i < 8; i++)
                for (int j = 0; j < i; j++) {
                    const int l = line / 8 * 8, c = chunk / 8 * 8, two = chunk / 2 * 2,
                              four = line / 4 * 4;
                    conflicts[0] +=
                        swizzle<PITCH>(line, c + i) % 8 == swizzle<PITCH>(line, c + j) % 8;
                    conflicts[0] +=
                        swizzle<PITCH>(l + i, chunk) % 8 == swizzle<PITCH>(l + j, chunk) % 8;
                    conflicts[0] += swizzle<PITCH>(four + i / 2, two + i % 2) % 8 ==
                                    swizzle<PITCH>(four + j / 2, two + j % 2) % 8;
                }
}

static __global__ void round_kernel(uint32_t *x, unsigned count) {
    unsigned i = element();
    if (i < count)
        x[i] = round_tf32(x[i]);
}

// What mma reads of a rounded number must be the nearest one, ties away from zero.
static size_t wrong_roundings(void) {
    const uint32_t given[] = {0x3f800000, 0x3f800fff, 0x3f801000, 0x3f802fff,
                              0xbf801000, 0x7f7fffff, 0x7f800000, 0xff800000,
                              0x7fffffff, 0xffffffff, 0x7fc00000, 0};
    const uint32_t want[] = {0x3f800000, 0x3f800000, 0x3f802000, 0x3f802000, 0xbf802000, 0x7f800000,
                             0x7f800000, 0xff800000, 0x7fffe000, 0xffffe000, 0x7fc00000, 0};
    enum { COUNT = sizeof given / sizeof *given };
    uint32_t got[COUNT], *on_device = to_device(given, COUNT);
    size_t wrong = 0;
    LAUNCH(round_kernel, COUNT, on_device, COUNT);
    copy(got, on_device, sizeof got);
    for (size_t i = 0; i < COUNT; i++)
        wrong += (got[i] & 0xffffe000) != want[i];
    device_free(on_device);
    return wrong;
}

static size_t bank_conflicts(void) {
    int none = 0, *count = to_device(&none, 1);
    conflicts_kernel<8><<<1, 1, 0, stream()>>>(count);
    conflicts_kernel<16><<<1, 1, 0, stream()>>>(count);
    conflicts_kernel<32><<<1, 1, 0, stream()>>>(count);
    CHECK_LAUNCH();
    copy(&none, count, sizeof none);
    device_free(count);
    return (size_t)none;
}

/* ---- The products of a training step, on the multiprocessors of a T4, an A100 and an H100. If the
   blocks are `waves` times as many as the multiprocessors, these compute for ceil(waves) / waves as
   long as they would if the blocks could be spread evenly. A product is late if that is more than
   1.25, and wasteful if less than 70 % of what the multiprocessors could compute in that time is
   needed, which also counts the rows and columns of tiles beyond C. */

static const size_t multiprocessors_of[] = {40, 108, 132};
enum { GPUS = sizeof multiprocessors_of / sizeof *multiprocessors_of };
enum { OF_TILED, OF_TENSOR, KERNELS_JUDGED };

struct Network {
    const char *name;
    size_t images;
    int expansion, blocks[4]; // of a ResNet: 1 with basic blocks, 4 with bottlenecks; 0: mnist
    // The share of the multiply-adds that may be in late products, and in wasteful ones. In mnist
    // both are large: its layers are small, and 32 columns fill half of the narrowest tensor tile.
    double most_late, most_wasteful;
};
static const Network networks[] = {{"mnist", 64, 0, {}, .11, .38},
                                   {"resnet18", 32, 1, {2, 2, 2, 2}, .02, .01},
                                   {"resnet18", 128, 1, {2, 2, 2, 2}, .02, .01},
                                   {"resnet50", 256, 4, {3, 4, 6, 3}, .02, .01}};

struct Shares { // of multiply-adds
    double all, late, wasteful;
};

struct Judge {
    const Network &network;
    bool prints; // the late products
    Shares shares[KERNELS_JUDGED][GPUS] = {};
    size_t too_many_parts = 0; // for parts_size()
};

static const char *reason_of(double waves, bool by_chunks) {
    if (waves < 1)
        return "each part sums over 256 of K or more";
    return by_chunks ? "the other tiles take longer" : "no other tile reads single elements";
}

static void print_late(const Judge &judge, const Layer &l, const char *pass,
                       const Variant<real, real> &v, const Product<real, real> &p,
                       size_t processors, double waves, bool by_chunks) {
    printf("%s %zu, %zu x %zu x %zu to %zu, filter %zu, stride %zu, %s: C %d x %d, K %d, %zu "
           "blocks of %zu x %zu on %zu multiprocessors, %.2f waves: %.2f; %s\n",
           judge.network.name, judge.network.images, l.in.h, l.in.w, l.in.c, l.out.c, l.kernel_size,
           l.stride, pass, p.rows, p.columns, p.depth, blocks_of(v, p), v.m, v.n, processors, waves,
           ceil(waves) / waves, reason_of(waves, by_chunks));
}

// The product in the kernels' tiles; CHUNK: so many channels are read at once, if they are a
// multiple of it
template <int KIND, int CHUNK, class Large, class Narrow, class Small>
static void judge_product(Judge &judge, const Layer &l, const char *pass, Product<real, real> p) {
    static const Variant<real, real> variants[VARIANTS] = {
        variant_of<Small, real, real>(nullptr), variant_of<Small, real, real>(nullptr),
        variant_of<Narrow, real, real>(nullptr), variant_of<Large, real, real>(nullptr)};
    const bool by_chunks = (l.in.c | l.out.c) % CHUNK == 0;
    const size_t phases = p.phases.stride * p.phases.stride;
    p.splits = splits_of(p.rows, p.columns, phases, p.depth);
    const size_t tiles = ceil_div(p.rows, 64) * ceil_div(p.columns, 64) * phases * p.splits;
    judge.too_many_parts += p.splits > 1 && tiles > MOST_TILES;
    for (size_t gpu = 0; gpu < GPUS; gpu++) {
        const size_t processors = multiprocessors_of[gpu];
        const Variant<real, real> &v = variants[by_chunks ? quickest(variants, p, processors) : 0];
        const double waves = (double)blocks_of(v, p) / processors;
        const double needed = (double)p.rows * p.columns * phases * p.splits / (v.m * v.n);
        const double multiply_adds = (double)l.weight_count * l.out.h * l.out.w;
        const bool late = ceil(waves) > 1.25 * waves;
        Shares &shares = judge.shares[KIND][gpu];
        shares.all += multiply_adds;
        shares.late += late ? multiply_adds : 0;
        shares.wasteful += needed < .7 * ceil(waves) * processors ? multiply_adds : 0;
        if (late && judge.prints)
            print_late(judge, l, pass, v, p, processors, waves, by_chunks);
    }
}

// The products of a layer that reads side x side x in numbers of each image.
static void judge_layer(Judge &judge, size_t side, size_t in, size_t out, size_t kernel,
                        size_t stride, size_t padding) {
    const size_t out_side = (side + 2 * padding - kernel) / stride + 1;
    Layer l = {};
    l.in = {side, side, in};
    l.out = {out_side, out_side, out};
    l.kernel_size = kernel;
    l.stride = stride;
    l.padding = padding;
    l.weight_count = kernel * kernel * in * out;
    Work w = {};
    w.l = &l;
    w.n = judge.network.images;
    static const char *const passes[] = {"forward", "weight gradient", "data gradient"};
    const Product<real, real> products[] = {
        forward_product<real>(w), weight_gradient_product<real>(w), data_gradient_product<real>(w)};
    const size_t count = in > 3 ? 3 : 2; // the gradient of the images is not computed
    for (size_t i = 0; i < count; i++) {
        judge_product<OF_TILED, 4, LargeTile, NarrowTile, SmallTile>(judge, l, passes[i],
                                                                     products[i]);
        judge_product<OF_TENSOR, 8, LargeTensorTile, NarrowTensorTile, SmallTensorTile>(
            judge, l, passes[i], products[i]);
    }
}

static void judge_mnist(Judge &judge) {
    judge_layer(judge, 28, 1, 32, 3, 1, 0);
    judge_layer(judge, 26, 32, 64, 3, 1, 0);
    judge_layer(judge, 1, 9216, 128, 1, 1, 0);
    judge_layer(judge, 1, 128, 10, 1, 1, 0);
}

// A block of a ResNet, whose first layer has this stride
static void judge_block(Judge &judge, size_t side, size_t in, size_t planes, size_t stride) {
    const size_t expansion = judge.network.expansion, out = expansion * planes;
    if (in != out)
        judge_layer(judge, side, in, out, 1, stride, 0); // the shortcut
    if (expansion > 1)
        judge_layer(judge, side, in, planes, 1, 1, 0);
    judge_layer(judge, side, expansion > 1 ? planes : in, planes, 3, stride, 1);
    if (expansion > 1)
        judge_layer(judge, side / stride, planes, out, 1, 1, 0);
    else
        judge_layer(judge, side / stride, planes, planes, 3, 1, 1);
}

static void judge_resnet(Judge &judge) {
    size_t side = 32, channels = 64;
    judge_layer(judge, side, 3, channels, 3, 1, 1);
    for (size_t stage = 0; stage < 4; stage++)
        for (int block = 0; block < judge.network.blocks[stage]; block++) {
            const size_t planes = (size_t)64 << stage, stride = stage > 0 && block == 0 ? 2 : 1;
            judge_block(judge, side, channels, planes, stride);
            channels = judge.network.expansion * planes;
            side /= stride;
        }
    judge_layer(judge, 1, channels, 100, 1, 1, 0);
}

static size_t idle_multiprocessors(bool prints) {
    size_t wrong = 0;
    for (const Network &network : networks) {
        Judge judge = {network, prints};
        if (network.expansion > 0)
            judge_resnet(judge);
        else
            judge_mnist(judge);
        wrong += judge.too_many_parts;
        for (const auto &kind : judge.shares)
            for (const Shares &shares : kind) {
                wrong += shares.late > network.most_late * shares.all;
                wrong += shares.wasteful > network.most_wasteful * shares.all;
            }
    }
    return wrong;
}

// How many blocks of a tile the shared memory of a multiprocessor holds; 1 KB of each is CUDA's.
template <class Tile> static int resident(int kb) {
    return kb * 1024 / (Tile::DYNAMIC_BYTES + 1024);
}

// What the comment at struct TensorTile says, of an H100, an A100 and smaller ones
static size_t wrong_residents(void) {
    static const struct {
        int kb, blocks[3];
    } gpus[] = {{228, {LargeTensorTile::BLOCKS, NarrowTensorTile::BLOCKS, SmallTensorTile::BLOCKS}},
                {164, {1, 2, 3}},
                {100, {1, 1, 2}}};
    size_t wrong = 0;
    for (const auto &gpu : gpus) {
        wrong += resident<LargeTensorTile>(gpu.kb) != gpu.blocks[0];
        wrong += resident<ShallowTensorTile>(gpu.kb) != gpu.blocks[0];
        wrong += resident<NarrowTensorTile>(gpu.kb) != gpu.blocks[1];
        wrong += resident<SmallTensorTile>(gpu.kb) != gpu.blocks[2];
    }
    return wrong;
}

int main(int argc, char **argv) {
    const char *reason;
    if (argc > 1 && strcmp(argv[1], "late") == 0)
        return idle_multiprocessors(true) > 0;
    if (device_count(&reason) == 0) {
        printf("skip cuda/layouts: %s\n", reason);
        return 0;
    }
    verdict("multiprocessors with work", idle_multiprocessors(false));
    verdict("blocks on a multiprocessor", wrong_residents());
    use(0, 0, end);
    DeviceInfo info = {};
    describe(&info);
    if (!info.tensor_cores[FP16]) {
        printf("skip cuda/layouts: %s has no tensor cores that cnn uses\n", info.name);
        return 0;
    }
    verdict("fragments of half", wrong_in_all_fragments<__half>());
    verdict("mma of half", wrong_sums<__half>());
    verdict("bank conflicts", bank_conflicts());
    if (!info.tensor_cores[BF16]) {
        printf("skip cuda/layouts: %s has no tensor cores that cnn uses in bf16 and tf32\n",
               info.name);
        return 0;
    }
    verdict("fragments of bfloat16", wrong_in_all_fragments<__nv_bfloat16>());
    verdict("fragments of float", wrong_in_all_fragments<real>());
    verdict("mma of bfloat16", wrong_sums<__nv_bfloat16>());
    verdict("mma of float", wrong_sums<real>());
    verdict("rounding to tf32", wrong_roundings());
    return 0;
}
