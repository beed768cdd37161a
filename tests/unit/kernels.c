/* kernels.c - cnn_kernels.c against the definitions in section 2 of cnn.c, over shapes that
   reach every edge of its tiles. The two agree up to rounding; the kernels give the same bits
   for any number of threads. */

/* ---- Convolutions and linear layers ---------------------------------------------------------- */

// What the kernels keep for a row, to be freed; NULL: nothing.
static void *prepare_row(const Kernels *k, const Layer *l) {
    void *prepared = k->prepare ? must_alloc(k->prepared_bytes(l), "a test") : NULL;
    if (prepared)
        k->prepare(prepared, l);
    return prepared;
}

typedef struct Inputs {
    Array in, weight, bias, dout, din; // din: what another reader of the row wrote before
} Inputs;
typedef struct Results {
    Array out, din, dweight, dbias;
} Results;

static Results run_layer(const Kernels *k, const Layer *l, const Fusion *fused, size_t n,
                         const Inputs *x, bool accumulate) {
    Results r = {array(n * shape_size(l->out), guard_value),
                 array(n * shape_size(l->in), guard_value), array(l->weight_count, guard_value),
                 array(l->bias_count, guard_value)};
    Array scratch = array(k->scratch_size(l, fused, n), guard_value);
    void *prepared = prepare_row(k, l);
    const Work w = {.l = l,
                    .fused = *fused,
                    .n = n,
                    .in = x->in.at,
                    .weight = x->weight.at,
                    .bias = l->bias_count ? x->bias.at : NULL,
                    .out = r.out.at,
                    .dout = x->dout.at,
                    .din = r.din.at,
                    .dweight = r.dweight.at,
                    .dbias = r.dbias.at,
                    .scratch = scratch.at,
                    .prepared = prepared,
                    .accumulate = accumulate};
    if (accumulate)
        memcpy(r.din.at, x->din.at, x->din.count * sizeof(real));
    k->layers[l->kind].forward(w);
    k->layers[l->kind].backward(w);
    check_guards("scratch", &scratch);
    free(scratch.base);
    free(prepared);
    return r;
}

// The sum of |a * b| of each output becomes its bound: terms roundings each, in either version.
static void to_bound(Array *sums, size_t terms) {
    for (size_t i = 0; i < sums->count; i++)
        sums->at[i] = (real)(2 * (double)terms * epsilon * (double)sums->at[i] + 1e-30);
}

static void compare_results(const Results *got, const Results *want, Results *bound, const Layer *l,
                            size_t n) {
    size_t taps = l->kernel_size * l->kernel_size, pixels = n * l->out.h * l->out.w;
    const char *names[4] = {"out", "din", "dweight", "dbias"};
    size_t terms[4] = {taps * l->in.c + 1, taps * l->out.c + 1, pixels, pixels};
    const Array *g = (const Array *)got, *w = (const Array *)want;
    Array *b = (Array *)bound;
    for (size_t i = 0; i < 4; i++) {
        to_bound(&b[i], terms[i]);
        check_tensor(names[i], g[i].at, w[i].at, b[i].at, g[i].count);
        check_guards(names[i], &g[i]);
    }
}

static void describe_failure(const Layer *l, const Fusion *fused, size_t n, bool accumulate) {
    char what[sizeof failure], kind[64];
    describe_layer(l, kind, sizeof kind);
    snprintf(what, sizeof what, "%.200s (%s, %zu images, %zu x %zu x %zu to %zu channels%s%s%s%s)",
             failure, kind, n, l->in.h, l->in.w, l->in.c, l->out.c,
             l->bias_count ? "" : ", no bias", fused->relu ? ", fused ReLU" : "",
             fused->input_relu_backward ? ", the ReLU before it backward" : "",
             accumulate ? ", accumulate" : "");
    snprintf(failure, sizeof failure, "%s", what);
}

// Two runs, with another number of threads or another L2, must have the same bits.
static void compare_bits(const Results *got, const Results *other) {
    const Array *g = (const Array *)got, *o = (const Array *)other;
    for (size_t i = 0; i < sizeof *got / sizeof *g; i++)
        if (g[i].count > 0 && memcmp(g[i].at, o[i].at, g[i].count * sizeof(real)) != 0)
            fail("another number of threads, or a larger L2, gives other bits of result %zu", i);
}

