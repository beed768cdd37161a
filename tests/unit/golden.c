/* golden.c - networks, optimizers and schedules against numbers of PyTorch. They are read from
   tests/pytorch/golden, which tests/pytorch/make_golden.py wrote. */

typedef struct Line {
    char keyword[16], name[64], kind[16];
    double *numbers;
    size_t count;
} Line;

typedef struct Golden {
    Line lines[256];
    size_t count;
} Golden;

// The words of a line up to its first number, and its numbers.
static Line parse_golden_line(char *text) {
    Line line = {.numbers = must_alloc(strlen(text) * sizeof(double), "a test")};
    char *rest = NULL, *words[3] = {line.keyword, line.name, line.kind};
    size_t sizes[3] = {sizeof line.keyword, sizeof line.name, sizeof line.kind}, count = 0;
    for (char *word = strtok_r(text, " \n", &rest); word; word = strtok_r(NULL, " \n", &rest)) {
        char *end;
        double number = strtod(word, &end);
        if (count < 2 || *end)
            snprintf(words[count], sizes[count], "%s", word);
        else
            line.numbers[line.count++] = number;
        count += count < 2;
    }
    return line;
}

static bool read_golden(Golden *g, const char *name) {
    char path[128], *text = NULL;
    size_t size = 0;
    snprintf(path, sizeof path, "tests/pytorch/golden/%s.txt", name);
    FILE *f = fopen(path, "r");
    g->count = 0;
    if (!f)
        fail("cannot read %s: run in the repository's root", path);
    while (f && getline(&text, &size, f) > 0 && g->count < 256)
        if (*text != '#')
            g->lines[g->count++] = parse_golden_line(text);
    free(text);
    if (f)
        fclose(f);
    return f != NULL;
}

static void free_golden(Golden *g) {
    for (size_t i = 0; i < g->count; i++)
        free(g->lines[i].numbers);
}

static const Line *golden_line(const Golden *g, const char *keyword, size_t number) {
    for (size_t i = 0; i < g->count; i++)
        if (strcmp(g->lines[i].keyword, keyword) == 0 && number-- == 0)
            return &g->lines[i];
    return NULL;
}

// Streams of numbers as make_golden.py has them.
enum { IMAGE_STREAM = 50, LABEL_STREAM, START_STREAM = 60, GRADIENT_STREAM, LOGIT_STREAM = 80 };
enum { WEIGHT_STREAM = 100, GOLDEN_CLASSES = 10, GOLDEN_LISTED = 64 };

static void fill_stream(real *to, size_t count, uint32_t stream) {
    for (size_t i = 0; i < count; i++) {
        uint32_t r[4];
        philox4x32(r, (uint32_t)(i / 4), stream, 0, 0xFFFE, 309);
        to[i] = 2 * uniform(r[i % 4]) - 1;
    }
}

static void fill_labels(uint8_t *labels, size_t count) {
    real values[count];
    fill_stream(values, count, LABEL_STREAM);
    for (size_t i = 0; i < count; i++)
        labels[i] = (uint8_t)floor(((double)values[i] + 1) / 2 * GOLDEN_CLASSES);
}

static size_t golden_bottleneck(Net *net, size_t x) {
    x = relu(net, conv_bn(net, x, "", "conv1", "bn1", 8, 3, 1));
    x = bottleneck(net, x, "layer1.0.", 8, 1);
    x = bottleneck(net, x, "layer2.0.", 16, 2);
    x = bottleneck(net, x, "layer2.1.", 16, 1);
    x = set_row_name(net, linear(net, global_avgpool2d(net, x), net->classes), "", "fc");
    return log_softmax(net, x);
}

typedef struct GoldenNet {
    const char *name;
    size_t (*build)(Net *net, size_t x);
    size_t batch;
    Shape images;
} GoldenNet;
static const GoldenNet golden_nets[] = {{"mnist", model_mnist, 4, {28, 28, 1}},
                                        {"cifar", model_cifar, 4, {32, 32, 3}},
                                        {"bottleneck", golden_bottleneck, 6, {12, 12, 3}},
                                        {"resnet8", model_resnet8, 6, {16, 16, 3}}};

