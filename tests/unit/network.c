/* network.c - sections 4 and 5 of cnn.c: shapes, names, parameters and initial values of
   networks; networks that cannot be built. */

/* ---- Shapes and names ------------------------------------------------------------------------ */

static void test_parameter_counts(void) {
    static Net net;
    static const struct {
        const char *model;
        Shape images;
        size_t classes, parameters;
    } counts[] = {
        {"mnist", {28, 28, 1}, 10, 1199882},       {"cifar", {32, 32, 3}, 10, 62006},
        {"resnet8", {32, 32, 3}, 10, 78042},       {"resnet18", {32, 32, 3}, 100, 11220132},
        {"resnet34", {32, 32, 3}, 100, 21328292},  {"resnet50", {32, 32, 3}, 100, 23705252},
        {"resnet101", {32, 32, 3}, 100, 42697380}, {"resnet152", {32, 32, 3}, 100, 58341028},
        {"lenet", {28, 28, 1}, 10, 61706},
    };
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        DatasetInfo info = {"test", counts[i].images, .classes = counts[i].classes};
        net_build(&net, find_model(counts[i].model), &info, &plain, &naive_kernels);
        if (net.parameter_count != counts[i].parameters)
            fail("%s: expected %zu as in PyTorch, found %zu", counts[i].model, counts[i].parameters,
                 net.parameter_count);
    }
    verdict("parameter counts of the models");
}

// The sizes of LeNet-5's layers, C1 to F6, as in the paper: a ReLU after each C and F changes none.
static void test_lenet_shapes(void) {
    static Net net;
    static const Shape shapes[] = {
        {28, 28, 1}, {28, 28, 6}, {28, 28, 6}, {14, 14, 6}, {10, 10, 16}, {10, 10, 16}, {5, 5, 16},
        {1, 1, 120}, {1, 1, 120}, {1, 1, 84},  {1, 1, 84},  {1, 1, 10},   {1, 1, 10}};
    const DatasetInfo info = {"test", {28, 28, 1}, .classes = 10};
    net_build(&net, find_model("lenet"), &info, &plain, &naive_kernels);
    if (net.layer_count != sizeof shapes / sizeof *shapes)
        fail("%zu rows, expected %zu", net.layer_count, sizeof shapes / sizeof *shapes);
    for (size_t i = 0; i < net.layer_count && !*failure; i++) {
        const Shape got = net.layers[i].out, want = shapes[i];
        if (got.h != want.h || got.w != want.w || got.c != want.c)
            fail("row %zu is %zu x %zu x %zu, expected %zu x %zu x %zu", i, got.h, got.w, got.c,
                 want.h, want.w, want.c);
    }
    verdict("shapes of LeNet-5");
}

static size_t build_named(Net *net, size_t x) {
    x = conv2d(net, conv2d(net, x, 2, 3, 1, 1), 2, 3, 1, 1);
    x = batchnorm2d(net, batchnorm2d(net, x));
    x = linear(net, linear(net, x, 3), net->classes);
    return log_softmax(net, x);
}

// Layers with parameters are numbered by kind, also those that follow each other.
static void test_layer_names(void) {
    static Net net;
    static const char *const names[] = {"", "conv1", "conv2", "bn1", "bn2", "fc1", "fc2", ""};
    static const Model model = {.name = "named", .build = build_named};
    const DatasetInfo info = {"test", {4, 4, 1}, .classes = 10};
    net_build(&net, &model, &info, &plain, &naive_kernels);
    for (size_t i = 0; i < net.layer_count; i++)
        if (strcmp(net.layers[i].name, names[i]) != 0)
            fail("row %zu: \"%s\", expected \"%s\"", i, net.layers[i].name, names[i]);
    verdict("names of layers");
}

// Every ResNet on the images of every dataset; the last stage has at least one pixel.
static void test_stems(void) {
    static Net net;
    static const struct {
        Stem stem;
        size_t kernel, side; // of the first convolution, of the last stage
    } stems[] = {{STEM_3, 3, 4}, {STEM_7, 7, 4}, {STEM_IMAGENET, 7, 1}};
    for (size_t m = (size_t)(find_model("resnet18") - models); m < LENGTH(models); m++) // 4 stages
        for (size_t i = 0; i < 6; i++) {
            Settings settings = plain;
            settings.stem = stems[i / 2].stem;
            Shape images = i % 2 ? (Shape){28, 28, 1} : (Shape){32, 32, 3};
            DatasetInfo info = {"test", images, .classes = 10};
            net_build(&net, &models[m], &info, &settings, &naive_kernels);
            size_t want = stems[i / 2].side;
            Shape last = net.layers[net.layer_count - 3].in; // average pool, linear, log_softmax
            size_t first = images.h / (i < 4 ? 1 : 2);       // pixels a row after the convolution
            if (last.h != want || last.w != want ||
                net.layers[1].kernel_size != stems[i / 2].kernel || net.layers[1].out.h != first ||
                net.layers[1].out.w != first)
                fail("%s with stem %u: %zu x %zu pixels in the end, expected %zu", models[m].name,
                     settings.stem, last.h, last.w, want);
        }
    verdict("all stems on images of 32 x 32 and 28 x 28 pixels");
}