// Whether the forward ends with a ReLU; the definition's is followed by one of its own.
static void compare_layer(Layer l, bool relu, size_t n, bool accumulate) {
    const Kernels *naive = &naive_kernels, *fast = &fast_kernels;
    const Fusion none = {0}, fused = {.relu = relu};
    Inputs x = {random_array(n * shape_size(l.in)), random_array(l.weight_count),
                random_array(l.bias_count), random_array(n * shape_size(l.out)),
                random_array(n * shape_size(l.in))};
    Inputs a = {absolute(&x.in), absolute(&x.weight), absolute(&x.bias), absolute(&x.dout),
                absolute(&x.din)};
    Results got = run_layer(fast, &l, &fused, n, &x, accumulate);
    set_num_threads(1);
    l2_megabytes = 2;
    Results alone = run_layer(fast, &l, &fused, n, &x, accumulate);
    set_num_threads(2);
    l2_megabytes = 1;
    Results want = run_layer(naive, &l, &none, n, &x, accumulate);
    Results bound = run_layer(naive, &l, &none, n, &a, accumulate);
    if (relu)
        relu_forward((Work){.l = &l, .n = n, .in = want.out.at, .out = want.out.at});
    bool before = *failure;
    compare_bits(&got, &alone);
    compare_results(&got, &want, &bound, &l, n);
    if (*failure && !before)
        describe_failure(&l, &fused, n, accumulate);
    free_arrays(&x, sizeof x);
    free_arrays(&a, sizeof a);
    free_arrays(&got, sizeof got);
    free_arrays(&alone, sizeof alone);
    free_arrays(&want, sizeof want);
    free_arrays(&bound, sizeof bound);
}

// Mostly small, at times large: odd sizes meet every edge of the tiles.
static Layer draw_conv(Net *net, size_t *n) {
    bool large = draw_bits() % 8 == 0;
    size_t kernel = draw_bits() % 12 == 0 ? 7 : draw_size(1, 5);
    size_t stride = draw_bits() % 8 == 0 ? 3 : draw_size(1, 2), padding = draw_size(0, kernel - 1);
    size_t least = kernel > 2 * padding ? kernel - 2 * padding : 1;
    Shape in = {draw_size(least, max_size(least, 13)), draw_size(least, max_size(least, 13)),
                large             ? draw_size(71, 150)
                : draw_bits() % 3 ? draw_size(1, 70)
                                  : draw_size(1, 8)};
    start_net(net, in);
    conv2d_bias(net, 0, draw_bits() % 3 ? draw_size(1, 70) : draw_size(1, 140), kernel, stride,
                padding, draw_bits() % 3 > 0);
    *n = draw_size(1, 9);
    return net->layers[1];
}

static void test_fast_conv(void) {
    static Net net;
    for (int shape = 0; shape < (quick ? 60 : 300);) {
        size_t n;
        Layer l = draw_conv(&net, &n);
        // the definitions are slow: a shape that would take them long is drawn again
        if (forward_flops(&l) * (double)n > 2 * 6e6)
            continue;
        compare_layer(l, draw_bits() % 2, n, draw_bits() % 2);
        shape++;
    }
    verdict("fast conv2d against its definition");
}

// The shapes of residual networks, all with and without a bias and accumulate.
static void test_fast_resnet_conv(void) {
    static Net net;
    static const struct {
        Shape in;
        size_t channels, kernel, stride, padding;
    } shapes[] = {
        {{8, 8, 16}, 32, 1, 2, 0},  // a shortcut
        {{7, 9, 70}, 17, 1, 2, 0},  // ... that drops the last row and column, or does not
        {{8, 9, 3}, 40, 1, 3, 0},   // ... and meets no two of three pixels
        {{12, 10, 3}, 16, 7, 1, 3}, // stems
        {{13, 12, 3}, 24, 7, 2, 3}, {{9, 8, 4}, 10, 7, 2, 3}, // 196 numbers under the filter
        {{6, 6, 24}, 24, 3, 1, 1},  {{7, 6, 12}, 20, 3, 2, 1}, {{14, 13, 2}, 9, 11, 4, 2},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t variant = 0; variant < 4; variant++) {
            start_net(&net, shapes[i].in);
            conv2d_bias(&net, 0, shapes[i].channels, shapes[i].kernel, shapes[i].stride,
                        shapes[i].padding, variant & 1);
            compare_layer(net.layers[1], false, 5, variant & 2);
        }
    verdict("fast conv2d of residual networks against its definition");
}