static void build_golden_net(Net *net, const GoldenNet *g, const Kernels *k) {
    Model model = {.name = g->name, .build = g->build};
    DatasetInfo info = {.name = "golden", .shape = g->images, .classes = GOLDEN_CLASSES};
    net_build(net, &model, &info, &plain, k);
    for (size_t i = 0; i < net->layer_count; i++)
        if (net->layers[i].kind == DROPOUT)
            net->layers[i].p = 0;
    plan_net(net, g->batch, 0);
    net_alloc(net);
    init_weights(net, 1);
}

// The tensor of this name in our list of those that a checkpoint holds.
static const Tensor *find_tensor(const Tensor *list, size_t count, const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(list[i].name, name) == 0)
            return &list[i];
    fail("there is no tensor %s", name);
    return NULL;
}

// What make_golden.py gives to the parameter that is number t in PyTorch's order.
static void set_golden_parameter(Net *net, const Tensor *t, uint32_t number) {
    bool norm = strstr(t->name, "bn") || strstr(t->name, "downsample.1");
    bool bias = strstr(t->name, ".bias");
    real *values = net->staging[0];
    fill_stream(values, t->count, WEIGHT_STREAM + number);
    const size_t fan_in = shape_size(t->filter);
    for (size_t i = 0; i < t->count; i++) {
        double v = (double)values[i];
        values[i] = (real)(t->filter.h ? 1 / sqrt((double)fan_in) * v
                           : !norm     ? .1 * v
                           : bias      ? .3 * v
                                       : 1 + .5 * v);
    }
    if (t->filter.h)
        reorder_weight(t->values, values, t->filter, t->count / fan_in, FROM_FILE);
    else
        memcpy(t->values, values, t->count * sizeof(real));
}

// Parameters in the order of the file's gradients, which is that of named_parameters().
static void set_golden_parameters(Net *net, const Golden *g, const Tensor *list, size_t count) {
    const Line *line;
    for (uint32_t t = 0; (line = golden_line(g, "grad", t)); t++) {
        const Tensor *tensor = find_tensor(list, count, line->name);
        if (tensor)
            set_golden_parameter(net, tensor, t);
    }
}

/* How far off a result may be, as a part of the largest number of its tensor. In double: 1e-6, as
   if by another order of sums. In float: a sum of t terms is off by about sqrt(t) * epsilon of its
   size; a gradient has been through the sums forward and backward of all rows: their errors add up.
   That holds as long as no rounding moves a ReLU's input over 0 or changes who is a max-pool's
   largest. Those inputs are at least 8e-6 from 0 (mnist; the residual networks 2e-5, whose rounding
   is up to 5e-6), and the two largest 5e-6 apart. */
static double golden_tolerance(const Net *net, size_t n) {
    double roundings = 0;
    for (size_t i = 1; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        double taps = (double)(l->kernel_size * l->kernel_size),
               pixels = (double)(n * l->out.h * l->out.w);
        if (l->kind == CONV2D || l->kind == LINEAR)
            roundings += sqrt(taps * (double)l->in.c) + sqrt(taps * (double)l->out.c);
        if (l->weight_count)
            roundings += sqrt(pixels);
    }
    return is_double ? 1e-6 : epsilon * roundings;
}

// A line without a name: the numbers themselves.
static void compare_numbers(const Golden *g, const char *keyword, const real *got,
                            double tolerance) {
    const Line *line = golden_line(g, keyword, 0);
    size_t count = line ? line->count : 0;
    Array want = array(count, 0), bound = array(count, 0);
    double largest = 0;
    for (size_t i = 0; i < count; i++)
        largest = fmax(largest, fabs(line->numbers[i]));
    for (size_t i = 0; i < count; i++) {
        want.at[i] = (real)line->numbers[i];
        bound.at[i] = (real)(tolerance * largest);
    }
    if (!line)
        fail("the file has no line %s", keyword);
    check_tensor(keyword, got, want.at, bound.at, count);
    free_arrays((Array[]){want, bound}, 2 * sizeof(Array));
}