/* ---- Networks that cannot be built ----------------------------------------------------------- */

static size_t build_unequal(Net *net, size_t x) {
    return add(net, conv2d(net, x, 2, 3, 1, 1), conv2d(net, x, 3, 3, 1, 1));
}

static size_t build_wide_window(Net *net, size_t x) {
    return conv2d(net, x, 2, 7, 1, 1);
}

static size_t build_wide_padding(Net *net, size_t x) {
    return maxpool2d(net, x, 2, 2, 2);
}

static size_t build_no_output(Net *net, size_t x) {
    return linear(net, x, 0);
}

static size_t build_all_dropped(Net *net, size_t x) {
    return dropout(net, x, 1);
}

static size_t build_softmax_of_pixels(Net *net, size_t x) {
    return log_softmax(net, conv2d(net, x, 10, 3, 1, 1));
}

static size_t build_other_classes(Net *net, size_t x) {
    return log_softmax(net, linear(net, x, net->classes + 1));
}

static size_t build_forgotten_row(Net *net, size_t x) {
    x = conv2d_bias(net, x, 4, 1, 1, 0, true);
    relu(net, x); // x = is missing
    return log_softmax(net, linear(net, x, net->classes));
}

static size_t build_unread_row(Net *net, size_t x) {
    x = log_softmax(net, linear(net, x, net->classes));
    relu(net, x);
    return x;
}

static size_t build_softmax_as_input(Net *net, size_t x) {
    x = linear(net, x, net->classes);
    return log_softmax(net, add(net, log_softmax(net, x), x));
}

static size_t build_softmax_as_other(Net *net, size_t x) {
    const size_t first = log_softmax(net, linear(net, x, net->classes));
    return log_softmax(net, add(net, linear(net, x, net->classes), first));
}

static size_t build_long(Net *net, size_t x) {
    for (size_t i = 0; i < MAX_LAYERS; i++)
        x = relu(net, x);
    return x;
}

static size_t build_relu(Net *net, size_t x) {
    return log_softmax(net, linear(net, relu(net, x), net->classes));
}

/* Builds it for images of 4 x 4 pixels in a process of its own and plans its memory; the exit
   status, and in text what it wrote to stderr. */