// 3 x 3 and 5 x 5, stride 1 and channels in whole vectors: what winograd() takes, and shapes just
// beside.
static void test_winograd(size_t kernel) {
    static Net net;
    size_t taken[2] = {0, 0}, by_columns = 0;
    size_t gradients[2][2] = {{0}}; // without a bias and with one; in chunks and at once
    for (int shape = 0; shape < (quick ? 20 : 80); shape++) {
        // pixels enough for several chunks of a weight gradient; columns enough for
        // winograd_by_columns()
        const bool many = kernel == 3 && shape % 10 > 7, wide = shape % 10 == 4;
        const size_t least = many ? 18 : 7, most = many ? 20 : 13;
        const size_t n = draw_size(many ? 16 : 1, many ? 20 : 9);
        Shape in = {draw_size(least, most), draw_size(least, most),
                    many ? max_size(LANES, FEW) : LANES * draw_size(1, shape % 8 ? 3 : 8)};
        size_t columns = shape % 2 ? LANES * draw_size(1, 3) : draw_size(LANES, 140);
        if (many)
            columns = COLUMNS + draw_size(1, 2 * LANES);
        if (wide) {
            in.c = whole_vectors(2 * DU_ROWS + 1);
            columns = max_size(DU_COLUMNS, 2 * num_threads * COLUMNS) + draw_size(1, 20);
        }
        start_net(&net, in);
        conv2d_bias(&net, 0, columns, kernel, 1, draw_size(0, kernel - 1),
                    (shape + shape / 10) % 3 > 0);
        Pass forward = forward_pass(&net.layers[1], false, NULL);
        forward.n = n;
        taken[0] += forward.tile > 0;
        by_columns += forward.tile > 0 && suits_columns(&forward);
        taken[1] += backward_pass(&net.layers[1], NULL, false).tile > 0;
        WeightGradient g = weight_gradient_plan(&net.layers[1], n, NULL);
        if (g.pass.tile > 0)
            gradients[net.layers[1].bias_count > 0][winograd_gradient_plan(&g).at_once]++;
        compare_layer(net.layers[1], draw_bits() % 2, n, draw_bits() % 2);
    }
    if (!taken[0] || !taken[1])
        fail("no shape was taken: %zu forward, %zu backward", taken[0], taken[1]);
    if (!by_columns)
        fail("no shape was computed by columns");
    for (size_t i = 0; i < 4 && kernel == 3; i++)
        if (!gradients[i / 2][i % 2])
            fail("no weight gradient %s a bias was computed %s", i / 2 ? "with" : "without",
                 i % 2 ? "at once" : "in chunks");
    for (size_t over = 0; over < 2; over++) { // what lies outside of an image is MAX_DEPTH zeros
        start_net(&net, (Shape){8, 9, MAX_DEPTH + over * LANES});
        conv2d_bias(&net, 0, LANES, kernel, 1, 1, false);
        if ((forward_pass(&net.layers[1], false, NULL).tile > 0) != (over == 0))
            fail("%zu channels: wrongly taken, or not", MAX_DEPTH + over * LANES);
    }
    verdict(kernel == 3 ? "Winograd's convolution, 3 x 3, against its definition"
                        : "Winograd's convolution, 5 x 5, against its definition");
}

// 3 x 3, stride 2 and channels enough: what suits_winograd() takes with a stride.
static void test_strided_winograd(void) {
    static Net net;
    size_t by_columns = 0;
    for (int shape = 0; shape < (quick ? 4 : 16); shape++) {
        const bool many = shape % 4 == 1, wide = shape % 4 == 2; // as in test_winograd()
        const size_t n = many ? 16 : draw_size(1, 4), least = many ? 17 : 7;
        Shape in = {draw_size(least, least + 4), draw_size(least, least + 4),
                    64 + LANES * draw_size(0, 2)};
        size_t columns = whole_vectors(draw_size(64, 90));
        if (wide) {
            in.c = whole_vectors(2 * DU_ROWS + 1);
            columns = max_size(DU_COLUMNS, 2 * num_threads * COLUMNS) + LANES;
        }
        start_net(&net, in);
        conv2d_bias(&net, 0, columns, 3, 2, 1, shape % 3 > 0);
        const Layer l = net.layers[1];
        Pass forward = forward_pass(&l, false, NULL);
        forward.n = n;
        if (!forward.tile || !backward_pass(&l, NULL, false).tile)
            fail("%zu x %zu x %zu was not taken", in.h, in.w, in.c);
        by_columns += suits_columns(&forward);
        compare_layer(l, draw_bits() % 2, n, draw_bits() % 2);
        conv2d_bias(&net, 0, 67, 3, 2, 1, true); // columns that are no whole vectors
        compare_layer(net.layers[2], draw_bits() % 2, 2, draw_bits() % 2);
    }
    if (!by_columns)
        fail("no shape was computed by columns");
    verdict("Winograd's convolution with stride 2 against its definition");
}

