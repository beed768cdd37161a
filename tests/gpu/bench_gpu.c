/* The operations of a training step on the GPU, each by itself, and the limits of the device: its
   arithmetic and its copy bandwidth. bench_gpu.sh, which times whole steps of ./cnn, calls this
   program. Figures are medians over several measurements, by events in the device's stream; no
   speeds are printed when the "device" is the emulator. The host queues the calls of an operation
   while the device is still busy with a copy, so that short operations do not show the time that
   the host takes to launch them; an operation's first call then finds nothing in the caches.

     build/bench_gpu [--nets "mnist,64 cifar64,250 ..."] [--json FILE] [--tiny] [OPTIONS of ./cnn]

   A net is model,batch; cifar64 is --model cifar --width 64. --tiny: networks that take the
   emulator seconds. OPTIONS select the kernels, such as --kernels tensor --precision bf16. One
   line of key=value for each network, then one for each kind of operation: its calls in a step,
   their total time, and GFLOP/s and GB/s over that time. FLOP are counted as in the summary of
   ./cnn, bytes as in the comments of cnn_kernels.cu; a convolution's count once for each number.

   roofline_ms is the time that the step would take if each operation reached the limit that
   applies to it: FLOP at peak_gflops, or bytes at copy_gb_per_s. In fp32 peak_gflops is that of
   multiply-adds in registers (peak=registers). Tensor cores have no such measurement: there it
   is what these kernels reach in a large convolution (peak=own_product), so that a percentage of
   it says how well they do on smaller ones, not how far they are from the hardware. Exit code 77
   without a GPU. */
#define CNN_NO_MAIN
#include "../../cnn.c"

enum { ROUNDS = 9, WALKS = 5, MAX_SAMPLES = 4096, MAX_WORDS = 64 };

// One call in a step.
typedef struct Sample {
    const char *op;
    double flops, bytes;       // at least
    double seconds[WALKS + 1]; // one for each repetition of the step; the first is a warm-up
} Sample;

static Sample samples[MAX_SAMPLES];
static size_t sample_count, walk;
static const Kernels *gpu; // what is measured
static bool emulated;
static char *command[MAX_WORDS]; // the command line of ./cnn; from `given` on, as it was given here
static int word_count, given;
static double peak_gflops, bandwidth; // the limits of the device; bandwidth in bytes per second
static void *copied[2];               // memory of the device: see copy_bytes()

// A GB, more than the caches hold, whose copy takes about as long as the host needs for 20 calls.
static size_t copy_bytes(void) {
    return emulated ? 1 << 20 : 1 << 30;
}

/* ---- Kernels that time each call of others. Short operations are repeated, so that the
   resolution of events does not matter; `grows`: a repetition changes its own input, so there must
   be few. */

