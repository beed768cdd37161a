/* Training speed on the GPU, without the loader: whole steps on one batch in its memory, then every
   operation of a step by itself, and the device's copy bandwidth. Figures are medians over
   several measurements, by events in the device's stream; no speeds are printed when the "device"
   is the emulator. The host queues the calls of an operation while the device is still busy with a
   copy, so that short operations do not show the time that the host takes to launch them; the first
   of an operation's calls then finds nothing in the caches.

     build/bench_gpu [--nets "mnist,64 cifar64,250 ..."] [--kernels NAME] [--json FILE] [--tiny]

   A net is model,batch[,kernels]; cifar64 is --model cifar --width 64. --tiny: networks that take
   the emulator seconds. One line of key=value for each network, then one for each kind of
   operation: its calls in a step, their total time, and GFLOP/s and GB/s over that time. FLOP
   are counted as in the summary of ./cnn, bytes as in the comments of cnn_kernels.cu, those of a
   convolution once for each number. Exit code 77 without a GPU. */
#define CNN_NO_MAIN
#include "../../cnn.c"

enum { ROUNDS = 9, WALKS = 5, MAX_SAMPLES = 4096 };

// One call in a step.
typedef struct Sample {
    const char *op, *name;     // name: of its layer, or empty
    double flops, bytes;       // at least
    double seconds[WALKS + 1]; // one for each repetition of the step; the first is a warm-up
} Sample;

static Sample samples[MAX_SAMPLES];
static size_t sample_count, walk;
static const Backend *gpu; // what is measured
static bool emulated;
static void *copied[2]; // memory of the device: see copy_bytes()

// A GB, more than the caches hold, whose copy takes about as long as the host needs for 20 calls.
static size_t copy_bytes(void) {
    return emulated ? 1 << 20 : 1 << 30;
}

/* ---- A backend that times each call of another one. Short operations are repeated, so that the
   resolution of events does not matter; `grows`: a repetition changes its own input, so there must
   be few. */

static Sample *next_sample(const char *op, const char *name, double flops, double bytes) {
    if (sample_count == MAX_SAMPLES)
        die(1, "more than %d operations in a step; raise MAX_SAMPLES", MAX_SAMPLES);
    Sample *s = &samples[sample_count++];
    s->op = op;
    s->name = name;
    s->flops = flops;
    s->bytes = bytes;
    return s;
}

static size_t repeats(const Sample *s, bool grows) {
    if (walk == 0 || emulated)
        return 1;
    size_t wanted = (size_t)fmin(20, ceil(2e-3 / fmax(s->seconds[0], 1e-6)));
    return grows ? min_size(wanted, 3) : wanted;
}

#define TIME(op, name, flops, bytes, grows, call)                    \
    do {                                                             \
        Sample *sample = next_sample(op, name, flops, bytes);        \
        size_t count_ = repeats(sample, grows);                      \
        gpu->copy(copied[1], copied[0], copy_bytes());               \
        gpu->mark(0);                                                \
        for (size_t i_ = 0; i_ < count_; i_++)                       \
            gpu->call;                                               \
        gpu->mark(1);                                                \
        sample->seconds[walk] = gpu->elapsed(0, 1) / (double)count_; \
    } while (0)

/* The bytes that a layer's operations move at least: for each element of its input and its output.
   Convolutions and linear layers also read or write each weight once in every pass. `data` is
   added in backward if it computes din. */
typedef struct Cost {
    const char *names[2]; // of forward and backward
    struct {
        double in, out;
    } forward, backward, data;
} Cost;

static const Cost costs[KINDS] = {
    [CONV2D] = {{"conv2d_forward", "conv2d_backward"}, {4, 4}, {4, 4}, {4, 0}},
    [LINEAR] = {{"linear_forward", "linear_backward"}, {4, 4}, {4, 4}, {4, 0}},
    [BATCHNORM2D] = {{"batchnorm2d_forward", "batchnorm2d_backward"}, {0, 12}, {0, 8}, {0, 12}},
    [RELU] = {{"relu_forward", "relu_backward"}, {0, 8}, {0, 12}, {0, 0}},
    [MAXPOOL2D] = {{"maxpool2d_forward", "maxpool2d_backward"}, {4, 5}, {4, 5}, {0, 0}},
    [AVGPOOL2D] = {{"avgpool2d_forward", "avgpool2d_backward"}, {4, 4}, {4, 4}, {0, 0}},
    [ADD] = {{"add_forward", "add_backward"}, {0, 8}, {0, 8}, {0, 0}},
    [DROPOUT] = {{"dropout_forward", "dropout_backward"}, {0, 9}, {0, 9}, {0, 0}},
    [LOG_SOFTMAX] = {{"log_softmax_forward", "log_softmax_backward"}, {0, 8}, {0, 12}, {0, 0}},
};