// With a larger L2, Winograd's blocks are larger, and more scratch memory is planned for them. In
// these layers no other pass needs as much: with 5 x 5 the forward, for its blocks of tiles, with
// 3 x 3 the weight gradient. The columns are no whole vectors, so the data gradient is not computed
// by Winograd. 4 MB, which the program treats as 2, need the most memory.
static void test_larger_l2(size_t kernel) {
    static Net net;
    const Fusion none = {0};
    start_net(&net, (Shape){46, 46, max_size(LANES, FEW)});
    conv2d_bias(&net, 0, 3 * COLUMNS + 1, kernel, 1, kernel / 2, false);
    const Layer *l = &net.layers[1];
    Inputs x = {random_array(shape_size(l->in)),
                random_array(l->weight_count),
                {0},
                random_array(shape_size(l->out)),
                {0}};
    Results want = run_layer(&fast_kernels, l, &none, 1, &x, false);
    l2_megabytes = 4;
    for (size_t threads = 1; threads <= 2; threads++) {
        set_num_threads(threads);
        Results got = run_layer(&fast_kernels, l, &none, 1, &x, false);
        compare_bits(&got, &want);
        free_arrays(&got, sizeof got);
    }
    l2_megabytes = 1;
    free_arrays(&x, sizeof x);
    free_arrays(&want, sizeof want);
    verdict("Winograd's scratch memory with a larger L2, %zu x %zu", kernel, kernel);
}

// Root mean square of got - want.
static double rms_error(const Array *got, const double *want) {
    double sum = 0;
    for (size_t i = 0; i < got->count; i++)
        sum += pow((double)got->at[i] - want[i], 2);
    return sqrt(sum / (double)got->count);
}

// out, din and dweight of a convolution without bias, in double; all three begin as zeros.
static void convolve_in_double(const Layer *l, size_t n, const Inputs *x, double *out, double *din,
                               double *dweight) {
    const size_t pixels = l->out.h * l->out.w, taps = l->kernel_size * l->kernel_size;
    for (size_t i = 0; i < n * pixels * taps; i++) {
        size_t tap = i % taps, pixel = i / taps % pixels, image = i / taps / pixels;
        ptrdiff_t from = input_pixel(l, pixel / l->out.w, pixel % l->out.w, tap);
        for (size_t c = 0; c < (from == OUTSIDE ? 0 : l->in.c); c++)
            for (size_t k = 0; k < l->out.c; k++) {
                size_t at = image * shape_size(l->in) + (size_t)from * l->in.c + c;
                size_t to = (image * pixels + pixel) * l->out.c + k;
                size_t w = (tap * l->in.c + c) * l->out.c + k;
                out[to] += (double)x->in.at[at] * (double)x->weight.at[w];
                din[at] += (double)x->dout.at[to] * (double)x->weight.at[w];
                dweight[w] += (double)x->in.at[at] * (double)x->dout.at[to];
            }
    }
}

// Compares a layer's rounding errors, without bias and on 2 images, with the definition's. Both are
// root mean squares against sums in double.
static void compare_rounding(const Layer *l) {
    const Fusion none = {0};
    const size_t n = 2;
    Inputs x = {random_array(n * shape_size(l->in)),
                random_array(l->weight_count),
                {0},
                random_array(n * shape_size(l->out)),
                {0}};
    Results fast = run_layer(&fast_kernels, l, &none, n, &x, false);
    Results naive = run_layer(&naive_kernels, l, &none, n, &x, false);
    double *want[3], ratio[3];
    for (size_t i = 0; i < 3; i++)
        want[i] = must_alloc(((Array *)&fast)[i].count * sizeof(double), "a test");
    convolve_in_double(l, n, &x, want[0], want[1], want[2]);
    for (size_t i = 0; i < 3; i++) {
        ratio[i] = rms_error((Array *)&fast + i, want[i]) / rms_error((Array *)&naive + i, want[i]);
        free(want[i]);
    }
    if (!is_double && !(fmax(fmax(ratio[0], ratio[1]), ratio[2]) < 2.8))
        fail("%zu channels, filters of %zu: rounding of out, din, dweight is %.2f, %.2f, %.2f "
             "times that of the definition, expected at most 2.8",
             l->in.c, l->kernel_size, ratio[0], ratio[1], ratio[2]);
    free_arrays(&x, sizeof x);
    free_arrays(&fast, sizeof fast);
    free_arrays(&naive, sizeof naive);
}