// Norm, sum and entries of a tensor, as tensor_line() in make_golden.py lists them.
static Array summarize(const real *values, size_t count) {
    size_t listed = min_size(GOLDEN_LISTED, count);
    Array all = array(2 + listed, guard_value);
    double squares = 0, sum = 0;
    for (size_t i = 0; i < count; i++) {
        squares += (double)values[i] * (double)values[i];
        sum += (double)values[i];
    }
    all.at[0] = (real)sqrt(squares);
    all.at[1] = (real)sum;
    for (size_t k = 0; k < listed; k++)
        all.at[2 + k] = values[k * count / listed];
    return all;
}

// values: in PyTorch's layout
static void compare_tensor(const Line *line, const real *values, size_t count, double tolerance) {
    if (line->numbers[0] != (double)count || line->count != 3 + min_size(GOLDEN_LISTED, count)) {
        fail("%s: %zu numbers, expected %g", line->name, count, line->numbers[0]);
        return;
    }
    Array got = summarize(values, count), want = array(got.count, 0), bound = array(got.count, 0);
    double norm = line->numbers[1], largest = norm / sqrt((double)count); // no less than this
    for (size_t i = 0; i < got.count; i++) {
        want.at[i] = (real)line->numbers[1 + i];
        largest = fmax(largest, i < 2 ? 0 : fabs(line->numbers[1 + i]));
    }
    for (size_t i = 0; i < got.count; i++) // as many errors as numbers may add up in the sum
        bound.at[i] = (real)(tolerance * (i == 0   ? norm
                                          : i == 1 ? norm * sqrt((double)count)
                                                   : largest));
    check_tensor(line->name, got.at, want.at, bound.at, got.count);
    free_arrays((Array[]){got, want, bound}, 3 * sizeof(Array));
}

static void compare_tensors(Net *net, const Golden *g, const char *keyword, const Tensor *list,
                            size_t count, double tolerance) {
    const Line *line;
    for (size_t i = 0; (line = golden_line(g, keyword, i)); i++) {
        const Tensor *t = find_tensor(list, count, line->name);
        if (!t)
            return;
        const real *values = t->values;
        if (t->filter.h) {
            reorder_weight(net->staging[1], t->values, t->filter, t->count / shape_size(t->filter),
                           TO_FILE);
            values = net->staging[1];
        }
        compare_tensor(line, values, t->count, tolerance);
    }
}

static void run_golden_net(Net *net, const GoldenNet *which, const Golden *g) {
    size_t n = which->batch;
    TensorList list = list_tensors(net);
    TensorList grads = {.tensors = must_alloc(list.count * sizeof(Tensor), "a test")};
    append_parameters(&grads, net, "", net->grads);
    double tolerance = golden_tolerance(net, n);
    RandomKey key = {.seed = 1, .epoch = 1, .stride = 1};
    set_golden_parameters(net, g, list.tensors, list.count);
    fill_stream(output(net, 0), n * shape_size(which->images), IMAGE_STREAM);
    fill_labels(net->labels, n);
    forward(net, n, &key);
    real loss = (real)loss_and_gradient(net, n).mean;
    compare_numbers(g, "logp", output(net, last_row(net)), tolerance);
    compare_numbers(g, "loss", &loss, tolerance);
    backward(net, n);
    compare_tensors(net, g, "grad", grads.tensors, grads.count, tolerance);
    compare_tensors(net, g, "stat", list.tensors, list.count, tolerance);
    forward(net, n, NULL);
    compare_numbers(g, "eval", output(net, last_row(net)), tolerance);
    free(list.tensors);
    free(grads.tensors);
}

static void test_golden_net(const GoldenNet *which, const Kernels *k) {
    static Net net;
    static Golden golden;
    if (read_golden(&golden, which->name)) {
        build_golden_net(&net, which, k);
        run_golden_net(&net, which, &golden);
        memory_plan_free(&net.plan);
    }
    free_golden(&golden);
    char name[96];
    snprintf(name, sizeof name, "PyTorch's %s, %s kernels", which->name, NAME_OF(k));
    verdict("%s", name);
}