static double forward_bytes(LayerKind kind, Work w) {
    const Cost *c = &costs[kind];
    const double in = (double)(w.n * shape_size(w.l->in)), out = (double)outputs(w);
    const double weights = kind == CONV2D || kind == LINEAR ? 4 * (double)w.l->weights : 0;
    const bool adds = w.residual && (kind == ADD || kind == BATCHNORM2D);
    return c->forward.in * in + (c->forward.out + (adds ? 4 : 0)) * out + weights;
}

static double backward_bytes(LayerKind kind, Work w) {
    const Cost *c = &costs[kind];
    const double in = (double)(w.n * shape_size(w.l->in)), out = (double)outputs(w);
    const double weights = kind == CONV2D || kind == LINEAR ? 4 * (double)w.l->weights : 0;
    double bytes = c->backward.in * in + c->backward.out * out + weights;
    if (w.din)
        bytes += c->data.in * in + c->data.out * out + weights;
    return bytes + (w.accumulate ? 4 * in : 0);
}

// kind is not w.l->kind where a ReLU or an add is fused with another row.
static void time_forward(LayerKind kind, Work w) {
    const bool multiplies = kind == CONV2D || kind == LINEAR;
    TIME(costs[kind].names[0], w.l->name, multiplies ? (double)w.n * layer_flops(w.l) : 0,
         forward_bytes(kind, w), w.out == w.in && kind != RELU, layers[kind].forward(w));
}

static void time_backward(LayerKind kind, Work w) {
    const double passes = kind == CONV2D || kind == LINEAR ? w.din ? 2 : 1 : 0;
    TIME(costs[kind].names[1], w.l->name, passes * (double)w.n * layer_flops(w.l),
         backward_bytes(kind, w), (w.accumulate || w.din == w.dout) && kind != RELU,
         layers[kind].backward(w));
}

// A function in the backend's table does not know its kind, so each kind has its own.
#define EACH_KIND(DO) \
    DO(CONV2D)        \
    DO(LINEAR)        \
    DO(BATCHNORM2D)   \
    DO(RELU)          \
    DO(MAXPOOL2D)     \
    DO(AVGPOOL2D)     \
    DO(ADD)           \
    DO(DROPOUT)       \
    DO(LOG_SOFTMAX)
#define TIMED_FUNCTIONS(kind)                  \
    static void time_forward_##kind(Work w) {  \
        time_forward(kind, w);                 \
    }                                          \
    static void time_backward_##kind(Work w) { \
        time_backward(kind, w);                \
    }
#define USE_TIMED_FUNCTIONS(kind)                 \
    b.layers[kind].forward = time_forward_##kind; \
    b.layers[kind].backward = time_backward_##kind;
EACH_KIND(TIMED_FUNCTIONS)

static void time_nll_loss(real *losses, real *dlogp, const real *logp, const uint8_t *labels,
                          size_t n, size_t batch, size_t classes, double smoothing) {
    TIME("nll_loss", "", 0, 8. * (double)(n * classes), false,
         nll_loss(losses, dlogp, logp, labels, n, batch, classes, smoothing));
}

static void time_adadelta(Update u) {
    TIME("adadelta", "", 0, 28. * (double)u.count, true, adadelta(u));
}

static void time_sgd(Update u) {
    TIME("sgd", "", 0, (u.momentum > 0 ? 20. : 12.) * (double)u.count, true, sgd(u));
}

static void time_copy(void *to, const void *from, size_t bytes) {
    TIME("copy", "", 0, 2. * (double)bytes, false, copy(to, from, bytes));
}