// As the part on Winograd in cnn_kernels.c says: rounding errors at most 2.8 times as large as in
// the definition.
static void test_winograd_rounding(size_t stride) {
    static Net net;
    for (size_t i = 0; i < (quick ? 4 : 8); i++) {
        const size_t kernel = stride == 1 ? 3 + i % 2 * 2 : 3;
        start_net(&net, (Shape){12, 12, (size_t)32 * stride << i / 2});
        conv2d_bias(&net, 0, 64, kernel, stride, 1, false);
        compare_rounding(&net.layers[1]);
    }
    verdict("Winograd's rounding against the definition's, stride %zu", stride);
}

static void test_fast_linear(void) {
    static Net net;
    for (int shape = 0; shape < (quick ? 10 : 40); shape++) {
        size_t inputs = shape % 4 ? draw_size(1, 300) : draw_size(1000, 2600); // MAX_DEPTH: 1024
        start_net(&net, (Shape){1, 1, inputs});
        linear(&net, 0, draw_size(1, 140));
        compare_layer(net.layers[1], draw_bits() % 2, draw_size(1, 40), draw_bits() % 2);
    }
    verdict("fast linear against its definition");
}

// Large layers of few pixels: what convolve_by_panels() takes, in one part and in several.
static void test_few_pixels(void) {
    static Net net;
    static const struct {
        size_t side, channels, columns, kernel;
    } shapes[] = {{1, 300, 17 * COLUMNS + 3, 1},
                  {1, 5 * MAX_DEPTH + 7, 3 * COLUMNS + 5, 1},
                  {1, 9 * COLUMNS, 2 * MAX_DEPTH + 9, 1},
                  {2, MAX_DEPTH + 2, 8 * COLUMNS + 1, 1}};
    size_t taken[2][2] = {{0}}; // forward, backward; one part, some
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (size_t variant = 0; variant < 4; variant++) {
            size_t n = draw_size(1, 8);
            start_net(&net, (Shape){shapes[i].side, shapes[i].side, shapes[i].channels});
            conv2d_bias(&net, 0, shapes[i].columns, shapes[i].kernel, 1, 0, variant != 1);
            Pass p[2] = {forward_pass(&net.layers[1], false, NULL),
                         backward_pass(&net.layers[1], NULL, false)};
            for (size_t way = 0; way < 2; way++)
                taken[way][panel_depth(&p[way]) < p[way].depth] += suits_panels(&p[way], n);
            compare_layer(net.layers[1], variant == 1 || variant == 2, n, variant % 2);
        }
    for (size_t i = 0; i < 4; i++)
        if (!taken[i / 2][i % 2])
            fail("no shape was taken %s, %s", i / 2 ? "backward" : "forward",
                 i % 2 ? "in parts" : "whole");
    verdict("layers of few pixels against their definition");
}

/* ---- A convolution and its max-pool in one --------------------------------------------------- */

typedef struct Pooled { // what forward left
    Array out, pooled;  // of the ReLU, of the max-pool
    uint8_t *argmax;
} Pooled;

// What the convolution works on; a max-pool's or a backward's part is filled in where it is used.
static Work conv_work(const Net *net, size_t n, const Inputs *x) {
    const Layer *l = &net->layers[1];
    return (Work){.l = l,
                  .fused = net->row_plans[1].fused,
                  .n = n,
                  .in = x->in.at,
                  .weight = x->weight.at,
                  .bias = l->bias_count ? x->bias.at : NULL};
}

// The convolution, its ReLU and its max-pool, one after another; out: of the first two.
static void forward_apart(const Kernels *k, Work w, real *out, real *pooled, uint8_t *argmax) {
    const Layer *pool = w.fused.pool;
    w.fused = (Fusion){0};
    w.out = out;
    k->layers[CONV2D].forward(w);
    relu_forward((Work){.l = w.l, .n = w.n, .in = out, .out = out});
    k->layers[MAXPOOL2D].forward(
        (Work){.l = pool, .n = w.n, .in = out, .out = pooled, .saved = argmax});
}

static Pooled pooled_forward(const Net *net, size_t n, const Inputs *x) {
    const Work w = conv_work(net, n, x);
    size_t count = n * shape_size(w.fused.pool->out);
    Pooled p = {array(n * shape_size(w.l->out), 0), array(count, 0), must_alloc(count, "a test")};
    forward_apart(&naive_kernels, w, p.out.at, p.pooled.at, p.argmax);
    return p;
}

