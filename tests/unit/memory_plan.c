/* memory_plan.c - the plan in section 4 of cnn.c, by which rows share memory and kernels: networks
   compute the same bits with it and without, ResNets need little memory for gradients, and the
   definitions compute every row by itself. */

static RowMode share_in_place(const Layer *to, const Fusion *with, const Layer *l) {
    (void)to, (void)with;
    return l->kind == RELU || l->kind == DROPOUT ? IN_PLACE : SEPARATE;
}

// The CPU's kernels with the plans that they ask for, and again with rows that work in place.
enum { PLANNERS = 4 };
static Kernels planner(size_t i) {
    Kernels b = *both_kernels[i % 2];
    b.fuse = i < 2 ? b.fuse : share_in_place;
    return b;
}

static size_t row_of_equal_shape(const Net *net, size_t x) {
    Shape s = net->layers[x].out;
    for (;;) {
        size_t y = draw_size(0, net->layer_count - 1);
        Shape t = net->layers[y].out;
        if (s.h == t.h && s.w == t.w && s.c == t.c)
            return y; // x itself, if no other is found before
    }
}

// A max-pool whose zeros the fast convolution's backward may skip, or not.
static void add_random_pool(Net *net, size_t x) {
    Shape s = net->layers[x].out;
    size_t window = min_size(s.h, s.w) >= 4 && draw_bits() % 2 ? 3 : 1;
    x = draw_bits() % 4 ? relu(net, conv2d(net, x, draw_size(1, 4), window, 1, 0)) : x;
    s = net->layers[x].out;
    size_t kernel = draw_size(1, min_size(min_size(s.h, s.w), 3));
    maxpool2d(net, x, kernel, draw_size(1, 3), draw_bits() % 2 ? kernel / 2 : 0);
}

static void add_random_row(Net *net) {
    size_t x = draw_bits() % 2 ? net->layer_count - 1 : draw_size(0, net->layer_count - 1);
    size_t channels = net->layers[x].out.c;
    switch (draw_size(0, 10)) {
    case 0:
        conv2d(net, x, draw_size(1, 4), 3, draw_size(1, 2), 1);
        break;
    case 1:
        conv2d_bias(net, x, channels, 3, 1, 1, false);
        break;
    case 2:
        x = batchnorm2d(net, x); // and often a sum that is fused with it
        if (draw_bits() % 2)
            add(net, x, row_of_equal_shape(net, x));
        break;
    case 3:
        maxpool2d(net, x, 3, 1, 1);
        break;
    case 4:
        dropout(net, x, (real).5); // a scale of 2: nothing is rounded
        break;
    case 5:
    case 6:
        relu(net, x);
        break;
    case 7:
        add_random_pool(net, x);
        break;
    default:
        add(net, x, row_of_equal_shape(net, x));
        break;
    }
}

// Each row reads rows drawn from all before it; in the end all that nobody reads come together.
static size_t build_random(Net *net, size_t x) {
    size_t sum = 0;
    for (size_t rows = draw_size(3, 24); rows > 0; rows--)
        add_random_row(net);
    size_t last = net->layer_count;
    for (x = 0; x < last; x++)
        if (count_reads(net, x) == 0) {
            size_t y = linear(net, draw_bits() % 2 ? x : global_avgpool2d(net, x), net->classes);
            sum = sum ? add(net, sum, y) : y;
        }
    return log_softmax(net, sum);
}
static const Model random_model = {.name = "random", .build = build_random};

// A row computed by kernels of its own; an add has its second row again.
static void separate(Net *net, size_t i) {
    const Layer *l = &net->layers[i];
    RowPlan *slot = &net->row_plans[i];
    slot->mode = SEPARATE;
    slot->computed_by = i;
    slot->fused = (Fusion){0};
    slot->residual = l->kind == ADD ? l->other : 0;
}