static Backend timed_backend(void) {
    Backend b = *gpu;
    EACH_KIND(USE_TIMED_FUNCTIONS)
    b.nll_loss = time_nll_loss;
    b.adadelta = time_adadelta;
    b.sgd = time_sgd;
    b.copy = time_copy;
    return b;
}

/* ---- A network */

// "cifar64,250,naive" in --nets; without the third part, the kernels are --kernels or the best.
typedef struct Case {
    char model[32], kernels[32];
    size_t width, batch;
} Case;

static Case parse_case(const char *word, const char *kernels) {
    Case c = {.width = 6};
    snprintf(c.kernels, sizeof c.kernels, "%s", kernels);
    if (sscanf(word, "%31[^,],%zu,%31s", c.model, &c.batch, c.kernels) < 2 || c.batch == 0)
        die(EXIT_USAGE, "--nets: expected model,batch or model,batch,kernels, found %s", word);
    if (sscanf(c.model, "cifar%zu", &c.width) == 1)
        c.model[strlen("cifar")] = 0;
    return c;
}

static const Backend *find_backend(const char *kernels) {
    const Backend *found = NULL;
    for (size_t i = 0; cuda_backend(i); i++) // the best one is the last
        if (!*kernels || strcmp(kernels, cuda_backend(i)->kernels) == 0)
            found = cuda_backend(i);
    if (!found)
        die(EXIT_USAGE, "--kernels: the GPU has none that are called %s", kernels);
    return found;
}

// The network on synthetic images, and a loader that has put one batch of them on the GPU.
static const Batch *setup_bench(Run *run, const Case *c) {
    char width[32], batch[32];
    snprintf(width, sizeof width, "%zu", c->width);
    snprintf(batch, sizeof batch, "%zu", c->batch);
    char *words[] = {"cnn", "--model", (char *)c->model, "--width", width, "--batch-size", batch};
    memset(run, 0, sizeof *run);
    setup_settings(run, sizeof words / sizeof *words, words);
    run->info = dataset_for(run->model, "synthetic");
    run->train_set.info = &run->info;
    make_synthetic(&run->train_set, true, c->batch);
    net_build(&run->net, run->model, &run->info, &run->settings, gpu);
    plan_memory(&run->net, c->batch);
    net_alloc(&run->net);
    net_init(&run->net, 1);
    run->state = gpu->alloc(count_states(run->optimizer, &run->settings) * run->net.param_size *
                            sizeof *run->state);
    if (!run->state)
        die(1, "no memory for the optimizer of %s", c->model);
    Placement place = {.backend = gpu, .pinned = true};
    loader_plan(&run->train_loader, &run->train_set, c->batch, 1, AUGMENT_NONE, place);
    loader_init(&run->train_loader);
    loader_start(&run->train_loader, 1, 1, 0);
    return loader_next(&run->train_loader);
}

static void free_bench(Run *run) {
    run->net.backend = gpu;
    loader_free(&run->train_loader);
    gpu->release(run->state);
    net_free(&run->net);
    free_dataset(&run->train_set);
}

// As in train(), where the loss is also copied to the host in every step.
static double train_step(Run *run, const Batch *batch) {
    net_load(&run->net, batch, 1e-4);
    forward(&run->net, batch->n, &run->net.step->draw);
    double loss = loss_and_gradient(&run->net, batch->n, true);
    backward(&run->net, batch->n);
    optimizer_step(run->optimizer, &run->net, run->state);
    return loss;
}

// Seconds of a step, in up to ROUNDS measurements, fewer on a slow device.
static size_t time_steps(Run *run, const Batch *batch, double seconds[ROUNDS]) {
    const double round_seconds = 0.3, enough = 12;
    const size_t least = emulated ? 1 : 3;
    size_t rounds = 0;
    for (size_t i = 0; i < least; i++)
        check_loss(&run->net, batch, train_step(run, batch));
    gpu->synchronize();
    double start = now();
    while (rounds < least || (!emulated && rounds < ROUNDS && now() - start < enough)) {
        size_t steps = 0;
        double begin = now(), loss = 0;
        gpu->mark(0);
        while (steps < 1 || (!emulated && (steps < 2 || now() - begin < round_seconds))) {
            loss = train_step(run, batch);
            steps++;
        }
        gpu->mark(1);
        seconds[rounds++] = gpu->elapsed(0, 1) / (double)steps;
        check_loss(&run->net, batch, loss);
    }
    return rounds;
}

