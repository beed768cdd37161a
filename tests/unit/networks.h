/* networks.h - networks for tests, above all odd_models[]: small ones whose rows are connected
   in ways that no model of cnn.c uses. gradients.c compares the gradients of all of them with
   central differences; memory_plan.c checks that no row overwrites what another one needs. */

static const Kernels *const both_kernels[] = {&naive_kernels, &fast_kernels};
static const RandomKey any_key = {.seed = 1, .epoch = 1, .stride = 1}; // of a training step

enum { BATCH = 7, CLASSES = 4 }; // of the networks that the tests make up

// Settings of networks that are built without a command line.
static const Settings plain = {.kernels = KERNELS_BEST, .precision = PRECISION_BEST, .width = 6};

// A network that has only its images yet.
static void start_net(Net *net, Shape in) {
    *net = (Net){.model = "test", .settings = &plain, .kernels = &fast_kernels};
    net->device = &cpu_device;
    net->world = 1;
    net->classes = CLASSES;
    add_layer(net, (Layer){.kind = INPUT, .in = in, .out = in});
}

static const RandomKey gradient_draw = {.seed = 5, .epoch = 2, .first = 30, .stride = 1};

static size_t classify(Net *net, size_t x) {
    return log_softmax(net, linear(net, global_avgpool2d(net, x), net->classes));
}

// BatchNorm with and without a ReLU after it, before a strided max-pool and before a linear layer.
static size_t build_batchnorm(Net *net, size_t x) {
    x = relu(net, batchnorm2d(net, conv2d_bias(net, x, 4, 3, 1, 1, false)));
    x = maxpool2d(net, batchnorm2d(net, conv2d(net, x, 5, 3, 1, 1)), 3, 2, 1);
    x = batchnorm2d(net, batchnorm2d(net, conv2d_bias(net, x, 4, 2, 1, 1, false)));
    x = relu(net, batchnorm2d(net, linear(net, x, 6)));
    return log_softmax(net, linear(net, x, net->classes));
}

static size_t build_basic(Net *net, size_t x) {
    x = relu(net, conv_bn(net, x, "", "conv1", "bn1", 4, 3, 1));
    x = basic_block(net, x, "same.", 4, 1);
    x = basic_block(net, x, "wider.", 5, 1);
    x = basic_block(net, x, "smaller.", 6, 2);
    return classify(net, basic_block(net, x, "again.", 6, 1));
}

static size_t build_bottleneck(Net *net, size_t x) {
    x = relu(net, conv_bn(net, x, "", "conv1", "bn1", 4, 3, 1));
    x = bottleneck(net, x, "wider.", 2, 1);
    x = bottleneck(net, x, "same.", 2, 1);
    return classify(net, bottleneck(net, x, "smaller.", 3, 2));
}

// BatchNorm and ReLU before the convolutions (He et al., arXiv:1603.05027): nothing after the add.
static size_t preactivation_block(Net *net, size_t x, size_t channels, size_t stride) {
    size_t y = relu(net, batchnorm2d(net, x));
    bool same = stride == 1 && net->layers[x].out.c == channels;
    size_t side = same ? x : conv2d_bias(net, y, channels, 1, stride, 0, false);
    y = relu(net, batchnorm2d(net, conv2d_bias(net, y, channels, 3, stride, 1, false)));
    return add(net, conv2d_bias(net, y, channels, 3, 1, 1, false), side);
}

static size_t build_preactivation(Net *net, size_t x) {
    x = preactivation_block(net, conv2d_bias(net, x, 4, 3, 1, 1, false), 4, 1);
    x = preactivation_block(net, preactivation_block(net, x, 4, 1), 6, 2);
    x = preactivation_block(net, x, 6, 1);
    return classify(net, relu(net, batchnorm2d(net, x)));
}

/* One row is read by rows of every kind. Backward meets the last one first; all others have to add
   what they find to its gradient. */
