/* parity.c - trains on the batches that another program prepared, for tests/live_pytorch.py.

   usage: parity IN.safetensors BATCHES.bin OUT.safetensors STEPS CLASSES H W C OPTIONS...
   Reads the first weights from IN, does STEPS steps with dropout off at the learning rate of the
   options, prints `loss NUMBER` for each and writes the weights to OUT. BATCHES.bin holds for each
   step the images [batch][h][w][c], then the labels, all as float64. OPTIONS are those of ./cnn. */

#define CNN_NO_MAIN
#include "../cnn.c"

enum { ARGUMENTS = 8 };

static size_t number(char **argv, size_t i) {
    return strtoul(argv[i], NULL, 10);
}

static void setup_parity(Run *run, int argc, char **argv) {
    setup_settings(run, argc - ARGUMENTS, argv + ARGUMENTS);
    Net *net = &run->net;
    const Settings *s = &run->settings;
    run->info = (DatasetInfo){.name = "batches", .classes = number(argv, 5)};
    run->info.shape = (Shape){number(argv, 6), number(argv, 7), number(argv, 8)};
    net_build(net, run->model, &run->info, s, &backends[strcmp(s->kernels, "fast") == 0]);
    for (size_t i = 0; i < net->count; i++)
        net->layers[i].p = 0; // dropout
    plan_memory(net, s->batch_size);
    net_alloc(net);
    net_init(net, s->seed);
    run->state = real_alloc(net, count_states(run->optimizer, s) * net->param_size, "optimizer");
}

static void exchange_weights(Net *net, const char *path, bool save) {
    char metadata[METADATA_SIZE] = "";
    size_t count;
    Tensor *list = list_tensors(net, NULL, NULL, &count);
    if (save)
        save_tensors(net, list, count, metadata, path);
    else
        load_tensors(net, list, count, true, metadata, path);
    free(list);
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
    if (argc <= ARGUMENTS)
        die(EXIT_USAGE, "expected %d arguments, found %d", ARGUMENTS, argc - 1);
    setup_parity(&run, argc, argv);
    Net *net = &run.net;
    const Settings *s = &run.settings;
    size_t pixels = shape_size(run.info.shape);
    Batch batch = {.n = s->batch_size};
    batch.images = must_alloc(batch.n * pixels * sizeof(real), "a batch");
    batch.labels = must_alloc(batch.n, "a batch");
    exchange_weights(net, argv[1], false);
    FILE *f = fopen(argv[2], "rb");
    if (!f)
        file_fail("cannot read", argv[2]);
    for (size_t step = 0; step < number(argv, 4); step++) {
        Draw draw = {s->seed, 1, step * batch.n};
        read_batch(f, &batch, pixels);
        net_load(net, &batch);
        forward(net, batch.n, &draw);
        printf("loss %.17g\n", loss_and_gradient(net, batch.n, true));
        backward(net, batch.n);
        run.optimizer->step(net, run.state, s->lr);
    }
    fclose(f);
    exchange_weights(net, argv[3], true);
    return 0;
}