static Sample *next_sample(const char *op, double flops, double bytes) {
    if (sample_count == MAX_SAMPLES)
        die(1, "more than %d operations in a step; raise MAX_SAMPLES", MAX_SAMPLES);
    Sample *s = &samples[sample_count++];
    s->op = op;
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

#define TIME(op, flops, bytes, grows, call)                                  \
    do {                                                                     \
        Sample *sample = next_sample(op, flops, bytes);                      \
        size_t count_ = repeats(sample, grows);                              \
        gpu->device->copy(copied[1], copied[0], copy_bytes());               \
        gpu->device->mark(0);                                                \
        for (size_t i_ = 0; i_ < count_; i_++)                               \
            gpu->call;                                                       \
        gpu->device->mark(1);                                                \
        sample->seconds[walk] = gpu->device->elapsed(0, 1) / (double)count_; \
    } while (0)

/* The numbers that a layer's operations move at least: for each element of its input and output.
   masks: also a byte for each element of the output. Convolutions and linear layers also read each
   weight or write its gradient, in 32 bits, once in every pass. `data` is added in backward if it
   computes din. */
typedef struct Cost {
    const char *names[2]; // of forward and backward
    struct {
        double in, out;
    } forward, backward, data;
    double masks;
} Cost;

static const Cost costs[KINDS] = {
    [CONV2D] = {{"conv2d_forward", "conv2d_backward"}, {1, 1}, {1, 1}, {1, 0}, 0},
    [LINEAR] = {{"linear_forward", "linear_backward"}, {1, 1}, {1, 1}, {1, 0}, 0},
    [BATCHNORM2D] = {{"batchnorm2d_forward", "batchnorm2d_backward"}, {0, 3}, {0, 2}, {0, 3}, 0},
    [RELU] = {{"relu_forward", "relu_backward"}, {0, 2}, {0, 3}, {0, 0}, 0},
    [MAXPOOL2D] = {{"maxpool2d_forward", "maxpool2d_backward"}, {1, 1}, {1, 1}, {0, 0}, 1},
    [GLOBAL_AVGPOOL2D] =
        {{"global_avgpool2d_forward", "global_avgpool2d_backward"}, {1, 1}, {1, 1}, {0, 0}, 0},
    [ADD] = {{"add_forward", "add_backward"}, {0, 2}, {0, 2}, {0, 0}, 0},
    [DROPOUT] = {{"dropout_forward", "dropout_backward"}, {0, 2}, {0, 2}, {0, 0}, 1},
    [LOG_SOFTMAX] = {{"log_softmax_forward", "log_softmax_backward"}, {0, 2}, {0, 3}, {0, 0}, 0},
};

static double forward_bytes(Work w) {
    const Cost *c = &costs[w.l->kind];
    const double in = (double)(w.n * shape_size(w.l->in)), out = (double)output_size(w);
    const double weights = has_weight_matrix(w.l) ? (double)w.l->weight_count : 0;
    const bool adds = w.residual;
    return (double)gpu->element_bytes *
               (c->forward.in * in + (c->forward.out + adds) * out + weights) +
           c->masks * out;
}

// With the backward of a fused ReLU, unless a BatchNorm does it as it reads dout, and of a sum
static double backward_bytes(Work w) {
    const Cost *c = &costs[w.l->kind];
    const double in = (double)(w.n * shape_size(w.l->in)), out = (double)output_size(w);
    const double weights = has_weight_matrix(w.l) ? (double)w.l->weight_count : 0;
    const bool masks = w.fused.relu_backward && (w.residual || w.l->kind != BATCHNORM2D);
    double numbers = c->backward.in * in + c->backward.out * out + (w.accumulate ? in : 0);
    if (masks)
        numbers += costs[RELU].backward.out * out;
    if (w.dresidual)
        numbers += (costs[ADD].backward.out + w.accumulate_residual) * out;
    if (w.din)
        numbers += c->data.in * in + c->data.out * out + weights;
    return (double)gpu->element_bytes * numbers + sizeof(real) * weights + c->masks * out;
}

static void time_forward(Work w) {
    const LayerKind kind = w.l->kind;
    TIME(costs[kind].names[0], has_weight_matrix(w.l) ? (double)w.n * forward_flops(w.l) : 0,
         forward_bytes(w), w.out == w.in && kind != RELU, layers[kind].forward(w));
}

static void time_backward(Work w) {
    const LayerKind kind = w.l->kind;
    const double passes = has_weight_matrix(w.l) ? w.din ? 2 : 1 : 0;
    const bool sums = w.accumulate || w.accumulate_residual;
    TIME(costs[kind].names[1], passes * (double)w.n * forward_flops(w.l), backward_bytes(w),
         (sums || w.din == w.dout) && kind != RELU, layers[kind].backward(w));
}

static void time_nll_loss(real *losses, real *correct, real *dlogp, const real *logp,
                          const uint8_t *labels, size_t n, size_t batch, size_t classes,
                          double smoothing, LossScale *scale) {
    TIME("nll_loss", 0, 8. * (double)(n * classes), false,
         nll_loss(losses, correct, dlogp, logp, labels, n, batch, classes, smoothing, scale));
}

static void time_adadelta(Update u) {
    TIME("adadelta", 0, (28. + (u.param16 ? 2 : 0)) * (double)u.count, true, update[ADADELTA](u));
}

static void time_sgd(Update u) {
    TIME("sgd", 0, ((u.momentum > 0 ? 20. : 12.) + (u.param16 ? 2 : 0)) * (double)u.count, true,
         update[SGD](u));
}

static void time_copy(void *to, const void *from, size_t bytes) {
    TIME("copy", 0, 2. * (double)bytes, false, device->copy(to, from, bytes));
}

// The kernels and the device of `gpu`, with the clock around each call
static Kernels timed_kernels(void) {
    static Device device;
    Kernels k = *gpu;
    device = *gpu->device;
    device.copy = time_copy;
    k.device = &device;
    for (size_t kind = INPUT + 1; kind < KINDS; kind++) {
        k.layers[kind].forward = time_forward;
        k.layers[kind].backward = time_backward;
    }
    k.nll_loss = time_nll_loss;
    k.update[ADADELTA] = time_adadelta;
    k.update[SGD] = time_sgd;
    return k;
}

/* ---- A network */

// "cifar64,250" in --nets
typedef struct Case {
    char model[32];
    size_t width, batch;
} Case;

static Case parse_case(const char *word) {
    Case c = {.width = 6};
    if (sscanf(word, "%31[^,],%zu", c.model, &c.batch) < 2 || c.batch == 0)
        die(EXIT_USAGE, "--nets: expected model,batch, found %s", word);
    if (sscanf(c.model, "cifar%zu", &c.width) == 1)
        c.model[strlen("cifar")] = 0;
    return c;
}

// The run's settings and its kernels
static void setup_run(Run *run, const Case *c) {
    static char width[32], batch[32];
    snprintf(width, sizeof width, "%zu", c->width);
    snprintf(batch, sizeof batch, "%zu", c->batch);
    char *of_case[] = {"cnn", "--model", (char *)c->model, "--width", width, "--batch-size", batch};
    memcpy(command, of_case, sizeof of_case);
    memset(run, 0, sizeof *run);
    setup_settings(run, word_count, command);
    setup_device(run);
    gpu = run->kernels;
}

// The network on synthetic images, and a loader that has put one batch of them on the GPU. build:
// another network than the model's, or NULL
static const Batch *setup_bench(Run *run, const Case *c, size_t (*build)(Net *net, size_t x)) {
    static Model built;
    setup_run(run, c);
    built = *run->model;
    built.build = build ? build : built.build;
    run->model = &built;
    run->dataset_info = dataset_for(run->model, "synthetic");
    run->train_set.info = &run->dataset_info;
    make_synthetic(&run->train_set, TRAINING_SET, c->batch);
    net_build(&run->net, run->model, &run->dataset_info, &run->settings, gpu);
    plan_net(&run->net, c->batch, 0);
    net_alloc(&run->net);
    init_weights(&run->net, 1);
    run->optimizer_state =
        gpu->device->alloc(count_states(&optimizers[run->settings.optimizer], &run->settings) *
                           run->net.param_size * sizeof *run->optimizer_state);
    if (!run->optimizer_state)
        die(1, "no memory for the optimizer of %s", c->model);
    Consumer consumer = {.device = gpu->device, .pinned = true, .ranks = 1};
    loader_plan(&run->train_loader, &run->train_set, c->batch, 1, AUGMENT_NONE, consumer);
    loader_init(&run->train_loader);
    loader_start(&run->train_loader, 1, 1, 0);
    return loader_next(&run->train_loader);
}

static void free_bench(Run *run) {
    run->net.kernels = gpu;
    run->net.device = gpu->device;
    loader_free(&run->train_loader);
    gpu->device->release(run->optimizer_state);
    memory_plan_free(&run->net.plan);
    free_dataset(&run->train_set);
}

// As in train(), where the loss is also copied to the host in every step.
static BatchLoss train_step(Run *run, const Batch *batch) {
    net_load(&run->net, batch, 1e-4);
    forward(&run->net, batch->n, &run->net.step->key);
    const BatchLoss loss = loss_and_gradient(&run->net, batch->n);
    backward(&run->net, batch->n);
    optimizer_step(&run->net, run->optimizer_state);
    return loss;
}

static void time_operations(Run *run, const Batch *batch) {
    check_loss(&run->net, batch, train_step(run, batch));
    Kernels timed = timed_kernels();
    run->net.kernels = &timed;
    run->net.device = timed.device;
    for (walk = 0; walk <= WALKS && (walk == 0 || !emulated); walk++) {
        sample_count = 0;
        train_step(run, batch);
    }
    run->net.kernels = gpu;
    for (size_t i = 0; i < sample_count && !emulated; i++)
        samples[i].seconds[0] = median(samples[i].seconds + 1, WALKS);
}

/* ---- The limits of the device */

// Bytes read and written per second by a copy within the device.
static double copy_bandwidth(void) {
    double seconds[ROUNDS];
    for (size_t i = 0; i < ROUNDS; i++) {
        gpu->device->mark(0);
        gpu->device->copy(copied[1], copied[0], copy_bytes());
        gpu->device->mark(1);
        seconds[i] = gpu->device->elapsed(0, 1);
    }
    return 2 * (double)copy_bytes() / median(seconds, ROUNDS);
}

// One convolution with many channels, which has nearly all multiply-adds of the network
static size_t build_product(Net *net, size_t x) {
    const size_t channels = emulated ? 16 : 512;
    x = conv2d(net, x, channels, 1, 1, 0);
    x = conv2d(net, x, channels, 3, 1, 1);
    return log_softmax(net, linear(net, global_avgpool2d(net, x), net->classes));
}

// GFLOP/s that these kernels reach in the faster direction of that convolution
static double product_gflops(void) {
    static Run run;
    const Case c = {.model = "resnet18", .width = 6, .batch = emulated ? 1 : 64};
    double best = 0;
    const Batch *batch = setup_bench(&run, &c, build_product);
    time_operations(&run, batch);
    for (size_t i = 0; i < sample_count; i++)
        best = fmax(best, samples[i].flops / samples[i].seconds[0] / 1e9);
    free_bench(&run);
    return best;
}

// Seconds of a step in which every operation reaches the limit that applies to it
static double roofline(void) {
    double seconds = 0;
    for (size_t i = 0; i < sample_count; i++)
        seconds += fmax(samples[i].flops / (1e9 * peak_gflops), samples[i].bytes / bandwidth);
    return seconds;
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
        printf("op=%s net=%s width=%zu batch=%zu calls=%zu", sum.op, c->model, c->width, c->batch,
               calls);
        if (json)
            fprintf(json, "%s\n      {\"op\": \"%s\", \"calls\": %zu", comma, sum.op, calls);
        report_operation(json, &sum);
        printf("%s\n", emulated ? " emulated=true" : "");
        if (json)
            fprintf(json, "}");
        comma = ",";
    }
}