static size_t build_shared(Net *net, size_t x) {
    x = conv2d(net, x, 4, 3, 1, 1);
    size_t sum = conv2d(net, x, 4, 3, 1, 1);
    sum = add(net, batchnorm2d(net, x), sum);
    sum = add(net, relu(net, x), sum);
    sum = add(net, dropout(net, x, (real).3), sum);
    sum = add(net, maxpool2d(net, x, 3, 1, 1), sum);
    sum = add(net, x, sum);
    size_t y = add(net, linear(net, global_avgpool2d(net, x), 5), linear(net, x, 5));
    y = add(net, y, linear(net, global_avgpool2d(net, sum), 5));
    x = linear(net, conv2d_bias(net, x, 3, 1, 2, 0, false), 5);
    return log_softmax(net, linear(net, add(net, x, y), net->classes));
}

// add(x, x); a sum whose sides are read again, before it and after it; one with the images.
static size_t build_adds(Net *net, size_t x) {
    size_t a = conv2d(net, x, 3, 3, 1, 1), b = conv2d(net, a, 3, 3, 1, 1);
    size_t twice = add(net, b, b);
    size_t c = add(net, twice, a);
    size_t d = add(net, conv2d(net, c, 3, 1, 1, 0), x);
    size_t e = relu(net, add(net, a, d));
    size_t f = add(net, conv2d(net, e, 3, 3, 1, 1), c);
    size_t g = add(net, add(net, x, f), batchnorm2d(net, c));
    return classify(net, add(net, relu(net, g), e));
}

// Two max-pools after one convolution, of which a fused kernel can do only the first.
static size_t build_pools(Net *net, size_t x) {
    x = relu(net, conv2d(net, relu(net, conv2d(net, x, 4, 3, 1, 2)), 4, 3, 1, 0));
    x = maxpool2d(net, maxpool2d(net, x, 2, 2, 0), 2, 1, 0);
    return log_softmax(net, linear(net, x, net->classes));
}

static const Model odd_models[] = {
    {.name = "batchnorm", .build = build_batchnorm},
    {.name = "basic blocks", .build = build_basic},
    {.name = "bottleneck blocks", .build = build_bottleneck},
    {.name = "pre-activation blocks", .build = build_preactivation},
    {.name = "one row, many readers", .build = build_shared},
    {.name = "adds", .build = build_adds},
    {.name = "two max-pools", .build = build_pools},
};
enum { ODD_MODELS = sizeof odd_models / sizeof *odd_models };

// Numbers other than 1 and 0, which would hide a BatchNorm that forgets its parameters.
static void draw_norms(Net *net) {
    for (size_t i = 0; i < net->layer_count; i++) {
        const Layer *l = &net->layers[i];
        for (size_t c = 0; l->kind == BATCHNORM2D && c < l->out.c; c++) {
            net->params[l->weight_offset + c] = 1 + draw_real() / 2;
            net->params[l->bias_offset + c] = draw_real() / 2;
        }
    }
}

static void load_random(Net *net) {
    for (size_t i = 0; i < BATCH * shape_size(net->layers[0].out); i++)
        output(net, 0)[i] = draw_real();
    for (size_t i = 0; i < BATCH; i++)
        net->labels[i] = (uint8_t)draw_size(0, CLASSES - 1);
}

static double loss_of(Net *net) {
    forward(net, BATCH, &gradient_draw);
    return loss_and_gradient(net, BATCH).mean;
}

// All gradients of a batch; where NaN was must be written before it is read.
static void find_gradients(Net *net) {
    memset(net->grads, 0xFF, net->param_size * sizeof(real));
    memset(net->dactivations, 0xFF, net->dactivation_bytes);
    memset(net->scratch, 0xFF, net->scratch_size * sizeof(real));
    loss_of(net);
    backward(net, BATCH);
}

static void build_small(Net *net, const Model *model, Shape images, const Settings *settings,
                        const Kernels *k) {
    DatasetInfo info = {.name = "test", .shape = images, .classes = CLASSES};
    net_build(net, model, &info, settings, k);
    plan_net(net, BATCH, 0);
    net_alloc(net);
    init_weights(net, 3);
    draw_norms(net);
}

// A loader with this function for augmentation; NULL: none.
static void plan_loader(Loader *l, const Dataset *data, size_t batch, size_t workers,
                        Augment *augment, Consumer consumer) {
    Augmentation a = AUGMENT_NONE;
    while (augmentations[a].augment != augment)
        a++;
    loader_plan(l, data, batch, workers, a, consumer);
    loader_init(l);
}

static const Consumer on_cpu = {.device = &cpu_device, .ranks = 1};
