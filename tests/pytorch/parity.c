/* parity.c - trains on the batches that live_pytorch.py prepared, which explains how to call it.

   Reads the first weights, trains with dropout off, prints `loss NUMBER` for each step, and writes
   the weights. */

#define CNN_NO_MAIN
#include "../../cnn.c"

enum {
    MODEL = 1,
    IN,
    BATCHES,
    OUT,
    STEPS,
    BATCH,
    CLASS_COUNT,
    H,
    W,
    C,
    LR,
    MOMENTUM,
    DECAY,
    NESTEROV,
    RULE,
    ARGUMENTS
};

static size_t number(char **argv, size_t i) {
    return strtoul(argv[i], NULL, 10);
}

// The arguments as options of ./cnn.
static void parse_arguments(Run *run, char **argv) {
    static const struct {
        char *option;
        size_t argument;
    } table[] = {{"--model", MODEL},        {"--batch-size", BATCH}, {"--lr", LR},
                 {"--weight-decay", DECAY}, {"--optimizer", RULE},   {"--momentum", MOMENTUM}};
    char *words[16] = {"cnn"};
    int count = 1;
    for (size_t i = 0; i < sizeof table / sizeof *table; i++) {
        words[count++] = table[i].option;
        words[count++] = argv[table[i].argument];
    }
    words[count++] = number(argv, NESTEROV) ? "--nesterov=on" : "--nesterov=off";
    setup_settings(run, count, words);
}

static void setup_parity(Run *run, char **argv) {
    parse_arguments(run, argv);
    Net *net = &run->net;
    const Settings *s = &run->settings;
    run->dataset_info = (DatasetInfo){.name = "batches", .classes = number(argv, CLASS_COUNT)};
    run->dataset_info.shape = (Shape){number(argv, H), number(argv, W), number(argv, C)};
    net_build(net, run->model, &run->dataset_info, s, choose_kernels(s, false));
    for (size_t i = 0; i < net->layer_count; i++)
        net->layers[i].p = 0; // dropout
    plan_net(net, s->batch_size, 0);
    net_alloc(net);
    init_weights(net, s->seed);
    run->plan.device = net->device;
    memory_plan_add(&run->plan, &run->optimizer_state,
                    count_states(&optimizers[s->optimizer], s) * net->param_size * sizeof(real),
                    DEVICE_MEMORY, FOR_OPTIMIZER);
    memory_plan_alloc(&run->plan);
}

static void read_batch(FILE *f, Batch *batch, size_t pixels) {
    double x;
    for (size_t i = 0; i < batch->n * (pixels + 1); i++) {
        if (fread(&x, sizeof x, 1, f) != 1)
            die(1, "the file of batches is too short");
        if (i < batch->n * pixels)
            batch->images[i] = (real)x;
        else
            batch->labels[i - batch->n * pixels] = (uint8_t)x;
    }
}

int main(int argc, char **argv) {
    static Run run;
    if (argc != ARGUMENTS)
        die(EXIT_USAGE, "expected %d arguments, found %d", ARGUMENTS - 1, argc - 1);
    setup_parity(&run, argv);
    Net *net = &run.net;
    const Settings *s = &run.settings;
    size_t pixels = shape_size(run.dataset_info.shape);
    Batch batch = {.n = s->batch_size};
    batch.images = must_alloc(batch.n * pixels * sizeof(real), "a batch");
    batch.labels = must_alloc(batch.n, "a batch");
    batch.device_images = batch.images;
    batch.device_labels = batch.labels;
    TensorFile weights;
    open_tensors(&weights, argv[IN]);
    read_tensors(&weights, net, NULL, NULL);
    FILE *f = fopen(argv[BATCHES], "rb");
    if (!f)
        die_file("cannot read", argv[BATCHES]);
    for (size_t step = 0; step < number(argv, STEPS); step++) {
        batch.key = (RandomKey){s->seed, 1, step * batch.n, 1};
        read_batch(f, &batch, pixels);
        net_load(net, &batch, s->lr);
        forward(net, batch.n, &net->step->key);
        printf("loss %.17g\n", loss_and_gradient(net, batch.n).mean);
        backward(net, batch.n);
        optimizer_step(net, run.optimizer_state);
    }
    fclose(f);
    save_tensors(net, NULL, NULL, "", argv[OUT]);
    memory_plan_free(&run.plan);
    memory_plan_free(&net->plan);
    free(batch.images);
    free(batch.labels);
    return 0;
}