static void bench_case(FILE *json, const Case *c) {
    static Run run;
    time_operations(&run, setup_bench(&run, c, NULL));
    printf("net=%s width=%zu batch=%zu", c->model, c->width, c->batch);
    if (json)
        fprintf(json, "\n    {\"net\": \"%s\", \"width\": %zu, \"batch\": %zu", c->model, c->width,
                c->batch);
    figure(json, "mflop", (double)c->batch * training_flops(&run.net) / 1e6, 1);
    figure(json, "roofline_ms", 1e3 * roofline(), 4);
    printf("%s\n", emulated ? " emulated=true" : "");
    if (json)
        fprintf(json, ",\n     \"operations\": [");
    report_operations(json, c);
    if (json)
        fprintf(json, "]}");
    fflush(stdout);
    free_bench(&run);
}

static void begin_report(FILE *json, const DeviceInfo *d, bool own_product) {
    char date[32], options[256] = "";
    time_t t = time(NULL);
    strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", gmtime(&t));
    for (int i = given; i < word_count; i++)
        snprintf(options + strlen(options), sizeof options - strlen(options), "%s%s",
                 i > given ? " " : "", command[i]);
    printf("Commit %s, driver %s; options: %s\n", CNN_COMMIT, d->driver, options);
    printf("emulated=%s peak=%s", emulated ? "true" : "false",
           own_product ? "own_product" : "registers");
    if (json) {
        fprintf(json, "{\"device\": ");
        print_json_string(json, d->name);
        fprintf(json, ", \"uuid\": ");
        print_json_string(json, d->uuid);
        fprintf(json, ", \"driver\": ");
        print_json_string(json, d->driver);
        fprintf(json,
                ",\n  \"date\": \"%s\", \"commit\": \"%s\", \"emulated\": %s, \"options\": ", date,
                CNN_COMMIT, emulated ? "true" : "false");
        print_json_string(json, options);
        fprintf(json, ", \"peak\": \"%s\"", own_product ? "own_product" : "registers");
    }
    figure(json, "peak_gflops", peak_gflops, 0);
    figure(json, "copy_gb_per_s", bandwidth / 1e9, 1);
    printf("\n");
    if (json)
        fprintf(json, ",\n  \"networks\": [");
}