/* The same network without a plan: every row's output and gradient has memory of its own. fused:
   the kernels of a row still compute what is fused with it, which shares its memory; else only a
   convolution's its ReLU and max-pool, by sums in another order than when they are separate. */
static void plan_apart(Net *net, bool fused) {
    net->activation_bytes = net->dactivation_bytes = 0;
    for (size_t i = 0; i < net->layer_count; i++) {
        RowPlan *slot = &net->row_plans[i];
        const RowPlan *to = &net->row_plans[slot->computed_by];
        if (!fused && !to->fused.pool)
            separate(net, i);
        slot->fused.input_relu_backward = fused && slot->fused.input_relu_backward;
        slot->shares_gradient = false;
        if (slot->mode == IN_PLACE)
            slot->mode = SEPARATE;
        if (slot->mode == FUSED_INTO_EARLIER) {
            slot->output = to->output;
            slot->doutput = to->doutput;
            continue;
        }
        const size_t size = align_up(net->max_batch * shape_size(net->layers[i].out));
        slot->output = net->activation_bytes;
        slot->doutput = net->dactivation_bytes;
        net->activation_bytes += size * sizeof(real);
        net->dactivation_bytes += size * sizeof(real);
    }
}

static void build_unplanned(Net *net, const Kernels *k, bool fused) {
    DatasetInfo info = {.name = "test", .shape = {4, 5, 2}, .classes = CLASSES};
    net_build(net, &random_model, &info, &plain, k);
    plan_net(net, BATCH, 0);
    plan_apart(net, fused);
    net->plan.count = 0;
    plan_net_arenas(net);
    net_alloc(net);
    init_weights(net, 3);
    draw_norms(net);
}

/* A gradient of every parameter, without what lies between the tensors. Where rows are not fused, a
   gradient of three readers or more may be summed in another order. The bound follows the largest
   gradient of the row: a bias before a BatchNorm has a gradient of 0, but for rounding. */
static void compare_gradients(const Net *got, const Net *want, bool rounds) {
    for (size_t i = 0; i < want->layer_count; i++) {
        const Layer *l = &want->layers[i];
        const size_t first[] = {l->weight_offset, l->bias_offset},
                     count[] = {l->weight_count, l->bias_count};
        char name[96];
        snprintf(name, sizeof name, "grad of row %zu of %zu, %s", i, want->layer_count, l->name);
        double largest = 0;
        for (size_t k = 0; k < 2; k++)
            for (size_t j = 0; j < count[k]; j++)
                largest = fmax(largest, fabs((double)want->grads[first[k] + j]));
        for (size_t k = 0; k < 2; k++) {
            Array bound = array(count[k], 0);
            for (size_t j = 0; j < count[k]; j++)
                bound.at[j] = (real)(1000 * epsilon * (largest + 1e-3));
            check_tensor(name, got->grads + first[k], want->grads + first[k],
                         rounds ? bound.at : NULL, count[k]);
            free(bound.base);
        }
    }
}

// The same network and the same numbers, with its plan and without.
static void compare_plans(const Kernels *k, uint32_t start, bool fused) {
    static Net planned, apart;
    drawn = start;
    build_small(&planned, &random_model, (Shape){4, 5, 2}, &plain, k);
    load_random(&planned);
    drawn = start;
    build_unplanned(&apart, k, fused);
    load_random(&apart);
    find_gradients(&planned);
    find_gradients(&apart);
    check_tensor("logp", output(&planned, last_row(&planned)), output(&apart, last_row(&apart)),
                 NULL, BATCH * CLASSES);
    compare_gradients(&planned, &apart, !fused);
    memory_plan_free(&planned.plan);
    memory_plan_free(&apart.plan);
}

static void test_plan_against_none(void) {
    set_num_threads(1);
    for (size_t round = 0; round < (quick ? 400 : 6000); round++) {
        const Kernels b = planner(round % PLANNERS);
        const uint32_t start = drawn;
        compare_plans(&b, start, true);
        compare_plans(&b, start, false);
    }
    set_num_threads(2);
    verdict("random networks: sharing memory and kernels changes no bit of any gradient");
}