// Ten steps by the line's settings; the network is nothing but its parameters.
static void check_golden_optimizer(const Line *line) {
    enum { COUNT = 16, STEPS = 10 };
    const double *x = line->numbers;
    real params[COUNT], grads[COUNT], state[2 * COUNT] = {0}, want[COUNT], bound[COUNT];
    Settings settings = plain;
    settings.momentum = x[1];
    settings.weight_decay = x[2];
    settings.nesterov = x[3] != 0;
    settings.optimizer = x[4] == 0 ? SGD : ADADELTA;
    Net net = {.settings = &settings, .kernels = &fast_kernels, .params = params, .grads = grads};
    net.device = &cpu_device;
    net.param_size = COUNT;
    net.step = &(StepInputs){.lr = x[0]};
    fill_stream(params, COUNT, START_STREAM);
    for (uint32_t step = 0; step < STEPS && line->count == 5 + COUNT * STEPS; step++) {
        fill_stream(grads, COUNT, GRADIENT_STREAM + step);
        optimizer_step(&net, state);
        for (size_t i = 0; i < COUNT; i++) { // a momentum of .9 keeps ten steps' roundings
            want[i] = (real)x[5 + step * COUNT + i];
            bound[i] = (real)(is_double ? 1e-12 : 40 * (step + 1) * epsilon);
        }
        check_tensor(line->name, params, want, bound, COUNT);
    }
    if (line->count != 5 + COUNT * STEPS)
        fail("%s: %zu numbers", line->name, line->count);
}

static void check_golden_schedule(const Line *line) {
    enum { STEPS = 3 };
    const double *x = line->numbers;
    Settings s = {.lr = .1, .gamma = x[0]};
    s.schedule = strcmp(line->kind, "cosine") == 0 ? SCHEDULE_COSINE : SCHEDULE_STEP;
    s.step_size = (size_t)x[1];
    s.warmup_epochs = (size_t)x[2];
    s.epochs = (size_t)x[3];
    if (line->count != 4 + s.epochs * STEPS || s.epochs == 0)
        fail("%s: %zu numbers", line->name, line->count);
    for (size_t i = 0; i + 4 < line->count; i++) {
        real got = (real)learning_rate(&s, i / STEPS, i % STEPS, STEPS), want = (real)x[4 + i];
        real bound = (real)(8 * epsilon * fabs(x[4 + i]) + 1e-17);
        check_tensor(line->name, &got, &want, &bound, 1);
    }
}

static void check_golden_smoothing(const Line *line) {
    enum { N = 4, COUNT = N * GOLDEN_CLASSES };
    real logits[COUNT], logp[COUNT], losses[N], correct[N];
    real got[1 + COUNT], want[1 + COUNT], bound[1 + COUNT];
    uint8_t labels[N];
    fill_stream(logits, COUNT, LOGIT_STREAM);
    fill_labels(labels, N);
    const Layer l = {.out = {1, 1, GOLDEN_CLASSES}};
    log_softmax_forward((Work){.l = &l, .n = N, .in = logits, .out = logp});
    nll_loss(losses, correct, got + 1, logp, labels, N, N, GOLDEN_CLASSES, .1, NULL);
    got[0] = (losses[0] + losses[1] + losses[2] + losses[3]) / N;
    for (size_t i = 0; i < 1 + COUNT && line->count == 1 + COUNT; i++) {
        want[i] = (real)line->numbers[i];
        bound[i] = (real)(32 * epsilon * fabs(line->numbers[i]));
    }
    if (line->count == 1 + COUNT)
        check_tensor("loss and gradient", got, want, bound, 1 + COUNT);
    else
        fail("%zu numbers", line->count);
}

// All lines of one keyword, of which there must be as many as expected.
static void test_golden_lines(const char *keyword, size_t expected, void (*check)(const Line *)) {
    static Golden golden;
    size_t count = 0;
    char name[64];
    read_golden(&golden, "optimizers");
    for (const Line *line; (line = golden_line(&golden, keyword, count)); count++)
        check(line);
    if (count != expected)
        fail("%zu lines, expected %zu", count, expected);
    free_golden(&golden);
    snprintf(name, sizeof name, "PyTorch's %s", keyword);
    verdict("%s", name);
}

static void test_golden(void) {
    for (size_t i = 0; i < sizeof golden_nets / sizeof *golden_nets; i++)
        for (size_t b = 0; b < 2; b++)
            test_golden_net(&golden_nets[i], both_kernels[b]);
    test_golden_lines("optimizer", 6, check_golden_optimizer);
    test_golden_lines("schedule", 5, check_golden_schedule);
    test_golden_lines("smoothing", 1, check_golden_smoothing);
}