static void time_operations(Run *run, const Batch *batch) {
    Backend timed = timed_backend();
    run->net.backend = &timed;
    for (walk = 0; walk <= WALKS && (walk == 0 || !emulated); walk++) {
        sample_count = 0;
        train_step(run, batch);
    }
    run->net.backend = gpu;
    for (size_t i = 0; i < sample_count && !emulated; i++)
        samples[i].seconds[0] = median(samples[i].seconds + 1, WALKS);
}

// ---- Report. In the emulator a figure is null in JSON and left out of a line.

static void figure(FILE *json, const char *key, double value, int digits) {
    if (!emulated)
        printf(" %s=%.*f", key, digits, value);
    if (json && emulated)
        fprintf(json, ", \"%s\": null", key);
    else if (json)
        fprintf(json, ", \"%s\": %.*f", key, digits, value);
}

// The sum over all calls of one operation; false if an earlier call has reported it.
static bool sum_operation(size_t first, Sample *sum, size_t *calls) {
    *sum = (Sample){.op = samples[first].op};
    *calls = 0;
    for (size_t i = 0; i < sample_count; i++) {
        const Sample *s = &samples[i];
        if (strcmp(s->op, sum->op) != 0)
            continue;
        if (i < first)
            return false;
        sum->flops += s->flops;
        sum->bytes += s->bytes;
        sum->seconds[0] += s->seconds[0];
        ++*calls;
    }
    return true;
}

static void report_operation(FILE *json, const Sample *s) {
    figure(json, "ms", 1e3 * s->seconds[0], 4);
    if (s->flops > 0)
        figure(json, "gflops", s->flops / s->seconds[0] / 1e9, 1);
    figure(json, "gb_per_s", s->bytes / s->seconds[0] / 1e9, 1);
}

static void report_operations(FILE *json, const Case *c) {
    Sample sum;
    size_t calls;
    const char *comma = "";
    for (size_t i = 0; i < sample_count; i++) {
        if (!sum_operation(i, &sum, &calls))
            continue;
        printf("op=%s net=%s width=%zu batch=%zu kernels=%s calls=%zu", sum.op, c->model, c->width,
               c->batch, gpu->kernels, calls);
        if (json)
            fprintf(json, "%s\n      {\"op\": \"%s\", \"calls\": %zu", comma, sum.op, calls);
        report_operation(json, &sum);
        printf("%s\n", emulated ? " emulated=true" : "");
        if (json)
            fprintf(json, "}");
        comma = ",";
    }
}

// Each call of a layer that has a name, for the JSON file only: there are too many to read.
static void report_layers(FILE *json) {
    const char *comma = "";
    for (size_t i = 0; i < sample_count; i++) {
        const Sample *s = &samples[i];
        if (!*s->name || emulated)
            continue;
        fprintf(json, "%s\n      {\"op\": \"%s\", \"layer\": \"%s\", \"ms\": %.4f", comma, s->op,
                s->name, 1e3 * s->seconds[0]);
        fprintf(json, ", \"gflops\": %.1f, \"gb_per_s\": %.1f}", s->flops / s->seconds[0] / 1e9,
                s->bytes / s->seconds[0] / 1e9);
        comma = ",";
    }
}