// As much as if no two gradients shared memory.
static size_t unshared_size(const Net *net) {
    size_t sum = 0;
    for (size_t i = 1; i < net->layer_count; i++)
        sum += sizeof(real) * align_up(net->max_batch * shape_size(net->layers[i].out));
    return sum;
}

/* A ResNet of whatever depth needs three gradients of the largest row, and little more: what a
   block receives and hands on share their memory. */
static void check_resnet_size(const Net *net) {
    size_t largest = 0;
    for (size_t i = 1; i < net->layer_count; i++)
        largest = max_size(largest, sizeof(real) *
                                        align_up(net->max_batch * shape_size(net->layers[i].out)));
    bool resnet = strncmp(net->model, "resnet", 6) == 0;
    if (resnet && (double)net->dactivation_bytes > 3.1 * (double)largest)
        fail("%s: %zu bytes, the largest gradient has %zu", net->model, net->dactivation_bytes,
             largest);
    if (strcmp(net->model, "resnet18") == 0 && net->dactivation_bytes * 4 > unshared_size(net))
        fail("resnet18: %zu of %zu bytes", net->dactivation_bytes, unshared_size(net));
}

// Every add of a ResNet is done while the output of a BatchNorm is stored.
static void check_resnet_adds(const Net *net) {
    bool resnet = strncmp(net->model, "resnet", 6) == 0;
    for (size_t i = 1; i < net->layer_count; i++)
        if (resnet && net->layers[i].kind == ADD && net->row_plans[i].mode != FUSED_INTO_EARLIER)
            fail("%s: row %zu is an add of its own", net->model, i);
}

// The m-th model: those of cnn.c, odd ones, then random ones without end.
static const Model *model_at(size_t m) {
    if (m < LENGTH(models))
        return &models[m];
    m -= LENGTH(models);
    return m < ODD_MODELS ? &odd_models[m] : &random_model;
}

static void test_plan_of_models(void) {
    static Net net;
    for (size_t m = 0; m < LENGTH(models) + ODD_MODELS; m++)
        for (Stem stem = STEM_3; stem <= STEM_IMAGENET; stem++) {
            Settings settings = plain;
            settings.stem = stem;
            DatasetInfo info = {.name = "test", .shape = {32, 32, 3}, .classes = 10};
            net_build(&net, model_at(m), &info, &settings, &fast_kernels);
            plan_net(&net, 2, 0);
            check_resnet_size(&net);
            check_resnet_adds(&net);
        }
    verdict("gradients of ResNets share memory");
}

// With the definitions every row is computed by its own kernels, to memory of its own.
static void check_nothing_fused(const Net *net) {
    static const Fusion none = {0};
    for (size_t i = 1; i < net->layer_count; i++) {
        const RowPlan *slot = &net->row_plans[i];
        const bool adds = net->layers[i].kind == ADD;
        if (slot->mode != SEPARATE || slot->computed_by != i ||
            memcmp(&slot->fused, &none, sizeof none) != 0 || (slot->residual > 0 && !adds))
            fail("%s: row %zu is fused or in place", net->model, i);
        if (slot->output == net->row_plans[net->layers[i].input].output)
            fail("%s: row %zu writes over its input", net->model, i);
    }
}

static void test_definitions_fuse_nothing(void) {
    static Net net;
    for (size_t m = 0; m < LENGTH(models) + ODD_MODELS + 100; m++) {
        DatasetInfo info = {.name = "test", .shape = {32, 32, 3}, .classes = 10};
        net_build(&net, model_at(m), &info, &plain, &naive_kernels);
        plan_net(&net, 2, 0);
        check_nothing_fused(&net);
    }
    verdict("the definitions fuse nothing");
}

static void test_memory_plan(void) {
    test_definitions_fuse_nothing();
    test_plan_against_none();
    test_plan_of_models();
}
