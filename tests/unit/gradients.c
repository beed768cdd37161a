/* gradients.c - section 6 of cnn.c: gradients against central differences (in double), the
   loss, the predicted classes, and the same bits for any number of threads. */

/* ---- Central differences --------------------------------------------------------------------- */

// One convolution after another, with the odd borders that kernel, stride and padding make.
static void build_plain_net(Net *net, const Kernels *k, size_t kernel, size_t stride,
                            size_t padding) {
    start_net(net, (Shape){5, 9, 3});
    net->kernels = k;
    size_t x = relu(net, conv2d(net, 0, 5, kernel, 1, kernel / 2)); // 5 x 9 stays, or grows by one
    x = conv2d(net, x, 9, kernel, stride, padding);
    Shape s = net->layers[x].out;
    bool pool_first = (stride + padding) % 2; // a ReLU after a convolution, or after a max-pool
    x = pool_first ? x : relu(net, x);
    size_t window = s.h >= 3 && s.w >= 3 && padding != 1 ? 3 : 2;
    size_t step = stride == 2 && kernel % 2 ? window - 1 : window; // windows that overlap, or not
    if (s.h >= window && s.w >= window)
        x = maxpool2d(net, x, window, step, 0);
    x = pool_first ? relu(net, x) : x;
    x = relu(net, linear(net, dropout(net, x, (real).3), 11));
    x = linear(net, dropout(net, x, (real).5), CLASSES);
    log_softmax(net, x);
    plan_net(net, BATCH, 0);
    net_alloc(net);
    init_weights(net, 3);
}

typedef struct Checked {
    size_t entries, kinks;
} Checked;

static double central_difference(Net *net, size_t at, double h) {
    real kept = net->params[at];
    net->params[at] = kept + (real)h;
    double above = loss_of(net);
    net->params[at] = kept - (real)h;
    double below = loss_of(net);
    net->params[at] = kept;
    return (above - below) / (2 * h);
}

/* Where the loss has a kink (a ReLU at 0, a tie of a max-pool) halving h changes the difference; a
   smaller h may keep clear of it. False if none does. */
static bool find_difference(Net *net, size_t at, real got, real bound, real *d) {
    for (double h = 1e-5; h > 5e-7; h /= 10) {
        *d = (real)central_difference(net, at, h);
        if (fabs((double)(got - *d)) <= (double)bound)
            return true;
        if (fabs((double)*d - central_difference(net, at, h / 2)) <= (double)bound)
            return true;
    }
    return false;
}

static void check_gradient(Net *net, const char *name, size_t offset, size_t count, size_t samples,
                           Checked *checked) {
    double scale = 0;
    for (size_t i = 0; i < count; i++)
        scale = fmax(scale, fabs((double)net->grads[offset + i]));
    samples = min_size(count, samples);
    for (size_t s = 0; s < samples; s++) {
        size_t i = count == samples ? s : draw_size(0, count - 1);
        real got = net->grads[offset + i], want, bound = (real)(1e-6 * scale + 1e-10);
        checked->entries++;
        if (find_difference(net, offset + i, got, bound, &want))
            check_tensor(name, &got, &want, &bound, 1);
        else
            checked->kinks++;
    }
}

// All parameters of a network, `samples` entries of each tensor.
static void check_gradients(Net *net, const char *what, size_t samples, Checked *checked) {
    load_random(net);
    find_gradients(net);
    for (size_t i = 1; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        char name[128];
        snprintf(name, sizeof name, "%s: grad of %s.weight", what, l->name);
        check_gradient(net, name, l->weight_offset, l->weight_count, samples, checked);
        snprintf(name, sizeof name, "%s: grad of %s.bias", what, l->name);
        check_gradient(net, name, l->bias_offset, l->bias_count, samples, checked);
    }
}

static void check_kinks(const Checked *checked) {
    if (checked->kinks * 20 > checked->entries)
        fail("%zu of %zu entries skipped as kinks", checked->kinks, checked->entries);
}

static void test_plain_gradients(const Kernels *k, size_t kernel) {
    static Net net;
    Checked checked = {0};
    for (size_t stride = 1; stride <= 2; stride++)
        for (size_t padding = 0; padding <= min_size(2, kernel - 1); padding++) {
            char name[96];
            snprintf(name, sizeof name, "stride %zu padding %zu", stride, padding);
            build_plain_net(&net, k, kernel, stride, padding);
            check_gradients(&net, name, quick ? 12 : 40, &checked);
            memory_plan_free(&net.plan);
        }
    check_kinks(&checked);
    char name[96];
    snprintf(name, sizeof name, "gradients, %s kernels, %zu x %zu filters", NAME_OF(k), kernel,
             kernel);
    verdict("%s", name);
}