static void bench_case(FILE *json, const Case *c) {
    static Run run;
    double seconds[ROUNDS];
    gpu = find_backend(c->kernels);
    const Batch *batch = setup_bench(&run, c);
    size_t rounds = time_steps(&run, batch, seconds);
    double step = median(seconds, rounds);
    printf("net=%s width=%zu batch=%zu kernels=%s", c->model, c->width, c->batch, gpu->kernels);
    if (json)
        fprintf(json, "\n    {\"net\": \"%s\", \"width\": %zu, \"batch\": %zu, \"kernels\": \"%s\"",
                c->model, c->width, c->batch, gpu->kernels);
    figure(json, "step_ms", 1e3 * step, 3);
    figure(json, "step_ms_min", 1e3 * seconds[0], 3);
    figure(json, "step_ms_max", 1e3 * seconds[rounds - 1], 3);
    figure(json, "img_per_s", (double)c->batch / step, 1);
    figure(json, "gflops", (double)c->batch * training_flops(&run.net) / step / 1e9, 1);
    printf("%s\n", emulated ? " emulated=true" : "");
    time_operations(&run, batch);
    if (json)
        fprintf(json, ",\n     \"operations\": [");
    report_operations(json, c);
    if (json) {
        fprintf(json, "],\n     \"layers\": [");
        report_layers(json);
        fprintf(json, "]}");
    }
    fflush(stdout);
    free_bench(&run);
}

// Bytes read and written by a copy within the device.
static double copy_gb_per_s(void) {
    double seconds[ROUNDS];
    for (size_t i = 0; i < ROUNDS; i++) {
        gpu->mark(0);
        gpu->copy(copied[1], copied[0], copy_bytes());
        gpu->mark(1);
        seconds[i] = gpu->elapsed(0, 1);
    }
    return 2e-9 * (double)copy_bytes() / median(seconds, ROUNDS);
}

static void begin_report(FILE *json, const Device *d) {
    char date[32];
    time_t t = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&t));
    printf("Device: %s, %s, commit %s\n", d->name, d->driver, CNN_COMMIT);
    printf("emulated=%s", emulated ? "true" : "false");
    if (json) {
        fprintf(json, "{\"device\": ");
        json_string(json, d->name);
        fprintf(json, ", \"uuid\": ");
        json_string(json, d->uuid);
        fprintf(json, ", \"driver\": ");
        json_string(json, d->driver);
        fprintf(json, ",\n  \"date\": \"%s\", \"commit\": \"%s\", \"emulated\": %s", date,
                CNN_COMMIT, emulated ? "true" : "false");
    }
    figure(json, "copy_gb_per_s", copy_gb_per_s(), 1);
    printf("\n");
    if (json)
        fprintf(json, ",\n  \"networks\": [");
}

static void bench(const char *nets, const char *kernels, FILE *json) {
    Device d = {0};
    gpu = find_backend(kernels);
    gpu->use(0, 0, die);
    gpu->describe(&d);
    emulated = d.emulated;
    for (size_t i = 0; i < 2; i++)
        if (!(copied[i] = gpu->alloc(copy_bytes())))
            die(1, "no memory on the device for a copy of %zu bytes", copy_bytes());
    begin_report(json, &d);
    const char *comma = "";
    for (const char *at = nets; *at; at += strcspn(at, " "), at += strspn(at, " ")) {
        char word[64];
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, " "), at);
        Case c = parse_case(word, kernels);
        if (json)
            fprintf(json, "%s", comma);
        bench_case(json, &c);
        comma = ",";
    }
    if (json)
        fprintf(json, "]}\n");
    for (size_t i = 0; i < 2; i++)
        gpu->release(copied[i]);
}

int main(int argc, char **argv) {
    const char *nets = "mnist,64,naive mnist,64 cifar64,50 cifar64,250 resnet18,128 resnet50,256";
    const char *kernels = "", *json = NULL, *reason;
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--tiny") == 0)
            nets = "mnist,2,naive mnist,2 cifar6,3 resnet8,2";
        else if (more && strcmp(argv[i], "--nets") == 0)
            nets = argv[++i];
        else if (more && strcmp(argv[i], "--kernels") == 0)
            kernels = argv[++i];
        else if (more && strcmp(argv[i], "--json") == 0)
            json = argv[++i];
        else
            die(EXIT_USAGE,
                "bench_gpu knows --tiny, --nets LIST, --kernels NAME and --json FILE, "
                "not %s",
                argv[i]);
    }
    if (cuda_backend(0)->devices(&reason) == 0) {
        fprintf(stderr, "skip: no GPU: %s\n", reason);
        return 77; // what automake and bench_pytorch.py count as skipped
    }
    AtomicFile file;
    if (json)
        atomic_open(&file, json);
    bench(nets, kernels, json ? file.stream : NULL);
    if (json)
        atomic_commit(&file);
    return 0;
}