static int refused_build(const Model *model, const Kernels *kernels, char *text, size_t size) {
    int ends[2], status = -1;
    fflush(stdout);
    pid_t child = pipe(ends) == 0 ? fork() : -1;
    if (child == 0) {
        static Net net;
        const DatasetInfo info = {"test", {4, 4, 1}, .classes = 10};
        exit_process = _exit; // nothing of the tests is to be flushed or freed here
        dup2(ends[1], STDERR_FILENO);
        net_build(&net, model, &info, &plain, kernels);
        plan_net(&net, 1, 0);
        _exit(0);
    }
    close(ends[1]);
    FILE *said = fdopen(ends[0], "r"); // musl writes a line and its end apart
    text[said ? fread(text, 1, size - 1, said) : 0] = '\0';
    if (said)
        fclose(said);
    return waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

static void test_refused_networks(void) {
    static const struct {
        size_t (*build)(Net *net, size_t x);
        const char *message;
    } cases[] = {
        {build_unequal, "add at row 3: expected equal shapes, found 4x4x2 and 4x4x3\n"},
        {build_wide_window,
         "conv2d at row 1: a window of 7 x 7, stride 1, padding 1, to 2 channels"},
        {build_wide_padding, "maxpool2d at row 1: a window of 2 x 2, stride 2, padding 2, to 1 "},
        {build_no_output, "linear at row 1: expected at least 1 output\n"},
        {build_all_dropped,
         "dropout at row 1: expected a probability from 0 to below 1, found 1\n"},
        {build_softmax_of_pixels, "log_softmax at row 2: expected 1 x 1 pixel, found 4 x 4\n"},
        {build_other_classes, "over the 10 classes of test; found row 2 of 3, with 11 outputs\n"},
        {build_unread_row, "over the 10 classes of test; found row 2 of 4, with 10 outputs\n"},
        {build_forgotten_row, "row 2, a relu: expected a later row that reads it, found none; "},
        {build_softmax_as_input,
         "row 3: reads a log_softmax; expected log_softmax only as the last "},
        {build_softmax_as_other,
         "row 4: reads a log_softmax; expected log_softmax only as the last "},
        {build_long, "raise MAX_LAYERS in cnn.c\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const Model model = {.name = "wrong", .build = cases[i].build};
        char text[512];
        const int status = refused_build(&model, &naive_kernels, text, sizeof text);
        if (status != 1 || !strstr(text, cases[i].message) ||
            strncmp(text, "cnn: error: model wrong", 23) != 0)
            fail("network %zu: exit status %d, expected 1 and ...%s, found %s", i, status,
                 cases[i].message, text);
    }
    verdict("networks that cannot be built");
}

// A kind of layer that somebody has added to some of the tables only
static void test_incomplete_tables(void) {
    const Model model = {.name = "wrong", .build = build_relu};
    char text[512], message[128];
    for (int i = 0; i < 2; i++) {
        Kernels kernels = *cpu_kernels[CPU_KERNELS - 1];
        const char *lacks = i == 0 ? "forward" : "backward";
        const char *table = kernels.choice == FAST ? "fast_kernels" : "naive_kernels";
        kernels.layers[RELU].backward = NULL;
        if (i == 0)
            kernels.layers[RELU].forward = NULL;
        snprintf(message, sizeof message, "row 1: layer kind %d (relu) has no %s in %s; add it\n",
                 RELU, lacks, table);
        const int status = refused_build(&model, &kernels, text, sizeof text);
        if (kernels.choice == FAST && (status != 1 || !strstr(text, message)))
            fail("exit status %d, expected 1 and ...%s, found %s", status, message, text);
    }
    verdict("tables that lack a function of a kind");
}

/* ---- Initial values -------------------------------------------------------------------------- */

typedef struct Spread {
    double largest, variance;
    double fourth, neighbors; // the fourth moment, by variance^2; correlation of neighbors
} Spread;

static Spread measure_spread(const real *values, size_t count) {
    Spread s = {0};
    for (size_t i = 0; i < count; i++) {
        double square = (double)values[i] * (double)values[i];
        s.largest = fmax(s.largest, fabs((double)values[i]));
        s.variance += square / (double)count;
        s.fourth += square * square / (double)count;
        s.neighbors += i ? (double)values[i] * (double)values[i - 1] / (double)count : 0;
    }
    s.fourth /= s.variance * s.variance;
    s.neighbors /= s.variance;
    return s;
}

// A fourth moment of 3: normal; 1.8: uniform.
static void expect_spread(const char *name, const real *values, size_t count, double variance,
                          double fourth) {
    Spread s = measure_spread(values, count);
    if (!(fabs(s.variance / variance - 1) < .05 && fabs(s.fourth / fourth - 1) < .1))
        fail("%s: variance %g, fourth moment %.2f, expected %g, %.2f", name, s.variance, s.fourth,
             variance, fourth);
    if (!(fabs(s.neighbors) < .05))
        fail("%s: neighbors have a correlation of %.2f", name, s.neighbors);
    if (fourth < 2 && !(s.largest <= sqrt(3 * variance)))
        fail("%s: largest %g, expected %g", name, s.largest, sqrt(3 * variance));
}

static void check_norm_start(const Net *net, size_t row) {
    const Layer *l = &net->layers[row];
    for (size_t c = 0; c < l->out.c; c++) {
        const real *stats = net->stats + net->row_plans[row].stats + c;
        if (net->params[l->weight_offset + c] != 1 || net->params[l->bias_offset + c] != 0 ||
            stats[0] != 0 || stats[l->out.c] != 1)
            fail("%s: channel %zu does not start as 1, 0 and mean 0, variance 1", l->name, c);
    }
}

static void test_initial_values(void) {
    static Net net;
    start_net(&net, (Shape){6, 6, 64});
    size_t x = batchnorm2d(&net, conv2d_bias(&net, 0, 96, 3, 1, 1, false));
    x = conv2d(&net, x, 128, 3, 1, 0);
    log_softmax(&net, linear(&net, x, CLASSES));
    plan_net(&net, 1, 0);
    net_alloc(&net);
    net.layers[4].bias_count = 0; // only a convolution without a bias has normal weights
    init_weights(&net, 1);
    const Layer *l = net.layers;
    expect_spread("conv1.weight", net.params + l[1].weight_offset, l[1].weight_count, 2. / (9 * 96),
                  3);
    check_norm_start(&net, 2);
    expect_spread("conv2.weight", net.params + l[3].weight_offset, l[3].weight_count,
                  1. / (9 * 96 * 3), 1.8);
    expect_spread("fc1.weight", net.params + l[4].weight_offset, l[4].weight_count,
                  1. / (128 * 16 * 3), 1.8);
    Spread bias = measure_spread(net.params + l[3].bias_offset, l[3].bias_count);
    if (!(bias.largest <= 1 / sqrt(9. * 96) && bias.largest > .9 / sqrt(9. * 96)))
        fail("conv2.bias: largest %g", bias.largest);
    memory_plan_free(&net.plan);
    verdict("initial values: normal, uniform, BatchNorm's");
}

static void test_network(void) {
    test_parameter_counts();
    test_lenet_shapes();
    test_layer_names();
    test_stems();
    test_refused_networks();
    test_incomplete_tables();
    test_initial_values();
}