static void test_odd_gradients(const Kernels *k, const Model *model) {
    static Net net;
    Checked checked = {0};
    Settings smooth = plain;
    smooth.label_smoothing = .15;
    drawn = 0; // the same numbers, whichever models come before
    build_small(&net, model, (Shape){6, 5, 3}, &smooth, k);
    check_gradients(&net, model->name, quick ? 6 : 30, &checked);
    memory_plan_free(&net.plan);
    check_kinks(&checked);
    char name[96];
    snprintf(name, sizeof name, "gradients, %s kernels, %s", NAME_OF(k), model->name);
    verdict("%s", name);
}

static void test_central_differences(void) {
    static const size_t kernels[] = {1, 2, 3, 5};
    set_num_threads(1); // layers this small only wait for the second thread
    for (size_t b = 0; is_double && b < 2; b++) { // float is too coarse for differences
        for (size_t k = 0; k < 4; k++)
            test_plain_gradients(both_kernels[b], kernels[k]);
        for (size_t m = 0; m < ODD_MODELS; m++)
            test_odd_gradients(both_kernels[b], &odd_models[m]);
    }
    set_num_threads(2);
}

/* ---- Whole steps ----------------------------------------------------------------------------- */

// One step of a network, by so many threads: all gradients and running statistics.
static Array train_by_threads(int threads) {
    static Net net;
    DatasetInfo info = {"test", {16, 16, 3}, .classes = CLASSES};
    set_num_threads(threads);
    drawn = 0;
    net_build(&net, find_model("resnet8"), &info, &plain, &fast_kernels);
    plan_net(&net, BATCH, 0);
    net_alloc(&net);
    init_weights(&net, 1);
    load_random(&net);
    loss_of(&net);
    backward(&net, BATCH);
    Array all = array(net.param_size + net.stats_size, guard_value);
    memcpy(all.at, net.grads, net.param_size * sizeof(real));
    memcpy(all.at + net.param_size, net.stats, net.stats_size * sizeof(real));
    memory_plan_free(&net.plan);
    set_num_threads(2);
    return all;
}

static void test_threads(void) {
    Array one = train_by_threads(1);
    for (int threads = 2; threads < 5; threads++) {
        Array more = train_by_threads(threads);
        check_tensor("1 thread against more", more.at, one.at, NULL, one.count);
        free(more.base);
    }
    free(one.base);
    verdict("a step of resnet8 has the same bits for any number of threads");
}

// The images of rank 1 of 2 in a later batch: numbers 5, 7, ... of the test set
static void test_predictions(void) {
    static Net net;
    static const real logp[5][CLASSES] = {
        {0, 3, 1, 2}, {5, 3, 1, 2}, {0, 3, 1, 4}, {0, 3, 3, 2}, {-4, -3, -2, -3}};
    static uint8_t labels[5] = {1, 1, 3, 1, 0};
    static real host[5 * CLASSES];
    real losses[5], correct[5];
    const Batch batch = {.key = {.first = 5, .stride = 2}, .labels = labels, .n = 5};
    const size_t classes[5] = {1, 0, 3, 1, 2}; // of equal ones the first counts
    double predicted[15] = {0}, expected[15] = {0};
    start_net(&net, (Shape){1, 1, CLASSES});
    net.images = (real *)logp;
    net.staging[0] = host;
    store_predictions(&net, &batch, predicted);
    nll_loss(losses, correct, NULL, logp[0], labels, 5, 5, CLASSES, 0, NULL);
    for (size_t i = 0; i < 5; i++) {
        expected[5 + 2 * i] = (double)classes[i];
        if (correct[i] != (classes[i] == labels[i]))
            fail("image %zu: correct is %g", i, (double)correct[i]);
    }
    if (memcmp(predicted, expected, sizeof expected) != 0)
        fail("other classes");
    verdict("predicted classes");
}

// Training smooths the labels, evaluation does not.
static void test_smoothing_of_training(void) {
    static Net net;
    Settings smooth = plain;
    smooth.label_smoothing = .2;
    build_small(&net, &odd_models[0], (Shape){6, 5, 3}, &smooth, &fast_kernels);
    load_random(&net);
    double trained = loss_of(&net), sum = 0, at = 0;
    forward(&net, BATCH, NULL);
    if (net.batches_tracked != 1)
        fail("%zu batches counted, expected the one of training", net.batches_tracked);
    loss_of(&net);
    double tested = test_loss(&net, BATCH).mean;
    const real *logp = output(&net, last_row(&net));
    for (size_t i = 0; i < BATCH * CLASSES; i++) {
        sum -= (double)logp[i] / (BATCH * CLASSES);
        at -= i % CLASSES == net.labels[i / CLASSES] ? (double)logp[i] / BATCH : 0;
    }
    real got[2] = {(real)trained, (real)tested}, want[2] = {(real)(.8 * at + .2 * sum), (real)at};
    real bound[2] = {(real)(64 * epsilon * at), (real)(64 * epsilon * at)};
    check_tensor("loss of training and of evaluation", got, want, bound, 2);
    memory_plan_free(&net.plan);
    verdict("label smoothing and a count of batches in training alone");
}

static void test_gradients(void) {
    test_central_differences();
    test_threads();
    test_predictions();
    test_smoothing_of_training();
}