// Memory for the gradients; din holds what another reader wrote, if that is to be added to.
static Results pooled_results(const Layer *l, const Inputs *x, bool accumulate) {
    Results r = {array(0, guard_value), array(x->in.count, guard_value),
                 array(l->weight_count, guard_value), array(l->bias_count, guard_value)};
    if (accumulate)
        memcpy(r.din.at, x->din.at, x->din.count * sizeof(real));
    return r;
}

// From the pool's dout to the convolution's gradients, by the definitions.
static Results pooled_naive(const Net *net, size_t n, const Inputs *x, const Pooled *p,
                            bool accumulate) {
    const Kernels *naive = &naive_kernels;
    const Layer *l = &net->layers[1];
    Work w = conv_work(net, n, x);
    const Fusion fused = w.fused;
    w.fused = (Fusion){0};
    Array dconv = array(n * shape_size(l->out), 0);
    Array scratch = array(naive->scratch_size(l, &w.fused, n), guard_value);
    Results r = pooled_results(l, x, accumulate);
    const Layer before = {.out = l->in}; // the ReLU that wrote in
    w.dout = dconv.at;
    w.din = r.din.at;
    w.dweight = r.dweight.at;
    w.dbias = r.dbias.at;
    w.scratch = scratch.at;
    w.accumulate = accumulate;
    naive->layers[MAXPOOL2D].backward(
        (Work){.l = fused.pool, .n = n, .dout = x->dout.at, .din = dconv.at, .saved = p->argmax});
    naive->layers[RELU].backward(
        (Work){.l = l, .n = n, .dout = dconv.at, .din = dconv.at, .out = p->out.at});
    naive->layers[CONV2D].backward(w);
    if (fused.input_relu_backward)
        relu_backward(
            (Work){.l = &before, .n = n, .dout = r.din.at, .din = r.din.at, .out = x->in.at});
    free(dconv.base);
    free(scratch.base);
    return r;
}

static Results pooled_fast(const Net *net, size_t n, const Inputs *x, const Pooled *p,
                           bool accumulate, bool wants_din) {
    Array scratch = array(net->scratch_size, guard_value);
    Results r = pooled_results(&net->layers[1], x, accumulate);
    Work w = conv_work(net, n, x);
    w.din = wants_din ? r.din.at : NULL;
    w.dweight = r.dweight.at;
    w.dbias = r.dbias.at;
    w.dout = x->dout.at;
    w.out = p->pooled.at;
    w.saved = p->argmax;
    w.scratch = scratch.at;
    w.accumulate = accumulate;
    fast_kernels.layers[CONV2D].backward(w);
    check_guards("scratch", &scratch);
    free(scratch.base);
    return r;
}

// Some of the gradient is zero, as a dropout after the pool makes it.
static void drop_some(Array *dout) {
    for (size_t i = 0; i < dout->count; i++)
        dout->at[i] = draw_bits() % 3 ? dout->at[i] : 0;
}

/* Where few channels are computed by planes, sums are in another order than the register tile's.
   They equal the definition's up to rounding, and so does the chosen pixel of each window. */
static void compare_planes(const Net *net, size_t n, const Inputs *x, const Array *got,
                           const uint8_t *argmax) {
    const Work w = conv_work(net, n, x);
    const Layer *l = w.l, *pool = w.fused.pool;
    const Shape I = pool->in, O = pool->out;
    Inputs a = {.in = absolute(&x->in), .weight = absolute(&x->weight), .bias = absolute(&x->bias)};
    Pooled want = pooled_forward(net, n, x), bound = pooled_forward(net, n, &a);
    Array chosen = array(got->count, guard_value);
    for (size_t i = 0; i < got->count; i++) {
        const size_t k = i % O.c, column = i / O.c % O.w, row = i / O.c / O.w;
        const size_t y = row % O.h * pool->stride + argmax[i] / 2;
        const size_t pixel = (row / O.h * I.h + y) * I.w + column * pool->stride + argmax[i] % 2;
        if (argmax[i] >= WINDOW_PIXELS)
            fail("a window of four pixels has its maximum at pixel %d", argmax[i]);
        else
            chosen.at[i] = want.out.at[pixel * O.c + k];
    }
    to_bound(&bound.pooled, l->kernel_size * l->kernel_size * l->in.c + 1);
    check_tensor("pooled", got->at, want.pooled.at, bound.pooled.at, got->count);
    check_tensor("chosen", chosen.at, want.pooled.at, bound.pooled.at, got->count);
    free_arrays(&a, 3 * sizeof(Array));
    free_arrays(&want, 2 * sizeof(Array));
    free_arrays(&bound, 2 * sizeof(Array));
    free(want.argmax);
    free(bound.argmax);
    free(chosen.base);
}