static void bench(const char *nets, FILE *json) {
    static Run run;
    const Case any = {.model = "mnist", .width = 6, .batch = 1};
    setup_run(&run, &any);
    const bool own_product = gpu->precision != FP32;
    emulated = run.device_info.emulated;
    for (size_t i = 0; i < 2; i++)
        if (!(copied[i] = gpu->device->alloc(copy_bytes())))
            die(1, "no memory on the device for a copy of %zu bytes", copy_bytes());
    peak_gflops = own_product ? product_gflops() : gpu->device->peak_gflops();
    bandwidth = copy_bandwidth();
    begin_report(json, &run.device_info, own_product);
    const char *comma = "";
    for (const char *at = nets; *at; at += strcspn(at, " "), at += strspn(at, " ")) {
        char word[64];
        snprintf(word, sizeof word, "%.*s", (int)strcspn(at, " "), at);
        Case c = parse_case(word);
        if (json)
            fprintf(json, "%s", comma);
        bench_case(json, &c);
        comma = ",";
    }
    if (json)
        fprintf(json, "]}\n");
    for (size_t i = 0; i < 2; i++)
        gpu->device->release(copied[i]);
}

int main(int argc, char **argv) {
    const char *nets = "mnist,64 cifar64,50 cifar64,250 resnet18,128 resnet50,256";
    const char *json = NULL, *reason;
    word_count = given = 7; // the network's words come before
    for (int i = 1; i < argc; i++) {
        bool more = i + 1 < argc;
        if (strcmp(argv[i], "--tiny") == 0)
            nets = "mnist,2 cifar6,3 resnet8,2";
        else if (more && strcmp(argv[i], "--nets") == 0)
            nets = argv[++i];
        else if (more && strcmp(argv[i], "--json") == 0)
            json = argv[++i];
        else if (word_count < MAX_WORDS) // setup_settings() refuses what ./cnn does not have
            command[word_count++] = argv[i];
        else
            die(EXIT_USAGE, "bench_gpu takes at most %d options of ./cnn", MAX_WORDS - given);
    }
    if (cuda_kernels(0)->device->count(&reason) == 0) {
        fprintf(stderr, "skip: no GPU: %s\n", reason);
        return 77; // what automake and bench_pytorch.py count as skipped
    }
    AtomicFile file;
    if (json)
        atomic_open(&file, json);
    bench(nets, json ? file.stream : NULL);
    if (json)
        atomic_commit(&file);
    return 0;
}