// conv2d, ReLU and max-pool in one have the bits of the three, unless they are computed by planes.
static void check_pooled_forward(Net *net, size_t n, const Inputs *x) {
    const Layer *l = &net->layers[1];
    Work w = conv_work(net, n, x);
    size_t count = n * shape_size(w.fused.pool->out);
    Array scratch = array(net->scratch_size, guard_value), out = array(n * shape_size(l->out), 0);
    Array want = array(count, guard_value), got = array(count, guard_value);
    uint8_t *argmax[2] = {must_alloc(count, "a test"), must_alloc(count, "a test")};
    void *prepared = prepare_row(&fast_kernels, l);
    w.scratch = scratch.at;
    w.prepared = prepared;
    w.out = got.at;
    w.saved = argmax[0];
    memset(argmax[0], 0xFF, count);
    fast_kernels.layers[CONV2D].forward(w);
    check_guards("scratch", &scratch);
    check_guards("the max-pool's output", &got);
    forward_apart(&fast_kernels, w, out.at, want.at, argmax[1]);
    if (suits_planes(l, w.fused.pool)) {
        compare_planes(net, n, x, &got, argmax[0]);
    } else if (memcmp(got.at, want.at, count * sizeof(real)) != 0 ||
               memcmp(argmax[0], argmax[1], count) != 0) {
        fail("conv2d, ReLU and max-pool in one give other bits than one after the other");
        describe_failure(l, &w.fused, n, false);
    }
    free(scratch.base);
    free(out.base);
    free(want.base);
    free(got.base);
    free(argmax[0]);
    free(argmax[1]);
    free(prepared);
}

// Backward executes the operations of one filter for each gradient that reaches the convolution:
// once for the gradient of the weights and, if it is wanted, once for the gradient of the input.
static void check_pooled_flops(const Net *net, size_t n, const Inputs *x, const Pooled *p,
                               bool wants_din) {
    const Layer *l = &net->layers[1];
    Work w = conv_work(net, n, x);
    Array zeros = array(x->dout.count, 0);
    void *prepared = prepare_row(&fast_kernels, l);
    double terms = 0, passes = wants_din ? 2 : 1;
    memset(zeros.at, 0, zeros.count * sizeof(real));
    for (size_t i = 0; i < x->dout.count; i++)
        if (x->dout.at[i] != 0 && p->pooled.at[i] > 0)
            terms++;
    w.prepared = prepared;
    w.out = p->pooled.at;
    w.din = wants_din ? x->din.at : NULL;
    w.dout = x->dout.at;
    const double all = fast_kernels.flops(w);
    w.dout = zeros.at;
    const double found = all - fast_kernels.flops(w);
    const double want = 2 * passes * terms * (double)(l->weight_count / l->out.c);
    if (prepared && found != want)
        fail("%.0f operations for the gradients that are not 0, expected %.0f", found, want);
    free(zeros.base);
    free(prepared);
}

static void compare_pooled(Net *net, size_t n, bool accumulate, bool wants_din) {
    const Layer *l = &net->layers[1];
    const Fusion *fused = &net->row_plans[1].fused;
    size_t inputs = n * shape_size(l->in);
    Inputs x = {random_array(inputs), random_array(l->weight_count), random_array(l->bias_count),
                random_array(n * shape_size(fused->pool->out)), random_array(inputs)};
    drop_some(&x.dout);
    Inputs a = {absolute(&x.in), absolute(&x.weight), absolute(&x.bias), absolute(&x.dout),
                absolute(&x.din)};
    check_pooled_forward(net, n, &x);
    Pooled p = pooled_forward(net, n, &x);
    check_pooled_flops(net, n, &x, &p, wants_din);
    Results got = pooled_fast(net, n, &x, &p, accumulate, wants_din);
    set_num_threads(1);
    Results alone = pooled_fast(net, n, &x, &p, accumulate, wants_din);
    set_num_threads(2);
    Results want = pooled_naive(net, n, &x, &p, accumulate);
    Results bound = pooled_naive(net, n, &a, &p, accumulate);
    bool before = *failure;
    compare_bits(&got, &alone);
    if (!wants_din)
        memcpy(got.din.at, want.din.at, want.din.count * sizeof(real));
    compare_results(&got, &want, &bound, l, n);
    if (*failure && !before)
        describe_failure(l, fused, n, accumulate);
    free_arrays(&x, sizeof x);
    free_arrays(&a, sizeof a);
    free_arrays(&want, sizeof want);
    free_arrays(&bound, sizeof bound);
    free_arrays(&got, sizeof got);
    free_arrays(&alone, sizeof alone);
    free_arrays(&p, 2 * sizeof(Array));
    free(p.argmax);
}

static void test_pooled(void) {
    static Net net;
    int by_planes = 0, pairs[2] = {0}; // 3 x 3, 5 x 5
    for (int shape = 0; shape < (quick ? 40 : 200); shape++) {
        const bool winograd = shape % 8 == 0, few = shape % 5 == 2;
        const bool many = shape % 10 == 7; // slices of several images
        size_t kernel = 3 + (few ? (size_t)shape / 5 : draw_bits()) % 2 * 2;
        size_t n = many ? draw_size(33, 70) : draw_size(1, 9);
        const size_t few_channels = shape % 20 < 10 ? LANES / 2 : FEW - 1;
        size_t least = winograd ? kernel + 7 : kernel + 1;
        Shape in = {least + draw_size(0, 9), least + draw_size(0, few ? 40 : 9),
                    winograd ? max_size(LANES, FEW)
                    : few    ? draw_size(1, few_channels)
                             : draw_size(1, 40)};
        start_net(&net, in);
        size_t channels = draw_size(1, shape % 10 == 3 ? 200 : few ? 12 : 70);
        size_t x = conv2d_bias(&net, 0, channels, kernel, 1, 0, draw_bits() % 2);
        maxpool2d(&net, relu(&net, x), 2, few ? 2 : draw_size(1, 3), 0);
        l2_megabytes = shape % 16 ? 1 : 4;
        plan_net(&net, n, 0);
        net.row_plans[1].fused.input_relu_backward = draw_bits() % 2;
        if (!net.row_plans[1].fused.pool)
            fail("a convolution without padding before a max-pool is not joined with it");
        else
            compare_pooled(&net, n, shape % 2, shape % 5);
        by_planes += suits_planes(&net.layers[1], &net.layers[3]);
        pairs[kernel == 5] += pooled_pass((Work){.l = &net.layers[1], .n = n}).pairs;
    }
    l2_megabytes = 1;
    if (by_planes == 0 && (size_t)LANES >= WINDOW_CHANNELS)
        fail("no shape has been computed by planes");
    if (!pairs[0] || !pairs[1])
        fail("no shape has had two pixels in a vector");
    verdict("a convolution and its max-pool in one, forward, and backward without its zeros");
}

// Only shapes that the tiles are made for, and that fit a thread's stack.
static void test_pooled_limit(void) {
    static const struct {
        size_t size, channels_in, channels, kernel, stride, window;
        bool joined;
    } table[] = {{12, 2, 1024, 3, 1, 2, true},
                 {12, 2, 1025, 3, 1, 2, false},
                 {12, 2, 8, 4, 1, 2, false},
                 {12, 2, 8, 3, 2, 2, false},
                 {12, 2, 8, 5, 1, 3, false},
                 {32, 512 / sizeof(real), 8, 5, 1, 2, true},
                 {33, 512 / sizeof(real), 8, 5, 1, 2, false},
                 {92, 1, 8, 3, 1, 2, VECTOR_BYTES < 64},
                 {90, 1, 8, 3, 1, 2, true},
                 {30, 2, 1336 / sizeof(real), 3, 1, 2, true},
                 {30, 2, 1336 / sizeof(real) + 1, 3, 1, 2, false}};
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        static Net net;
        start_net(&net, (Shape){table[i].size, table[i].size, table[i].channels_in});
        size_t x = conv2d(&net, 0, table[i].channels, table[i].kernel, table[i].stride, 0);
        maxpool2d(&net, relu(&net, x), table[i].window, 2, 0);
        plan_net(&net, 1, 0);
        const bool joined = net.row_plans[1].fused.pool;
        if (joined != table[i].joined)
            fail("row %zu: %s", i, joined ? "joined" : "not joined");
    }
    verdict("a convolution and its max-pool in one: which ones");
}

static void test_kernels(void) {
    test_fast_conv();
    test_fast_resnet_conv();
    test_winograd(3);
    test_winograd(5);
    test_winograd_rounding(1);
    test_fast_linear();
    test_few_pixels();
    test_pooled();
    test_pooled_limit();
    test_strided_winograd();
    test_larger_l2(3);
    test_larger_l2(5);
    test_winograd_rounding(2);
}
